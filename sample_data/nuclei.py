"""The outline of each nucleus in a square of a sample slide, as QuPath's detections."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scene import MPP, NUCLEI, Scene
from shapely import Polygon, STRtree, box, difference, prepare, union_all
from shapely.geometry import mapping

SIDE = 384
"""Side of the square in pixels."""

VERTICES = 20
"""Corners of an outline: a polygon of the ellipse's area whose edge deviates by at most 0.1 px."""

HIDDEN = 0.6
"""One of which a larger share lies under darker nuclei cannot be told from them: no outline."""

VISIBLE = 0.3
"""One of which a smaller share lies in tissue, the rest in a lumen or vessel, has no outline."""


def nuclei_collection(scene: Scene) -> dict[str, Any]:
    """A FeatureCollection: the square where nuclei are outlined (`Region*`), and their outlines.

    Level-0 pixels, to a tenth. Outlines touch and overlap where nuclei do; those that the square's
    edge cuts are whole.
    """
    square = _square(scene)
    region = {
        "type": "Feature",
        "geometry": mapping(square),
        "properties": {"objectType": "annotation", "classification": "Region*"},
    }
    nuclei = [
        {
            "type": "Feature",
            "geometry": mapping(outline),
            "properties": {"objectType": "detection", "classification": NUCLEI[kind]},
        }
        for kind, outline in _outlines(scene, square)
    ]
    return {"type": "FeatureCollection", "features": [region, *nuclei]}


def _square(scene: Scene) -> Polygon:
    """The place of most nuclei, of every kind a few, where the tissue is sharp, flat and clear."""
    marks = [scene.fold.buffer(35 / MPP), scene.pen.buffer(50 / MPP), scene.blur.buffer(200 / MPP)]
    clear = scene.tissue.buffer(-10 / MPP).difference(union_all(marks))
    prepare(clear)
    best, most = None, (-1, -1)
    x, y = scene.nuclei[:, 0], scene.nuclei[:, 1]
    for top in range(0, scene.height - SIDE, SIDE // 4):
        for left in range(0, scene.width - SIDE, SIDE // 4):
            inside = (x >= left) & (x < left + SIDE) & (y >= top) & (y < top + SIDE)
            counts = np.bincount(scene.kinds[inside], minlength=len(NUCLEI))
            score, square = (min(20, *counts), sum(counts)), box(left, top, left + SIDE, top + SIDE)
            if score > most and clear.contains(square):
                best, most = square, score
    if best is None:
        raise ValueError(f"no square of {SIDE} px is clear of marks; make the slide larger")
    return best


def _outlines(scene: Scene, square: Polygon) -> list[tuple[int, Polygon]]:
    """Kind and outline of the nuclei that lie in the square or reach into it.

    The darkest comes last, as it is the one that is seen where two overlap.
    """
    clearings, near = STRtree(scene.clearings), square.buffer(scene.nuclei[:, 2:4].max() * 3)
    left, top, right, bottom = near.bounds
    x, y = scene.nuclei[:, 0], scene.nuclei[:, 1]
    there = np.flatnonzero((x > left) & (x < right) & (y > top) & (y < bottom))
    darker, found = list[Polygon](), list[tuple[int, Polygon]]()
    for at in there[np.argsort(-scene.nuclei[there, 5], kind="stable")]:
        whole = _ellipse(scene.nuclei[at])
        holes = [scene.clearings[hole] for hole in clearings.query(whole, predicate="intersects")]
        seen = _largest(difference(whole, union_all(holes)))
        if seen.area < VISIBLE * whole.area:
            continue
        hidden = seen.intersection(union_all([each for each in darker if each.intersects(seen)]))
        if hidden.area > HIDDEN * seen.area:
            continue
        darker.append(seen)
        if seen.intersects(square):
            found.append((int(scene.kinds[at]), seen))
    return found[::-1]


def _ellipse(nucleus: NDArray[np.float64]) -> Polygon:
    x, y, length, breadth, angle, _ = nucleus
    turn = 2 * math.pi / VERTICES
    grown = math.sqrt(turn / math.sin(turn))
    at = turn * np.arange(VERTICES)
    along, across = grown * length * np.cos(at), grown * breadth * np.sin(at)
    cos, sin = math.cos(angle), math.sin(angle)
    corners = np.column_stack([x + along * cos - across * sin, y + along * sin + across * cos])
    return Polygon(corners.round(1))


def _largest(shape: Any) -> Polygon:
    """The largest part of what a difference left, to a tenth of a pixel."""
    parts = getattr(shape, "geoms", [shape])
    largest = max(parts, key=lambda part: part.area)
    return Polygon(np.asarray(largest.exterior.coords).round(1)) if largest.area else Polygon()
