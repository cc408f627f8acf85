"""Chooses what of a stage is kept, offloaded and recomputed: least time under a cap of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.retention.policy_milp import (
    GAP,
    Copying,
    RetentionProgram,
    lower_bound,
    relax,
    solve,
    windows,
)
from pathoseg.parallel.retention.policy_options import (
    MOST_UNITS,
    AllowedPolicies,
    PolicyOption,
    Retained,
    options_of,
    retain,
)
from pathoseg.parallel.retention.stage_liveness import BlockRun, StageFacts, runs_of
from pathoseg.parallel.schedule.costs import Costs, Link, StageCost
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import linear
from pathoseg.parallel.schedule.simulate import simulate

_ATTEMPTS = 4
_NOT_AT_ALL = Copying(None)
_AS_IT_IS = Copying()
# These two get nearest to the bound over `benchmarks/retention`, of 24 that were tried.
_CAUTIOUS = (Copying(at_once=2), Copying(1.5, at_once=4))
# A program with more options is solved with those first that are nearest to the best of its
# relaxed one: of each run so many. Where these do not come within the solver's gap of that, it is
# solved with all options that may be better than them; not so the cautious programs, of which
# nothing is to be proven.
_MANY = 300
_NEAREST = (8, 24)
# The least room of a program is found to within this share of it.
_FINE = 1 / 256


@dataclass(frozen=True, slots=True)
class Choice:
    """The activation policy chosen for a stage.

    Attributes:
        policy: The layers.
        window: Bytes that may wait to be copied to the host, and as many that may be back early.
        retained: What comes of it.
    """

    policy: ActivationPolicy
    window: int
    retained: Retained

    def need(self, in_flight: int) -> int:
        """Return the bytes that so many microbatches hold at the worst moment, windows included."""
        kept = self.retained.kept
        return self.retained.peak + (in_flight - 1) * kept + windows(in_flight) * self.window


class Chooser:
    """The choice of one stage's activation policy, under any cap.

    Args:
        facts: The stage.
        host: What a copy takes, in each direction.
        ways: What is allowed.
    """

    def __init__(self, facts: StageFacts, host: Link, ways: AllowedPolicies) -> None:
        self._facts, self._host, self._ways = facts, host, ways
        self._everything = Choice(ActivationPolicy(), 0, retain(facts, ActivationPolicy()))
        self._runs: list[BlockRun] = []
        self._options: list[list[PolicyOption]] = []
        self._lean = cache(self._find_lean)

    def choose(self, cap: int, in_flight: int = 1) -> Choice | None:
        """Return the choice that takes least time, or None where none fits.

        `RetentionProgram` takes copies for a fluid. Tensors are none, and their copies hide less
        well than it says: it is solved without copies, then with copies as they are, then with
        slower ones and with room for more of them, and what these give is replayed, tensor by
        tensor (`simulate`). A program whose relaxed one is no better than the fastest of these is
        not solved: it cannot gain, or, with slower copies, is not likely to. Where none of these
        fits though a program has answers, the fastest of `_find_lean` that fits is taken, which
        are the same for all caps: what fits under a cap fits under a larger one.

        Args:
            cap: Bytes for what microbatches hold, for workspace and the windows.
            in_flight: Microbatches between their forward and backward at once.
        """
        if self._everything.need(in_flight) <= cap:
            return self._everything
        self._prepare()
        best, fastest = None, inf
        copies = (_AS_IT_IS, *_CAUTIOUS) if self._ways.offload else ()
        for copying in (_NOT_AT_ALL, *copies):
            for choice in self._fitting(copying, cap, in_flight, fastest):
                seconds = self.seconds(choice, in_flight)
                if seconds < fastest:
                    best, fastest = choice, seconds
        if best is not None or relax(self._whole(cap, in_flight).program) is None:
            return best
        fitting = [
            self._widened(choice, cap, in_flight)
            for choice in self._lean(in_flight)
            if choice.need(in_flight) <= cap
        ]
        return min(fitting, key=lambda choice: self.seconds(choice, in_flight), default=None)

    def bound(self, cap: int, in_flight: int = 1) -> float:
        """Return a lower bound of the seconds of a microbatch: the MILP's dual bound with all
        options and copies as a fluid; inf if none fits."""
        self._prepare()
        posed = self._whole(cap, in_flight)
        return lower_bound(posed.program) * posed.second

    def seconds(self, choice: Choice, in_flight: int = 1) -> float:
        """Return the simulated seconds of a microbatch with so many in flight."""
        cost = StageCost(
            sum(self._facts.forward.values()),
            sum(self._facts.backward.values()) + choice.retained.recompute_seconds,
            tensors=choice.retained.tensors,
        )
        order = gpipe(linear(1), 2 * in_flight, in_flight)
        lowered = lower(order, offload={0: choice.policy.offloaded})
        costs = Costs((cost,), host=self._host, window=choice.window)
        return float(simulate(lowered, costs).time) / (2 * in_flight)

    def _prepare(self) -> None:
        if not self._options:
            self._runs = runs_of(self._facts, MOST_UNITS)
            # Beside joined blocks, which are most of a stage, the others need no more options.
            few = any(run.blocks[0].parts for run in self._runs)
            self._options = [
                options_of(self._facts, run, self._host, self._ways, few) for run in self._runs
            ]

    @property
    def _freest(self) -> Copying:
        """The assumption about copies under which a program has most answers."""
        return _AS_IT_IS if self._ways.offload else _NOT_AT_ALL

    def _whole(self, cap: int, in_flight: int) -> RetentionProgram:
        return self._pose(self._options, self._freest, cap, in_flight)

    def _find_lean(self, in_flight: int) -> list[Choice]:
        """Choices of less and less memory: the program's answers while its least room is sought.

        `_fitting` lowers its room by what the last answer took too much, which may be more than
        any program can do without, where an answer to a room in between would have fitted.
        """
        small, large = 0, self._everything.need(in_flight)
        found: list[Choice] = []
        while large - small > _FINE * large:
            room = (small + large) // 2
            answers = [
                Choice(policy, window, retain(self._facts, policy))
                for answer in self._solved(self._freest, room, in_flight, inf)
                for policy, window in answer
            ]
            found += answers
            small, large = (small, room) if answers else (room, large)
        return found

    def _fitting(self, copying: Copying, cap: int, in_flight: int, fastest: float) -> list[Choice]:
        """The program's answers, each in the first arrangement that fits.

        The program neglects that what a forward still reads is on the device even if it is not
        kept; where that is too much, the program's cap is lowered by it.
        """
        room, found = cap, []
        for _ in range(_ATTEMPTS):
            missing = 0
            for answer in self._solved(copying, room, in_flight, fastest):
                choices = [
                    Choice(policy, window, retain(self._facts, policy)) for policy, window in answer
                ]
                missing = min(choice.need(in_flight) for choice in choices) - cap
                if missing <= 0:
                    fits = next(each for each in choices if each.need(in_flight) <= cap)
                    found.append(self._widened(fits, cap, in_flight))
            if missing <= 0:
                break
            room -= missing
            if room <= 0:
                break
        return found

    def _widened(self, choice: Choice, cap: int, in_flight: int) -> Choice:
        """The choice with all the room that is left as window, which costs no time."""
        spare = cap - choice.need(in_flight)
        wider = min(
            choice.window + spare // windows(in_flight), choice.retained.offloaded * in_flight
        )
        return replace(choice, window=max(choice.window, wider))

    def _solved(
        self, copying: Copying, room: int, in_flight: int, fastest: float
    ) -> Iterator[Iterator[tuple[ActivationPolicy, int]]]:
        """The program's best and what was found on the way to it, in each arrangement; nothing
        where it has no answer, or none that gains on so many seconds."""
        posed = self._pose(self._options, copying, room, in_flight)
        relaxed = relax(posed.program)
        if relaxed is None or relaxed.cost * posed.second > (1 - GAP) * fastest:
            return
        cost = inf
        many = posed.size > _MANY
        for count in _NEAREST if many else ():
            nearest = posed.nearest(relaxed.reduced_costs, count)
            tried = self._pose(nearest, copying, room, in_flight)
            values = solve(tried.program)
            if values is not None:
                cost = min(cost, float(values @ tried.program.cost))
                yield tried.choices(values)
            if (1 - GAP) * cost <= relaxed.cost:
                return
        if many:
            if copying in _CAUTIOUS:
                return
            hopeful = posed.within(relaxed.reduced_costs, (1 - GAP) * cost - relaxed.cost)
            posed = self._pose(hopeful, copying, room, in_flight)
        values = solve(posed.program)
        if values is not None:
            yield posed.choices(values)

    def _pose(
        self, options: list[list[PolicyOption]], copying: Copying, cap: int, in_flight: int
    ) -> RetentionProgram:
        return RetentionProgram(
            self._facts, self._runs, options, self._host, copying, cap, in_flight
        )
