"""1F1B: a backward as soon as there is one, so that few activations are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, inf
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
    taken = times or [(1.0, 2.0)] * len(home)
    before: list[list[int]] = [[] for _ in home]
    after: list[list[int]] = [[] for _ in home]
    for source, target in {edge[:2] for edge in edges}:
        before[target].append(source)
        after[source].append(target)
    free = [0.0] * placement.ranks
    # By stage, when each visit ended.
    forwards: list[list[float]] = [[] for _ in home]
    backwards: list[list[float]] = [[] for _ in home]
    ends = {Kind.FORWARD: forwards, Kind.BACKWARD: backwards}

    def possible(stage: int, kind: Kind) -> float:
        """Return the time at which its next forward or backward could start on a free rank."""
        number = len(ends[kind][stage])
        if kind is Kind.BACKWARD:
            needed = [forwards[stage], *(backwards[each] for each in after[stage])]
        elif number - len(backwards[stage]) < in_flight[stage]:
            needed = [forwards[each] for each in before[stage]]
        else:
            return inf
        if number == len(microbatches) or any(len(each) <= number for each in needed):
            return inf
        return max((each[number] for each in needed), default=0.0)

    for _ in range(2 * len(home) * len(microbatches)):
        start, kind, number, stage = min(
            _Ready(max(free[rank], at), kind, len(done[stage]), stage)
            for kind, done in ends.items()
            for stage, rank in enumerate(home)
            if (at := possible(stage, kind)) < inf
        )
        forward, backward = taken[stage]
        end = start + (forward if kind is Kind.FORWARD else backward)
        ends[kind][stage].append(end)
        free[home[stage]] = end
        lists[home[stage]].append(Action(kind, replica, stage, microbatches[number]))
    return tuple(map(tuple, lists))


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
