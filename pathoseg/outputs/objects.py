"""Separates touching objects of a mask by a height that the network predicts: a watershed.

    height along a row      ^          A and B are two objects; C is a ripple of B.
                          .. ..        ^
                         .     .      . . C
                        .   A   .    . B ..^.
                       .         .  .        .
    background  ______.           ..          .______
                      a a a a a a a|b b b b|c c     (1) each pixel goes to its highest neighbour,
                                                        and so up to a peak: its basin
                                   |b b b b b b     (2) from the highest saddle down, two basins
                                                        merge if the lower peak stands less than
                                                        `depth` above the saddle

Step (2) leaves the peaks whose dynamic (Grimaud, "A new measure of contrast: the dynamics", 1992)
is at least `depth`. An object up to `extent` pixels across is the same wherever it is computed, if
all that decides on it is seen: itself, the objects around it, and those around these.
`ObjectFinder` computes blocks of the mask with a halo of that size, and keeps of each the objects
whose peak lies in the block:

    +-----------------------------+
    |  halo      +----+           |
    |    +-------|.o  |------+    |   o is the block's: its peak lies inside.
    |    |       +----+      |    |   x belongs to the block below, where it is whole, too.
    |    |  block         .  |    |
    |    +---------------.x.-+    |
    |                     .       |
    +-----------------------------+

A larger object is cut: further than `extent` from the block of its peak, and where an object of an
earlier block has its pixels.
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

NumberPlane = NDArray[np.int32]
"""The number of the object of each pixel, shape (height, width); 0 where there is none."""

_AROUND = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
_HALF = [(0, 1), (1, -1), (1, 0), (1, 1)]  # of the eight neighbours, one of each pair


@dataclass(frozen=True, slots=True)
class Basins:
    """The objects of a part of a mask.

    Attributes:
        labels: Number of each pixel's object, from 1; 0 where there is none. Shape (rows, columns).
        peaks: Row and column of each object's highest pixel, shape (objects, 2).
    """

    labels: NumberPlane
    peaks: NDArray[np.int64]


def separate(height: NDArray[np.int16], depth: int) -> Basins:
    """Separate objects by the height of their pixels.

    Of pixels, and of peaks, that are equally high, the one further down, then further right counts
    as the higher one.

    Args:
        height: Shape (rows, columns), below 2,048; negative where there is no object.
        depth: Two basins merge where the lower peak stands less than this above their saddle.

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
    merged = _merged(height, number, basin, tops, rank, depth)
    kept = np.flatnonzero(merged == np.arange(len(peak)))
    labels = np.zeros(height.shape, np.int32)
    labels.reshape(-1)[inside] = np.searchsorted(kept, merged)[basin] + 1
    return Basins(labels, np.stack(np.divmod(inside[peak[kept]], columns), axis=1))


def _climb(
    height: NDArray[np.int16], number: NumberPlane, inside: NDArray[np.int64]
) -> NumberPlane:
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


def _followed(up: NumberPlane) -> NumberPlane:
    """Return the last pixel (or basin) of each chain of pointers."""
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further


def _merged(
    height: NDArray[np.int16],
    number: NumberPlane,
    basin: NumberPlane,
    tops: NDArray[np.int16],
    rank: NDArray[np.int64],
    depth: int,
) -> NumberPlane:
    """(2) Return for each basin the basin that it is finally merged into, itself if none."""
    count = len(tops)
    one, other, saddle = _saddles(height, number, basin)
    # Peaks only get higher by merging, so what stands this high above a saddle never crosses it.
    shallow = np.minimum(tops[one], tops[other]) - saddle < depth
    one, other, saddle = one[shallow], other[shallow], saddle[shallow]
    low, high = np.sort(np.stack([rank[one], rank[other]]), axis=0)
    order = np.lexsort((low, high, saddle))[::-1]
    parent, top, standing = list(range(count)), tops.tolist(), rank.tolist()

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = at = parent[parent[at]]
        return at

    for a, b, level in zip(
        one[order].tolist(), other[order].tolist(), saddle[order].tolist(), strict=True
    ):
        below, above = root(a), root(b)
        if standing[below] > standing[above]:
            below, above = above, below
        if top[below] - level < depth:
            parent[below] = above
    return _followed(np.array(parent, np.int32))


