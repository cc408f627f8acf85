"""The object numbers of a mask (`mask = "instances"`): renumbered, given a class, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.annotations.coverage import Ints
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Size

_MOST = (1 << 16) - 1
_ROWS = 256
_COMPACT = 0.5  # part of its bounding box above which an object cannot be in two distant places
_WIDEST = 2048  # cells in which the pieces of an object are looked for
_FAR = 2  # sides of an object's largest piece, or of the mask's middle object if that is larger
_NEAR = 16  # pixels of the mask: specks of noise this near to each other are let be
_FEW = 3  # areas of a single value that can be one object


@dataclass(frozen=True, slots=True)
class ObjectNumbers:
    """Values, classes and boxes of the objects of a mask, numbered from 1 by ascending value.

    Attributes:
        values: Value in the file of each number, shape (numbers + 1,).
        classes: Class value of each number: from 1, 255 where it is ignored, 0 for
            background, shape (numbers + 1,).
        unclassified: Number of objects without a class in the mask of classes: they are ignored.
        boxes: Left, top, right and bottom of each number in pixels of the mask, shape
            (numbers + 1, 4).
    """

    values: Ints
    classes: NDArray[np.uint8]
    unclassified: int
    boxes: Ints

    @classmethod
    def of(
        cls,
        path: Path,
        pixels: NDArray[Any],
        ignored: Collection[int],
        class_pixels: NDArray[np.uint8] | None,
        slide_size: Size,
    ) -> tuple[ObjectNumbers, NDArray[np.uint16]]:
        """Number the objects of a mask.

        Args:
            path: Its file, for errors.
            pixels: Values, shape (height, width).
            ignored: Values that are no object; what is there is not known.
            class_pixels: Class values of the same slide, of any size; an object has the class that
                covers most of it, and is ignored where that mask is 0 in all of it. None makes
                all objects of class 1.
            slide_size: Level-0 pixels, in which errors name places.

        Returns:
            The objects, and the number of each pixel, 0 for background, shape (height, width).

        Raises:
            PathosegError: Values are negative, there are more than 65,535 objects, the value of an
                object is in two places far apart, or one value marks all objects.
        """
        values = _values(path, pixels)
        kept = np.array([value not in ignored for value in values.tolist()], np.bool_)
        if len(values) - 1 > _MOST:
            raise PathosegError(
                f"{path} numbers {len(values) - 1:,} objects; a mask may have {_MOST:,}.",
                "Cut the image and its mask into parts, or give the objects as outlines (GeoJSON).",
            )
        numbers = np.empty(pixels.shape, np.uint16)
        for rows in _bands(pixels):
            numbers[rows] = np.searchsorted(values, pixels[rows])
        areas, boxes = _extents(numbers, len(values))
        _refuse_what_is_not_numbered(path, numbers, values, kept, areas, boxes, slide_size)
        if class_pixels is None:
            classes = np.full(len(values), 1, np.uint8)
        else:
            classes = _classes(numbers, len(values), class_pixels)
        unclassified = int(np.count_nonzero(kept[1:] & (classes[1:] == 0)))
        classes[~kept | (classes == 0)], classes[0] = IGNORE, BACKGROUND
        return cls(values, classes, unclassified, boxes), numbers


def _values(path: Path, pixels: NDArray[Any]) -> Ints:
    """The values in use and 0, ascending."""
    found = np.zeros(1, np.int64)
    for rows in _bands(pixels):
        found = np.union1d(found, pixels[rows])
    if found[0] < 0:
        raise PathosegError(
            f"{path} holds the value {found[0]}; objects are numbered from 1, and 0 is background.",
            "Save it again with numbers from 1 to 65,535.",
        )
    return found.astype(np.int64)


def _classes(
    numbers: NDArray[np.uint16], count: int, class_pixels: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The class value that covers most of each number, the higher of equals; 0 for none."""
    # The pixel of the class mask under each centre.
    down, across = (
        ((np.arange(side) + 0.5) * (of / side)).astype(np.int64)
        for side, of in zip(numbers.shape, class_pixels.shape, strict=True)
    )
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for rows in _bands(numbers):
        seen = class_pixels[down[rows]][:, across]
        labelled = (numbers[rows] > 0) & (seen > 0)
        key = numbers[rows][labelled].astype(np.int64) * 256 + seen[labelled]
        new, times = np.unique(key, return_counts=True)
        keys, where = np.unique(np.concatenate([keys, new]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, times])).astype(np.int64)
    number, value = np.divmod(keys, 256)
    order = np.lexsort((value, counts, number))
    classes = np.zeros(count, np.uint8)
    classes[number[order]] = value[order]  # where a number occurs twice, numpy keeps the last
    return classes


