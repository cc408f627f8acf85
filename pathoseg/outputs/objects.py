"""Separates touching objects of a mask by a height that the network predicts.

    height along a row      ^          A and B are two objects; C is a ripple of B.
                          .. ..        ^
                         .     .      . . C
                        .   A   .    . B ..^.
                       .         .  .        .
    background  ______.           ..          .______
                      a a a a a a a|b b b b|c c     (1) each pixel goes to its highest neighbour,
                                                        and so up to a peak: its basin
                                   |b b b b b b     (2) a basin whose peak stands less than `depth`
                                                        above the saddle to a higher basin joins it

Both steps look at neighbours alone: a pixel at the eight around it, a basin at those it touches. So
an object is the same wherever it is computed, if all that decides on it is seen: itself, the basins
around it, and those around these. `ObjectFinder` computes blocks of the mask with a halo of that
size, and keeps of each the objects whose peak lies in the block:

    +-----------------------------+
    |  halo      +----+           |
    |    +-------|.o  |------+    |   o is the block's: its peak lies inside.
    |    |       +----+      |    |   x belongs to the block below, where it is whole, too.
    |    |  block         .  |    |
    |    +---------------.x.-+    |
    |                     .       |
    +-----------------------------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.annotations.coverage import counted
from pathoseg.geometry import Box, ObjectMask, Size
from pathoseg.outputs.boundary import Boundary, Runs, polygons

Labels = NDArray[np.int32]

_AROUND = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
_HALF = [(0, 1), (1, -1), (1, 0), (1, 1)]  # of the eight neighbours, one of each pair


@dataclass(frozen=True, slots=True)
class Basins:
    """The objects of a part of a mask.

    Attributes:
        labels: Number of each pixel's object, from 1; 0 where there is none. Shape (rows, columns).
        peaks: Row and column of each object's highest pixel, shape (objects, 2).
    """

    labels: Labels
    peaks: NDArray[np.int64]


def separate(height: NDArray[np.int16], depth: int) -> Basins:
    """Separate objects by the height of their pixels.

    Of pixels, and of peaks, that are equally high, the one further down, then further right counts
    as the higher one.

    Args:
        height: Shape (rows, columns), below 2,048; negative where there is no object.
        depth: A basin joins the higher neighbour to which its saddle is highest where its peak
            stands less than this above the saddle.

    Returns:
        Objects, numbered by their peaks' order.
    """
    columns = height.shape[1]
    inside = np.flatnonzero(height >= 0)
    number = np.full(height.shape, -1, np.int32)  # of each pixel inside, from 0
    number.reshape(-1)[inside] = np.arange(len(inside), dtype=np.int32)
    up = _climb(height, number, inside)
    peak = np.flatnonzero(up == np.arange(len(up)))
    basin = np.searchsorted(peak, up).astype(np.int32)

    # Peaks in the order of height, then place: `rank` compares them as one number.
    tops = height.reshape(-1)[inside[peak]]
    rank = np.empty(len(peak), np.int64)
    rank[np.lexsort((peak, tops))] = np.arange(len(peak))
    joins = _joined(height, number, basin, tops, rank, depth)
    kept = np.flatnonzero(joins == np.arange(len(peak)))
    labels = np.zeros(height.shape, np.int32)
    labels.reshape(-1)[inside] = np.searchsorted(kept, joins)[basin] + 1
    return Basins(labels, np.stack(np.divmod(inside[peak[kept]], columns), axis=1))


def _climb(height: NDArray[np.int16], number: Labels, inside: NDArray[np.int64]) -> Labels:
    """(1) The number of the peak of each pixel inside, numbered as they are."""
    rows, columns = height.shape
    # Of the pixels around one, the largest height × 16 + place is that of its highest neighbour.
    levels = np.pad(height, 1, constant_values=-1) * np.int16(16)
    best = levels[:-2, :-2].copy()
    for place, (y, x) in enumerate(_AROUND[1:], start=1):
        np.maximum(best, levels[1 + y : 1 + y + rows, 1 + x : 1 + x + columns] + place, out=best)
    offsets = np.array([y * columns + x for y, x in _AROUND])
    up = number.reshape(-1)[inside + offsets[best.reshape(-1)[inside] & 15]]
    return _followed(up)


def _followed(up: Labels) -> Labels:
    """Return the last pixel (or basin) of each chain of pointers."""
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further


def _joined(
    height: NDArray[np.int16],
    number: Labels,
    basin: Labels,
    tops: NDArray[np.int16],
    rank: NDArray[np.int64],
    depth: int,
) -> Labels:
    """(2) The basin that each basin becomes part of, in the end; itself, if of none."""
    count = len(tops)
    pairs, saddles = [], []
    of = np.full(height.shape, -1, np.int32)
    of[number >= 0] = basin
    rows, columns = height.shape
    for y, x in _HALF:
        here = (slice(0, rows - y), slice(max(0, -x), columns - max(0, x)))
        there = (slice(y, rows), slice(max(0, x), columns - max(0, -x)))
        meet = (of[here] != of[there]) & (of[here] >= 0) & (of[there] >= 0)
        one, other = of[here][meet], of[there][meet]
        saddles.append(np.minimum(height[here][meet], height[there][meet]))
        higher = rank[other] > rank[one]
        low, high = np.where(higher, one, other), np.where(higher, other, one)
        pairs.append(np.stack([low, high]))
    (low, high), saddle = np.concatenate(pairs, axis=1), np.concatenate(saddles)
    # Of each lower basin the highest saddle; of equal ones that to the highest peak.
    order = np.lexsort((rank[high], saddle, low))
    low, high, saddle = low[order], high[order], saddle[order]
    last = np.flatnonzero(np.append(low[1:] != low[:-1], True)[: len(low)])
    low, high, saddle = low[last], high[last], saddle[last]
    shallow = tops[low].astype(np.int32) - saddle < depth
    joins = np.arange(count, dtype=np.int32)
    joins[low[shallow]] = high[shallow]
    return _followed(joins)


@dataclass(frozen=True, slots=True, eq=False)
class FoundObjects:
    """Some objects of a mask, all of whose pixels lie in one box.

    Attributes:
        box: In pixels of the mask.
        labels: Number of each pixel's object, from 1; 0 where there is none of these. Shape
            (height, width).
        class_index: The class of most of its pixels, of each object, shape (objects,).
        probability: Mean probability of its pixels' own classes, shape (objects,).
        pixels: Number of its pixels, shape (objects,).
        is_cut: True where it reaches the box's edge inside the mask, and may go on beyond it.
        outlines: Along pixel edges, or nearly so after simplification, in pixels of the mask.
        left_out: Number of objects below `min_pixels` beside these.
    """

    box: Box
    labels: Labels
    class_index: NDArray[np.int64]
    probability: NDArray[np.float64]
    pixels: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    outlines: NDArray[np.object_]
    left_out: int

    def __len__(self) -> int:
        return len(self.pixels)

    def trimmed(self) -> FoundObjects:
        """Return the same objects in the smallest box that holds them; of one pixel for none."""
        rows = np.flatnonzero(self.labels.any(axis=1)).tolist()
        columns = np.flatnonzero(self.labels.any(axis=0)).tolist()
        top, bottom = (rows[0], rows[-1] + 1) if len(rows) else (0, 1)
        left, right = (columns[0], columns[-1] + 1) if len(columns) else (0, 1)
        box = Box(self.box.x + left, self.box.y + top, right - left, bottom - top)
        return replace(self, box=box, labels=self.labels[top:bottom, left:right])

    def masks(self) -> list[ObjectMask]:
        """Return the pixels of each object."""
        found = []
        for number, (rows, columns) in enumerate(ndimage.find_objects(self.labels), start=1):
            pixels = self.labels[rows, columns] == number
            x, y = self.box.x + columns.start, self.box.y + rows.start
            found.append(ObjectMask(Box(x, y, pixels.shape[1], pixels.shape[0]), pixels))
        return found


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """Parameters of separating objects.

    Attributes:
        depth: See `separate`, in units of the height.
        extent: Pixels across the largest object that is certain to be found whole.
        min_pixels: The smallest object that is kept.
        simplify: Tolerance of the outlines' simplification in pixels; 0 keeps all corners.
    """

    depth: int
    extent: int
    min_pixels: int = 1
    simplify: float = 0.0

    @property
    def halo(self) -> int:
        """Pixels around a block that decide on its objects: three in a row."""
        return 3 * self.extent


_BLOCK = Size(2048, 1024)


class ObjectFinder:
    """Finds the objects of a mask while its bands arrive, in blocks that bands do not shift.

    Held are the rows of a row of blocks with the halo above and below.

    Args:
        size: The mask's.
        options: How they are separated.
    """

    def __init__(self, size: Size, options: ObjectOptions) -> None:
        self._size, self._options = size, options
        self._bands = deque[tuple[int, NDArray[np.uint8]]]()
        self._rows = self._done = 0  # rows that came, and rows of finished blocks

    @property
    def settled(self) -> int:
        """The row above which no object that is still to come has pixels."""
        return max(0, self._done - self._options.halo)

    def add(self, planes: NDArray[np.uint8]) -> Iterator[FoundObjects]:
        """Take the mask's next rows, and yield the objects of the blocks that they complete.

        Args:
            planes: Class index, height, and probability times 255, shape (3, rows, width). They are
                kept, and must stay as they are.
        """
        self._bands.append((self._rows, planes))
        self._rows += planes.shape[1]
        whole = self._rows == self._size.height
        while self._done < self._rows:
            bottom = min(self._done + _BLOCK.height, self._size.height)
            if not whole and self._rows < bottom + self._options.halo:
                return
            for left in range(0, self._size.width, _BLOCK.width):
                right = min(left + _BLOCK.width, self._size.width)
                block = Box(left, self._done, right - left, bottom - self._done)
                found = self._find(block)
                if len(found) or found.left_out:
                    yield found
            self._done = bottom
            while self._bands and self._bands[0][0] + self._bands[0][1].shape[1] <= (
                bottom - self._options.halo
            ):
                self._bands.popleft()

    def _find(self, block: Box) -> FoundObjects:
        around = self._around(block)
        window = np.concatenate([*self._cut(around)], axis=1)
        kind, height, probability = window
        known = (kind != BACKGROUND) & (kind != IGNORE)
        basins = separate(np.where(known, height.astype(np.int16), -1), self._options.depth)
        own = block.within(around)
        inside = [
            (basins.peaks[:, axis] >= part.start) & (basins.peaks[:, axis] < part.stop)
            for axis, part in enumerate(own)
        ]
        kept = inside[0] & inside[1]
        return self._described(around, basins.labels, kept, kind, probability)

    def _around(self, block: Box) -> Box:
        """The block with its halo, as far as there is a mask."""
        halo, size = self._options.halo, self._size
        left, top = max(0, block.x - halo), max(0, block.y - halo)
        right, bottom = min(size.width, block.right + halo), min(size.height, block.bottom + halo)
        return Box(left, top, right - left, bottom - top)

    def _cut(self, box: Box) -> Iterator[NDArray[np.uint8]]:
        """The planes of a box, in parts from top to bottom."""
        for top, band in self._bands:
            part = Box(box.x, top, box.width, band.shape[1]).intersection(box)
            if part is not None:
                rows, columns = part.within(Box(0, top, self._size.width, band.shape[1]))
                yield band[:, rows, columns]

    def _described(
        self,
        box: Box,
        labels: Labels,
        kept: NDArray[np.bool_],
        kind: NDArray[np.uint8],
        probability: NDArray[np.uint8],
    ) -> FoundObjects:
        """Describe the objects that are `kept` and have at least `min_pixels`."""
        colours = _coloured(labels)
        runs = Runs.of(colours)
        lower, upper = runs.touching()
        graph = coo_array((np.ones(len(lower)), (lower, upper)), shape=(len(runs), len(runs)))
        count, part = connected_components(graph, directed=False)
        lengths = runs.end - runs.start
        size = np.bincount(part, lengths, count).astype(np.int64)
        of = np.zeros(count, np.int64)  # the object of each part, from 0
        of[part] = labels[runs.row, runs.start] - 1
        # Pixels that meet the rest of their object at a corner alone are not part of it.
        largest = np.zeros(len(kept), np.int64)
        np.maximum.at(largest, of, size)
        order = np.lexsort((-size, of))
        first = order[np.append(True, of[order][1:] != of[order][:-1])[: len(order)]]
        large = largest >= self._options.min_pixels
        number = np.zeros(count, np.int32)  # of each part as an object that is returned, from 1
        number[first] = np.where(kept & large, np.cumsum(kept & large), 0)[of[first]]
        # Objects of other blocks are seen too, where these meet them.
        seen = np.zeros(count, np.bool_)
        seen[first] = large[of[first]]

        shown = np.zeros(labels.shape, np.int32)
        at = np.repeat(runs.row * labels.shape[1] + runs.start, lengths) + counted(lengths)
        shown.reshape(-1)[at] = np.repeat(number[part], lengths)
        colours.reshape(-1)[at] *= np.repeat(seen[part], lengths)
        objects = int((kept & large).sum())
        own = shown > 0
        numbers = shown[own].astype(np.int64) - 1
        pixels = np.bincount(numbers, minlength=objects)
        votes = np.bincount(numbers * 256 + kind[own], minlength=256 * objects).reshape(-1, 256)
        chance = np.bincount(numbers, probability[own], objects) / (255 * np.maximum(pixels, 1))
        return FoundObjects(
            box,
            shown,
            votes.argmax(axis=1),
            chance,
            pixels,
            self._reaches_edge(shown, box, objects),
            self._outlines(colours, shown, box),
            int(kept.sum()) - objects,
        )

    def _reaches_edge(self, shown: Labels, box: Box, objects: int) -> NDArray[np.bool_]:
        size, found = self._size, np.zeros(objects + 1, np.bool_)
        inner = [box.y > 0, box.bottom < size.height, box.x > 0, box.right < size.width]
        for edge, is_inner in zip(
            (shown[0], shown[-1], shown[:, 0], shown[:, -1]), inner, strict=True
        ):
            if is_inner:
                found[edge] = True
        return found[1:]

    def _outlines(self, colours: NDArray[np.uint8], shown: Labels, box: Box) -> NDArray[np.object_]:
        bordered = np.pad(colours, ((1, 1), (0, 0)))
        runs = Runs.of(bordered)
        if not shown.any():
            return np.empty(0, object)
        boundary = Boundary(joints=self._options.simplify > 0)
        region = shown[runs.row - 1, runs.start].astype(np.int64)
        edges = boundary.edges(bordered, runs, region, 0)
        edges = edges[edges["region"] > 0]
        found = polygons(edges, self._options.simplify)
        corner = np.array([box.x, box.y])
        return np.asarray(shapely.transform(found, lambda corners: corners + corner))


def _coloured(labels: Labels) -> NDArray[np.uint8]:
    """Numbers from 1 to 254 for which neighbours that share an edge differ; 0 where labels are."""
    colour = np.append(0, np.arange(int(labels.max(initial=0))) % 251 + 1).astype(np.uint8)
    pairs = []
    for one, other in ((labels[:, 1:], labels[:, :-1]), (labels[1:], labels[:-1])):
        meet = (one != other) & (one > 0) & (other > 0)
        pairs.append(np.stack([one[meet], other[meet]], axis=1))
    meeting = np.concatenate(pairs)
    alike = np.unique(meeting[colour[meeting[:, 0]] == colour[meeting[:, 1]]], axis=0)
    for number in np.unique(alike.max(axis=1, initial=0)) if len(alike) else ():
        near = meeting[(meeting == number).any(axis=1)]
        colour[number] = np.setdiff1d(np.arange(1, 255), colour[near])[0]
    return colour[labels]
