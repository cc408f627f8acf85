"""Finds the true objects of a slide in its object plane, which arrives in strips.

An object is a connected area of one colour (of eight neighbours). From strip to strip `ObjectAreas`
keeps the pixels of the areas that reach the last row, and for each colour which area each pixel of
that row belongs to:

    strip n      | . a a . . b b . |     a and b are open, two areas of one colour
                 | . a a . . b b . |  <- the last row: 0 1 1 0 0 2 2 0
    strip n + 1  | . . a a a b . . |     one area here touches both: the three are one object
                 | c . . . . . . . |     c is another, and open
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.geometry import Box, ObjectMask

Plane = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class TrueObject:
    """An object of the truth.

    Attributes:
        mask: Its pixels.
        class_index: Its class, that of its first pixel.
    """

    mask: ObjectMask
    class_index: int


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """The areas of a colour that reach the last row.

    Attributes:
        objects: Each as the parts that came so far.
        edge: Of each pixel of the row, the number of its area from 1; 0 where there is none.
    """

    objects: Sequence[list[TrueObject]]
    edge: Numbers


class ObjectAreas:
    """Collects the true objects of a slide from strips of its object plane.

    Args:
        width: The plane's, in pixels.
    """

    def __init__(self, width: int) -> None:
        self._width, self._rows = width, 0
        self._open = dict[int, _Open]()

    @property
    def settled(self) -> int:
        """The row above which no object that is still to come has pixels."""
        tops = [
            part.mask.box.y
            for colour in self._open.values()
            for parts in colour.objects
            for part in parts
        ]
        return min(tops, default=self._rows)

    def add(self, colours: Plane, classes: Plane) -> list[TrueObject]:
        """Take the next rows, and return the objects that they complete.

        Args:
            colours: Of objects, shape (rows, width); 0 is none, 255 unknown.
            classes: Class indices of the same shape.
        """
        found = list[TrueObject]()
        now = {int(colour) for colour in np.unique(colours)}.difference((BACKGROUND, IGNORE))
        for colour in sorted(now | self._open.keys()):
            found += self._join(colour, colours, classes)
        self._rows += len(colours)
        return found

    def close(self) -> list[TrueObject]:
        """Return the objects that reach the last row."""
        found = [_whole(parts) for each in self._open.values() for parts in each.objects]
        self._open.clear()
        return found

    def _join(self, colour: int, colours: Plane, classes: Plane) -> list[TrueObject]:
        """Join the areas of a colour in the new rows to those above; return what is complete."""
        areas = _areas(colours, colour)
        parts = [[each] for each in _cut_out(areas, classes, self._rows)]
        before = self._open.pop(colour, _Open([], np.zeros(self._width, np.int64)))
        touching = _touching(before.edge, areas[0])
        above, count = len(before.objects), len(before.objects) + len(parts)
        graph = coo_array(
            (np.ones(len(touching)), (touching[:, 0], above + touching[:, 1])), shape=(count, count)
        )
        joined, number = connected_components(graph, directed=False)
        objects: list[list[TrueObject]] = [[] for _ in range(joined)]
        for one, these in zip(number.tolist(), [*before.objects, *parts], strict=True):
            objects[one] += these
        last = areas[-1].astype(np.int64)
        reaching = last > 0
        still = np.unique(number[above + last[reaching] - 1])
        if len(still):
            edge = np.zeros(self._width, np.int64)
            edge[reaching] = 1 + np.searchsorted(still, number[above + last[reaching] - 1])
            self._open[colour] = _Open([objects[one] for one in still.tolist()], edge)
        kept = set(still.tolist())
        return [_whole(these) for one, these in enumerate(objects) if one not in kept]


def _areas(colours: Plane, colour: int) -> NDArray[np.int32]:
    """Number from 1 of each pixel's connected area of a colour; 0 elsewhere."""
    own = (colours == colour).view(np.uint8)
    return np.asarray(cv2.connectedComponents(own, connectivity=_NEIGHBOURS)[1], np.int32)


def _cut_out(areas: NDArray[np.int32], classes: Plane, top: int) -> list[TrueObject]:
    """The areas, by number; row 0 of the arrays is row `top` of the plane."""
    found = []
    for number, (rows, columns) in enumerate(find_objects(areas), start=1):
        pixels = areas[rows, columns] == number
        first = np.unravel_index(pixels.argmax(), pixels.shape)
        box = Box(columns.start, top + rows.start, pixels.shape[1], pixels.shape[0])
        found.append(TrueObject(ObjectMask(box, pixels), int(classes[rows, columns][first])))
    return found


def _touching(above: Numbers, below: NDArray[np.int32]) -> Numbers:
    """Pairs of areas, counted from 0, of two rows that follow each other; shape (pairs, 2)."""
    width, pairs = len(above), list[Numbers]()
    for shift in (-1, 0, 1):
        upper = above[max(0, shift) : width + min(0, shift)]
        lower = below[max(0, -shift) : width + min(0, -shift)].astype(np.int64)
        meet = (upper > 0) & (lower > 0)
        pairs.append(np.stack([upper[meet], lower[meet]], axis=1))
    return np.unique(np.concatenate(pairs), axis=0) - 1


def _whole(parts: list[TrueObject]) -> TrueObject:
    """One object of parts that touch."""
    if len(parts) == 1:
        return parts[0]
    boxes = [part.mask.box for part in parts]
    left, top = min(box.x for box in boxes), min(box.y for box in boxes)
    right, bottom = max(box.right for box in boxes), max(box.bottom for box in boxes)
    whole = Box(left, top, right - left, bottom - top)
    pixels = np.zeros((whole.height, whole.width), bool)
    for part in parts:
        pixels[part.mask.box.within(whole)] |= part.mask.pixels
    first = min(parts, key=lambda part: (part.mask.box.y, part.mask.box.x))
    return TrueObject(ObjectMask(whole, pixels), first.class_index)
