"""An order made to measure for given costs, placement and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.list_scheduling import list_schedule
from pathoseg.parallel.schedule.local_search import polish
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement, Schedule
from pathoseg.parallel.schedule.simulate import simulate, weights_by_rank
from pathoseg.parallel.schedule.workload import Timetable, Workload, workload

# How much is tried: seconds at most, however large the step.
_PLACED = 150_000  # visits that the list scheduler places for starts, and again for swings
_REPLAYED = 160_000  # visits that the polishing of one timetable replays
_POLISHED = 3  # timetables that are polished
_SWINGS = 2
# Found by placing all combinations on a few hundred steps; the most often useful come first.
_PATIENCE = (0.5, 0.0, 1.0)
_PACES = (
    (0.6, True),
    (0.4, True),
    (0.5, False),
    (0.3, False),
    (None, False),  # not paced: backwards first
    (0.7, False),
    (1.0, False),
)


def synthesise(
    placement: Placement,
    costs: Costs,
    microbatches: int,
    cap: int,
    edges: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
) -> Schedule:
    """Build an order of F and B that is short and never holds more than `cap` on any rank.

    One list scheduler, run many times: with visits wanted at several paces or backwards first,
    several degrees of caution and patience, and microbatches dealt to the replicas in several
    ways. The best timetables are swung: the step is scheduled backwards in time, with the
    priorities that its forward timetable gives, and forwards again (double justification: Valls,
    Ballestín and Quintanilla, 2005). What is then best is polished by swaps on the critical path.
    The first timetable that ends when none can end earlier (`none_ends_before`) is taken at once.
    No named order is looked at, and the same input always gives the same order.

    Args:
        placement: Where the stages are; with a mirrored one both directions are used wherever
            that is shorter.
        costs: Times, bytes and links; messages are taken not to wait for each other.
        microbatches: In the whole step.
        cap: Bytes on each rank for all but weights: activations, tensors to and from other
            stages, and workspace. It is kept as `simulate` counts the lowered order.
        edges: The tensors between the stages; None is a chain.
        recompute: The stages that are to be recomputed: they hold their checkpoint, and all of
            their activations only while a backward runs.

    Raises:
        PathosegError: A single microbatch exceeds the cap.
    """
    tensors = chain(placement.stages) if edges is None else tuple(edges)
    early = 0
    while True:
        works = [
            workload(Schedule("", placement, tensors, dealt, ()), costs, cap, recompute, early)
            for dealt in _dealings(placement.replicas, microbatches)
        ]
        order = _schedule(_best(works), placement, tensors, recompute)
        excess = _held(order, costs, recompute) - cap
        if excess <= 0:
            return order
        early += excess


def _best(works: Sequence[Workload]) -> _Attempt:
    visits = len(works[0])
    starts = []
    for attempt in islice(_starts(works), max(12, _PLACED // visits)):
        if all(work.none_ends_before(_end(attempt)) for work in works):
            return attempt
        starts.append(attempt)
    starts.sort(key=_end)
    hopeful = starts[: max(8, _PLACED // (2 * _SWINGS * visits))]
    known: _Swings = {}
    swung = sorted((_swing(each, known) for each in hopeful), key=_end)
    distinct = {(_end(each), each.work.replica_of): each for each in swung}
    polished = [
        each._replace(timetable=polish(each.work, each.timetable, _REPLAYED // visits))
        for each in list(distinct.values())[:_POLISHED]
    ]
    return min(polished, key=_end)


def _held(order: Schedule, costs: Costs, recompute: Collection[int]) -> int:
    """Return the peak bytes of activations of the fullest rank."""
    run = simulate(lower(order, recompute=recompute), costs)
    weights = weights_by_rank(order.placement, costs)
    return max(peak - own for peak, own in zip(run.peak_memory, weights, strict=True))


class _Attempt(NamedTuple):
    """A timetable and how it came about."""

    work: Workload
    cautious: bool
    patience: float
    timetable: Timetable


def _end(attempt: _Attempt) -> float:
    return attempt.timetable.end


def _dealings(replicas: int, microbatches: int) -> list[tuple[int, ...]]:
    """Ways to deal microbatches to replicas: in turn by 1 or 2, and all to the first."""
    in_turn = [
        tuple(microbatch // block % replicas for microbatch in range(microbatches))
        for block in (1, 2)
    ]
    return list(dict.fromkeys([*in_turn, (0,) * microbatches]))


def _starts(works: Sequence[Workload]) -> Iterator[_Attempt]:
    """First timetables, the most promising ways to get one first."""
    for patience, cautious, (pace, together) in product(_PATIENCE, (True, False), _PACES):
        # Where replicas set out together it makes no difference which microbatch is whose.
        for work in works[:1] if together else works:
            priority = _backward_first(work) if pace is None else _paced(work, pace, together)
            timetable = list_schedule(work, priority, cautious, patience)
            yield _Attempt(work, cautious, patience, timetable)


def _backward_first(work: Workload) -> list[float]:
    microbatches = len(work.replica_of)
    return [
        microbatch + microbatches * (2 * visit < work.length)
        for microbatch in range(microbatches)
        for visit in range(work.length)
    ]


def _paced(work: Workload, pace: float, together: bool) -> list[float]:
    """Return the start of each visit if microbatches set out at equal intervals and never waited.

    Args:
        work: The visits, and their times and ranks.
        pace: The interval, as a share of the one that would keep the busiest rank busy. Where it
            is small forwards go first, where it is large backwards.
        together: All replicas set out at once, instead of in turn.

    Returns:
        By visit of the step, its start in the unit of the costs: a priority, the lowest first.
    """
    loads = [0.0] * len(work.caps)
    for home, time in zip(work.homes, work.durations, strict=True):
        loads[home] += time
    way = [0.0] * work.length
    for visit, before in enumerate(work.routes[0].before):
        way[visit] = max((way[each] + work.times[each] for each, _ in before), default=0.0)
    sent = [0] * len(work.routes)
    priority = []
    for microbatch, replica in enumerate(work.replica_of):
        if together:
            start = sent[replica] / work.replica_of.count(replica)
            sent[replica] += 1
        else:
            start = microbatch / len(work.replica_of)
        priority += [start * pace * max(loads) + ahead for ahead in way]
    return priority


# By all that a swing depends on: how microbatches are dealt, whether it goes forwards in time, its
# priorities, caution and patience. Most swings of a small step come again from other starts.
_Swings = dict[tuple[tuple[int, ...], bool, tuple[float, ...], bool, float], Timetable]


def _swing(attempt: _Attempt, known: _Swings) -> _Attempt:
    """The best of the timetables that follow from scheduling to and fro in time."""
    work, cautious, patience, best = attempt
    current, mirror = best, work.mirrored
    for _ in range(_SWINGS):
        for ahead, back in ((work, mirror), (mirror, work)):
            priority = current.mirrored(ahead).starts
            key = work.replica_of, back is work, tuple(priority), cautious, patience
            if key not in known:
                known[key] = list_schedule(back, priority, cautious, patience)
            current = known[key]
            if current.end < best.end:
                best = current if back is work else current.mirrored(mirror)
    return attempt._replace(timetable=best)


def _schedule(
    attempt: _Attempt,
    placement: Placement,
    edges: tuple[Edge, ...],
    recompute: Collection[int],
) -> Schedule:
    work = attempt.work
    feeding = {edge.source for edge in edges}
    lists: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for visit in attempt.timetable.order:
        microbatch, index = divmod(visit, work.length)
        stage = min(index, work.length - 1 - index)
        kinds = [Kind.FORWARD if index == stage else Kind.BACKWARD]
        if stage in recompute and stage not in feeding:
            # Its backward is part of the forward visit.
            kinds = [Kind.FORWARD, Kind.BACKWARD] if index == stage else []
        replica = work.replica_of[microbatch]
        lists[work.homes[visit]] += [Action(kind, replica, stage, microbatch) for kind in kinds]
    return Schedule("synthesised", placement, edges, work.replica_of, tuple(map(tuple, lists)))
