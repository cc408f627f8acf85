"""Solves mixed-integer programs by HiGHS: the same program gives the same answer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathoseg.parallel.retention.program import Program

# HiGHS stops this share of the cost short of the least, or after so many nodes. Never by the
# clock: a busy machine would find another answer.
GAP = 2e-3
_NODES = 1000


class Relaxed(NamedTuple):
    """A program's answer where no variable has to be whole.

    Attributes:
        cost: Not more than that of any answer.
        dear: How much the cost grows at least with one more of each variable.
    """

    cost: float
    dear: NDArray[np.float64]


def relax(program: Program) -> Relaxed | None:
    """The least cost if no variable had to be whole; None where nothing holds every row."""
    from scipy.optimize import linprog  # a second to import, and few plans need it

    rows = program.matrix().tocsr()
    least, limits = np.array(program.least), np.array(program.limits)
    even = least == limits
    found = linprog(
        program.cost,
        A_ub=rows[~even],
        b_ub=limits[~even],
        A_eq=rows[even],
        b_eq=limits[even],
        bounds=[(0, most) for most in program.most],
    )
    return None if found.x is None else Relaxed(found.fun, found.lower.marginals)


def solve(program: Program) -> NDArray[np.float64] | None:
    """The best values, or None where none were found."""
    values: NDArray[np.float64] | None = _solved(program).x
    return values


def least(program: Program) -> float:
    """A cost that no values are below, and some are hardly above; inf where nothing holds every
    row."""
    bound: float | None = _solved(program).mip_dual_bound
    return inf if bound is None else bound


def _solved(program: Program) -> Any:
    from scipy.optimize import Bounds, LinearConstraint, milp

    with _silent():
        return milp(
            program.cost,
            integrality=np.array(program.whole, int),
            bounds=Bounds(0, np.array(program.most)),
            constraints=[
                LinearConstraint(
                    program.matrix().tocsr(), np.array(program.least), np.array(program.limits)
                )
            ],
            options={"mip_rel_gap": GAP, "node_limit": _NODES},
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches the standard output of the process: HiGHS 1.12 prints a line there, whatever
    its options, where it repairs what it found. Plans are made in the only thread that prints."""
    library = ctypes.CDLL(None)
    library.fflush(None)
    shown, hidden = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(hidden, 1)
    try:
        yield
    finally:
        library.fflush(None)  # C holds its output back, too
        os.dup2(shown, 1)
        os.close(shown)
        os.close(hidden)
