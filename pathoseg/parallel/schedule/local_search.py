"""Betters a timetable by swapping neighbours on its critical path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pathoseg.parallel.schedule.workload import Timetable, Workload

Swap = tuple[int, int]  # a rank, and the position of the first of two neighbours in its list

# Swaps by visit of the step that may better nothing before the search ends. Of 208 steps of
# benchmarks/schedules one is 1.5 % longer than with all replays; its tables are the same.
_IN_VAIN = 8


def polish(work: Workload, timetable: Timetable, replays: int) -> Timetable:
    """Tabu search: swap two visits that follow each other on a rank and on the critical path.

    Only such a swap can shorten a step (van Laarhoven, Aarts and Lenstra, 1992). The best swap
    that keeps to the caps is made even where it lengthens the step, and is not undone for a while
    (Taillard, 1994); of equally long steps the one whose microbatches end earlier is the better.

    Args:
        work: What is ordered.
        timetable: Where to start from.
        replays: About how many swaps to try; fewer where no order can end earlier, or where many
            in turn better nothing.
    """
    search = _Search(work, timetable)
    current = best = search.replay()
    order = timetable.order
    rounds = bettered = 0
    while current is not None and best is not None and search.tried < replays:
        if work.none_ends_before(best.end) or search.tried - bettered > _IN_VAIN * len(work):
            break
        rounds += 1
        current = search.move(current, best, rounds)
        if current is not None and current.worth < best.worth:
            best, order, bettered = current, search.order(), search.tried
    return timetable if best is None else Timetable(best.starts, order, best.end)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A run of the lists: when visits start, and which visit each waited for last, if any."""

    starts: list[float]
    awaited: list[int | None]
    last: int  # the visit that ends last
    end: float
    worth: tuple[float, float]  # to be made small


class _Search:
    """The lists of visits by rank, and the swaps that are barred until some round."""

    def __init__(self, work: Workload, timetable: Timetable) -> None:
        self.tried = 0
        self._work = work
        self._random = random.Random(0)
        self._barred: dict[tuple[int, int], int] = {}
        self._home = work.homes
        self._wakes = [
            {work.homes[later] for later, _ in after} - {home}
            for home, after in zip(work.homes, work.after, strict=True)
        ]
        self._lists: list[list[int]] = [[] for _ in work.caps]
        for visit in timetable.order:
            self._lists[self._home[visit]].append(visit)

    def order(self) -> list[int]:
        return [visit for visits in self._lists for visit in visits]

    def replay(self) -> _Replay | None:
        """Run the lists, every visit as early as it can; None where they are stuck."""
        count = len(self._work)
        times, before = self._work.durations, self._work.before
        starts: list[float] = [0] * count
        ends: list[float] = [-1] * count
        awaited: list[int | None] = [None] * count
        position = [0] * len(self._lists)
        movable = list(range(len(self._lists)))
        while movable:
            rank = movable.pop()
            order = self._lists[rank]
            index = position[rank]
            while index < len(order):
                visit = order[index]
                cause = order[index - 1] if index else None
                start = 0 if cause is None else ends[cause]
                for earlier, delay in before[visit]:
                    if ends[earlier] < 0:
                        break
                    if ends[earlier] + delay > start:
                        start, cause = ends[earlier] + delay, earlier
                else:
                    awaited[visit] = cause
                    starts[visit] = start
                    ends[visit] = start + times[visit]
                    movable += self._wakes[visit]
                    index += 1
                    continue
                break
            position[rank] = index
        if min(ends) < 0:
            return None
        last = max(range(count), key=ends.__getitem__)
        length = self._work.length
        finished = sum(max(ends[first : first + length]) for first in range(0, count, length))
        return _Replay(starts, awaited, last, ends[last], (ends[last], finished))

    def move(self, current: _Replay, best: _Replay, rounds: int) -> _Replay | None:
        """Make the best swap that is not barred, or the first that betters the step."""
        swaps = [swap for swap in self._critical(current) if self._fits(swap)]
        self._random.shuffle(swaps)
        found: tuple[Swap, _Replay] | None = None
        for swap in swaps:
            rank, index = swap
            pair = self._lists[rank][index], self._lists[rank][index + 1]
            self._exchange(swap)
            result = self.replay()
            self._exchange(swap)
            self.tried += 1
            if result is None:
                continue
            barred = self._barred.get(pair, 0) > rounds and result.worth >= best.worth
            if not barred and (found is None or result.worth < found[1].worth):
                found = swap, result
                if result.worth < current.worth:
                    break
        if found is None:
            stuck = not self._barred
            self._barred.clear()
            return None if stuck else current
        swap, result = found
        self._exchange(swap)
        rank, index = swap
        pair = self._lists[rank][index], self._lists[rank][index + 1]
        self._barred[pair] = rounds + self._random.randint(8, 30)
        return result

    def _critical(self, replay: _Replay) -> Iterator[Swap]:
        """Neighbours in a list of which the second waited for the first, back from the end."""
        at = {visit: index for order in self._lists for index, visit in enumerate(order)}
        visit: int | None = replay.last
        while visit is not None:
            cause = replay.awaited[visit]
            if (
                cause is not None
                and self._home[cause] == self._home[visit]
                and at[cause] == at[visit] - 1
                and all(cause != earlier for earlier, _ in self._work.before[visit])
            ):
                yield self._home[visit], at[cause]
            visit = cause

    def _exchange(self, swap: Swap) -> None:
        rank, index = swap
        order = self._lists[rank]
        order[index], order[index + 1] = order[index + 1], order[index]

    def _fits(self, swap: Swap) -> bool:
        """Return True if the rank stays within its memory cap after this swap."""
        rank, index = swap
        order, work = self._lists[rank], self._work
        used = sum(work.taken[visit] - work.freed[visit] for visit in order[:index])
        for visit in (order[index + 1], order[index]):
            used += work.taken[visit]
            if used + work.extra[visit % work.length] > work.caps[rank]:
                return False
            used -= work.freed[visit]
        return True
