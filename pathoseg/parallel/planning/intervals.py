"""Sums and maxima over all intervals of layers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


class Distinct:
    """Bytes of the distinct items that the layers from the first to each stop use."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size + 1, np.int64)
        self._since: dict[str, int] = {}

    def use(self, item: str, position: int, size: int) -> None:
        """A layer before all others that were told of uses the item."""
        since = min(position + 1, len(self.bytes) - 1)
        self.bytes[since : self._since.get(item, len(self.bytes))] += size
        self._since[item] = since

    def forget(self, item: str, size: int) -> None:
        """The item does not count."""
        if item in self._since:
            self.bytes[self._since.pop(item) :] -= size


class Maxima:
    """Maxima of intervals of an array, by a sparse table (Bender and Farach-Colton, 2000)."""

    def __init__(self, values: Bytes) -> None:
        levels = [values]
        while (width := 2 ** len(levels)) <= len(values):
            starts = len(values) - width + 1
            longer = values.copy()
            longer[:starts] = np.maximum(
                levels[-1][:starts], levels[-1][width // 2 : width // 2 + starts]
            )
            levels.append(longer)
        self._levels = np.array(levels)

    def __call__(self, starts: Bytes, stops: Bytes) -> Bytes:
        """The maximum from each start to before its stop, which is above it."""
        level = np.frexp(stops - starts)[1] - 1
        found: Bytes = np.maximum(
            self._levels[level, starts], self._levels[level, stops - 2**level]
        )
        return found
