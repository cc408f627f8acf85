"""The exact geometry of a sample slide: tissue, labelled regions, clearings, nuclei and marks.

Coordinates are level-0 pixels. Glands and tumour nests are made of the same cells at the same
density and differ in architecture alone: a gland is one regular row of nuclei around a lumen, a
nest is disorder. So no colour tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shapely import (
    LineString,
    MultiPolygon,
    Point,
    Polygon,
    contains_xy,
    dwithin,
    prepare,
    union_all,
)
from shapely.affinity import rotate, scale, translate
from shapely.geometry.base import BaseGeometry

MPP = 0.5
"""Microns per level-0 pixel."""

EPITHELIUM = 24 / MPP
"""Thickness of a gland's wall, 24 µm."""

CELL_AREA = 140 / MPP**2
"""Epithelial area per nucleus, 140 µm² in glands and in nests."""

NUCLEUS = (5.2 / MPP, 2.9 / MPP)
"""Half axes of an epithelial nucleus, the same in glands and in nests."""

NUCLEI = ("epithelial", "lymphocyte", "fibroblast")
"""Kinds of nuclei."""

ATTEMPTS = 10_000
"""Throws before a slide counts as full."""

_EDGE = 15 / MPP  # of tissue, where nothing is placed

Shape = Polygon | MultiPolygon


@dataclass(frozen=True)
class Region:
    """A labelled region: holes are lumina (gland), islands of stroma or necrosis (tumour)."""

    class_name: str
    geometry: Shape


@dataclass(frozen=True)
class Scene:
    """One slide's content.

    Attributes:
        width: Pixels across.
        height: Pixels down.
        tissue: Where the section lies.
        regions: Labelled glands and tumour nests, disjoint.
        clearings: Glass inside the tissue: lumina, vessels, fat.
        nuclei: Array (n, 6): x, y, half length, half width, angle in radians, amount of stain.
        kinds: The kind of each nucleus, an index of NUCLEI.
        fold: Centre line of a fold.
        pen: Centre line of a pen mark.
        blur: Centre of an out-of-focus spot.
    """

    width: int
    height: int
    tissue: Shape
    regions: tuple[Region, ...]
    clearings: tuple[Polygon, ...]
    nuclei: NDArray[np.float64]
    kinds: NDArray[np.int64]
    fold: LineString
    pen: LineString
    blur: Point


def make_scene(width: int, height: int, rng: np.random.Generator) -> Scene:
    """A section that fills most of the slide; glands and nests cover about half of it."""
    tissue = _tissue(width, height, rng)
    taken: list[Shape] = []
    regions: list[Region] = []
    # What must not be missing comes first, while there is room.
    infiltrates = _place(tissue, taken, _infiltrate, 0.02 * tissue.area, rng)
    for class_name, make, share in (
        ("tumour", _satellites, 0.07),
        ("gland", _gland, 0.20),
        ("tumour", _nest, 0.14),
    ):
        placed = _place(tissue, taken, make, share * tissue.area, rng)
        regions += [Region(class_name, geometry) for geometry in placed]
    vessels = _place(tissue, taken, _vessel, 0.03 * tissue.area, rng)

    # Half of the nests' holes are empty too, so a white hole does not betray a gland.
    holes = [
        Polygon(ring)
        for region in regions
        for part in _parts(region.geometry)
        for ring in part.interiors
        if region.class_name == "gland" or rng.random() < 0.5
    ]
    clearings = (*holes, *(part for vessel in vessels for part in _parts(vessel)))
    stroma = tissue.difference(union_all(taken))
    by_kind = (
        [_gland_nuclei(r.geometry, rng) for r in regions if r.class_name == "gland"]
        + [_nest_nuclei(r.geometry, rng) for r in regions if r.class_name == "tumour"],
        [_lymphocytes(shape, rng) for shape in infiltrates],
        [_fibroblasts(stroma, rng)],
    )
    kinds = np.repeat(np.arange(len(NUCLEI)), [sum(map(len, groups)) for groups in by_kind])

    left, top, right, bottom = tissue.bounds
    fold_x = rng.uniform(0.3, 0.7) * width + 0.1 * width * np.sin(np.linspace(0, 3, 30))
    fold_y = np.linspace(top - 50, top + 0.8 * (bottom - top), 30)
    pen_x = np.linspace(0.05, 0.45, 40) * width
    pen_y = height * (0.955 + 0.012 * np.sin(np.linspace(0, 12, 40) + rng.uniform(0, 6)))
    blur = Point(rng.uniform(left, right), rng.uniform(top, bottom))
    return Scene(
        width,
        height,
        tissue,
        tuple(regions),
        clearings,
        np.concatenate([nuclei for groups in by_kind for nuclei in groups]),
        kinds,
        LineString(np.column_stack([fold_x, fold_y])),
        LineString(np.column_stack([pen_x, pen_y])),
        blur,
    )


RING = (425 / MPP, 595 / MPP)
"""Pixels from the middle of a hub between which all of its glands lie, in `make_hub_scene`."""

