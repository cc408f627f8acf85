"""The runs of equal class along a mask's rows, and which of them touch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE

# Above any column: row × WIDEST + column sorts by row, then column.
WIDEST = 2**31

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Stretches of one class, in order of row and column; background and unread are left out.

    Attributes:
        row: Of each run.
        start: Its first column.
        end: The column behind its last.
        value: Its class index.
    """

    row: Indices
    start: Indices
    end: Indices
    value: Indices

    @classmethod
    def of(cls, band: NDArray[np.uint8], first_row: int) -> Runs:
        """The runs of a band of shape (rows, width) whose rows count from `first_row`."""
        changes = np.ones(band.shape, bool)
        np.not_equal(band[:, 1:], band[:, :-1], out=changes[:, 1:])
        first = np.flatnonzero(changes)
        length = np.diff(first, append=band.size)
        value = band.ravel()[first]
        kept = (value != BACKGROUND) & (value != IGNORE)
        row, start = np.divmod(first[kept], band.shape[1])
        return cls(row + first_row, start, start + length[kept], value[kept].astype(np.int64))

    def __len__(self) -> int:
        return len(self.row)

    def where(self, chosen: NDArray[np.bool_]) -> Runs:
        return Runs(self.row[chosen], self.start[chosen], self.end[chosen], self.value[chosen])

    def moved_to(self, row: int) -> Runs:
        return Runs(np.full(len(self), row), self.start, self.end, self.value)

    def followed_by(self, later: Runs) -> Runs:
        return Runs(
            np.concatenate([self.row, later.row]),
            np.concatenate([self.start, later.start]),
            np.concatenate([self.end, later.end]),
            np.concatenate([self.value, later.value]),
        )

    def touching(self) -> tuple[Indices, Indices]:
        """The pairs (lower, upper) of runs of one class that share a pixel edge across two rows."""
        start = self.row * WIDEST + self.start
        end = self.row * WIDEST + self.end
        # Of the row above: from the first run that ends behind my start to before the first that
        # starts behind my end.
        lowest = np.searchsorted(end, start - WIDEST, side="right")
        count = np.searchsorted(start, end - WIDEST, side="left") - lowest
        lower = np.repeat(np.arange(len(self)), count)
        position = np.arange(len(lower)) - np.repeat(np.cumsum(count) - count, count)
        upper = np.repeat(lowest, count) + position
        same = self.value[lower] == self.value[upper]
        return lower[same], upper[same]
