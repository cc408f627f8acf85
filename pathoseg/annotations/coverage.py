"""Gives each label pixel the class that covers most of it, from changes along rows of pixels.

Positions are whole numbers of 1/256 pixel, so areas are whole numbers: what has most of a pixel is
exact, ties are ties, and the box that is asked for changes nothing. An edge of a class covers some
of the pixel in which it stands, and as much as it is high of each pixel that follows:

       pixel 0         pixel 1         pixel 2
    |...............|...............|...............|
          [=================)                          a class from 0.4 to 1.5
           +.6             +.4             0           changes by its left edge: .6, then 1
            0              -.5            -.5          changes by its right edge
           =.6             =.5            =.0          sums along the row: the area covered

So each edge makes two changes, whatever lies between edges (after the rasterisers of glyphs in
FreeType and AGG).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.geometry import Box, Frame, Size

UNIT = 256
"""Parts of a pixel's side in which positions are counted."""

INTEREST = 256
"""The value that stands for the regions of interest, beside 0 to 255 of the classes."""

_COLOURS = 256  # values of an object plane
_MOST_SUMS = 1 << 21  # 30 bytes each at most

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """Changes of the covered area along the rows of a box, one for each edge, row and pixel.

    Attributes:
        part: Number of the part, shape (steps,).
        row: The row of pixels, shape (steps,).
        column: The pixel in which the step is, -1 where it is left of the box, shape (steps,).
        here: Change of the area that the part covers of that pixel, in 1/(2 · 256²) of a pixel,
            shape (steps,).
        beyond: Change of the area that it covers of each following pixel, less `here`.
        value: Of each part, the index of its class, or `INTEREST`.
        order: Of each part, the number of its region in the order of painting; None where of two
            classes the higher index is the last.
    """

    part: Ints
    row: Ints
    column: Ints
    here: Ints
    beyond: Ints
    value: Ints
    order: Ints | None = None


def to_units(position: NDArray[np.float64]) -> Ints:
    """Convert positions in pixels to whole numbers of 1/256, to the nearest."""
    units: Ints = np.floor(position * UNIT + 0.5).astype(np.int64)
    return units


def counted(lengths: Ints) -> Ints:
    """0, 1, … up to each length in turn: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    up: Ints = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return up


def units_on_slide(first: int, last: int, length: float) -> Ints:
    """Return the length of each of the pixels `first` to `last` on the slide, in 1/256 pixel.

    Args:
        first: The first pixel, across or down.
        last: One past the last pixel.
        length: Length of the slide along that axis, in pixels.
    """
    sides = to_units(np.array([0.0, length]))
    lengths: Ints = np.diff((np.arange(first, last + 1) * UNIT).clip(*sides))
    return lengths


def pixel_centres(box: Box, frame: Frame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return level-0 x of the columns, shape (width,), and y of the rows, (height,), of `box`."""
    x = (np.arange(box.x, box.right, dtype=np.float64) + 0.5) * frame.scale_x
    y = (np.arange(box.y, box.bottom, dtype=np.float64) + 0.5) * frame.scale_y
    return x, y


def ignore_outside(mask: NDArray[np.uint8], box: Box, frame: Frame, slide_size: Size) -> None:
    """Set the pixels of `mask` whose centres lie outside the slide to 255."""
    x, y = pixel_centres(box, frame)
    mask[:, (x < 0) | (x >= slide_size.width)] = IGNORE
    mask[(y < 0) | (y >= slide_size.height), :] = IGNORE


