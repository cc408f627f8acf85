"""Chooses what of a stage is kept, offloaded and recomputed: least time under a cap of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from pathoseg.parallel.graph.retention import Retention
from pathoseg.parallel.planning.blocks import Run, runs_of
from pathoseg.parallel.planning.patterns import MOST_UNITS, Pattern, Ways, patterns_of
from pathoseg.parallel.planning.retained import Retained, retain
from pathoseg.parallel.planning.retention_program import RetentionProgram, windows
from pathoseg.parallel.planning.solver import least, relax, solve
from pathoseg.parallel.planning.storages import StageFacts
from pathoseg.parallel.schedule.costs import Costs, Link, StageCost
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.placement import linear
from pathoseg.parallel.schedule.simulate import simulate

_ATTEMPTS = 4
_SLOWNESS = (None, 1.0, 3.0)  # of copies; None is none
_GAIN = 1e-3  # of the time: what may be had by copies is not looked for below this
# A program with more patterns is solved with those that are nearest to the best of its relaxed one:
# of each run so many. Where these do not come so close to it, then with more, and at last with all.
_MANY = 300
_NEAREST = (8, 24)
_CLOSE = 1.02


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a stage's layers.

    Attributes:
        retention: The layers.
        window: Bytes that may wait to be copied to the host, and as many that may be back early.
        retained: What comes of it.
    """

    retention: Retention
    window: int
    retained: Retained

    def need(self, in_flight: int) -> int:
        """Bytes that so many microbatches hold at the worst moment, windows included."""
        kept = self.retained.kept
        return self.retained.peak + (in_flight - 1) * kept + windows(in_flight) * self.window


class Chooser:
    """Chooses for one stage, under any cap.

    Args:
        facts: The stage.
        host: What a copy takes, in each direction.
        ways: What is allowed.
    """

    def __init__(self, facts: StageFacts, host: Link, ways: Ways) -> None:
        self._facts, self._host, self._ways = facts, host, ways
        self._everything = Choice(Retention(), 0, retain(facts, Retention()))
        self._runs: list[Run] = []
        self._patterns: list[list[Pattern]] = []

    def choose(self, cap: int, in_flight: int = 1) -> Choice | None:
        """The choice that takes least time, or None where none fits.

        `RetentionProgram` takes copies for a fluid. Tensors are none, and where their copies hide
        less well than it says, less should be copied: it is solved without copies, then with
        copies as fast as they are, then slower, and what these give is replayed, tensor by tensor
        (`simulate`). What cannot gain, as the relaxed program shows, is not solved.

        Args:
            cap: Bytes for what microbatches hold, for workspace and the windows.
            in_flight: Microbatches between their forward and backward at once.
        """
        if self._everything.need(in_flight) <= cap:
            return self._everything
        self._prepare()
        best, fastest = None, inf
        for slowness in _SLOWNESS if self._ways.offload else (None,):
            choice = self._fitting(slowness, cap, in_flight, fastest)
            if choice is None:
                continue
            seconds = self.seconds(choice, in_flight)
            if seconds < fastest:
                best, fastest = choice, seconds
        return best

    def bound(self, cap: int, in_flight: int = 1) -> float:
        """Seconds of a microbatch below which no mixture of the ways of all blocks comes: of the
        program with all of them, where copies are a fluid; inf where none fits."""
        self._prepare()
        slowness = 1.0 if self._ways.offload else None
        posed = self._pose(self._patterns, slowness, cap, in_flight)
        return least(posed.program) * posed.second

    def seconds(self, choice: Choice, in_flight: int = 1) -> float:
        """Of a microbatch, where so many are in flight, by `simulate`."""
        cost = StageCost(
            sum(self._facts.forward.values()),
            sum(self._facts.backward.values()) + choice.retained.again,
            tensors=choice.retained.tensors,
        )
        order = gpipe(linear(1), 2 * in_flight, in_flight)
        lowered = lower(order, offload={0: choice.retention.offloaded})
        costs = Costs((cost,), host=self._host, window=choice.window)
        return float(simulate(lowered, costs).time) / (2 * in_flight)

    def _prepare(self) -> None:
        if not self._patterns:
            self._runs = runs_of(self._facts, MOST_UNITS)
            self._patterns = [
                patterns_of(self._facts, run, self._host, self._ways) for run in self._runs
            ]

    def _fitting(
        self, slowness: float | None, cap: int, in_flight: int, fastest: float
    ) -> Choice | None:
        """The program's best, in the first arrangement that fits.

        The program neglects that what a forward still reads is on the device even if it is not
        kept; where that is too much, the program's cap is lowered by it.
        """
        room = cap
        for _ in range(_ATTEMPTS):
            needs = []
            for retention, window in self._solved(slowness, room, in_flight, fastest):
                choice = Choice(retention, window, retain(self._facts, retention))
                spare = cap - choice.need(in_flight)
                if spare >= 0:
                    # A wider window costs nothing where there is room for it.
                    wider = min(
                        window + spare // windows(in_flight), choice.retained.offloaded * in_flight
                    )
                    return replace(choice, window=max(window, wider))
                needs.append(-spare)
            room -= min(needs, default=room)
            if room <= 0:
                return None
        return None

    def _solved(
        self, slowness: float | None, room: int, in_flight: int, fastest: float
    ) -> list[tuple[Retention, int]]:
        """What the program says, in each arrangement; nothing where it has no answer, or none that
        gains on so many seconds."""
        posed = self._pose(self._patterns, slowness, room, in_flight)
        limit = (1 - _GAIN) * fastest / posed.second
        relaxed = relax(posed.program)
        if relaxed is None or relaxed.cost > limit:
            return []
        best, cost = None, limit
        for count in _NEAREST if posed.size > _MANY else ():
            nearest = posed.nearest(relaxed.dear, count)
            tried = self._pose(nearest, slowness, room, in_flight)
            values = solve(tried.program, cost)
            if values is not None:
                best, cost = [*tried.choices(values)], float(values @ tried.program.cost)
            if cost <= _CLOSE * relaxed.cost:
                return best or []
        values = solve(posed.program, cost)
        return (best or []) if values is None else [*posed.choices(values)]

    def _pose(
        self, patterns: list[list[Pattern]], slowness: float | None, cap: int, in_flight: int
    ) -> RetentionProgram:
        return RetentionProgram(
            self._facts, self._runs, patterns, self._host, slowness, cap, in_flight
        )
