"""Makes the levels of a pyramid, a strip at a time, while the rows of level 0 arrive.

    bands      (channels, any number of rows, width)
      |
    level 0    (1) a strip of 512 rows is filled, and then
      |        (2) its half are the next rows of the level below
    level 1    likewise, until one is small enough
      :

So what is held is a strip of each level, together twice that of level 0, whatever the height.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Size

TILE = 512
_SMALLEST_LEVEL = 1024

Add = Callable[[NDArray[np.uint8]], None]
Halve = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


@dataclass(frozen=True, eq=False, slots=True)
class FinishedRows:
    """Finished rows of a level, to be read until the next strip is asked for.

    Attributes:
        level: Its number.
        top: The first row.
        rows: Shape (channels, rows, width), 512 rows but at the lower end.
        padded: The same in whole tiles of 512 × 512 px, 0 outside the level.
    """

    level: int
    top: int
    rows: NDArray[np.uint8]
    padded: NDArray[np.uint8]


class Pyramid:
    """The levels of an image, each half the size of the one before, the last one 1,024 px at most.

    Args:
        size: The extent of level 0.
        channels: How many it has.
        halve: Makes the rows of the next level out of a strip of a channel, such as `mode_of_four`.

    Attributes:
        sizes: The extents of all levels.
    """

    def __init__(self, size: Size, channels: int, halve: Halve) -> None:
        self.sizes = [size]
        while max(self.sizes[-1].width, self.sizes[-1].height) > _SMALLEST_LEVEL:
            last = self.sizes[-1]
            self.sizes.append(Size(-(-last.width // 2), -(-last.height // 2)))
        levels = list[_Level]()
        for number, each in reversed(list(enumerate(self.sizes))):
            levels.append(_Level(number, each, channels, halve, levels[-1] if levels else None))
        self._level0 = levels[-1]

    def add(self, band: NDArray[np.uint8]) -> Iterator[FinishedRows]:
        """Take the next rows, shape (channels, rows, width), and yield what they finish.

        Strips are overwritten: use each before the next, and all of them before more rows.

        Raises:
            ValueError: They are more than the image has.
        """
        return self._level0.add(band)

    def finish(self) -> Iterator[FinishedRows]:
        """Yield what is left once all rows are added.

        Raises:
            ValueError: They are fewer than the image has.
        """
        return self._level0.finish()


class _Level:
    """A level while its rows arrive.

    Args:
        number: Of the level.
        size: Its extent.
        channels: How many it has.
        halve: See `Pyramid`.
        below: The next level, or None.
    """

    def __init__(
        self, number: int, size: Size, channels: int, halve: Halve, below: _Level | None
    ) -> None:
        self._number, self._size, self._halve, self._below = number, size, halve, below
        self._padded = np.zeros((channels, TILE, size.rounded_up(TILE).width), np.uint8)
        self._strip = self._padded[:, :, : size.width]
        self._filled = self._rows = 0  # of the strip, of all

    def add(self, band: NDArray[np.uint8]) -> Iterator[FinishedRows]:
        """(1) See `Pyramid.add`."""
        self._rows += band.shape[1]
        if self._rows > self._size.height:
            raise self._wrong_rows()
        while band.shape[1]:
            taken, band = np.split(band, [TILE - self._filled], axis=1)
            self._strip[:, self._filled : self._filled + taken.shape[1]] = taken
            self._filled += taken.shape[1]
            if self._filled == TILE:
                yield from self._finished(self._rows - band.shape[1])

    def finish(self) -> Iterator[FinishedRows]:
        """See `Pyramid.finish`."""
        if self._rows != self._size.height:
            raise self._wrong_rows()
        if self._filled:
            self._strip[:, self._filled :] = 0
            yield from self._finished(self._rows)
        if self._below is not None:
            yield from self._below.finish()

    def _finished(self, bottom: int) -> Iterator[FinishedRows]:
        """(2) Yield the strip that ends at a row, then what its half finishes below."""
        rows, self._filled = self._strip[:, : self._filled], 0
        yield FinishedRows(self._number, bottom - rows.shape[1], rows, self._padded)
        if self._below is not None:
            yield from self._below.add(np.stack([self._halve(channel) for channel in rows]))

    def _wrong_rows(self) -> ValueError:
        return ValueError(f"the bands' rows are not the image's {self._size.height}")


def _quarters(strip: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The four pixels of each pixel of the next level; an odd last row or column counts twice."""
    height, width = strip.shape
    even = strip
    if height % 2 or width % 2:
        even = np.pad(strip, ((0, height % 2), (0, width % 2)), mode="edge")
    return [even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]]


def mode_of_four(strip: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mode of every 2 × 2 pixels, the upper left one's value where two pairs tie."""
    a, b, c, d = _quarters(strip)
    without_a = np.where((b == c) | (b == d), b, np.where(c == d, c, a))
    return np.where((a == b) | (a == c) | (a == d), a, without_a)


def mean_of_four(strip: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mean of every 2 × 2 pixels, half a level rounded up."""
    a, b, c, d = _quarters(strip)
    total = np.add(a, b, dtype=np.uint16)
    total += c
    total += d
    total += 2
    return (total >> 2).astype(np.uint8)
