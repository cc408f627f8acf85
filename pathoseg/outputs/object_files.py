"""Measures the objects of a mask, and writes them as QuPath detections and as a table."""

from __future__ import annotations

import csv
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.coverage import counted
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.geometry import Frame
from pathoseg.outputs.objects import FoundObjects, NumberPlane

Numbers = NDArray[np.float64]

# QuPath's own names where it has one, in the order of the table's columns.
AREA, PERIMETER, CIRCULARITY, SOLIDITY = "Area µm^2", "Length µm", "Circularity", "Solidity"
LONGEST, SHORTEST = "Max diameter µm", "Min diameter µm"
HEMATOXYLIN, EOSIN = "Hematoxylin OD mean", "Eosin OD mean"
PROBABILITY = "Class probability"
_MEASUREMENTS = [AREA, PERIMETER, CIRCULARITY, SOLIDITY, LONGEST, SHORTEST]
_MEASUREMENTS += [HEMATOXYLIN, EOSIN, PROBABILITY]


def measure(found: FoundObjects, mpp: float, stains: NDArray[np.float32]) -> dict[str, Numbers]:
    """Measure objects.

    The perimeter is Crofton's: of the lines of pixels across, down and along both diagonals, the
    number that cross the object's edge (Legland, Kiêu and Devaux, "Computation of Minkowski
    measures on 2D and 3D binary images", 2007). The steps of pixel edges would add a quarter.

    Args:
        found: The objects.
        mpp: Microns per pixel of the mask.
        stains: Optical density of hematoxylin and eosin, shape (height, width, 2) of `found.box`;
            nan where nothing was read.

    Returns:
        Name of each measurement → its values, shape (objects,).
    """
    area, perimeter = found.pixels.astype(np.float64), _perimeters(found.labels, len(found))
    hull = shapely.convex_hull(found.outlines)
    longest, shortest = _calipers(hull)
    known = (found.labels > 0) & np.isfinite(stains[..., 0])
    owner, size = found.labels[known], len(found) + 1
    count = np.bincount(owner, minlength=size).astype(np.float64)
    count[count == 0] = np.nan
    od = [np.bincount(owner, values, size)[1:] / count[1:] for values in stains[known].T]
    return {
        AREA: area * mpp**2,
        PERIMETER: perimeter * mpp,
        CIRCULARITY: np.minimum(1.0, 4 * np.pi * area / perimeter**2),
        SOLIDITY: shapely.area(found.outlines) / shapely.area(hull),
        LONGEST: longest * mpp,
        SHORTEST: shortest * mpp,
        HEMATOXYLIN: od[0],
        EOSIN: od[1],
        PROBABILITY: found.probability,
    }


def _perimeters(labels: NumberPlane, count: int) -> Numbers:
    """π/8 (n₀ + n₉₀ + (n₄₅ + n₁₃₅) / √2), n being how often lines of a direction cross the edge."""
    bordered = np.pad(labels, 1)
    rows, columns = bordered.shape
    total = np.zeros(count + 1)
    for y, x, spacing in ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.5**0.5), (1, -1, 0.5**0.5)):
        one = bordered[: rows - y, max(0, -x) : columns - max(0, x)]
        other = bordered[y:, max(0, x) : columns - max(0, -x)]
        differs = one != other
        for side in (one[differs], other[differs]):
            total += spacing * np.bincount(side, minlength=count + 1)
    return total[1:] * np.pi / 8


def _centroids(found: FoundObjects) -> Numbers:
    """Return the mean x and y of each object's pixels, shape (objects, 2)."""
    y, x = np.nonzero(found.labels)
    owner, size = found.labels[y, x], len(found) + 1
    places = [found.box.x + x, found.box.y + y]
    sums = [np.bincount(owner, place, size)[1:] for place in places]
    return np.stack(sums, axis=1) / found.pixels[:, None]


def _calipers(hulls: NDArray[np.object_]) -> tuple[Numbers, Numbers]:
    """Return the largest and the smallest distance of two parallel lines that touch each hull.

    The largest is that of two corners; the smallest has a side of the hull on one of its lines.
    """
    corners, owner = shapely.get_coordinates(hulls, return_index=True)
    if not len(corners):
        return np.zeros(0), np.zeros(0)
    begin = np.flatnonzero(np.diff(owner, prepend=-1))
    count = np.diff(begin, append=len(owner))
    side = np.flatnonzero(owner[1:] == owner[:-1])  # by its first corner
    # Each side with each corner of its hull.
    pairs = count[owner[side]]
    one = np.repeat(side, pairs)
    offset = corners[np.repeat(begin[owner[side]], pairs) + counted(pairs)] - corners[one]
    x, y = (corners[side + 1] - corners[side]).T
    length = np.repeat(np.hypot(x, y), pairs)
    across = np.abs(np.repeat(x, pairs) * offset[:, 1] - np.repeat(y, pairs) * offset[:, 0])
    first_pair, first_side = np.cumsum(pairs) - pairs, begin - np.arange(len(begin))
    furthest = np.maximum.reduceat(np.hypot(*offset.T), first_pair)
    width = np.maximum.reduceat(across / length, first_pair)
    return np.maximum.reduceat(furthest, first_side), np.minimum.reduceat(width, first_side)


class ObjectWriter:
    """Writes objects to a GeoJSON and a table as they are found, in constant memory.

    Args:
        geojson: Where to write detections.
        table: Where to write a row for each object, in the same order.
        classes: Names and colours.
        frame: The mask's frame of the slide.

    Attributes:
        written: Number of objects by class index.
        cut: Number of them that were larger than `ObjectOptions.extent`, and lost pixels.
        left_out: Number of those that were too small.

    Raises:
        OSError: The disk is full or cannot be written; any method may raise it.
    """

    def __init__(self, geojson: Path, table: Path, classes: ClassTable, frame: Frame) -> None:
        self.written, self.cut, self.left_out = Counter[int](), 0, 0
        self._classes, self._frame = classes, frame
        with ExitStack() as stack:
            self._detections = stack.enter_context(GeoJsonWriter(geojson, classes, "detection"))
            file = stack.enter_context(table.open("w", newline="", encoding="utf-8"))
            self._rows = csv.writer(file, lineterminator="\n")
            self._rows.writerow(["class", "Centroid X px", "Centroid Y px", *_MEASUREMENTS])
            self._stack = stack.pop_all()

    def add(self, found: FoundObjects, stains: NDArray[np.float32]) -> Numbers:
        """Write objects; `stains` as in `measure`.

        Returns:
            Their centroids as the table has them, in level-0 pixels, shape (objects, 2).
        """
        self.left_out += found.left_out
        if not len(found):
            return np.empty((0, 2))
        scale = np.array([self._frame.scale_x, self._frame.scale_y])
        measured = measure(found, self._frame.mpp.mean, stains)
        names, values = list(measured), np.stack([*measured.values()], axis=1)
        values = np.round(values, 4)
        classes = found.class_index.tolist()
        self._detections.add_all(
            shapely.transform(found.outlines, lambda corners: corners * scale),
            classes,
            [dict(zip(names, row, strict=True)) for row in values.tolist()],
        )
        centres: Numbers = np.round((_centroids(found) + 0.5) * scale, 2)
        for index, centre, row in zip(classes, centres.tolist(), values.tolist(), strict=True):
            known = ["" if math.isnan(value) else value for value in row]
            self._rows.writerow((self._classes.names[index - 1], *centre, *known))
        self.written.update(classes)
        self.cut += int(found.is_cut.sum())
        return centres

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
