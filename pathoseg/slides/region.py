"""Reads a box of a frame: the level that fits, resampled, padded, with what is unread marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import UnreadableError
from pathoseg.geometry import Box, Frame, Level, Size
from pathoseg.slides.levels import averages
from pathoseg.slides.slide import Slide

# A level this much too coarse still serves: 0.5 µm is asked of slides of 0.499 and 0.5016.
_TOLERANCE = 0.02
_STEPS = 32  # positions are told in this share of a pixel: float32 holds what is summed exactly
_SAME = 1 / (2 * _STEPS)  # so positions this close to a level's pixels are those pixels
_LONGEST = 32_766  # OpenCV samples no side that needs more than 16 bits
_STRIP = 64  # rows sampled at a time: what they take stays in the processor's cache
_MARGIN = 2  # cells around a box that its outermost samples may reach
# The unread is found in blocks of this side of a stored level, the usual side of a stored tile.
_BLOCK = 256
_MOST_SOURCE_PIXELS = 16_000_000
_NEGLIGIBLE = 1e-3  # a share of unread pixels that changes no value of 255


@dataclass(frozen=True, slots=True)
class Region:
    """The pixels of a box, and which of them the slide could not deliver.

    Attributes:
        pixels: RGB, shape (height, width, 3); white outside the slide and where unread.
        unread: Shape (height, width), true where the value would have come, even partly, from
            unreadable pixels; None where everything was read.
    """

    pixels: NDArray[np.uint8]
    unread: NDArray[np.bool_] | None = None


def read_region(slide: Slide, frame: Frame, box: Box) -> Region:
    """Read `box`, given in pixels of `frame`, as if the slide lay on an endless white ground.

    The coarsest level that is fine enough is averaged over as many whole pixels as fit into one
    of the frame's, on a grid that starts at the slide's corner. What remains to the frame's
    resolution (less than a factor of two) is interpolated linearly, at positions that are rounded
    to 1/32 cell. A pixel has the same value in every box in which it is read.

    Over all positions, linear interpolation blurs by a variance of 1/6 squared cell, the mean over
    a frame's pixel of r cells by r²/12: what is missing from r = √2 on is blurred before.

    Args:
        slide: The slide.
        frame: The resolution asked for.
        box: May reach outside the slide.
    """
    index, level = _level_for(slide, min(frame.scale_x, frame.scale_y))
    downsample = level.downsample
    across = _span(box.x, box.width, frame.scale_x / downsample)
    down = _span(box.y, box.height, frame.scale_y / downsample)
    source = Box(
        across.first * across.cell,
        down.first * down.cell,
        across.count * across.cell,
        down.count * down.cell,
    )
    longest = max(across.count, down.count, box.width, box.height)
    if (source.size.pixels > _MOST_SOURCE_PIXELS or longest > _LONGEST) and box.size.pixels > 1:
        return _read_halves(slide, frame, box)
    padded = _read_padded(slide, index, level.size, source)
    return _resampled(padded, across, down)


def _level_for(slide: Slide, downsample: float) -> tuple[int, Level]:
    """The coarsest level that is no coarser than asked for, to within the tolerance."""
    levels = list(enumerate((*slide.levels, *slide.reduced)))
    fit = [pair for pair in levels if pair[1].downsample <= downsample * (1 + _TOLERANCE)]
    return max(fit, key=lambda pair: pair[1].downsample, default=levels[0])


@dataclass(frozen=True, slots=True)
class _Span:
    """The cells and sample positions of a level that one side of a box needs.

    Attributes:
        cell: Pixels of the level that are averaged into one cell.
        first: The first cell to read.
        count: How many cells.
        samples: Where the pixels of the box lie, in 1/32 cell from the middle of the first;
            None where they are the cells.
        rest: Cells per pixel of the frame.
    """

    cell: int
    first: int
    count: int
    samples: NDArray[np.int64] | None
    rest: float


def _span(start: int, length: int, step: float) -> _Span:
    """Return the span of a level for the pixels `start` to `start + length` of a frame, each of
    `step` level pixels."""
    cell = max(1, int(step * (1 + _TOLERANCE)))
    rest = step / cell
    low, high = start * rest, (start + length) * rest
    first = round(low)
    if abs(low - first) < _SAME and abs(high - first - length) < _SAME:
        return _Span(cell, first, length, None, rest)
    first, last = math.floor(low) - _MARGIN, math.ceil(high) + _MARGIN
    middles = (np.arange(start, start + length) + 0.5) * rest - 0.5
    samples = np.rint(middles * _STEPS).astype(np.int64) - first * _STEPS
    return _Span(cell, first, last - first, samples, rest)


def _read_halves(slide: Slide, frame: Frame, box: Box) -> Region:
    """Read a box in two parts: memory stays bounded where no level is coarse enough."""
    wide = box.width * frame.scale_x >= box.height * frame.scale_y
    if box.height == 1 or (wide and box.width > 1):
        axis, half = 1, box.width // 2
        first = Box(box.x, box.y, half, box.height)
        second = Box(box.x + half, box.y, box.width - half, box.height)
    else:
        axis, half = 0, box.height // 2
        first = Box(box.x, box.y, box.width, half)
        second = Box(box.x, box.y + half, box.width, box.height - half)
    regions = read_region(slide, frame, first), read_region(slide, frame, second)
    pixels = np.concatenate([region.pixels for region in regions], axis)
    if all(region.unread is None for region in regions):
        return Region(pixels)
    flags = [
        np.zeros(region.pixels.shape[:2], bool) if region.unread is None else region.unread
        for region in regions
    ]
    return Region(pixels, np.concatenate(flags, axis))


def _read_padded(slide: Slide, index: int, size: Size, source: Box) -> Region:
    """The pixels of `source` in a level of that size, white where it reaches outside."""
    inside = source.intersection(Box(0, 0, size.width, size.height))
    if inside is None:
        return Region(_white(source))
    try:
        region = Region(slide.read_level(index, inside))
    except UnreadableError:
        region = _read_blocks(slide, index, inside)
    if inside == source:
        return region
    part = inside.within(source)
    pixels = _white(source)
    pixels[part] = region.pixels
    if region.unread is None:
        return Region(pixels)
    unread = np.zeros(pixels.shape[:2], bool)
    unread[part] = region.unread
    return Region(pixels, unread)


def _read_blocks(slide: Slide, index: int, inside: Box) -> Region:
    """Read a box block by block, those that fail by their quarters, and mark what still fails."""
    pixels, unread = _white(inside), np.zeros((inside.height, inside.width), bool)
    smallest = max(1, _BLOCK // _shrink(slide, index))

    def read(side: int, around: Box) -> None:
        for top in range(around.y // side * side, around.bottom, side):
            for left in range(around.x // side * side, around.right, side):
                block = Box(left, top, side, side).intersection(around)
                assert block is not None
                try:
                    pixels[block.within(inside)] = slide.read_level(index, block)
                except UnreadableError:
                    if side > smallest:
                        read(side // 2, block)
                    else:
                        unread[block.within(inside)] = True

    read(_BLOCK, inside)
    return Region(pixels, unread)


def _shrink(slide: Slide, index: int) -> int:
    """Pixels of the stored level that a level is decoded from per pixel of its own."""
    if index < len(slide.levels):
        return 1
    downsample = slide.reduced[index - len(slide.levels)].downsample
    stored = max(each.downsample for each in slide.levels if each.downsample < downsample)
    return round(downsample / stored)


def _resampled(source: Region, across: _Span, down: _Span) -> Region:
    """Resample the pixels read for a box: average them into cells, sample these."""
    pixels = _resampled_image(source.pixels, across, down)
    if source.unread is None:
        return Region(pixels)
    share = _resampled_image(source.unread.astype(np.float32), across, down)
    return Region(pixels, share > _NEGLIGIBLE)


def _resampled_image(source: NDArray[Any], across: _Span, down: _Span) -> NDArray[Any]:
    cells = averages(source, across.cell, down.cell)
    if across.samples is None and down.samples is None:
        return cells
    if max(across.rest, down.rest) ** 2 > 2:
        cells = cv2.sepFilter2D(cells, -1, _blur(across.rest), _blur(down.rest))
    return _sampled(cells, _positions(across), _positions(down))


def _sampled(cells: NDArray[Any], x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[Any]:
    """The cells, interpolated linearly at every (x, y) of two sorted lists of positions."""
    sampled = np.empty((len(y), len(x), *cells.shape[2:]), cells.dtype)
    across = np.broadcast_to(x, (_STRIP, len(x))).copy()
    down = np.empty_like(across)
    # OpenCV samples four channels in less than half the time of three.
    padded = np.empty((_STRIP, len(x), 4), np.uint8)
    source = np.empty((0, cells.shape[1], 4), np.uint8)
    for top in range(0, len(y), _STRIP):
        rows, out = y[top : top + _STRIP], sampled[top : top + _STRIP]
        part = cells[int(rows[0]) : int(rows[-1]) + 2]
        down[: len(rows)] = (rows - int(rows[0]))[:, None]
        places = across[: len(rows)], down[: len(rows)]
        if cells.ndim == 2:
            cv2.remap(part, *places, cv2.INTER_LINEAR, dst=out)
            continue
        if len(source) < len(part):
            source = np.empty((len(part) + 1, *source.shape[1:]), np.uint8)
        four = cv2.cvtColor(part, cv2.COLOR_RGB2RGBA, dst=source[: len(part)])
        cv2.remap(four, *places, cv2.INTER_LINEAR, dst=padded[: len(rows)])
        cv2.cvtColor(padded[: len(rows)], cv2.COLOR_RGBA2RGB, dst=out)
    return sampled


def _blur(rest: float) -> NDArray[np.float64]:
    """Three weights that blur by what linear interpolation lacks, see `read_region`."""
    side = max(0.0, rest**2 - 2) / 24
    return np.array([side, 1 - 2 * side, side])


def _positions(span: _Span) -> NDArray[np.float32]:
    """Return the sample positions of a box in cells; exact, so that every box rounds alike."""
    samples = span.samples if span.samples is not None else np.arange(span.count) * _STEPS
    return (samples / _STEPS).astype(np.float32)


def _white(box: Box) -> NDArray[np.uint8]:
    return np.full((box.height, box.width, 3), 255, np.uint8)
