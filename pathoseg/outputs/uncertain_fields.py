"""Finds the least certain fields of a slide while the rows of its uncertainty arrive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Frame, Size

MOST = 10
_LEAST_SHARE = 0.5  # of a field that counts: a mean over a sliver of tissue says little


@dataclass(frozen=True, slots=True)
class UncertainField:
    """A field of a slide in level-0 pixels, and how certain the model is of it.

    Attributes:
        x: Left.
        y: Top.
        width: Its extent across.
        height: Its extent down.
        uncertainty: Mean entropy of the class probabilities over its tissue, over the largest
            entropy: from 0, certain, to 1, where all classes are as probable.
    """

    x: int
    y: int
    width: int
    height: int
    uncertainty: float


class FieldRanking:
    """Mean uncertainty of squares side by side, the first at (0, 0); the last ones may be cut.

    What is held are two numbers a field.

    Args:
        size: Extent of the map of uncertainty.
        side: Of a field in its pixels.
    """

    def __init__(self, size: Size, side: int) -> None:
        self._size, self._side, self._rows = size, side, 0
        self._starts = np.arange(0, size.width, side)
        shape = -(-size.height // side), len(self._starts)
        self._sums, self._counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def add(self, uncertainty: NDArray[np.uint8], counts: NDArray[np.bool_]) -> None:
        """Take the next rows.

        Args:
            uncertainty: Shares of 255, shape (rows, width).
            counts: True where a pixel counts: it is of tissue, and was read.
        """
        while len(counts):
            field, row = divmod(self._rows, self._side)
            here, counts = np.split(counts, [self._side - row])
            values, uncertainty = np.split(uncertainty, [self._side - row])
            self._rows += len(here)
            sums = np.where(here, values, np.uint8(0)).sum(axis=0, dtype=np.int64)
            self._sums[field] += np.add.reduceat(sums, self._starts)
            self._counts[field] += np.add.reduceat(here.sum(axis=0, dtype=np.int64), self._starts)

    def least_certain(self, frame: Frame, level0: Size) -> tuple[UncertainField, ...]:
        """Return up to ten fields, the least certain first, of equal ones the upper, left one.

        A field takes part if at least half a whole one's pixels count, and it is not all certain.

        Args:
            frame: The map's.
            level0: Pixels of the slide.
        """
        side, size = self._side, self._size
        whole = min(side, size.width) * min(side, size.height)
        fit = (self._counts >= _LEAST_SHARE * whole) & (self._sums > 0)
        means = np.where(fit, self._sums / (255 * np.maximum(self._counts, 1)), 0)
        order = np.argsort(-means, axis=None, kind="stable")[: min(MOST, int(fit.sum()))]
        found = []
        for row, column in zip(*np.unravel_index(order, means.shape), strict=True):
            x, y = (
                round(int(at) * side * scale)
                for at, scale in ((column, frame.scale_x), (row, frame.scale_y))
            )
            right, bottom = (
                min(limit, round((int(at) + 1) * side * scale))
                for at, scale, limit in (
                    (column, frame.scale_x, level0.width),
                    (row, frame.scale_y, level0.height),
                )
            )
            mean = round(float(means[row, column]), 6)
            found.append(UncertainField(x, y, right - x, bottom - y, mean))
        return tuple(found)
