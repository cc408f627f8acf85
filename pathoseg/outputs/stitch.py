"""Blends overlapping tile predictions into finished bands, holding only what tiles still share.

    across             |========== tile 0 =========|
                                         |========= tile 1 ==========|
    overlap                              |-m-|.....|-m-|               m: margin
    weight of tile 0   1   1   1   1   1   1  .9 .5 .1   0             a raised cosine between
    weight of tile 1                       0  .1 .5 .9   1   1   1     the margins; the sum is 1

    the sums of tile (row, column)
    +--------------+------+
    |              |      |    (1) done: no later tile reaches it; it leaves as pixels of the band
    |   (1) done   | (2)  |    (2) `_left`: added to the next tile of the row
    |              |      |    (3) `_above[column]`: added to the tile below in the next row
    +--------------+      |
    |   (3) below  |      |    Corners come to (3) through (2): the next tile passes them on.
    +--------------+------+

Each sum has a channel for each class and one of the weights, by which it is divided when it is done
(`_finished`). So a band takes the memory of one row's strips (3), one tile, and the band's pixels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE
from pathoseg.device import Arrival
from pathoseg.errors import PathosegError
from pathoseg.geometry import Size
from pathoseg.tiles.grid import TileGrid

# The least weight of a pixel: it shows only where no other tile reaches, as beside skipped tiles.
_FLOOR = 1e-6
# The weight of an unread pixel: too little to show beside any read one (at least _FLOOR²).
_UNREAD = 1e-30

TilePrediction = tuple[int, torch.Tensor, NDArray[np.bool_] | None]
Finish = Callable[[torch.Tensor], torch.Tensor]
_Kind = tuple[bool, bool, int]


def argmax(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the most probable class of each pixel, the lower one of two that tie.

    Args:
        probabilities: Shape (classes, height, width).

    Returns:
        Shape (height, width), uint8.
    """
    best = probabilities[0]
    index = torch.zeros(best.shape, dtype=torch.uint8, device=best.device)
    # Several times as fast as torch.argmax over the first axis.
    for number, probability in enumerate(probabilities[1:], start=1):
        index.masked_fill_(probability > best, number)
        if number < len(probabilities) - 1:
            best = torch.maximum(best, probability)
    return index


CONFIDENCE_LEVELS = 2**15 - 1


