"""Blends overlapping tile predictions into finished bands, holding only what tiles still share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.errors import PathosegError
from pathoseg.tiles.grid import TileGrid

# The least weight of a pixel: it shows only where no other tile reaches, as beside skipped tiles.
_FLOOR = 1e-6
# The weight of an unread pixel: too little to show beside any read one (at least _FLOOR²).
_UNREAD = 1e-30

Prediction = tuple[int, NDArray[np.floating[Any]], NDArray[np.bool_] | None]


def argmax(probabilities: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The most probable class of each pixel, the lower one where two tie.

    Args:
        probabilities: Shape (classes, height, width).

    Returns:
        Shape (height, width).
    """
    best = probabilities[0]
    index = np.zeros(best.shape, np.uint8)
    # Twice as fast as np.argmax over the first axis.
    for number, probability in enumerate(probabilities[1:], start=1):
        np.copyto(index, np.uint8(number), where=probability > best)
        best = np.maximum(best, probability)
    return index


def stitch(
    grid: TileGrid,
    predictions: Iterable[Prediction],
    classes: int,
    margin: int,
    finish: Callable[[NDArray[np.float32]], NDArray[Any]] = argmax,
) -> Iterator[NDArray[Any]]:
    """Yields the mask of a grid's extent from top to bottom, a band for each row of tiles.

    Where tiles overlap, a pixel is the weighted mean of their probabilities. Across an overlap a
    tile's weight is zero for `margin` pixels from its edge, then rises to one as a raised cosine;
    the weights of two neighbours add up to one. Kept from tile to tile are the sums of the columns
    shared with the next tile, and from row to row those of the rows shared with the next row.

    Args:
        grid: Where the tiles lie; any overlap below the tile.
        predictions: Index in the grid, probabilities of shape (classes, tile height, tile width),
            and which pixels could not be read (or None), in increasing order of the index. Tiles
            may be missing: what no tile covers is background.
        classes: Number of classes with background.
        margin: Pixels from a tile's edge that its network sees too little around, at most half
            of the overlap.
        finish: Makes an array of shape (..., height, width) out of probabilities.

    Yields:
        Bands of shape (..., rows, extent's width). Pixels that no tile has read are 255.

    Raises:
        PathosegError: The margin exceeds half of the overlap.
        ValueError: The predictions are out of order or outside the grid.
    """
    rows = _Axis.of(grid.extent.height, grid.tile.height, grid.stride.height, grid.rows)
    columns = _Axis.of(grid.extent.width, grid.tile.width, grid.stride.width, grid.columns)
    for axis in (rows, columns):
        if axis.shared and 2 * margin > axis.shared:
            raise PathosegError(
                f"Tiles that share {axis.shared} px leave nothing to blend between two margins "
                f"of {margin} px.",
                f"Choose an overlap of at least {2 * margin} px, or a smaller margin.",
            )
    blank = finish(np.zeros((classes, 1, 1), np.float32))
    above = np.zeros((classes + 1, rows.shared, grid.extent.width), np.float32)
    waiting = iter(predictions)
    following = None
    for row in range(rows.count):
        height = rows.finished(row)
        band = np.zeros((*blank.shape[:-2], height, grid.extent.width), blank.dtype)
        left = np.zeros((classes + 1, rows.length(row), columns.shared), np.float32)
        for column in range(columns.count):
            # Only when it is due, so that a band never waits for the next row's first tile.
            following = following or next(waiting, None)
            sums = np.zeros((classes + 1, rows.length(row), columns.length(column)), np.float32)
            if following is not None and following[0] == row * columns.count + column:
                window = np.outer(rows.window(row, margin), columns.window(column, margin))
                _add(sums, following, window)
                following = None
            sums[:, :, : columns.shared] += left
            complete, left = np.split(sums, [columns.finished(column)], axis=2)
            across = slice(column * columns.step, column * columns.step + complete.shape[2])
            complete[:, : rows.shared] += above[:, :, across]
            complete, below = np.split(complete, [height], axis=1)
            above[:, : below.shape[1], across] = below
            if complete[-1].any():
                band[..., across] = _finished(complete, finish)
        yield band
    if following is not None or next(waiting, None) is not None:
        raise ValueError("the predictions are out of order or outside the grid")


def _add(sums: NDArray[np.float32], prediction: Prediction, window: NDArray[np.float32]) -> None:
    """Adds weighted probabilities, and the weights behind them, of a tile cut to its `sums`."""
    _, probabilities, unread = prediction
    height, width = window.shape
    if unread is not None:
        unread = unread[:height, :width]
        window = np.where(unread, np.float32(0), window)
    np.multiply(probabilities[:, :height, :width], window, out=sums[:-1])
    sums[-1] = window if unread is None else np.where(unread, np.float32(_UNREAD), window)


def _finished(
    sums: NDArray[np.float32], finish: Callable[[NDArray[np.float32]], NDArray[Any]]
) -> NDArray[Any]:
    weights = sums[-1]
    result = finish(sums[:-1] / np.maximum(weights, np.float32(_UNREAD)))
    result[..., weights < 0.5 * _FLOOR**2] = IGNORE
    result[..., weights == 0] = BACKGROUND
    return result


@dataclass(frozen=True, slots=True)
class _Axis:
    """One direction of a grid: `count` tiles, `step` pixels apart; neighbours share `shared`."""

    extent: int
    tile: int
    step: int
    count: int

    @classmethod
    def of(cls, extent: int, tile: int, stride: int, count: int) -> _Axis:
        """An axis whose single tile has nothing to share with."""
        return cls(extent, tile, stride if count > 1 else tile, count)

    @property
    def shared(self) -> int:
        return self.tile - self.step

    def length(self, index: int) -> int:
        """Pixels of a tile inside the extent."""
        return min(self.tile, self.extent - index * self.step)

    def finished(self, index: int) -> int:
        """Pixels of a tile, from its start, that no later tile shares."""
        return self.step if index < self.count - 1 else self.length(index)

    def window(self, index: int, margin: int) -> NDArray[np.float32]:
        """A tile's weights: without a ramp at the first tile's start and the last one's end."""
        ramp = self.shared - 2 * margin
        cosine = np.sin(0.5 * np.pi * (np.arange(ramp) + 0.5) / max(ramp, 1)) ** 2
        rise = np.concatenate([np.zeros(margin), cosine, np.ones(margin)])[: self.shared]
        weights = np.ones(self.tile)
        if index > 0:
            weights[: self.shared] = rise
        if index < self.count - 1:
            weights[self.step :] = np.minimum(weights[self.step :], rise[::-1])
        return np.maximum(weights, _FLOOR)[: self.length(index)].astype(np.float32)