def rows_at_once(width: int, classes: int, steps: float = math.inf) -> int:
    """Return the number of rows of a box to label at a time, so that memory has a bound.

    Args:
        width: Of the box.
        classes: Different values of its parts.
        steps: A bound of the steps in all rows, where there is one; each begins two pieces.
    """
    sums = classes + 4  # of a piece, and no more pieces than pixels
    if 2 * steps * sums <= _MOST_SUMS:
        sums = 1
    return max(1, _MOST_SUMS // ((width + 3) * sums))


def most_covered(
    steps: Steps, heights: Ints, widths: Ints, unlabelled: int, interest: bool = False
) -> NDArray[np.uint8]:
    """Return the class that covers most of each pixel of a box.

    Of classes that cover as much, the pixel gets the one painted last; of a class and what nothing
    covers, the class.

    Args:
        steps: Of parts on the slide, where none covers another.
        heights: How much of each row is on the slide, in 1/256, shape (rows,).
        widths: The same of each column, shape (columns,).
        unlabelled: The class index of what no part covers.
        interest: True if it applies in the regions of interest alone. They cover all others, and
            what they do not cover is ignored.

    Returns:
        Class indices, shape (rows, columns).
    """
    rest = IGNORE if interest else unlabelled
    mask: NDArray[np.uint8] = np.full((len(heights), len(widths)), rest, np.uint8)
    if not len(steps.row):
        return mask
    top, bottom = int(steps.row.min()), int(steps.row.max()) + 1
    lines = _Lines.of(steps, top, bottom, widths)
    covered = lines.covered(steps)
    whole = 2 * heights[top:bottom][lines.row] * np.pad(widths, (1, 2))[lines.column + 1]
    known = covered.pop(INTEREST, np.zeros_like(whole)) if interest else whole
    areas = covered | {unlabelled: known - sum(a for v, a in covered.items() if v != unlabelled)}
    if interest:
        areas[IGNORE] = areas.get(IGNORE, 0) + whole - known
    # What comes later has what ties: outside, then unlabelled, then what somebody has drawn there.
    most = np.maximum(areas[rest], areas[unlabelled])
    found = np.where(areas[unlabelled] == most, unlabelled, rest)
    for value, area in covered.items():
        found[(areas[value] >= most) & (area > 0)] = value
        most = np.maximum(most, areas[value])
    _settle_ties(found, steps, lines, top, len(widths), {v: areas[v] for v in covered}, most)
    mask[top:bottom] = lines.filled(found.astype(np.uint8))
    return mask


def most_covering(steps: Steps, mask: NDArray[np.uint8], widths: Ints) -> NDArray[np.uint8]:
    """Return the colour of the object that covers most of each pixel, of those of its class.

    Args:
        steps: All that `most_covered` made `mask` of; the value of a part is `object_value` of its
            class and colour, 0 where it is no object, or `INTEREST`.
        mask: Class indices, shape (rows, columns).
        widths: How much of each column is on the slide, in 1/256, shape (columns,).

    Returns:
        Colours; 0 where `mask` is background, 255 where it is 255. Shape (rows, columns).
    """
    objects: NDArray[np.uint8] = np.where(mask == IGNORE, np.uint8(IGNORE), np.uint8(BACKGROUND))
    if not len(steps.row):
        return objects
    top, bottom = int(steps.row.min()), int(steps.row.max()) + 1
    lines = _Lines.of(steps, top, bottom, widths)
    # Classes change where something steps, so all pixels of a piece are of one class.
    shown = mask[lines.row + top, lines.column.clip(0, len(widths) - 1)]
    found, most = np.zeros(len(shown), np.int64), np.zeros(len(shown), np.int64)
    covered = dict[int, Ints]()
    for value, area in lines.covered(steps).items():
        if value != INTEREST:
            # One that is no object has no class that `mask` shows: it is 0.
            covered[value] = np.where((shown == value // _COLOURS) & (value > 0), area, 0)
            found[(covered[value] >= most) & (covered[value] > 0)] = value
            most = np.maximum(most, covered[value])
    _settle_ties(found, steps, lines, top, len(widths), covered, most)
    painted = lines.filled((found % _COLOURS).astype(np.uint8))
    known = mask[top:bottom] != IGNORE
    objects[top:bottom][known] = painted[known]
    return objects


def object_value(classes: Ints, colours: NDArray[np.uint8]) -> Ints:
    """Return the value that stands for objects of a class (from 1) and a colour (from 1)."""
    return classes * _COLOURS + colours


def _settle_ties(
    found: Ints,
    steps: Steps,
    lines: _Lines,
    top: int,
    width: int,
    covered: Mapping[int, Ints],
    most: Ints,
) -> None:
    """Give pieces of which several values cover as much to that of the region painted last.

    Args:
        found: A value for each piece, changed in place.
        steps: Of all parts.
        lines: The pieces.
        top: The row of the first line.
        width: Of the box.
        covered: By value, the area that it covers of a pixel of each piece.
        most: The largest of these and of what nothing covers.
    """
    if len(covered) < 2 or steps.order is None:
        return
    equal = np.stack([area == most for area in covered.values()])
    at = np.flatnonzero((equal.sum(axis=0) > 1) & (most > 0))
    if len(at):
        tied = dict(zip(covered, equal[:, at], strict=True))
        rows, columns = lines.row[at] + top, lines.column[at]
        last = _painted_last(steps, steps.order, rows, columns, width, tied)
        found[at] = np.where(last < 0, found[at], last)


@dataclass(frozen=True, slots=True)
class _Lines:
    """The rows of a box, cut where anything changes: pieces of pixels that are all alike.

    Attributes:
        first: Place of the first pixel of each piece, counting `stride` places a row; the first
            place of a row is column -1.
        row: Its row.
        column: Its column.
        stride: Places of a row: column -1, all columns, and two beyond.
        number: Of each place that is the first of a piece, the number of the piece.
        steps: Place of each step.
    """

    first: Ints
    row: Ints
    column: Ints
    stride: int
    number: NDArray[np.int32]
    steps: Ints

    @classmethod
    def of(cls, steps: Steps, top: int, bottom: int, widths: Ints) -> _Lines:
        """Cut the rows `top` to `bottom` where there are steps, and where the slide ends."""
        stride = len(widths) + 3
        begins = np.zeros((bottom - top, stride), np.bool_)
        begins[:, np.flatnonzero(np.diff(np.pad(widths, (1, 1)), prepend=-1))] = True
        begins[:, :2] = True
        at = (steps.row - top) * stride + steps.column + 1
        begins.reshape(-1)[at] = True
        begins.reshape(-1)[at + 1] = True
        first = np.flatnonzero(begins)
        row = first // stride
        number = np.empty(begins.size, np.int32)
        number[first] = np.arange(len(first))
        return cls(first, row, first - row * stride - 1, stride, number, at)

    def covered(self, steps: Steps) -> dict[int, Ints]:
        """Return the area of a pixel of each piece that parts of each value cover.

        Args:
            steps: The changes that the pieces were made of.

        Returns:
            By value, ascending: areas in 1/(2 · 256²) of a pixel, shape (pieces,).
        """
        stepping = np.zeros(len(steps.value), np.bool_)
        stepping[steps.part] = True
        drawn = np.unique(steps.value[stepping])
        kind = np.searchsorted(drawn, steps.value)[steps.part]
        count = len(self.first)
        sums = np.zeros((len(drawn), count), np.int64)
        for places, change in ((self.steps, steps.here), (self.steps + 1, steps.beyond)):
            np.add.at(sums.reshape(-1), kind * count + self.number[places], change)
        sums.cumsum(axis=1, out=sums)
        # What a row ends with is not what the next one begins with.
        starts = np.flatnonzero(self.column < 0)
        before = np.pad(sums, ((0, 0), (1, 0)))[:, starts]
        areas = sums - before.repeat(np.diff(starts, append=count), axis=1)
        return dict(zip(drawn.tolist(), areas, strict=True))

    def filled(self, value: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The values of the pieces as pixels of the box."""
        lengths = np.diff(self.first, append=len(self.number))
        return value.repeat(lengths).reshape(-1, self.stride)[:, 1:-2]


def _painted_last(
    steps: Steps,
    order: Ints,
    rows: Ints,
    columns: Ints,
    width: int,
    tied: Mapping[int, NDArray[np.bool_]],
) -> Ints:
    """Break ties: return the class of the region painted last, of those that cover a pixel equally.

    Args:
        steps: Of all parts.
        order: Of each part, the number of its region.
        rows: Of the pixels, ascending.
        columns: Of the pixels, ascending in each row.
        width: Of the box.
        tied: By class, True for each pixel where it is one of the tied classes.

    Returns:
        Class indices, -1 where no region shows, shape (pixels,).
    """
    has_ties = np.zeros(int(steps.row.max()) + 1, np.bool_)
    has_ties[rows] = True
    wanted = np.flatnonzero(has_ties[steps.row] & (steps.value != INTEREST)[steps.part])
    stride = width + 3  # columns -1 to width, and what lies beyond the last
    # A line is a region in a row. What shows of it in a pixel is the sum of its steps so far.
    region, row = np.tile(order[steps.part[wanted]], 2), np.tile(steps.row[wanted], 2)
    column = np.concatenate([steps.column[wanted], steps.column[wanted] + 1])
    area = np.concatenate([steps.here[wanted], steps.beyond[wanted]])
    key = (region * len(has_ties) + row) * stride + column + 1
    sorting = np.argsort(key, kind="stable")
    key, region, row, column = key[sorting], region[sorting], row[sorting], column[sorting]
    covered = np.cumsum(area[sorting])
    start = np.flatnonzero(np.diff(key // stride, prepend=-1))
    end = np.append(start[1:], len(key)) - 1
    before = covered[start] - area[sorting][start]
    last = np.where(covered[end] == before, np.minimum(column[end], width), width)
    # Each line with each of the pixels that lie between its ends.
    pixel = rows * width + columns
    begin = np.searchsorted(pixel, row[start] * width + np.maximum(column[start], 0))
    count = np.searchsorted(pixel, row[start] * width + last) - begin
    count = np.maximum(count, 0)
    line = np.repeat(np.arange(len(start)), count)
    at = np.repeat(begin, count) + counted(count)
    wanted_key = key[start][line] - column[start][line] + columns[at]
    so_far = covered[np.searchsorted(key, wanted_key, side="right") - 1]
    painted = steps.value != INTEREST
    value_of = np.zeros(int(order.max()) + 1, np.int64)
    value_of[order[painted]] = steps.value[painted]
    shows = so_far > before[line]
    value = value_of[region[start][line]]
    for one, where in tied.items():
        shows &= (value != one) | where[at]
    best = np.full(len(pixel), -1)
    np.maximum.at(best, at[shows], region[start][line][shows])
    latest: Ints = np.where(best < 0, -1, value_of[best])
    return latest
