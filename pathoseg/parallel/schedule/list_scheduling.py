"""List scheduling of forwards and backwards under a memory cap."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from pathoseg.parallel.schedule.workload import Timetable, Workload


def list_schedule(
    work: Workload, priority: Sequence[float], cautious: bool, patience: float
) -> Timetable:
    """Give each rank, whenever it is free, the visit of lowest priority number that may start.

    A forward takes memory, and where two microbatches wait for each other's the step would be
    stuck. So one microbatch is senior to another by the priority of its first visit, and a
    forward may start only if every senior one could still end, were it alone to go on (the
    banker's algorithm of Dijkstra, 1965).

    Args:
        work: What is to be ordered; each microbatch alone keeps to the caps.
        priority: By visit; the lowest goes first.
        cautious: Keep memory free for all senior microbatches at once.
        patience: How long a rank waits for a visit of lower number that is on its way, as a
            share of the time of what it could do instead: 0 never idles (a *non-delay*
            schedule), 1 gives Giffler and Thompson's *active* schedules (1960).
    """
    return _ListScheduler(work, priority, cautious, patience).run()


class _ListScheduler:
    """The state of all ranks while visits are placed in the order of time."""

    def __init__(
        self, work: Workload, priority: Sequence[float], cautious: bool, patience: float
    ) -> None:
        self._work = work
        self._priority = priority
        self._cautious = cautious
        self._patience = patience
        microbatches, ranks = len(work.replica_of), len(work.caps)
        self._starts: list[float] = [-1] * len(work)
        self._order: list[int] = []
        self._lacking = [len(before) for before in work.before]
        self._arrival: dict[int, float] = {}  # of visits whose predecessors have all started
        self._candidates: list[list[int]] = [[] for _ in range(ranks)]
        self._alarms: list[tuple[float, int]] = []  # when to look at which rank
        self._running: list[int | None] = [None] * ranks
        # Of each replica, a microbatch is looked at only once the one before it has started.
        seniority = sorted(range(microbatches), key=lambda each: priority[work.length * each])
        self._queues = [deque[int]() for _ in work.routes]
        for microbatch in seniority:
            self._queues[work.replica_of[microbatch]].append(microbatch)
        self._newest = [-1 for _ in work.routes]
        self._memory = [_Memory(work, rank, seniority) for rank in range(ranks)]

    def run(self) -> Timetable:
        for replica in range(len(self._queues)):
            self._enter(replica, 0)
        end: float = 0
        while self._alarms:
            now, rank = heapq.heappop(self._alarms)
            running = self._running[rank]
            if running is not None:
                if self._end(running) > now:
                    continue
                self._memory[rank].end(running)
                self._running[rank] = None
            chosen = self._choose(rank, now)
            if chosen is not None:
                self._start(rank, chosen, now)
                end = max(end, self._end(chosen))
        assert len(self._order) == len(self._work), "a microbatch alone exceeds a cap"
        return Timetable(self._starts, self._order, end)

    def _end(self, visit: int) -> float:
        return self._starts[visit] + self._work.durations[visit]

    def _enter(self, replica: int, now: float) -> None:
        if self._queues[replica]:
            self._newest[replica] = self._queues[replica].popleft()
            first = self._work.length * self._newest[replica]
            for visit in range(first, first + self._work.length):
                if not self._lacking[visit]:
                    self._announce(visit, now)

    def _announce(self, visit: int, arrival: float) -> None:
        rank = self._work.homes[visit]
        self._arrival[visit] = arrival
        self._candidates[rank].append(visit)
        heapq.heappush(self._alarms, (arrival, rank))

    def _choose(self, rank: int, now: float) -> int | None:
        """The best visit that may start, unless a better one is worth waiting for."""
        work, arrival = self._work, self._arrival
        memory, cautious = self._memory[rank], self._cautious
        fitting = [visit for visit in self._candidates[rank] if memory.allows(visit, cautious)]
        shortest = min(
            (work.durations[visit] for visit in fitting if arrival[visit] <= now),
            default=None,
        )
        if shortest is None:
            return None
        latest = now + self._patience * shortest
        best = min(
            (visit for visit in fitting if arrival[visit] <= now or arrival[visit] < latest),
            key=self._priority.__getitem__,
        )
        return best if arrival[best] <= now else None

    def _start(self, rank: int, visit: int, now: float) -> None:
        work = self._work
        microbatch = visit // work.length
        replica = work.replica_of[microbatch]
        if microbatch == self._newest[replica]:
            self._enter(replica, now)
        self._memory[rank].start(visit)
        self._candidates[rank].remove(visit)
        self._running[rank] = visit
        self._starts[visit] = now
        self._order.append(visit)
        end = self._end(visit)
        heapq.heappush(self._alarms, (end, rank))
        for following, delay in work.after[visit]:
            self._lacking[following] -= 1
            self._arrival[following] = max(self._arrival.get(following, now), end + delay)
            if not self._lacking[following]:
                self._announce(following, self._arrival[following])


class _Memory:
    """The memory held on one rank, and the microbatches that may take more."""

    def __init__(self, work: Workload, rank: int, seniority: Sequence[int]) -> None:
        self._work = work
        self._cap = work.caps[rank]
        self._used = 0
        # By replica: what a microbatch holds here at most and beyond that, and how often it comes.
        self._needs = [work.needs(replica, rank) for replica in range(len(work.routes))]
        visits = [route.homes.count(rank) for route in work.routes]
        # Microbatches with visits still to come here, the senior first: bytes held, visits left.
        expected = [each for each in seniority if visits[work.replica_of[each]]]
        self._held = dict.fromkeys(expected, 0)
        self._left = {each: visits[work.replica_of[each]] for each in expected}

    def allows(self, visit: int, cautious: bool) -> bool:
        microbatch, index = divmod(visit, self._work.length)
        taken = self._work.taken[visit]
        if self._used + taken + self._work.extra[index] > self._cap:
            return False
        if not taken:
            return True
        free = self._cap - self._used
        owed = most = 0
        for other, held in self._held.items():
            whole, extra = self._needs[self._work.replica_of[other]]
            owed += whole - held
            most = max(most, extra)
            if cautious:
                needed = owed + most
            else:
                free += held  # now all that juniors of this one do not hold
                needed = whole + extra + (taken if other != microbatch else 0)
            if needed > free:
                return False
            if other == microbatch:
                break
        return True

    def start(self, visit: int) -> None:
        taken = self._work.taken[visit]
        self._used += taken
        self._held[visit // self._work.length] += taken

    def end(self, visit: int) -> None:
        microbatch = visit // self._work.length
        freed = self._work.freed[visit]
        self._used -= freed
        self._held[microbatch] -= freed
        self._left[microbatch] -= 1
        if not self._left[microbatch]:
            del self._held[microbatch]
