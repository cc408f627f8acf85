"""Colours of objects: small numbers by which objects that lie close together differ.

Objects are painted into a plane of bytes. Two that are nearer than some distance have different
colours, so each connected area of one colour is an object, and no array of object numbers is
needed. The graph of neighbours is coloured greedily, vertices of most neighbours first (Welsh and
Powell 1967): nuclei take 4 to 8 colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.coverage import Ints, counted
from pathoseg.errors import PathosegError

_MOST = IGNORE - 1
_NUMBERS = 1 << 16  # of a mask, background among them
_ROWS = 256  # of a mask that are looked at together


def colours(count: int, pairs: Ints, path: Path) -> NDArray[np.uint8]:
    """Colour the vertices of a graph so that neighbours differ, the same in each run.

    Args:
        count: Number of vertices.
        pairs: Neighbours, shape (pairs, 2); a pair may occur once or in both orders.
        path: The file whose objects these are, for the error.

    Returns:
        Numbers from 1, shape (count,).

    Raises:
        PathosegError: More than 254 colours are needed.
    """
    both = np.concatenate([pairs, pairs[:, ::-1]])
    both = both[np.argsort(both[:, 0], kind="stable")]
    degree = np.bincount(both[:, 0], minlength=count)
    begin = np.append(0, np.cumsum(degree)).tolist()
    neighbours = both[:, 1].tolist()
    taken = [0] * count  # 1 << colour; 0 before there is one
    for one in np.argsort(-degree, kind="stable").tolist():
        used = 1
        for other in neighbours[begin[one] : begin[one + 1]]:
            used |= taken[other]
        taken[one] = ~used & (used + 1)  # the lowest bit that nobody has
    most = max(taken, default=0).bit_length() - 1
    if most > _MOST:
        raise PathosegError(
            f"More than {_MOST} objects in {path} lie on one spot.",
            "See whether outlines were drawn or imported many times over, and delete the copies.",
        )
    return np.array([bit.bit_length() - 1 for bit in taken], np.uint8)


def near_outlines(geometry: NDArray[np.object_], distance: float) -> Ints:
    """Find the pairs of outlines that are no further apart than a distance.

    Args:
        geometry: Polygons and multi-polygons, large ones first.
        distance: In the unit of their coordinates.

    Returns:
        Positions in `geometry`, shape (pairs, 2), the smaller first.
    """
    left, top, right, bottom = shapely.bounds(geometry).T
    around = shapely.box(left - distance, top - distance, right + distance, bottom + distance)
    one, other = shapely.STRtree(geometry).query(around)
    one, other = one[one < other], other[one < other]
    prepared = geometry[np.unique(one)]
    shapely.prepare(prepared)
    near = shapely.dwithin(geometry[one], geometry[other], distance)
    shapely.destroy_prepared(prepared)
    return np.stack([one[near], other[near]], axis=1)


def near_numbers(bands: Iterator[NDArray[np.integer]], boxes: Ints, distance: float) -> Ints:
    """Find the pairs of numbers in a mask whose areas are no further apart than a distance.

    The mask is divided into cells of half the distance. Pairs are those that reach into two cells
    that are near, if their bounding boxes are: some are a little further apart.

    Args:
        bands: All rows of the mask, in parts of `rows_of_cells(distance)` rows from the top;
            numbers from 0, background, to 65,535.
        boxes: Of each number, its left, top, right and bottom, shape (numbers + 1, 4).
        distance: In pixels of the mask.

    Returns:
        Numbers, shape (pairs, 2), the smaller first, each pair once.
    """
    cell = _cell(distance)
    reach = int(distance / cell) + 1
    offsets = [
        (down, right)
        for down in range(reach + 1)
        for right in range(-reach if down else 0, reach + 1)
        if math.hypot(max(0, down - 1), max(0, abs(right) - 1)) * cell <= distance
    ]
    found, before, top = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for band in bands:
        height, width = band.shape
        stride = -(-width // cell) + reach  # so that no offset leads into a cell of the next row
        y, x = np.nonzero(_at_borders(band))
        place = (top + y // cell) * stride + x // cell
        held = np.concatenate([before, np.unique(place * _NUMBERS + band[y, x])])
        place, number = held // _NUMBERS, held % _NUMBERS
        first = max(0, top - reach) * stride  # the first cell that is looked at, and all after it
        after = top + -(-height // cell) + reach + 1
        begin = np.append(
            0, np.cumsum(np.bincount(place - first, minlength=after * stride - first))
        )
        near = [found]
        for down, right in offsets:
            wanted = place - first + down * stride + right
            inside = np.flatnonzero(wanted >= 0)
            low, high = begin[wanted[inside]], begin[wanted[inside] + 1]
            one = np.repeat(inside, high - low)
            other = np.repeat(low, high - low) + counted(high - low)
            one, other = number[one], number[other]
            low, high = np.minimum(one, other), np.maximum(one, other)
            near.append(np.unique((low * _NUMBERS + high)[low < high]))
        found = np.unique(np.concatenate(near))
        top += -(-height // cell)
        before = held[place >= (top - reach) * stride]
    one, other = np.divmod(found, _NUMBERS)
    gap = np.maximum(boxes[one, :2] - boxes[other, 2:], boxes[other, :2] - boxes[one, 2:])
    kept = np.hypot(*gap.clip(0).T) <= distance
    return np.stack([one[kept], other[kept]], axis=1)


def _at_borders(band: NDArray[np.integer]) -> NDArray[np.bool_]:
    """True where a number ends, and in the first and last row: the rest is no nearest point."""
    inner = np.zeros(band.shape, np.bool_)
    here = band[1:-1, 1:-1]
    inner[1:-1, 1:-1] = (
        (here == band[:-2, 1:-1])
        & (here == band[2:, 1:-1])
        & (here == band[1:-1, :-2])
        & (here == band[1:-1, 2:])
    )
    return ~inner & (band > 0)


def rows_of_cells(distance: float) -> int:
    """Return the number of rows of a mask that `near_numbers` takes at a time."""
    cell = _cell(distance)
    return max(1, _ROWS // cell) * cell


def _cell(distance: float) -> int:
    return max(1, math.ceil(distance / 2))
