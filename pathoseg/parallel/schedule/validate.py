"""Validation of a schedule: it is complete and cannot deadlock, whoever built it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Kind, predecessors
from pathoseg.parallel.schedule.schedule import Schedule


def runnable(schedule: Schedule) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield every action once, after all that must precede it, in the order of its rank's list.

    Yields:
        The rank, its action, and the actions that had to precede it.

    Raises:
        PathosegError: The lists deadlock; the error names what each rank waits for.
    """
    setting = schedule.setting
    done: set[Action] = set()
    position = [0] * len(schedule.lists)
    waiting: dict[Action, list[int]] = {}
    movable = list(reversed(range(len(schedule.lists))))
    while movable:
        rank = movable.pop()
        actions = schedule.lists[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            needed = predecessors(action, setting)
            lacking = next((each for each in needed if each not in done), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(rank)
                break
            yield rank, action, needed
            done.add(action)
            position[rank] += 1
            movable += waiting.pop(action, ())
    if waiting:
        raise _stuck(
            schedule,
            {
                rank: (schedule.lists[rank][position[rank]], needed)
                for needed, ranks in waiting.items()
                for rank in ranks
            },
        )


def _stuck(schedule: Schedule, waits: dict[int, tuple[Action, Action]]) -> PathosegError:
    home = {action: rank for rank, own in enumerate(schedule.lists) for action in own}
    told = (
        f"rank {rank} waits at {action} for {needed} "
        + (f"of rank {home[needed]}" if needed in home else "that no rank has")
        for rank, (action, needed) in sorted(waits.items())
    )
    return PathosegError(
        f"The schedule {schedule.name} is stuck: {'; '.join(told)}.",
        "Reorder these ranks' lists so that one of them can move.",
    )


def validate(schedule: Schedule) -> None:
    """Accept a schedule that does each thing exactly once, where it belongs, and can end.

    Raises:
        PathosegError: The first thing that is wrong: a malformed header, an action that fits no
            kind or is on the wrong rank, one that is missing, there twice or needless, one ahead
            of what must precede it, sums that ranks start in different orders, or a deadlock.
    """
    for problem in _problems(schedule):
        raise PathosegError(
            f"The schedule {schedule.name} is broken: {problem}.", "Correct the order."
        )
    for _ in runnable(schedule):
        pass


def _problems(schedule: Schedule) -> Iterator[str]:
    # Each check relies on those before it: the caller stops at the first problem.
    yield from _header(schedule)
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            yield from _misplaced(schedule, rank, action)
    for action, times in Counter(schedule).items():
        if times > 1:
            yield f"{action} is there {times} times"
    present, needed = set(schedule), _needed(schedule)
    for action in sorted(needed - present, key=str):
        yield f"{action} is missing"
    for action in sorted(present - needed, key=str):
        yield f"{action} has no use"
    for rank, actions in enumerate(schedule.lists):
        at = {action: index for index, action in enumerate(actions)}
        for index, action in enumerate(actions):
            for earlier in predecessors(action, schedule.setting):
                if at.get(earlier, -1) > index:
                    yield f"rank {rank} has {action} before {earlier}, which must precede it"
    yield from _crossed_sums(schedule)


def _header(schedule: Schedule) -> Iterator[str]:
    placement = schedule.placement
    stages = range(placement.stages if placement.homes else 0)
    if not stages:
        yield "it has no stages"
    if any(len(home) != len(stages) for home in placement.homes):
        yield "its replicas differ in their number of stages"
    if any(rank not in range(placement.ranks) for home in placement.homes for rank in home):
        yield f"a replica lies on a rank outside 0…{placement.ranks - 1}"
    if len(schedule.lists) != placement.ranks:
        yield f"it has {len(schedule.lists)} lists for {placement.ranks} ranks"
    for edge in schedule.edges:
        if edge.source not in stages or edge.target not in stages or edge.source >= edge.target:
            yield f"edge {edge} does not lead from a stage to a later one"
    if len(set(schedule.edges)) != len(schedule.edges):
        yield "an edge is there twice"
    if any(replica not in range(placement.replicas) for replica in schedule.replica_of):
        yield f"a microbatch runs on a replica outside 0…{placement.replicas - 1}"
    if schedule.groups < 1:
        yield f"it has {schedule.groups} groups"


def _misplaced(schedule: Schedule, rank: int, action: Action) -> Iterator[str]:
    misfit = action.misfit()
    if misfit is not None:
        yield f"{action}: {misfit}"
    elif not (
        action.replica in range(schedule.placement.replicas)
        and action.stage in range(schedule.stages)
    ):
        yield f"{action} speaks of a replica or stage that is not there"
    elif schedule.placement.homes[action.replica][action.stage] != rank:
        yield f"{action} is on rank {rank}, which does not hold that stage"


def _needed(schedule: Schedule) -> set[Action]:
    """All the actions that this schedule must have, given what it recomputes and offloads."""
    homes = schedule.placement.homes
    needed = set()
    for microbatch, replica in enumerate(schedule.replica_of):
        for stage in range(schedule.stages):
            needed.add(Action(Kind.FORWARD, replica, stage, microbatch))
            needed.add(Action(Kind.BACKWARD, replica, stage, microbatch))
        for edge in schedule.edges:
            if (replica, edge) in schedule.setting.messages:
                for stage in edge[:2]:
                    needed.add(Action(Kind.SEND, replica, stage, microbatch, edge))
                    needed.add(Action(Kind.RECV, replica, stage, microbatch, edge))
    visits = {(each.replica, each.stage, each.microbatch) for each in needed}
    for action in schedule:
        if (action.replica, action.stage, action.microbatch) in visits:
            if action.kind is Kind.RECOMPUTE:
                needed.add(action)
            elif action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
                needed.add(action._replace(kind=Kind.OFFLOAD))
                needed.add(action._replace(kind=Kind.PREFETCH))
    if schedule.lowered:
        summed = len(homes) * schedule.groups > 1
        for replica in range(len(homes)):
            for stage in range(schedule.stages):
                needed.add(Action(Kind.STEP, replica, stage))
                for bucket in range(max(1, schedule.setting.buckets[stage]) if summed else 0):
                    needed.add(Action(Kind.REDUCE, replica, stage, bucket=bucket))
                    needed.add(Action(Kind.WAIT_REDUCE, replica, stage, bucket=bucket))
    return needed


def _crossed_sums(schedule: Schedule) -> Iterator[str]:
    """Ranks that share several sums must join them in one order, or a transport may hang."""
    sorter: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    for actions in schedule.lists:
        joined: dict[tuple[int, int], None] = {}
        for action in actions:
            if action.kind is Kind.REDUCE and action.bucket is not None:
                # A rank with this stage of two replicas joins the sum with the second.
                joined.pop((action.stage, action.bucket), None)
                joined[action.stage, action.bucket] = None
        for earlier, later in pairwise(joined):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except CycleError as circle:
        stages = sorted({stage for stage, _ in circle.args[1]})
        yield f"its ranks join the sums of stages {stages} in different orders"
