"""Traces the regions of a mask as polygons while its bands arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from shapely import Polygon

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.geometry import Frame
from pathoseg.outputs.arcs import Indices
from pathoseg.outputs.boundary import Boundary, Edges, Runs, polygons

_PIXELS_AT_ONCE = 2**20  # noise has a run every few pixels, at some hundred bytes each
_REGIONS_AT_ONCE = 2**9
_TRACED = np.arange(256, dtype=np.uint8)
_TRACED[[BACKGROUND, IGNORE]] = 0


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """Pixels of one class that are connected by edges.

    Attributes:
        geometry: Their outline along pixel edges, or nearly so after simplification, in pixels.
        class_index: Their value in the mask.
        pixels: Their number.
    """

    geometry: Polygon
    class_index: int
    pixels: int


@dataclass(slots=True)
class _OpenRegion:
    """A region that reaches the last row so far: its edges in parts, and its pixels."""

    parts: list[Edges] = field(default_factory=list)
    pixels: int = 0

    def joined(self, other: _OpenRegion) -> _OpenRegion:
        # The shorter list moves, so that the parts of a region in many bands move few times.
        long, short = sorted([self, other], key=lambda region: -len(region.parts))
        long.parts.extend(short.parts)
        long.pixels += short.pixels
        return long


class RegionTracer:
    """Turns a mask into one polygon for each region of connected pixels.

    Pixels are connected by edges, not by corners, across bands too. Polygons trace pixel edges: a
    region's area is its number of pixels, and its neighbours share its boundary. Background and
    unread pixels are not traced. Held are the boundaries of the regions that go on below the last
    row, and the regions that end within a megapixel.

    Args:
        simplify: Tolerance of Douglas and Peucker's simplification in pixels, by which regions that
            share an edge still share it (see arcs.py); 0 keeps all corners.
        min_pixels: The smallest region that is traced.
    """

    def __init__(self, simplify: float = 0.0, min_pixels: int = 1) -> None:
        self._simplify = simplify
        self._min_pixels = min_pixels
        self._top = 0
        self._boundary = Boundary(joints=simplify > 0)
        self._open: list[_OpenRegion] = []
        # The last row's labels, and which open region each of its runs belongs to.
        self._last_row = np.zeros((1, 0), np.uint8)
        self._last_region = np.zeros(0, np.int64)
        self._pending: Iterator[TracedRegion] = iter(())

    def add(self, band: NDArray[np.uint8]) -> Iterator[TracedRegion]:
        """Take the mask's next rows, and yield the regions that they complete.

        Regions are traced as they are looked at, those that are not before the rows that come next:
        until then, `band` must stay as it is.

        Args:
            band: Class indices, shape (rows, width).
        """
        for _ in self._pending:
            pass
        if not self._last_row.size:
            self._last_row = np.zeros((1, band.shape[1]), np.uint8)
        rows = max(1, _PIXELS_AT_ONCE // band.shape[1])
        pieces = (band[top : top + rows] for top in range(0, len(band), rows))
        self._pending = chain.from_iterable(map(self._traced, pieces))
        return self._pending

    def close(self) -> Iterator[TracedRegion]:
        """Yield the regions that reach the mask's last row."""
        return self.add(np.zeros((1, self._last_row.size or 1), np.uint8))

    def _traced(self, band: NDArray[np.uint8]) -> list[TracedRegion]:
        rows, top = len(band), self._top
        self._top += rows
        labels = np.concatenate([self._last_row, _TRACED[band]])
        self._last_row = labels[-1:].copy()
        runs = Runs.of(labels)
        if not len(runs):
            return []
        count, region, earlier = self._numbered(runs)
        edges = self._boundary.edges(labels, runs, region, top)
        value = np.empty(count, np.int64)
        value[region] = runs.value
        own = np.where(runs.row > 0, runs.end - runs.start, 0)
        pixels = np.bincount(region, own, count).astype(np.int64)

        last = runs.row == rows
        going_on = np.unique(region[last])
        ended = self._joined(earlier, going_on, edges, pixels)
        self._last_region = np.searchsorted(going_on, region[last])

        within = np.ones(count, bool)
        within[earlier] = within[going_on] = False
        parts = [edges[within[edges["region"]]]]
        for number, whole in ended.items():
            pixels[number] = whole.pixels
            for part in whole.parts:
                part["region"] = number
            parts.extend(whole.parts)
        return self._regions(np.concatenate(parts), value, pixels)

    def _numbered(self, runs: Runs) -> tuple[int, Indices, Indices]:
        """Number the connected regions that a band's runs and the open regions form.

        Returns:
            Their count, the number of each run (runs,), and that of each open region.
        """
        lower, upper = runs.touching()
        # An open region is a node too: one with its runs in the last row, which come first.
        known = np.arange(len(self._last_region))
        pairs = np.append(lower, known), np.append(upper, len(runs) + self._last_region)
        nodes = len(runs) + len(self._open)
        graph = coo_array((np.ones(len(pairs[0])), pairs), shape=(nodes, nodes))
        count, number = connected_components(graph, directed=False)
        return count, number[: len(runs)], number[len(runs) :]

    def _joined(
        self, earlier: Indices, going_on: Indices, edges: Edges, pixels: Indices
    ) -> dict[int, _OpenRegion]:
        """Add a band to the open regions, and take those from them that do not go on."""
        joined: dict[int, _OpenRegion] = {}
        for number, region in zip(earlier.tolist(), self._open, strict=True):
            joined[number] = joined[number].joined(region) if number in joined else region
        edges = edges[np.argsort(edges["region"], kind="stable")]
        numbers = np.union1d(earlier, going_on)
        starts = np.searchsorted(edges["region"], numbers)
        ends = np.searchsorted(edges["region"], numbers, side="right")
        for number, start, end in zip(numbers.tolist(), starts, ends, strict=True):
            region = joined.setdefault(number, _OpenRegion())
            region.pixels += int(pixels[number])
            if end > start:
                region.parts.append(edges[start:end].copy())  # a view would hold the whole band
        self._open = [joined.pop(number) for number in going_on.tolist()]
        return joined

    def _regions(self, edges: Edges, value: Indices, pixels: Indices) -> list[TracedRegion]:
        edges = edges[pixels[edges["region"]] >= self._min_pixels]
        if not len(edges):
            return []
        outlines = polygons(edges, self._simplify)
        return [
            TracedRegion(outline, int(value[number]), int(pixels[number]))
            for number, outline in zip(np.unique(edges["region"]), outlines, strict=True)
        ]


def write_regions(
    writer: GeoJsonWriter, regions: Iterable[TracedRegion], frame: Frame
) -> Counter[int]:
    """Write regions in level-0 pixels of the slide's own frame, as QuPath counts them.

    Args:
        writer: An open file.
        regions: In pixels of `frame`.
        frame: The mask's frame of the slide.

    Returns:
        How many regions of each class were written.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    scale = np.array([frame.scale_x, frame.scale_y])
    written: Counter[int] = Counter()
    waiting = iter(regions)
    while some := list(islice(waiting, _REGIONS_AT_ONCE)):
        outlines = np.array([region.geometry for region in some], object)
        indices = [region.class_index for region in some]
        writer.add_all(
            shapely.transform(outlines, lambda corners: corners * scale),
            indices,
            [{"Area µm^2": region.pixels * frame.mpp.x * frame.mpp.y} for region in some],
        )
        written.update(indices)
    return written