class _Pieces(NamedTuple):
    """The connected areas of a value.

    Attributes:
        boxes: Left, top, width, height and area of each, in cells, shape (pieces, 5).
        cell: Side of a cell in pixels of the mask.
        left, top: Of the first cell, in pixels of the mask.
    """

    boxes: NDArray[np.int32]
    cell: int
    left: int
    top: int

    @classmethod
    def of(cls, numbers: NDArray[np.uint16], number: int, around: Box) -> _Pieces:
        """Label 8-connected areas on a grid of at most 2,048 cells a side; a cell is one place."""
        cell = -(-max(around.width, around.height) // _WIDEST)
        columns = np.arange(0, around.width, cell)
        held = np.empty((-(-around.height // cell), len(columns)), np.uint8)
        high = max(1, _ROWS // cell)  # cells
        for first in range(0, len(held), high):
            top, bottom = (around.y + row * cell for row in (first, first + high))
            lines = numbers[top : min(bottom, around.bottom), around.x : around.right] == number
            lines = np.logical_or.reduceat(lines, np.arange(0, len(lines), cell), axis=0)
            held[first : first + high] = np.logical_or.reduceat(lines, columns, axis=1)
        _, _, boxes, _ = cv2.connectedComponentsWithStats(held, connectivity=8)
        return cls(boxes[1:].astype(np.int32), cell, around.x, around.y)

    def far_apart(self, usual: float) -> tuple[int, int] | None:
        """The largest piece and the furthest from it, where that lies far from it; or None.

        Args:
            usual: Longest side of a usual object in pixels of the mask: of one that others hide,
                scraps may lie that far apart.
        """
        left, top, width, height, area = self.boxes.T
        most = int(area.argmax())
        right, bottom = left + width, top + height
        across = np.maximum(left - right[most], left[most] - right)
        down = np.maximum(top - bottom[most], top[most] - bottom)
        gap = np.maximum(across, down)
        side = max(width[most], height[most], usual / self.cell)
        furthest = int(gap.argmax())
        is_far = gap[furthest] > max(_FAR * side, _NEAR / self.cell)
        return (most, furthest) if is_far else None

    def place(self, piece: int, mask: tuple[int, ...], slide: Size) -> str:
        """The middle of a piece in level-0 pixels, as text."""
        left, top, width, height, _ = self.boxes[piece].tolist()
        x = (self.left + (left + width / 2) * self.cell) * slide.width / mask[1]
        y = (self.top + (top + height / 2) * self.cell) * slide.height / mask[0]
        return f"({x:.0f}, {y:.0f})"


def _refuse_what_is_not_numbered(
    path: Path,
    numbers: NDArray[np.uint16],
    values: Ints,
    kept: NDArray[np.bool_],
    areas: Ints,
    boxes: Ints,
    slide_size: Size,
) -> None:
    """Refuse a value that marks what cannot be one object."""
    objects = np.flatnonzero(kept)[1:]  # the first is background
    if len(objects) == 1:
        pieces = _Pieces.of(numbers, int(objects[0]), _box(boxes[objects[0]]))
        if len(pieces.boxes) > _FEW:
            raise PathosegError(
                f"{path} holds the one value {values[objects[0]]} in {len(pieces.boxes)} separate "
                "areas: it says where objects are, and not which is which.",
                "Number them 1, 2, 3…; or leave objects alone: `[annotations] mask = "
                '"binary"` and `[model] task = "segment"`.',
            )
    extents = boxes[:, 2:] - boxes[:, :2]
    held = extents.prod(axis=1)
    is_compact = areas[objects] >= _COMPACT * held[objects]
    whole, suspects = objects[is_compact], objects[~is_compact].tolist()
    usual = float(np.median(extents[whole].max(axis=1))) if len(whole) else 0.0
    # The largest box first: numbers that begin again in each part of an image show at once.
    for one in sorted(suspects, key=lambda one: -int(held[one])):
        pieces = _Pieces.of(numbers, one, _box(boxes[one]))
        if (found := pieces.far_apart(usual)) is None:
            continue
        here, there = (pieces.place(piece, numbers.shape, slide_size) for piece in found)
        raise PathosegError(
            f"{path} has object number {values[one]} in two places far apart, at {here} and "
            f"{there} px of the slide.",
            "Give each object a number of its own. Numbers that begin again in each part of an "
            'image or after 65,535 look like this, and so do classes (`mask = "indices"`).',
        )


def _extents(numbers: NDArray[np.uint16], count: int) -> tuple[Ints, Ints]:
    """Area of each number, shape (count,), and its left, top, right and bottom, (count, 4)."""
    height, width = numbers.shape
    areas = np.zeros(count, np.int64)
    boxes = np.tile(np.array([width, height, 0, 0], np.int64), (count, 1))
    for rows in _bands(numbers):
        band = numbers[rows]
        changed = np.ones(band.shape, np.bool_)
        np.not_equal(band[:, 1:], band[:, :-1], out=changed[:, 1:])
        at = np.flatnonzero(changed)
        row, first = np.divmod(at, width)
        length = np.diff(at, append=band.size)
        number = band[row, first]
        row += rows.start
        areas += np.bincount(number, length, minlength=count).astype(np.int64)
        np.minimum.at(boxes[:, 0], number, first)
        np.minimum.at(boxes[:, 1], number, row)
        np.maximum.at(boxes[:, 2], number, first + length)
        np.maximum.at(boxes[:, 3], number, row + 1)
    return areas, boxes


def _box(sides: Ints) -> Box:
    left, top, right, bottom = sides.tolist()
    return Box(left, top, right - left, bottom - top)


def _bands(pixels: NDArray[Any]) -> Iterator[slice]:
    for top in range(0, len(pixels), _ROWS):
        yield slice(top, min(top + _ROWS, len(pixels)))
