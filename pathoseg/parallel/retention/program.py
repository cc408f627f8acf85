"""A mixed-integer program, written row by row."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

# A variable's number, and its factor in a row.
Term = tuple[int, float]

# Smaller factors are left out: beside those near 1 they make a solver lose its way.
_LEAST = 1e-6


class Program:
    """What is to be least, and what must hold. Variables are numbered, and not below 0.

    Attributes:
        cost: What one of each variable costs.
        most: Greatest value of each.
        whole: Which are whole numbers.
        least: What each row is at least.
        limits: What each row is at most.
    """

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.most: list[float] = []
        self.whole: list[bool] = []
        self.least: list[float] = []
        self.limits: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def variable(self, cost: float = 0.0, most: float = inf, whole: bool = False) -> int:
        """A new one's number."""
        self.cost.append(cost)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_most(self, limit: float, *terms: Term) -> None:
        """The sum of the terms is at most the limit; factors of one variable add up."""
        self._row(-inf, limit, terms)

    def equal(self, value: float, *terms: Term) -> None:
        """The sum of the terms is the value."""
        self._row(value, value, terms)

    def _row(self, least: float, limit: float, terms: tuple[Term, ...]) -> None:
        row = len(self.limits)
        self._entries += [(row, at, factor) for at, factor in terms if abs(factor) > _LEAST]
        self.least.append(least)
        self.limits.append(limit)

    def matrix(self) -> coo_array:
        """The rows."""
        rows, columns, factors = np.array(self._entries).T
        where: tuple[NDArray[np.int64], ...] = (rows.astype(int), columns.astype(int))
        return coo_array((factors, where), shape=(len(self.limits), len(self.cost)))


def less(*terms: Term) -> list[Term]:
    """The terms with the other sign."""
    return [(variable, -factor) for variable, factor in terms]
