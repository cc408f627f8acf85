"""An order made to measure for given costs, placement and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain, predecessors
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.list_scheduling import Route, Step, Timetable, list_schedule
from pathoseg.parallel.schedule.placement import Placement
from pathoseg.parallel.schedule.polish import polish
from pathoseg.parallel.schedule.schedule import Schedule

# How much is tried: seconds at most, however large the step.
_PLACED = 150_000  # visits that the list scheduler places, over all of its runs
_REPLAYED = 60_000  # visits that the polishing of one timetable replays
_POLISHED = 8  # timetables that are polished
_SWINGS = 2


def synthesise(
    placement: Placement,
    costs: Costs,
    microbatches: int,
    cap: int,
    edges: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
) -> Schedule:
    """Build an order of F and B that is short and never holds more than `cap` on any rank.

    One list scheduler, run many times: with two priorities, several degrees of caution and
    patience, and several ways to deal the microbatches to the replicas. The best are swung: the
    step is scheduled backwards in time, with the priorities that its forward timetable gives,
    and forwards again (double justification: Valls, Ballestín and Quintanilla, 2005). What is
    then best is polished by swaps on the critical path. No named order is looked at, and the
    same input always gives the same order.

    Args:
        placement: Where the stages are; with a mirrored one both directions are used wherever
            that is shorter.
        costs: Times, bytes and links; messages are taken not to wait for each other.
        microbatches: In the whole step.
        cap: Bytes on each rank for activations, the tensors received for them, and workspace;
            not for weights, nor for tensors that arrive ahead of their use.
        edges: The tensors between the stages; None is a chain.
        recompute: The stages that are to be recomputed: they hold their checkpoint, and all of
            their activations only while a backward runs.

    Raises:
        PathosegError: A single microbatch exceeds the cap.
    """
    tensors = chain(placement.stages) if edges is None else tuple(edges)
    steps = [
        _step(Schedule("", placement, tensors, dealt, ()), costs, cap, recompute)
        for dealt in _dealings(placement.replicas, microbatches)
    ]
    visits = steps[0].visits * microbatches
    runs = max(1, _PLACED // (visits * (1 + 2 * _SWINGS)))
    swung = [_swing(start) for start in islice(_starts(steps), runs)]
    distinct = {(_end(each), each.step.replica_of): each for each in sorted(swung, key=_end)}
    polished = [
        each._replace(timetable=polish(each.step, each.timetable, _REPLAYED // visits))
        for each in list(distinct.values())[:_POLISHED]
    ]
    return _schedule(min(polished, key=_end), placement, tensors)


class _Attempt(NamedTuple):
    """A timetable and how it came about."""

    step: Step
    cautious: bool
    patience: float
    timetable: Timetable


def _end(attempt: _Attempt) -> float:
    return attempt.timetable.end


def _dealings(replicas: int, microbatches: int) -> list[tuple[int, ...]]:
    """Ways to deal microbatches to replicas: in turn by 1, 2, 4…; and all to the first."""
    blocks = [2**power for power in range(microbatches.bit_length()) if 2**power < microbatches]
    in_turn = [
        tuple(microbatch // block % replicas for microbatch in range(microbatches))
        for block in blocks
    ]
    return list(dict.fromkeys([*in_turn, (0,) * microbatches]))


def _step(schedule: Schedule, costs: Costs, cap: int, recompute: Collection[int]) -> Step:
    """The visits of an order without lists, with their times and bytes."""
    setting, placement = schedule.setting, schedule.placement
    held, forward_extra, backward_extra, times, back_times = [], [], [], [], []
    for stage, cost in enumerate(costs.stages):
        entering = sum(costs.sizes.get(edge, 0) for edge in setting.inputs[stage])
        leaving = sum(costs.sizes.get(edge, 0) for edge in setting.outputs[stage])
        again = stage in recompute
        kept = cost.checkpoint if again else cost.activations
        workspace = cost.backward_workspace
        if again:
            # Where the backward follows at once, the forward itself keeps all and runs once.
            workspace = max(workspace, cost.forward_workspace)
        held.append(kept + entering)
        times.append(cost.forward)
        forward_extra.append(cost.forward_workspace)
        back_times.append(cost.backward + (cost.recomputation if again else 0))
        backward_extra.append(cost.activations - kept + leaving + workspace)
    extra = forward_extra + backward_extra[::-1]
    for home in placement.homes:
        for rank in range(placement.ranks):
            mine = [stage for stage, at in enumerate(home) if at == rank]
            most = max(
                (max(forward_extra[stage], backward_extra[stage]) for stage in mine), default=0
            )
            needed = sum(held[stage] for stage in mine) + most
            if needed > cap:
                raise PathosegError(
                    f"One microbatch needs {needed:,} bytes on rank {rank}, above the "
                    f"cap of {cap:,}.",
                    "Allow more memory, cut the model into more stages or recompute them.",
                )
    return Step(
        tuple(_route(schedule, costs, replica) for replica in range(placement.replicas)),
        schedule.replica_of,
        tuple(times + back_times[::-1]),
        tuple(held),
        tuple(extra),
        (cap,) * placement.ranks,
    )


def _route(schedule: Schedule, costs: Costs, replica: int) -> Route:
    """The visits of one replica's microbatch, and what each has to wait for."""
    home = schedule.placement.homes[replica]
    stages = len(home)
    last = 2 * stages - 1
    before: list[tuple[tuple[int, float], ...]] = []
    after: list[list[tuple[int, float]]] = [[] for _ in range(2 * stages)]
    for visit in range(2 * stages):
        forward = visit < stages
        kind = Kind.FORWARD if forward else Kind.BACKWARD
        action = Action(kind, replica, visit if forward else last - visit, 0)
        own: list[tuple[int, float]] = []
        for needed in predecessors(action, schedule.setting):
            earlier = needed.stage if needed.kind is Kind.FORWARD else last - needed.stage
            delay = _delay(schedule, costs, home, needed, action)
            own.append((earlier, delay))
            after[earlier].append((visit, delay))
        before.append(tuple(own))
    return Route((*home, *reversed(home)), tuple(before), tuple(map(tuple, after)))


