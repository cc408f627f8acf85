"""Outlines as people draw them, made into valid regions with an area."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import ArrayLike, NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.annotations.annotation import Annotation
from pathoseg.errors import PathosegError

WITHOUT_AREA = "outlines without an area"

# Level-0 pixels: twenty times the widest slide, and far from where float arithmetic gets coarse.
_FARTHEST = 1e7


def ring(points: ArrayLike) -> NDArray[np.float64] | None:
    """The corners of a closed line.

    Args:
        points: (x, y), or more numbers, per corner; the first may be repeated at the end.

    Returns:
        Array of shape (n, 2), the first corner not repeated; None below three corners.

    Raises:
        ValueError: These are not pairs of finite numbers within reach of a slide.
    """
    try:
        corners = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("a ring is not a list of [x, y] pairs") from error
    if corners.size == 0:
        return None
    if corners.ndim != 2 or corners.shape[1] < 2:
        raise ValueError("a ring is not a list of [x, y] pairs")
    corners = corners[:, :2]
    if not (np.abs(corners) <= _FARTHEST).all():  # false for NaN
        raise ValueError("a coordinate is not a pixel of any slide")
    if (corners[0] == corners[-1]).all():
        corners = corners[:-1]
    return corners if len(corners) >= 3 else None


def region(rings: Sequence[ArrayLike]) -> Polygon | MultiPolygon | None:
    """The area inside the first ring and outside the others, or None where there is none.

    A line that crosses itself encloses what it goes round (nonzero winding): a hand that strays
    over its own line has not drawn a hole there, as the even-odd rule would have it.

    Raises:
        ValueError: A ring is not a list of corners.
    """
    corners = [ring(points) for points in rings]
    if not corners or corners[0] is None:
        return None
    outer, holes = corners[0], [hole for hole in corners[1:] if hole is not None]
    polygon = Polygon(outer, holes)
    if polygon.is_valid:
        return areal(polygon)
    cut = shapely.union_all([_enclosed(hole) for hole in holes])
    return areal(shapely.difference(_enclosed(outer), cut))


def united(parts: Sequence[Polygon]) -> Polygon | MultiPolygon | None:
    """The parts as one region; where they overlap it counts once."""
    together = MultiPolygon(parts)
    return areal(together if together.is_valid else shapely.union_all(parts))


def _enclosed(corners: NDArray[np.float64]) -> shapely.Geometry:
    """The faces that a closed line makes with itself and goes round at least once.

    The winding number of a face is that of a point in it: the edges that pass it upwards on its
    right, less those that pass downwards (Sunday, "Inclusion of a point in a polygon", 2001).
    """
    (x0, y0), (x1, y1) = corners.T, np.roll(corners, -1, axis=0).T
    faces = shapely.polygonize([shapely.unary_union(shapely.LinearRing(corners))])
    inside = []
    for face in shapely.get_parts(faces):
        point = face.representative_point()
        left_of_edge = (x1 - x0) * (point.y - y0) - (point.x - x0) * (y1 - y0)
        upwards = (y0 <= point.y) & (point.y < y1) & (left_of_edge > 0)
        downwards = (y1 <= point.y) & (point.y < y0) & (left_of_edge < 0)
        if upwards.sum() != downwards.sum():
            inside.append(face)
    return shapely.union_all(inside)


def areal(geometry: shapely.Geometry) -> Polygon | MultiPolygon | None:
    """Return the polygons of a geometry that have an area, as one geometry; None if none has."""
    parts = [
        part for part in shapely.get_parts(geometry) if isinstance(part, Polygon) and part.area > 0
    ]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else MultiPolygon(parts)


def cut_out(
    annotations: Sequence[Annotation], holes: Sequence[Polygon | MultiPolygon]
) -> list[Annotation]:
    """The annotations without what any of `holes` covers; the wholly covered are left out."""
    tree = shapely.STRtree(holes)
    remaining = []
    for annotation in annotations:
        touching = tree.query(annotation.geometry, predicate="intersects")
        if not len(touching):
            remaining.append(annotation)
            continue
        hole = shapely.union_all(tree.geometries[touching])
        if rest := areal(annotation.geometry.difference(hole)):
            remaining.append(replace(annotation, geometry=rest))
    return remaining


def refuse_without_area(path: Path, outlines: int, areas: int) -> None:
    """Refuse a file that holds only points and lines; an empty file is a slide without findings.

    Args:
        path: The file, for the error.
        outlines: Number of outlines in it.
        areas: How many of them enclose an area.

    Raises:
        PathosegError: There are outlines, but none encloses an area.
    """
    if outlines and not areas:
        raise PathosegError(
            f"None of the {outlines} annotations in {path} encloses an area.",
            "Draw regions; points, lines, rulers and TMA cores are not segmented.",
        )