HUB = 180 / MPP
"""Radius of a hub, 180 µm."""

HUBS = {"inflamed": "infiltrate", "resting": "vessel"}
"""Class of the glands around a hub, and what the hub is made of."""


def make_hub_scene(hubs: Sequence[str], width: int, height: int, rng: np.random.Generator) -> Scene:
    """A section in which all glands look the same, and their class is that of their hub.

    Around each hub lies a ring of glands; between the two is nothing but stroma.

    Args:
        hubs: The class around each hub, a key of `HUBS`; hubs lie beside each other.
        width: Pixels across.
        height: Pixels down.
        rng: Decides the rest.
    """
    tissue = _tissue(width, height, rng)
    taken: list[Shape] = []
    regions: list[Region] = []
    infiltrates: list[Shape] = []
    vessels: list[Shape] = []
    shares = (np.arange(len(hubs)) + 0.5) / len(hubs)
    middles = [
        Point(
            width * share + rng.uniform(-60, 60) / MPP, 0.47 * height + rng.uniform(-60, 60) / MPP
        )
        for share in shares
    ]
    for class_name, middle in zip(hubs, middles, strict=True):
        disc = middle.buffer(HUB)
        if HUBS[class_name] == "infiltrate":
            infiltrates += _place(disc, taken, _infiltrate, 0.6 * disc.area, rng)
        else:
            vessels += _place(disc, taken, _vessel, 0.6 * disc.area, rng)
    for class_name, middle in zip(hubs, middles, strict=True):
        ring = middle.buffer(RING[1] + _EDGE).difference(middle.buffer(RING[0] - _EDGE))
        others = [other.buffer(1.2 * RING[1]) for other in middles if other is not middle]
        own = ring.intersection(tissue).difference(union_all(others))
        glands = _place(own, taken, _gland, 0.45 * own.area, rng)
        regions += [Region(class_name, gland) for gland in glands]
    lumina = [Polygon(ring) for region in regions for ring in _parts(region.geometry)[0].interiors]
    by_kind = (
        [_gland_nuclei(region.geometry, rng) for region in regions],
        [_lymphocytes(shape, rng) for shape in infiltrates],
        [_fibroblasts(tissue.difference(union_all(taken)), rng)],
    )
    return Scene(
        width,
        height,
        tissue,
        tuple(regions),
        (*lumina, *(part for vessel in vessels for part in _parts(vessel))),
        np.concatenate([nuclei for groups in by_kind for nuclei in groups]),
        np.repeat(np.arange(len(NUCLEI)), [sum(map(len, groups)) for groups in by_kind]),
        fold=LineString(),
        pen=LineString(),
        blur=Point(-width, -height),
    )


def _blob(
    radius: float, wobble: float, rng: np.random.Generator, points: int = 96, waves: int = 6
) -> Polygon:
    """A star-shaped outline around (0, 0): a circle with a few random waves, turned at random."""
    angle = np.linspace(0, 2 * math.pi, points, endpoint=False)
    order = np.arange(2, 2 + waves)
    height = wobble * rng.standard_normal(waves) / order
    phase = rng.uniform(0, 2 * math.pi, waves)
    r = radius * np.clip(1 + np.cos(np.outer(angle, order) + phase) @ height, 0.3, 1.8)
    return Polygon(np.column_stack([r * np.cos(angle), r * np.sin(angle)]))


def _tissue(width: int, height: int, rng: np.random.Generator) -> Shape:
    outline = _blob(1.0, 0.13, rng, points=240, waves=10)
    left, top, right, bottom = outline.bounds
    centred = translate(outline, -(left + right) / 2, -(top + bottom) / 2)
    fitted = scale(
        centred, 0.92 * width / (right - left), 0.84 * height / (bottom - top), origin=(0, 0)
    )
    return translate(fitted, width / 2, 0.47 * height)


def _gland(rng: np.random.Generator) -> Shape:
    outline = scale(_blob(rng.uniform(45, 75) / MPP, 0.15, rng), 1, rng.uniform(0.75, 1))
    outline = rotate(outline, rng.uniform(0, 360))
    lumen = max(_parts(outline.buffer(-EPITHELIUM)), key=lambda part: part.area)
    return Polygon(outline.exterior, [lumen.exterior.simplify(0.5).coords])


def _nest(rng: np.random.Generator) -> Shape:
    outline = scale(_blob(rng.uniform(38, 72) / MPP, 0.35, rng), 1, rng.uniform(0.65, 1))
    outline = rotate(outline, rng.uniform(0, 360)).buffer(-4).buffer(4)
    shape = max(_parts(outline), key=lambda part: part.area)
    if rng.random() < 0.8:
        island = translate(_blob(rng.uniform(10, 18) / MPP, 0.2, rng), *rng.normal(0, 15, 2))
        if shape.buffer(-8 / MPP).contains(island):
            return Polygon(shape.exterior, [island.exterior])
    return shape


