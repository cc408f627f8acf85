"""The integer program that chooses a policy for each block of a stage, and its solver (HiGHS)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.retention.policy_options import PolicyOption
from pathoseg.parallel.retention.stage_liveness import BlockRun, StageFacts
from pathoseg.parallel.schedule.costs import Link
from pathoseg.platform_support import c_function

# A variable's number, and its factor in a row.
Term = tuple[int, float]

# Smaller factors are left out: beside those near 1 they make a solver lose its way.
_SMALLEST_FACTOR = 1e-6


class Program:
    """A mixed-integer program: minimise the cost under linear constraints; variables are ≥ 0.

    Attributes:
        cost: What one of each variable costs.
        most: Greatest value of each.
        whole: Which are whole numbers.
        row_lower: What each row is at least.
        row_upper: What each row is at most.
    """

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.most: list[float] = []
        self.whole: list[bool] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def variable(self, cost: float = 0.0, most: float = inf, whole: bool = False) -> int:
        """Add a variable; return its index."""
        self.cost.append(cost)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_most(self, limit: float, *terms: Term) -> None:
        """Add the constraint Σ terms ≤ limit; factors of one variable add up."""
        self._row(-inf, limit, terms)

    def equal(self, value: float, *terms: Term) -> None:
        """Add the constraint Σ terms = value."""
        self._row(value, value, terms)

    def _row(self, lower: float, upper: float, terms: tuple[Term, ...]) -> None:
        row = len(self.row_upper)
        self._entries += [
            (row, at, factor) for at, factor in terms if abs(factor) > _SMALLEST_FACTOR
        ]
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def matrix(self) -> coo_array:
        """Return the constraint matrix, shape (rows, variables)."""
        rows, columns, factors = np.array(self._entries).T
        where: tuple[NDArray[np.int64], ...] = (rows.astype(int), columns.astype(int))
        return coo_array((factors, where), shape=(len(self.row_upper), len(self.cost)))


def negated(*terms: Term) -> list[Term]:
    """Return the terms with opposite sign."""
    return [(variable, -factor) for variable, factor in terms]


# HiGHS stops this share of the cost short of the least, or after so many nodes. Never by the
# clock: a busy machine would find another answer.
GAP = 2e-3
_NODES = 1000


class Relaxed(NamedTuple):
    """The optimum of a program's linear relaxation.

    Attributes:
        cost: Its cost: a lower bound of the cost of every integer solution.
        reduced_costs: By how much one more of each variable raises it at least, shape (variables,).
    """

    cost: float
    reduced_costs: NDArray[np.float64]


def relax(program: Program) -> Relaxed | None:
    """Solve the linear relaxation; None where it is infeasible."""
    from scipy.optimize import linprog  # a second to import, and few plans need it

    rows = program.matrix().tocsr()
    limits = np.array(program.row_upper)
    even = limits == np.array(program.row_lower)
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
    """Return the best values found, or None."""
    values: NDArray[np.float64] | None = _solved(program).x
    return values


def lower_bound(program: Program) -> float:
    """Return the solver's lower bound of the cost; inf where the program is infeasible."""
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
                    program.matrix().tocsr(),
                    np.array(program.row_lower),
                    np.array(program.row_upper),
                )
            ],
            options={"mip_rel_gap": GAP, "node_limit": _NODES},
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches the standard output of the process: HiGHS 1.12 prints a line there, whatever
    its options, where it repairs what it found. Plans are made in the only thread that prints."""
    flush = c_function("fflush") or (lambda _: None)
    flush(None)
    shown, hidden = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(hidden, 1)
    try:
        yield
    finally:
        flush(None)  # C holds its output back, too
        os.dup2(shown, 1)
        os.close(shown)
        os.close(hidden)


def earliest_first(options: Sequence[PolicyOption]) -> list[PolicyOption]:
    """The order in which options of equal blocks need least memory (Liu, "An application of
    generalized tree pebbling to sparse matrix factorization", 1987)."""
    return sorted(options, key=lambda each: each.kept - each.peak)


def arrangements(
    facts: StageFacts,
    runs: Sequence[BlockRun],
    options: Sequence[Sequence[PolicyOption]],
    counts: Sequence[Sequence[int]],
) -> Iterator[ActivationPolicy]:
    """Yield activation policies in which each option is taken so often.

    First the one in which those of a run take turns, as copies hide best; then the one that needs
    least memory.

    Args:
        facts: The stage.
        runs: Its equal blocks.
        options: Of each run, as `earliest_first` has them.
        counts: How often each option is taken.
    """
    for smooth in (True, False):
        offloaded: list[int] = []
        recomputed: list[int] = []
        twice: list[int] = []
        for run, some, numbers in zip(runs, options, counts, strict=True):
            blocks = iter(run.blocks)
            for option in _in_turn(some, numbers) if smooth else _in_order(some, numbers):
                first = next(blocks).layers.start
                for _ in range(1, option.blocks):
                    next(blocks)
                offloaded += [first + at for at in option.offloaded]
                recomputed += [first + at for at in option.recomputed]
                twice += [first + at for at in option.twice]
        names = [
            tuple(facts.graph.layers[at].name for at in sorted(some))
            for some in (offloaded, recomputed, twice)
        ]
        yield ActivationPolicy(*names)


def _in_order(options: Sequence[PolicyOption], numbers: Sequence[int]) -> list[PolicyOption]:
    return [each for each, number in zip(options, numbers, strict=True) for _ in range(number)]


def _in_turn(options: Sequence[PolicyOption], numbers: Sequence[int]) -> list[PolicyOption]:
    """Each spread evenly over the run."""
    places = [
        ((place + 0.5) / number, at) for at, number in enumerate(numbers) for place in range(number)
    ]
    return [options[at] for _, at in sorted(places)]


# What a second of copies, or a window as large as the cap, costs in time where they cost none: no
# copy is made for nothing.
_TIE = 1e-5


def windows(in_flight: int) -> int:
    """Return how many staging buffers a stage needs: one if a single microbatch is in flight, as
    no offload then overlaps a prefetch (`take_turns`), else two."""
    return 1 if in_flight == 1 else 2


class Copying(NamedTuple):
    """Assumptions of the program about copies to the host and back.

    Attributes:
        slowness: How many times as long as the host's link says; None forbids them.
        at_once: How many of the largest layer the window has room for at least.
    """

    slowness: float | None = 1.0
    at_once: int = 1


class RetentionProgram:
    """The integer program of one stage.

    Each run of equal blocks takes options. The backward of a block needs what all earlier blocks
    keep, its own peak and the copies' windows; of equal blocks those come first whose peak exceeds
    most what they keep, which needs least (Liu, 1987). Copies are a fluid that flows while layers
    compute: of what the runs up to some layer give to be copied no more than a window may wait, and
    no more than a window may be back ahead of its use.

    Bytes are counted in caps, and seconds in the stage's own.

    Args:
        facts: The stage.
        runs: Its equal blocks.
        options: Of each run.
        host: What a copy takes.
        copying: How it is taken to be.
        cap: Bytes for what microbatches hold, for workspace and the windows.
        in_flight: Microbatches between their forward and backward at once.

    Attributes:
        program: What is to be solved.
        second: Seconds of the forward and backward that all its times are counted in.
    """

    def __init__(
        self,
        facts: StageFacts,
        runs: Sequence[BlockRun],
        options: Sequence[Sequence[PolicyOption]],
        host: Link,
        copying: Copying,
        cap: int,
        in_flight: int,
    ) -> None:
        slowness = copying.slowness
        self._facts, self._runs = facts, runs
        if slowness is None:
            options = [[each for each in some if not each.largest] for some in options]
        self._options = [earliest_first(some) for some in options]
        self.second = sum(facts.forward.values()) + sum(facts.backward.values())
        self._second_of_copies = self.second / (slowness or 1.0)
        self._beta, self._cap = host.beta, cap
        self.program = Program()
        self._window = self.program.variable(cost=_TIE, most=0.5)
        self._final = self.program.variable()  # what one microbatch keeps
        # Of each run, by option: how often it is taken, and whether it is.
        self._taken: list[list[tuple[int, int]]] = []
        self._take(cap, copying.at_once)
        self._hold(cap, in_flight)
        window = (self._window, self._beta * cap / self._second_of_copies)
        given = self._forward(window, in_flight)
        self._backward(window, in_flight, given)

    @property
    def size(self) -> int:
        """The number of policy options."""
        return sum(map(len, self._options))

    def nearest(self, reduced_costs: NDArray[np.float64], most: int) -> list[list[PolicyOption]]:
        """Return, for each run, the `most` options of least reduced cost and the option of least
        memory."""
        found = []
        for taken, options in zip(self._taken, self._options, strict=True):
            prices = [sum(reduced_costs[variable] for variable in {*pair}) for pair in taken]
            order = sorted(range(len(options)), key=prices.__getitem__)
            leanest = min(range(len(options)), key=lambda at: options[at].peak)
            found.append([options[at] for at in dict.fromkeys([*order[:most], leanest])])
        return found

    def within(self, reduced_costs: NDArray[np.float64], margin: float) -> list[list[PolicyOption]]:
        """Return, for each run, the options whose reduced cost is within `margin`.

        Any other option adds more than `margin` to the bound of the relaxed program, so no better
        solution uses it (reduced-cost fixing)."""
        return [
            [
                each
                for pair, each in zip(taken, options, strict=True)
                if sum(reduced_costs[[*{*pair}]]) <= margin
            ]
            for taken, options in zip(self._taken, self._options, strict=True)
        ]

    def choices(self, values: NDArray[np.float64]) -> Iterator[tuple[ActivationPolicy, int]]:
        """Yield the activation policy and the staging buffer of a solution, once for each order of
        the options among equal blocks, the most even one first."""
        counts = [[round(values[count]) for count, _ in taken] for taken in self._taken]
        largest = max(
            each.largest
            for some, numbers in zip(self._options, counts, strict=True)
            for each, number in zip(some, numbers, strict=True)
            if number
        )
        window = max(largest, ceil(values[self._window] * self._cap)) if largest else 0
        for policy in arrangements(self._facts, self._runs, self._options, counts):
            yield policy, window

    def _take(self, cap: int, at_once: int) -> None:
        """Every block is in one option; the window takes the largest layer, so many times."""
        program = self.program
        for run, options in zip(self._runs, self._options, strict=True):
            taken = []
            for each in options:
                most = len(run.blocks) // each.blocks
                count = used = program.variable(most=most, whole=True)
                if len(run.blocks) > 1:
                    used = program.variable(most=1, whole=True)
                    program.at_most(0, (count, 1), (used, -most))
                taken.append((count, used))
            self._taken.append(taken)
            sizes = [
                (used, at_once * each.largest / cap)
                for (_, used), each in zip(taken, options, strict=True)
            ]
            for some in _alternatives(run, sizes):
                program.at_most(0, *some, (self._window, -1))
            blocks = [(count, each.blocks) for (count, _), each in zip(taken, options, strict=True)]
            program.equal(len(run.blocks), *blocks)

    def _hold(self, cap: int, in_flight: int) -> None:
        """The memory of each block's backward."""
        program = self.program
        always = [(self._window, float(windows(in_flight))), (self._final, in_flight - 1.0)]
        before: list[Term] = []
        early = list(self._early(cap))
        for number, (taken, options) in enumerate(zip(self._taken, self._options, strict=True)):
            held = [term for term, runs in early if number in runs]
            common = [*always, *before, *held]
            kept = [
                (count, each.kept / cap) for (count, _), each in zip(taken, options, strict=True)
            ]
            if len(self._runs[number].blocks) == 1:
                peaks = [
                    (count, each.peak / cap)
                    for (count, _), each in zip(taken, options, strict=True)
                ]
                program.at_most(1, *common, *peaks)
            else:
                for at, each in enumerate(options):
                    beyond = (taken[at][1], (each.peak - each.kept) / cap)
                    program.at_most(1, *common, *kept[: at + 1], beyond)
            after = program.variable()
            program.equal(0, *before, *kept, (after, -1))
            before = [(after, 1.0)]
        program.equal(0, *before, (self._final, -1))

    def _early(self, cap: int) -> Iterator[tuple[Term, range]]:
        """Constrain dropped tensors that a later block needs: they stay live once recomputed; an
        option that recomputes more than its own layers cannot provide them so early."""
        program, facts = self.program, self._facts
        for asking, (taken, options) in enumerate(zip(self._taken, self._options, strict=True)):
            for storage in sorted(frozenset().union(*(each.demands for each in options))):
                maker = facts.saved[storage].maker
                size = sum(facts.sizes[each] for each in facts.makes[maker] if each in facts.saved)
                owner = next(
                    number
                    for number, run in enumerate(self._runs)
                    if any(storage in unit.storages for block in run.blocks for unit in block.units)
                )
                own = [*zip(self._taken[owner], self._options[owner], strict=True)]
                away = [(used, 1.0) for (_, used), each in own if storage in each.away]
                deep = [(used, 1.0) for (_, used), each in own if storage in each.deep]
                asked = [
                    (used, 1.0)
                    for (_, used), each in zip(taken, options, strict=True)
                    if storage in each.demands
                ]
                there = program.variable(most=1)
                for some in _alternatives(self._runs[asking], asked):
                    program.at_most(1, *some, *away, (there, -1))
                    program.at_most(1, *some, *deep)
                yield (there, size / cap), range(owner + 1, asking + 1)

    # Copies are a fluid. After each run of blocks, in the order of a pass: t the time, c what has
    # been copied, g what the forward gave to be copied, u what the backward has used, and W the
    # window, all as the time that their copies take; n microbatches are in flight.
    #
    #   each pass (1) t' ≥ t + computing               with what is recomputed
    #             (2) c' - c ≤ t' - t                  copies flow while layers compute
    #   forward   (3) c ≤ g + (n - 1) · behind         nothing is copied before it is given
    #             (4) g + (n - 1) · behind - c ≤ W     no more than a window waits to leave
    #             (5) g - c ≤ behind, at the end; where one window serves both, g ≤ c
    #   backward  (6) u ≤ c + early                    nothing is used before it is back
    #             (7) c + early - u ≤ W                no more than a window is back
    #             (8) g - c ≤ short, at the end; early = ahead - (n - 1) · short, ahead ≤ W
    #
    # What a forward leaves `behind` is still there for the next microbatch's, and what a backward
    # was `short` of is not there for the next: it is the last one in flight that has to do with
    # the window.

    def _forward(self, window: Term, in_flight: int) -> list[list[Term]]:
        """Constrain the forward; return, ahead of each run and after all, what was given."""
        program, copying = self.program, self._second_of_copies
        others = in_flight - 1.0
        given: list[list[Term]] = [[]]
        clock: list[Term] = []
        copied: list[Term] = []
        behind = program.variable()
        for run, taken, options in zip(self._runs, self._taken, self._options, strict=True):
            copies = [
                (count, each.copies / copying)
                for (count, _), each in zip(taken, options, strict=True)
            ]
            total = program.variable()
            program.equal(0, *given[-1], *copies, (total, -1))
            given.append([(total, 1.0)])
            clock, copied = self._pass(clock, copied, run, self._facts.forward, [])
            program.at_most(0, *copied, *negated(*given[-1], (behind, others)))  # (3)
            program.at_most(0, *given[-1], *negated(*copied, window), (behind, others))  # (4)
        tail = [(behind, 1.0)] if windows(in_flight) > 1 else []
        program.at_most(0, *given[-1], *negated(*copied, *tail))  # (5)
        program.cost[clock[0][0]] += 1.0
        program.cost[given[-1][0][0]] += _TIE
        return given

    def _backward(self, window: Term, in_flight: int, given: Sequence[list[Term]]) -> None:
        """Constrain the backward of what the forward gave to be copied."""
        program = self.program
        clock: list[Term] = []
        copied: list[Term] = []
        early: list[Term] = []
        short = program.variable()
        if in_flight > 1:
            ahead = program.variable()
            program.at_most(0, (ahead, 1.0), *negated(window))
            early = [(ahead, 1.0), (short, 1.0 - in_flight)]
        backwards = zip(self._runs, self._taken, self._options, given[:-1], strict=True)
        for run, taken, options, before in reversed([*backwards]):
            again = [
                (count, each.recompute_seconds / self.second)
                for (count, _), each in zip(taken, options, strict=True)
            ]
            clock, copied = self._pass(clock, copied, run, self._facts.backward, again)
            used = [*given[-1], *negated(*before)]
            program.at_most(0, *used, *negated(*copied, *early))  # (6)
            program.at_most(0, *copied, *early, *negated(*used, window))  # (7)
        program.at_most(0, *given[-1], *negated(*copied, (short, 1.0)))  # (8)
        program.cost[clock[0][0]] += 1.0

    def _pass(
        self,
        clock: list[Term],
        copied: list[Term],
        run: BlockRun,
        seconds: Mapping[int, float],
        again: list[Term],
    ) -> tuple[list[Term], list[Term]]:
        """Return the time and the bytes copied after a run has computed."""
        program = self.program
        computing = sum(seconds[at] for block in run.blocks for at in block.layers)
        later, more = [(program.variable(), 1.0)], [(program.variable(), 1.0)]
        program.at_most(-computing / self.second, *clock, *again, *negated(*later))  # (1)
        program.at_most(0, *more, *negated(*copied), *clock, *negated(*later))  # (2)
        return later, more


def _alternatives(run: BlockRun, terms: Sequence[Term]) -> list[Sequence[Term]]:
    """Terms of a run's options in groups of which at most one is not 0."""
    return [terms] if len(run.blocks) == 1 else [[term] for term in terms]