def argmax_and_confidence(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the most probable class of each pixel, as `argmax`, and its probability.

    Args:
        probabilities: Shape (classes, height, width).

    Returns:
        Shape (2, height, width), int16: the class, and its probability times 32,767.
    """
    levels = probabilities.amax(0).mul_(CONFIDENCE_LEVELS).round_().clamp_(max=CONFIDENCE_LEVELS)
    return torch.stack([argmax(probabilities).to(torch.int16), levels.to(torch.int16)])


HEIGHT_LEVELS = 8
"""Levels of an object's height a pixel."""

_CEILING = 30 * HEIGHT_LEVELS  # below the highest that is learned: large objects are flat inside


def object_planes(maps: torch.Tensor) -> torch.Tensor:
    """Return the most probable class of each pixel, its height, and the class's probability.

    Args:
        maps: Probabilities and, last, the height in pixels, shape (classes + 1, height, width).

    Returns:
        Shape (3, height, width), uint8: the class, the height times `HEIGHT_LEVELS`, at most
        that of 30 pixels, and the probability times 255. The last two are 0 in the background.
    """
    classes = argmax(maps[:-1])
    heights = (maps[-1] * HEIGHT_LEVELS).round_().clamp_(0, _CEILING).to(torch.uint8)
    levels = (maps[:-1].amax(0) * 255).round_().to(torch.uint8)
    blank = classes == BACKGROUND
    return torch.stack([classes, heights.masked_fill_(blank, 0), levels.masked_fill_(blank, 0)])


def certainty_planes(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the probability of each class, and how evenly they are spread.

    Args:
        probabilities: Shape (classes, height, width), two classes or more.

    Returns:
        Shape (classes + 1, height, width), uint8: probabilities times 255, and last their entropy
        over its largest value, the logarithm of the number of classes, times 255.
    """
    entropy = torch.special.entr(probabilities).sum(0).div_(math.log(len(probabilities)))
    shares = torch.cat([probabilities, entropy[None]])
    return shares.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def settle_certainty(mask: NDArray[np.uint8], certainty: NDArray[np.uint8]) -> None:
    """Give a certainty to pixels that were not predicted, in place.

    Bands are joined with 0 where nothing is predicted and with 255 where nothing could be read.
    The former have no tissue: they are background for certain. Of the latter nothing is known: no
    class has a share, and there is no entropy.

    Args:
        mask: Class indices, shape (rows, width).
        certainty: As of `certainty_planes`, shape (classes + 1, rows, width).
    """
    certainty[BACKGROUND][~certainty[:-1].any(axis=0)] = 255
    certainty[:, mask == IGNORE] = 0


def refuse_misfit(tile: int, overlap: int, multiple: int, margin: int) -> None:
    """Refuse what no slide could be cut into and blended of, before any is read.

    Args:
        tile: Side of a tile in pixels.
        overlap: Pixels that neighbours share.
        multiple: As for `TileGrid.cover`.
        margin: As for `stitch`.

    Raises:
        PathosegError: Tile and overlap do not fit the model, or the margin exceeds half of the
            overlap.
    """
    TileGrid.cover(Size(tile, tile), tile, overlap, multiple)
    _refuse_margin(overlap, margin)


def _refuse_margin(shared: int, margin: int) -> None:
    if shared and 2 * margin > shared:
        raise PathosegError(
            f"Tiles that share {shared} px leave nothing to blend between two margins "
            f"of {margin} px.",
            f"Choose an overlap of at least {2 * margin} px, or a smaller margin.",
        )


def stitch(
    grid: TileGrid,
    predictions: Iterable[TilePrediction],
    channels: int,
    margin: int,
    finish: Finish = argmax,
    first: int = 0,
) -> Iterator[NDArray[Any]]:
    """Yield the mask of a grid's extent from top to bottom, a band for each row of tiles.

    Where tiles overlap, a pixel is the weighted mean of their probabilities. Across an overlap a
    tile's weight is zero for `margin` pixels from its edge, then rises to one as a raised cosine;
    the weights of two neighbours add up to one. Kept from tile to tile are the sums of the columns
    shared with the next tile, and from row to row, where there are tiles, those of the rows shared
    with the next row. All of this happens on the device of the predictions: what comes to the host
    is what `finish` makes of them, each pixel once.

    Args:
        grid: The tiles' places; any overlap below the tile.
        predictions: Index in the grid, predicted maps of shape (channels, tile height, tile width),
            and which pixels could not be read (or None), in increasing order of the index. Tiles
            may be missing: what no tile covers is background.
        channels: Channels of a prediction: the classes, and the height of objects.
        margin: Pixels from a tile's edge that its network sees too little around, at most half
            of the overlap.
        finish: Makes a tensor of shape (..., height, width) out of probabilities.
        first: The row of tiles to begin with; the bands from `first + reach_down(grid)` on are
            equal to the bit to those of the whole.

    Yields:
        Bands of shape (..., rows, extent's width). Pixels that no tile has read are 255.

    Raises:
        PathosegError: The margin exceeds half of the overlap.
        ValueError: The predictions are out of order or outside the grid.
    """
    rows = _Axis.of(grid.extent.height, grid.tile.height, grid.stride.height, grid.rows)
    columns = _Axis.of(grid.extent.width, grid.tile.width, grid.stride.width, grid.columns)
    for axis in (rows, columns):
        _refuse_margin(axis.shared, margin)
    blank = finish(torch.zeros(channels, 1, 1)).numpy()
    blend = _Blend(rows, columns, margin)
    waiting = iter(predictions)
    following = None
    for row in range(first, rows.count):
        band = np.zeros((*blank.shape[:-2], rows.finished(row), grid.extent.width), blank.dtype)
        arriving = deque[tuple[int, Arrival]]()
        for column in range(columns.count):
            # Only when it is due, so that a band never waits for the next row's first tile.
            following = following or next(waiting, None)
            due = following is not None and following[0] == row * columns.count + column
            sums = blend.add(row, column, following if due else None)
            following = None if due else following
            if sums is not None:
                arriving.append((column * columns.step, Arrival(_finished(sums, finish))))
            # The device goes on with the next tile while the last one's pixels are on their way.
            while arriving and (len(arriving) > 1 or arriving[0][1].is_here):
                _put(band, *arriving.popleft())
        while arriving:
            _put(band, *arriving.popleft())
        yield band
    if following is not None or next(waiting, None) is not None:
        raise ValueError("the predictions are out of order or outside the grid")


def reach_down(grid: TileGrid) -> int:
    """Return how many rows of tiles below its own a tile overlaps."""
    return _reach(grid.tile.height, grid.stride.height)


def _reach(tile: int, step: int) -> int:
    return -(-tile // step) - 1


def _put(band: NDArray[Any], left: int, arrival: Arrival) -> None:
    pixels = arrival.array()
    band[..., left : left + pixels.shape[-1]] = pixels


def _finished(sums: torch.Tensor, finish: Finish) -> torch.Tensor:
    weights = sums[-1]
    unread, uncovered = weights < 0.5 * _FLOOR**2, weights == 0
    result = finish(sums[:-1].div_(weights.clamp_(min=_UNREAD)))
    return result.masked_fill_(unread, IGNORE).masked_fill_(uncovered, BACKGROUND)


class _Blend:
    """Weighted sums of the probabilities of tiles, and as their last channel those of the weights.

    Its memory is used for all tiles: new pages would cost more than the sums.

    Args:
        rows: The grid's, downwards.
        columns: The grid's, across.
        margin: See `stitch`.
    """

    def __init__(self, rows: _Axis, columns: _Axis, margin: int) -> None:
        self._rows, self._columns, self._margin = rows, columns, margin
        self._windows: dict[tuple[_Kind, _Kind], torch.Tensor] = {}
        self._sums = self._left = torch.empty(0)  # of a tile, and of what it shares with the next
        self._left_until = (0, 0)  # the row, and the first column that the shared do not reach
        # By column, what tiles share with the next row, and the first row that it does not reach.
        self._above: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, row: int, column: int, tile: TilePrediction | None) -> torch.Tensor | None:
        """Take the next tile and return the sums that no later one changes.

        Args:
            row: The tile's.
            column: The tile's.
            tile: The tile's prediction, None where it is missing.

        Returns:
            Shape (classes + 1, height, width), to be used up before the next call; None where no
            tile reaches.
        """
        rows, columns = self._rows, self._columns
        shares_left = row == self._left_until[0] and column < self._left_until[1]
        above, above_until = self._above.pop(column, (None, row))
        if tile is None and not shares_left and above is None:
            return None
        height, width = rows.length(row), columns.length(column)
        if tile is not None:
            self._weigh(tile, self._window(row, column, tile[1].device))
            self._left_until = (row, column + 1 + columns.reach)
        sums = self._sums[:, :height, :width]
        if tile is None:
            sums.zero_()
        if shares_left:
            sums[:, :, : columns.shared] += self._left[:, :height, :width]
        done, shared = sums.tensor_split([columns.finished(column)], dim=2)
        self._left[:, :height, : shared.shape[2]] = shared
        if above is not None:
            done[:, : rows.shared] += above
        done, below = done.tensor_split([rows.finished(row)], dim=1)
        if tile is not None or shares_left:
            above_until = row + 1 + rows.reach
        if row + 1 < above_until:
            self._above[column] = below.clone(), above_until
        return done

    def _weigh(self, tile: TilePrediction, window: torch.Tensor) -> None:
        """Start the sums with a tile, cut to where its window lies."""
        _, probabilities, unread = tile
        height, width = window.shape
        if not len(self._sums):
            shape = len(probabilities) + 1, self._rows.tile, self._columns.tile
            self._sums = torch.zeros(shape, device=probabilities.device)
            self._left = torch.zeros_like(self._sums[:, :, : self._columns.shared])
        weights = window
        if unread is not None:
            lost = torch.from_numpy(unread[:height, :width]).to(window.device)
            window, weights = window.masked_fill(lost, 0), window.masked_fill(lost, _UNREAD)
        sums = self._sums[:, :height, :width]
        torch.mul(probabilities[:, :height, :width], window, out=sums[:-1])
        sums[-1] = weights

    def _window(self, row: int, column: int, device: torch.device) -> torch.Tensor:
        """The weights of a tile; few differ from each other."""
        kind = self._rows.kind(row), self._columns.kind(column)
        if kind not in self._windows:
            down = self._rows.window(row, self._margin)
            across = self._columns.window(column, self._margin)
            self._windows[kind] = torch.from_numpy(np.outer(down, across)).to(device)
        return self._windows[kind]


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

    @property
    def reach(self) -> int:
        """The number of following tiles that a tile overlaps."""
        return _reach(self.tile, self.step)

    def length(self, index: int) -> int:
        """Pixels of a tile inside the extent."""
        return min(self.tile, self.extent - index * self.step)

    def finished(self, index: int) -> int:
        """Pixels of a tile, from its start, that no later tile shares."""
        return self.step if index < self.count - 1 else self.length(index)

    def kind(self, index: int) -> _Kind:
        """Return the key of a tile's weights: tiles of the same kind share them."""
        return index > 0, index < self.count - 1, self.length(index)

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