def _satellites(rng: np.random.Generator) -> Shape:
    """One tumour in several pieces, annotated as one multi-polygon."""
    pieces: list[Polygon] = []
    for angle in np.arange(3) * 2 * math.pi / 3 + rng.uniform(0, 2):
        radius = rng.uniform(30, 42) / MPP
        piece = _blob(radius, 0.2, rng)
        reach = rng.uniform(50, 60) / MPP
        moved = translate(piece, reach * math.cos(angle), reach * math.sin(angle))
        if not any(moved.distance(other) < 8 for other in pieces):
            pieces.append(moved)
    return MultiPolygon(pieces)


def _vessel(rng: np.random.Generator) -> Shape:
    outline = _blob(rng.uniform(12, 30) / MPP, 0.15, rng)
    return rotate(scale(outline, 1, rng.uniform(0.5, 1)), rng.uniform(0, 360))


def _infiltrate(rng: np.random.Generator) -> Shape:
    return _blob(rng.uniform(25, 45) / MPP, 0.3, rng)


def _place(
    tissue: BaseGeometry,
    taken: list[Shape],
    make: Callable[[np.random.Generator], Shape],
    area: float,
    rng: np.random.Generator,
) -> list[Shape]:
    """Throws shapes at the tissue until `area` is covered; what overlaps `taken` is dropped.

    Accepted shapes join `taken` with their holes filled.
    """
    inner = tissue.buffer(-_EDGE)
    prepare(inner)
    left, top, right, bottom = inner.bounds
    placed: list[Shape] = []
    covered = 0.0
    for _ in range(ATTEMPTS):
        x, y = rng.uniform(left, right), rng.uniform(top, bottom)
        if dwithin(taken, Point(x, y), 30 / MPP).any() or not contains_xy(inner, x, y):
            continue
        shape = translate(make(rng), x, y)
        filled = MultiPolygon([Polygon(part.exterior) for part in _parts(shape)])
        if not inner.contains(filled) or dwithin(taken, filled, 8 / MPP).any():
            continue
        placed.append(shape)
        taken.append(filled)
        covered += filled.area
        if covered >= area:
            break
    return placed


def _parts(shape: Shape) -> list[Polygon]:
    return [shape] if isinstance(shape, Polygon) else list(shape.geoms)


def _rows(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    half: tuple[float, float],
    angle: NDArray[np.float64],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Nuclei at (x, y): half axes vary by a tenth, stain by a fifth."""
    n = len(x)
    sizes = np.outer(rng.normal(1, 0.1, n).clip(0.7, 1.3), half)
    return np.column_stack([x, y, sizes, angle, rng.normal(1, 0.2, n).clip(0.5, 1.6)])


def _gland_nuclei(gland: Shape, rng: np.random.Generator) -> NDArray[np.float64]:
    """One row near the base, evenly spaced, standing across the wall."""
    (shape,) = _parts(gland)
    row = Polygon(shape.exterior).buffer(-0.4 * EPITHELIUM).exterior
    count = round(shape.area / CELL_AREA)
    along = (np.arange(count) + rng.uniform(-0.15, 0.15, count)) * row.length / count
    here = np.array([row.interpolate(s).coords[0] for s in along])
    ahead = np.array([row.interpolate((s + 2) % row.length).coords[0] for s in along])
    across = np.arctan2(ahead[:, 1] - here[:, 1], ahead[:, 0] - here[:, 0]) + math.pi / 2
    return _rows(here[:, 0], here[:, 1], NUCLEUS, across, rng)


def _nest_nuclei(nest: Shape, rng: np.random.Generator) -> NDArray[np.float64]:
    """The same number per area, anywhere and in any direction."""
    x, y = _scatter(nest.buffer(-2 / MPP), CELL_AREA * nest.buffer(-2 / MPP).area / nest.area, rng)
    return _rows(x, y, NUCLEUS, rng.uniform(0, math.pi, len(x)), rng)


def _lymphocytes(shape: Shape, rng: np.random.Generator) -> NDArray[np.float64]:
    x, y = _scatter(shape, 60 / MPP**2, rng)
    return _rows(x, y, (3.1 / MPP, 2.9 / MPP), rng.uniform(0, math.pi, len(x)), rng)


def _fibroblasts(stroma: BaseGeometry, rng: np.random.Generator) -> NDArray[np.float64]:
    x, y = _scatter(stroma, 700 / MPP**2, rng)
    return _rows(x, y, (6.5 / MPP, 1.6 / MPP), rng.normal(0.4, 0.5, len(x)), rng)


def _scatter(
    shape: BaseGeometry, area_each: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points inside `shape`, one for every `area_each` pixels: a grid shaken out of order."""
    step = math.sqrt(area_each)
    left, top, right, bottom = shape.bounds
    grid = np.mgrid[top : bottom + step : step, left : right + step : step].reshape(2, -1)
    y, x = grid + rng.uniform(-0.55, 0.55, grid.shape) * step
    inside = contains_xy(shape, x, y)
    return x[inside], y[inside]