def _delay(
    schedule: Schedule, costs: Costs, home: Sequence[int], made: Action, used: Action
) -> float:
    """The time that the tensors from one visit to another are on the way."""
    source, target = home[made.stage], home[used.stage]
    if source == target:
        return 0
    ends = {made.stage, used.stage}
    size = sum(costs.sizes.get(edge, 0) for edge in schedule.edges if set(edge[:2]) == ends)
    network = costs.network
    return network.latency(source, target) + network.transfer(source, target, size)


def _starts(steps: Sequence[Step]) -> Iterator[_Attempt]:
    """First timetables, the most promising ways to get one first."""
    for patience, cautious, backward_first in product((0, 0.5, 1), (False, True), (True, False)):
        for step in steps:
            priority = _backward_first(step) if backward_first else _longest_way_first(step)
            timetable = list_schedule(step, priority, cautious, patience)
            yield _Attempt(step, cautious, patience, timetable)


def _backward_first(step: Step) -> list[float]:
    microbatches = len(step.replica_of)
    return [
        microbatch + microbatches * (visit < len(step.held))
        for microbatch in range(microbatches)
        for visit in range(step.visits)
    ]


def _longest_way_first(step: Step) -> list[float]:
    microbatches = len(step.replica_of)
    way = [sum(step.times[visit:]) for visit in range(step.visits)]
    keys = [(-left, microbatch) for microbatch in range(microbatches) for left in way]
    ranking = {key: float(rank) for rank, key in enumerate(sorted(set(keys)))}
    return [ranking[key] for key in keys]


def _swing(attempt: _Attempt) -> _Attempt:
    """The best of the timetables that follow from scheduling to and fro in time."""
    step, cautious, patience, best = attempt
    current, mirror = best, step.mirrored()
    for _ in range(_SWINGS):
        for ahead, back in ((step, mirror), (mirror, step)):
            turned = current.mirrored(ahead)
            current = list_schedule(back, turned.starts, cautious, patience)
            if current.end < best.end:
                best = current if back is step else current.mirrored(mirror)
    return attempt._replace(timetable=best)


def _schedule(attempt: _Attempt, placement: Placement, edges: tuple[Edge, ...]) -> Schedule:
    step = attempt.step
    lists: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for visit in attempt.timetable.order:
        microbatch, index = divmod(visit, step.visits)
        forward = index < placement.stages
        kind = Kind.FORWARD if forward else Kind.BACKWARD
        stage = index if forward else step.visits - 1 - index
        lists[step.home(visit)].append(Action(kind, step.replica_of[microbatch], stage, microbatch))
    return Schedule("synthesised", placement, edges, step.replica_of, tuple(map(tuple, lists)))
