"""Windows over a slide's tissue whose predictions, joined, equal those of one pass over the slide.

A network whose logits depend on pixels within a known reach alone needs no blending: a window is
read with a margin of that reach, and only what lies inside of the margin is used. What is predicted
twice is the margins, so windows are to be large and few, and yet to leave the glass out:

    band 0   . # # # . .        cells of tissue (#) and glass (.)
             # # # # . #
    band 1   # # . . . #        one band of the mask is a row of windows; no window crosses bands,
             . . . . . .        so each band can be computed by another process

Within a band the windows are those of least total area, margins included, that cover its tissue.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pathoseg.annotations.annotation import IGNORE
from pathoseg.device import Arrival, answer
from pathoseg.geometry import IMAGE, Box, Frame, Size
from pathoseg.outputs.stitch import Finish, TilePrediction, argmax

_CELL_UM = 64.0  # glass is left out by cells of this side,
_CELL = 128  # or of so many pixels where that is more
_BAND = 1536  # pixels, about: lower bands repeat more margins, higher ones wait longer for a row
_MOST_PIXELS = 2**22  # larger windows save next to nothing
# What a window costs beside its pixels: measured 8,000 on a CPU, with reading and joining twice
# that; more on a GPU, where it decides little.
_WINDOW_COST = 2**14
# A process takes up to 1.9 times the tensors of a forward pass: kernels' workspace and the gaps
# between tensors (U-Net of width 16 and 32 at 1,024 and 2,048 px on a CPU).
_WORKSPACE = 2
_LARGEST_SHARE = 4  # margins may take up to this part of a window's side; else tiles are blended


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """The size and margin of windows.

    Attributes:
        margin: Pixels around the used part of a window: the network's reach, and no less.
        most_pixels: The largest number of pixels of a window with its margins.
        multiple: Divides sides and positions of windows, in pixels.
    """

    margin: int
    most_pixels: int
    multiple: int

    @classmethod
    def choose(cls, reach: int, multiple: int, most_pixels: int) -> WindowOptions | None:
        """Choose the options for a network.

        Args:
            reach: Pixels around one that its logits depend on.
            multiple: Divides the sides of the network's input.
            most_pixels: The largest number of pixels of a window.

        Returns:
            None where windows would be mostly margin.
        """
        margin = -(-reach // multiple) * multiple
        if _LARGEST_SHARE * 2 * margin > math.isqrt(most_pixels):
            return None
        return cls(margin, most_pixels, multiple)


def most_pixels(
    model: nn.Module,
    multiple: int,
    memory: int,
    batch: int,
    around: Mapping[str, tuple[int, int]] | None = None,
) -> int:
    """Return the most pixels of a window for which a forward pass takes `memory` bytes.

    It is counted in float32 whatever the device computes in, so that processes on a CPU and on a
    GPU cut a slide alike.

    Args:
        model: In eval mode, on its device.
        multiple: See `WindowOptions`.
        memory: In bytes.
        batch: Windows of a forward pass.
        around: By name of each other input, how many pixels of the window one of its own is wide,
            and how many of its own it has on each side of the window. They weigh less in a larger
            window than in the one that is tried.
    """
    side = multiple * max(2, -(-64 // multiple))
    if around:
        side *= 2
    device, sides = next(model.parameters()).device, {IMAGE: side}
    for name, (ratio, margin) in (around or {}).items():
        sides[name] = side // ratio + 2 * margin
    blank = {name: torch.zeros(1, 3, each, each, device=device) for name, each in sides.items()}
    with torch.inference_mode(), _LiveBytes() as live:
        answer(model, blank if around else blank[IMAGE])
    a_pixel = _WORKSPACE * max(1, live.peak) / side**2
    return min(_MOST_PIXELS, int(memory / (batch * a_pixel)))


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the bytes of the tensors that operators make, and of those alive at most at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    self._now += self._sizes[key]
                    finalize(storage, self._freed, key)
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


@dataclass(frozen=True, slots=True)
class Window:
    """One window, in pixels of the slide's frame.

    Attributes:
        box: Its place with margins: the network's input.
        core: The part of it whose predictions are used.
    """

    box: Box
    core: Box


class Windows:
    """The windows of a slide, numbered band by band, from left to right within a band.

    Args:
        extent: The pixels of the slide.
        options: What bounds windows.
        cell: Side of a cell in pixels.
        tissue: Shape (rows, columns) of cells: which are predicted.

    Attributes:
        rows: Number of bands.
    """

    def __init__(
        self, extent: Size, options: WindowOptions, cell: int, tissue: NDArray[np.bool_]
    ) -> None:
        self._extent, self._cell, self._tissue = extent, cell, tissue
        self._cells_a_band = max(1, _BAND // cell)
        self.rows = -(-len(tissue) // self._cells_a_band)
        self._windows: list[Window] = []
        self._first = [0]
        for row in range(self.rows):
            self._windows += self._cut(row, options)
            self._first.append(len(self._windows))

    @classmethod
    def over(
        cls, frame: Frame, options: WindowOptions, has_tissue: Callable[[Box], bool]
    ) -> Windows:
        """Lay windows over the tissue of a slide.

        Args:
            frame: The slide at the model's resolution.
            options: Size and margin of windows.
            has_tissue: Returns True if a box, in pixels of `frame`, holds tissue.
        """
        side = max(_CELL, _CELL_UM / frame.mpp.mean)
        cell = math.ceil(side / options.multiple) * options.multiple
        rows, columns = -(-frame.size.height // cell), -(-frame.size.width // cell)
        tissue = [
            has_tissue(Box(column * cell, row * cell, cell, cell))
            for row in range(rows)
            for column in range(columns)
        ]
        return cls(
            frame.size, options, cell, np.reshape(np.array(tissue, np.bool_), (rows, columns))
        )

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def skipped(self) -> int:
        """The number of cells without tissue."""
        return int(self._tissue.size - self._tissue.sum())

    @property
    def pixels(self) -> int:
        """The number of the slide's pixels in cells with tissue, which are predicted."""
        rows, columns = self._tissue.shape
        heights = np.minimum(self._cell, self._extent.height - self._cell * np.arange(rows))
        widths = np.minimum(self._cell, self._extent.width - self._cell * np.arange(columns))
        return int(heights @ (self._tissue @ widths))

    def box(self, number: int) -> Box:
        """Return the place of a window with its margins, in pixels of the slide."""
        return self._windows[number].box

    def core(self, number: int) -> Box:
        """Return the part of a window whose predictions are used, in pixels of the slide."""
        return self._windows[number].core

    def inside(self, number: int) -> Box:
        """Return a window's core in pixels of the window."""
        window = self._windows[number]
        x, y = window.core.x - window.box.x, window.core.y - window.box.y
        return Box(x, y, window.core.width, window.core.height)

    def row_of(self, number: int) -> int:
        """Return the band in which a window lies."""
        return bisect_right(self._first, number) - 1

    def first_of(self, row: int) -> int:
        """Return the first window of a band; for the number of bands, the number of windows."""
        return self._first[row]

    def join(
        self,
        predictions: Iterable[TilePrediction],
        channels: int,
        finish: Finish = argmax,
        first: int = 0,
    ) -> Iterator[NDArray[Any]]:
        """Yield the mask of the extent from top to bottom, one band of windows after the other.

        Args:
            predictions: Number of the window, predicted maps (channels, height, width) of the
                window or of its core alone, and which of the window's pixels could not be read
                (or None), in order. Windows may be missing.
            channels: Channels of a prediction: the classes, and the height of objects.
            finish: Makes a tensor of shape (..., height, width) out of probabilities.
            first: The band to begin with.

        Yields:
            Bands of shape (..., rows, extent's width): background in cells without tissue, 255
            where unread.
        """
        blank = finish(torch.zeros(channels, 1, 1)).numpy()
        height = self._cell * self._cells_a_band
        waiting = iter(predictions)
        following: TilePrediction | None = None
        for row in range(first, self.rows):
            top, end = row * height, self._first[row + 1]
            rows = min(height, self._extent.height - top)
            band = np.zeros((*blank.shape[:-2], rows, self._extent.width), blank.dtype)
            arriving: tuple[int, Arrival, NDArray[np.bool_] | None] | None = None
            while following is not None or (following := next(waiting, None)) is not None:
                number, chances, unread = following
                if number >= end:
                    break
                following = None
                if chances.shape[-2:] != (self.core(number).height, self.core(number).width):
                    chances = chances[:, *self._inner(number)]
                here = number, Arrival(finish(chances)), unread
                # The device goes on with the next window while this one's pixels are on their way.
                if arriving is not None:
                    self._put(band, top, *arriving)
                arriving = here
                if number == end - 1:  # the band does not wait for the next one's first window
                    break
            if arriving is not None:
                self._put(band, top, *arriving)
            yield band

    def _inner(self, number: int) -> tuple[slice, slice]:
        part = self.inside(number)
        return slice(part.y, part.bottom), slice(part.x, part.right)

    def _put(
        self,
        band: NDArray[Any],
        top: int,
        number: int,
        arrival: Arrival,
        unread: NDArray[np.bool_] | None,
    ) -> None:
        core, cell = self._windows[number].core, self._cell
        pixels = arrival.array()
        columns = slice(core.x // cell, -(-core.right // cell))
        tissue = self._tissue[core.y // cell : -(-core.bottom // cell), columns]
        wanted = tissue.repeat(cell, 0).repeat(cell, 1)[: core.height, : core.width]
        if unread is not None:
            pixels = np.where(unread[self._inner(number)], pixels.dtype.type(IGNORE), pixels)
        # In place: cores do not overlap.
        here = band[..., core.y - top : core.bottom - top, core.x : core.right]
        np.copyto(here, pixels, where=wanted)

    def _cut(self, row: int, options: WindowOptions) -> list[Window]:
        """The windows of a band."""
        start, cell, margin = row * self._cells_a_band, self._cell, options.margin
        tissue = self._tissue[start : start + self._cells_a_band]
        limit = self._extent.rounded_up(options.multiple)

        def edges(first: int, count: int, end: int) -> tuple[list[int], list[int]]:
            """Return, for each line between cells, where a window from it begins, or to it ends."""
            lines = [(first + line) * cell for line in range(count + 1)]
            return [max(0, at - margin) for at in lines], [min(end, at + margin) for at in lines]

        left, right = edges(0, tissue.shape[1], limit.width)
        top, bottom = edges(start, len(tissue), limit.height)
        windows = []
        for part in _least_area(tissue, left, right, top, bottom, options.most_pixels):
            box = Box(
                left[part.x],
                top[part.y],
                right[part.right] - left[part.x],
                bottom[part.bottom] - top[part.y],
            )
            core = Box(
                part.x * cell, (start + part.y) * cell, part.width * cell, part.height * cell
            ).intersection(Box(0, 0, self._extent.width, self._extent.height))
            assert core is not None
            windows.append(Window(box, core))
        return windows


def _least_area(
    tissue: NDArray[np.bool_],
    left: Sequence[int],
    right: Sequence[int],
    top: Sequence[int],
    bottom: Sequence[int],
    most_pixels: int,
) -> list[Box]:
    """The rectangles of cells that cover a band's tissue with the fewest pixels.

    Columns are cut into stretches, and each stretch into intervals of rows; what holds no tissue
    may be passed over. Two nested shortest paths find the best of all such cuts:
    cost[j] = min over i < j of cost[i] + price of rows i to j, or cost[j - 1] where row j - 1 is
    empty, and likewise over columns with the result as the price of a stretch.

    Args:
        tissue: Shape (rows, columns).
        left: Pixel at which a window begins whose first column is this one.
        right: Pixel at which a window ends whose last column is the one before this.
        top: As `left`, of rows.
        bottom: As `right`, of rows.
        most_pixels: Of a window; a single cell may have more.

    Returns:
        In units of cells, from left to right, then from top to bottom.
    """
    rows, columns = tissue.shape
    if not tissue.any():
        return []
    held = np.pad(tissue.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    begin, end = np.array(left), np.array(right)
    stretches: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
    for length in range(1, columns + 1):
        width = end[length:] - begin[:-length]
        if length > 1 and width.min() * (bottom[1] - top[0]) > most_pixels:
            break
        inside = held[:, length:] - held[:, :-length]
        cost = np.zeros((rows + 1, len(width)))
        origin = np.zeros((rows + 1, len(width)), np.int64)
        for last in range(1, rows + 1):
            empty = inside[last] == inside[last - 1]
            cost[last] = np.where(empty, cost[last - 1], np.inf)
            origin[last] = last  # which says that the row is passed over
            for first in range(last):
                area = width * (bottom[last] - top[first])
                price = cost[first] + area + _WINDOW_COST
                if length > 1 or last - first > 1:
                    price[area > most_pixels] = np.inf
                better = price < cost[last]
                cost[last][better], origin[last][better] = price[better], first
        stretches.append((cost[rows], origin))
    found = []
    for first, last in _shortest([cost for cost, _ in stretches], held[rows, 1:] > held[rows, :-1]):
        origin = stretches[last - first - 1][1][:, first]
        row = rows
        while row > 0:
            above = int(origin[row])
            if above == row:
                row -= 1
                continue
            used = first + np.flatnonzero(tissue[above:row, first:last].any(axis=0))
            found.append(Box(int(used[0]), above, int(used[-1] - used[0]) + 1, row - above))
            row = above
    return sorted(found, key=lambda box: (box.x, box.y))


def _shortest(
    prices: Sequence[NDArray[np.float64]], needed: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """The cheapest stretches, (first, end) of columns, that cover all needed columns.

    Args:
        prices: `prices[n - 1][first]` is that of the n columns from `first` on.
        needed: Which columns may not be left out.
    """
    cost, origin = [0.0], [0]
    for last in range(1, len(needed) + 1):
        best, at = (math.inf, last) if needed[last - 1] else (cost[last - 1], last)
        for length in range(1, min(last, len(prices)) + 1):
            price = cost[last - length] + float(prices[length - 1][last - length])
            if price < best:
                best, at = price, last - length
        cost.append(best)
        origin.append(at)
    found, last = [], len(needed)
    while last > 0:
        if origin[last] == last:
            last -= 1
        else:
            found.append((origin[last], last))
            last = origin[last]
    return found