def _saddles(
    height: NDArray[np.int16], number: NumberPlane, basin: NumberPlane
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int16]]:
    """Return pairs of basins that touch, and the height of the highest saddle of each pair."""
    basin_of = np.full(height.shape, -1, np.int64)
    basin_of[number >= 0] = basin
    rows, columns = height.shape
    found = []  # for each pair of pixels its basins and its saddle as one number, which sorts fast
    for y, x in _HALF:
        here = (slice(0, rows - y), slice(max(0, -x), columns - max(0, x)))
        there = (slice(y, rows), slice(max(0, x), columns - max(0, -x)))
        one, other = basin_of[here], basin_of[there]
        meet = (one != other) & (one >= 0) & (other >= 0)
        one, other = one[meet], other[meet]
        pair = np.minimum(one, other) << 26 | np.maximum(one, other)
        found.append(pair << 11 | np.minimum(height[here][meet], height[there][meet]))
    each = np.sort(np.concatenate(found))
    highest = each[np.append(each[1:] >> 11 != each[:-1] >> 11, True)[: len(each)]]
    return highest >> 37, highest >> 11 & 0x3FFFFFF, (highest & 0x7FF).astype(np.int16)


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
        is_cut: True where pixels of it were left away: it is larger than `extent`.
        outlines: Along pixel edges, or nearly so after simplification, in pixels of the mask.
        left_out: Number of objects below `min_pixels` beside these.
    """

    box: Box
    labels: NumberPlane
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
        """Width of the halo in pixels: an object, its neighbours, and their neighbours."""
        return 3 * self.extent


_BLOCK = Size(2048, 1024)


class ObjectFinder:
    """Finds the objects of a mask band by band, in blocks whose places do not depend on the bands.

    Keeps the rows of one row of blocks and its halo: 3 bytes a pixel, and a bit for what is taken.

    Args:
        size: The mask's.
        options: How objects are separated.
    """

    def __init__(self, size: Size, options: ObjectOptions) -> None:
        self._size, self._options = size, options
        self._bands = deque[tuple[int, NDArray[np.uint8]]]()
        self._rows = self._done = 0  # rows that came, and rows of finished blocks
        # A bit for each pixel of an object that was yielded, from the row `_taken_top` on.
        self._taken = np.zeros((0, -(-size.width // 8)), np.uint8)
        self._taken_top = 0

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
            self._follow(bottom)
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
        around = self._around(block, self._options.halo)
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
        lost = self._cut_off(basins.labels, kept, block, around)
        return self._described(around, basins.labels, kept, lost, kind, probability)

    def _follow(self, bottom: int) -> None:
        """Move the bitmap of taken pixels to the rows that blocks ending at `bottom` may reach."""
        extent = self._options.extent
        top, end = max(0, self._done - extent), min(bottom + extent, self._size.height)
        still = self._taken[top - self._taken_top :]
        more = np.zeros((end - top - len(still), still.shape[1]), np.uint8)
        self._taken, self._taken_top = np.concatenate([still, more]), top

    def _cut_off(
        self, labels: NumberPlane, kept: NDArray[np.bool_], block: Box, around: Box
    ) -> NDArray[np.bool_]:
        """Remove pixels of kept objects that are far from the block, or taken; take the others.

        Args:
            labels: Changed in place, shape of `around`.
            kept: The objects whose peak lies in the block, shape (objects,).
            block: In pixels of the mask.
            around: The block and its halo.

        Returns:
            The objects that lost pixels, shape (objects,).
        """
        is_own = np.append(False, kept)[labels]
        near = self._around(block, self._options.extent)
        part, first = near.within(around), near.x // 8
        rows = slice(near.y - self._taken_top, near.bottom - self._taken_top)
        columns = slice(first, -(-near.right // 8))
        bits = np.unpackbits(self._taken[rows, columns], axis=1)
        taken = bits[:, near.x - 8 * first :][:, : near.width]
        allowed = np.zeros(labels.shape, np.bool_)
        allowed[part] = taken == 0
        away = is_own & ~allowed
        lost = np.zeros(len(kept), np.bool_)
        lost[labels[away] - 1] = True
        labels[away] = 0
        taken |= is_own[part] & allowed[part]
        self._taken[rows, columns] = np.packbits(bits, axis=1)
        return lost

    def _around(self, block: Box, halo: int) -> Box:
        """The block with `halo` pixels around it, as far as there is a mask."""
        size = self._size
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
        labels: NumberPlane,
        kept: NDArray[np.bool_],
        lost: NDArray[np.bool_],
        kind: NDArray[np.uint8],
        probability: NDArray[np.uint8],
    ) -> FoundObjects:
        """Describe the objects that are `kept` and have at least `min_pixels`.

        Parts of one that meet at corners alone, or were cut apart, are objects of their own.
        """
        colours = _coloured(labels)
        runs = Runs.of(colours)
        lower, upper = runs.touching()
        graph = coo_array((np.ones(len(lower)), (lower, upper)), shape=(len(runs), len(runs)))
        count, part = connected_components(graph, directed=False)
        lengths = runs.end - runs.start
        size = np.bincount(part, lengths, count).astype(np.int64)
        of = np.zeros(count, np.int64)  # the object of each part, from 0
        of[part] = labels[runs.row, runs.start] - 1
        large = size >= self._options.min_pixels
        order = np.lexsort((-size, of))  # an object's largest part first
        returned = order[(large & kept[of])[order]]
        objects = len(returned)
        number = np.zeros(count, np.int32)  # of each part as an object that is returned, from 1
        number[returned] = np.arange(1, objects + 1)
        is_small = np.zeros(len(kept), np.bool_)  # of each object that is there
        is_small[of] = True
        is_small[of[large]] = False

        shown = np.zeros(labels.shape, np.int32)
        at = np.repeat(runs.row * labels.shape[1] + runs.start, lengths) + counted(lengths)
        shown.reshape(-1)[at] = np.repeat(number[part], lengths)
        # Objects of other blocks stay, so that shared edges are simplified alike from both sides.
        colours.reshape(-1)[at] *= np.repeat(large[part], lengths)
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
            lost[of[returned]],
            self._outlines(colours, shown, box),
            int((kept & is_small).sum()),
        )

    def _outlines(
        self, colours: NDArray[np.uint8], shown: NumberPlane, box: Box
    ) -> NDArray[np.object_]:
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


def _coloured(labels: NumberPlane) -> NDArray[np.uint8]:
    """Numbers from 1 to 254 for which neighbours that share an edge differ; 0 where labels are."""
    colour = np.append(0, np.arange(int(labels.max(initial=0))) % 251 + 1).astype(np.uint8)
    pairs = []
    for one, other in ((labels[:, 1:], labels[:, :-1]), (labels[1:], labels[:-1])):
        meet = (one != other) & (one > 0) & (other > 0)
        pairs.append(np.stack([one[meet], other[meet]], axis=1))
    meeting = np.concatenate(pairs)
    alike = np.unique(meeting[colour[meeting[:, 0]] == colour[meeting[:, 1]]], axis=0)
    # The one that meets fewer pixels of others: a vast object may meet more than there are colours.
    edge = np.bincount(meeting.reshape(-1), minlength=len(colour))
    again = np.unique(np.where(edge[alike[:, 0]] < edge[alike[:, 1]], *alike.T))
    # What each of those meets, from `begin` to `end` of the pairs sorted by their first number.
    ways = np.concatenate([meeting, meeting[:, ::-1]])
    ways = ways[np.isin(ways[:, 0], again)]
    ways = ways[np.argsort(ways[:, 0])]
    begin, end = (np.searchsorted(ways[:, 0], again, side) for side in ("left", "right"))
    for number, near in zip(again, map(slice, begin, end), strict=True):
        colour[number] = np.setdiff1d(np.arange(1, 255), colour[ways[near, 1]])[0]
    return colour[labels]
