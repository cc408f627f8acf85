"""1F1B: a backward as soon as there is one, so that few activations are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain
from pathoseg.parallel.schedule.schedule import Placement, Schedule, linear


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Order forwards until the pipe is full, then backward and forward in turn: PipeDream-Flush.

    With N microbatches on D equal stages it takes GPipe's time and rank r holds the activations of
    min(N, D - r) microbatches. Lowered with recomputation of every stage, it holds those of one
    microbatch, and the inputs of its stage for the others (Narayanan et al., ICML 2021).
    """
    return one_f_one_b_of(linear(ranks), microbatches, chain(ranks))


def one_f_one_b_of(
    placement: Placement,
    microbatches: int,
    edges: Iterable[Edge],
    times: Sequence[tuple[float, float]] = (),
) -> Schedule:
    """1F1B on stages that form a graph: `warm_up` forwards of a stage ahead of its backwards.

    Args:
        placement: One replica.
        microbatches: In the whole step.
        edges: The tensors between the stages.
        times: Of each stage, a forward and a backward, where a rank holds several stages; empty
            takes 1 and 2.
    """
    edges = tuple(edges)
    in_flight = warm_up(placement, edges)
    lists = one_way(placement, 0, range(microbatches), edges, in_flight, times)
    return Schedule("1f1b", placement, chain(placement.stages), (0,) * microbatches, lists)


def warm_up(placement: Placement, edges: Iterable[Edge]) -> tuple[int, ...]:
    """Return how many microbatches each stage holds so that no rank has to wait for the next one.

    It is the length of the longest path from the stage to an end of the stage graph, in ranks: a
    stage whose rank holds k stages counts 1 / k. In a chain of D stages on D ranks stage s holds
    D - s; branches that do not read each other add nothing to each other's paths:

            ┌ 1 ┐
        0 ──┼ 2 ┼── 4         0 holds 3, each of 1, 2, 3 holds 2, 4 holds 1
            └ 3 ┘
    """
    [home, *_] = placement.homes
    share = [Fraction(1, home.count(rank)) for rank in home]
    longest = list(share)
    for source, target, _ in sorted(edges, reverse=True):  # what follows the target is known
        longest[source] = max(longest[source], share[source] + longest[target])
    return tuple(map(ceil, longest))


def one_way(
    placement: Placement,
    replica: int,
    microbatches: range,
    edges: Iterable[Edge],
    in_flight: Sequence[int],
    times: Sequence[tuple[float, float]] = (),
) -> tuple[tuple[Action, ...], ...]:
    """Return the visits of one replica, by rank.

    A rank of one stage takes them as `alternate` says. One of several takes, whenever it is free,
    a backward that can run, else a forward of a stage with fewer than `in_flight` microbatches;
    the lowest microbatch first.

    Args:
        placement: The ranks of the stages.
        replica: Number of the replica.
        microbatches: Those that it runs, in this order in each stage.
        edges: The tensors between the stages.
        in_flight: By stage, the most microbatches between their forward and backward.
        times: As for `one_f_one_b_of`.
    """
    home = placement.homes[replica]
    lists: list[list[Action]] = [[] for _ in range(placement.ranks)]
    if len(set(home)) == len(home):
        for stage, rank in enumerate(home):
            lists[rank] = alternate(replica, stage, microbatches, in_flight[stage])
        return tuple(map(tuple, lists))
    way = _OneWay(home, edges, in_flight, times or [(1.0, 2.0)] * len(home), len(microbatches))
    for _ in range(2 * len(home) * len(microbatches)):
        visit = way.take_next()
        action = Action(visit.kind, replica, visit.stage, microbatches[visit.number])
        lists[home[visit.stage]].append(action)
    return tuple(map(tuple, lists))


class _OneWay:
    """The visits of one replica so far: when each ended, and when its rank is free again.

    Args:
        home: The rank of each stage.
        edges: The tensors between the stages.
        in_flight: By stage, the most microbatches between their forward and backward.
        times: Of each stage, a forward and a backward.
        microbatches: Their number.
    """

    def __init__(
        self,
        home: Sequence[int],
        edges: Iterable[Edge],
        in_flight: Sequence[int],
        times: Sequence[tuple[float, float]],
        microbatches: int,
    ) -> None:
        self._home, self._in_flight, self._microbatches = home, in_flight, microbatches
        self._seconds = {
            Kind.FORWARD: [forward for forward, _ in times],
            Kind.BACKWARD: [backward for _, backward in times],
        }
        self._before: list[list[int]] = [[] for _ in home]
        self._after: list[list[int]] = [[] for _ in home]
        for source, target in {edge[:2] for edge in edges}:
            self._before[target].append(source)
            self._after[source].append(target)
        self._free = dict.fromkeys(home, 0.0)
        # By stage, when each visit ended.
        self._forwards: list[list[float]] = [[] for _ in home]
        self._backwards: list[list[float]] = [[] for _ in home]
        self._ends = {Kind.FORWARD: self._forwards, Kind.BACKWARD: self._backwards}

    def take_next(self) -> _Ready:
        """Run the visit that can start first, and return it."""
        visit = min(
            ready
            for kind in self._ends
            for stage in range(len(self._home))
            if (ready := self._ready(stage, kind)) is not None
        )
        end = visit.start + self._seconds[visit.kind][visit.stage]
        self._ends[visit.kind][visit.stage].append(end)
        self._free[self._home[visit.stage]] = end
        return visit

    def _ready(self, stage: int, kind: Kind) -> _Ready | None:
        """Return a stage's next forward or backward; None where it cannot run yet."""
        number = len(self._ends[kind][stage])
        if kind is Kind.BACKWARD:
            needed = [self._forwards[stage], *(self._backwards[at] for at in self._after[stage])]
        elif number - len(self._backwards[stage]) < self._in_flight[stage]:
            needed = [self._forwards[at] for at in self._before[stage]]
        else:
            return None
        if number == self._microbatches or any(len(each) <= number for each in needed):
            return None
        start = max((each[number] for each in needed), default=0.0)
        return _Ready(max(self._free[self._home[stage]], start), kind, number, stage)


class _Ready(NamedTuple):
    """A visit that can run; the least is taken first, and a backward (B) is less than a forward."""

    start: float
    kind: Kind
    number: int
    stage: int


def alternate(replica: int, stage: int, microbatches: range, in_flight: int) -> list[Action]:
    """Return the visits of one stage: `in_flight` forwards, then backward and forward in turn.

    Args:
        replica: The replica.
        stage: The stage.
        microbatches: Their numbers.
        in_flight: Forwards ahead of the first backward.
    """
    forwards = [Action(Kind.FORWARD, replica, stage, microbatch) for microbatch in microbatches]
    backwards = [Action(Kind.BACKWARD, replica, stage, microbatch) for microbatch in microbatches]
    filled = min(in_flight, len(microbatches))
    order = forwards[:filled]
    for backward, forward in zip(backwards, forwards[filled:], strict=False):
        order += [backward, forward]
    return order + backwards[len(forwards) - filled :]
