"""Whether a schedule can run to its end: its actions as they become possible, or who is stuck."""

from __future__ import annotations

from collections.abc import Iterator

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, predecessors
from pathoseg.parallel.schedule.schedule import Schedule


def runnable(schedule: Schedule) -> Iterator[tuple[int, Action, list[Action]]]:
    """Every action once, each after all that must precede it, in the order of its rank's list.

    Yields:
        The rank, its action, and the actions that had to precede it.

    Raises:
        PathosegError: Nothing can move any more; it names what each rank waits for.
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
