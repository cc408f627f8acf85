"""List scheduling of forwards and backwards under a memory cap, in time or against it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one replica's microbatches, as visits 0 … 2S - 1: S forwards, S backwards.

    Visit k < S is the forward of stage k; visit 2S - 1 - k is its backward.

    Attributes:
        homes: The rank of each visit.
        before: By visit, the visits that must end before it, and the time from there to here.
        after: The same read the other way: the visits that wait for it.
    """

    homes: tuple[int, ...]
    before: tuple[tuple[tuple[int, float], ...], ...]
    after: tuple[tuple[tuple[int, float], ...], ...]

    def mirrored(self) -> Route:
        """The way in reversed time."""
        return Route(self.homes, _turned(self.after), _turned(self.before))


@dataclass(frozen=True, slots=True)
class Step:
    """All visits that are to be put in order: visit k of microbatch m has the number 2S m + k.

    Attributes:
        routes: By replica.
        replica_of: By microbatch.
        times: By visit of a microbatch.
        held: By stage, the bytes held from the start of a forward to the end of its backward.
        extra: By visit of a microbatch, the bytes held beyond that while it runs.
        caps: By rank, the bytes there are.
    """

    routes: tuple[Route, ...]
    replica_of: tuple[int, ...]
    times: tuple[float, ...]
    held: tuple[int, ...]
    extra: tuple[int, ...]
    caps: tuple[int, ...]

    @property
    def visits(self) -> int:
        """Visits of one microbatch."""
        return len(self.times)

    def home(self, visit: int) -> int:
        microbatch, index = divmod(visit, self.visits)
        return self.routes[self.replica_of[microbatch]].homes[index]

    def before(self, visit: int) -> list[tuple[int, float]]:
        """The visits that must end before this one, and the time from there to here."""
        microbatch, index = divmod(visit, self.visits)
        route = self.routes[self.replica_of[microbatch]]
        return [(visit - index + earlier, delay) for earlier, delay in route.before[index]]

    def after(self, visit: int) -> list[tuple[int, float]]:
        """The visits that wait for this one, and the time from here to there."""
        microbatch, index = divmod(visit, self.visits)
        route = self.routes[self.replica_of[microbatch]]
        return [(visit - index + later, delay) for later, delay in route.after[index]]

    def taken(self, visit: int) -> int:
        """Bytes that are held from the start of this visit on."""
        index = visit % self.visits
        return self.held[index] if index < len(self.held) else 0

    def freed(self, visit: int) -> int:
        """Bytes that are no longer held when this visit ends."""
        index = visit % self.visits
        return 0 if index < len(self.held) else self.held[self.visits - 1 - index]

    def mirrored(self) -> Step:
        """The step in reversed time: its backwards are forwards, and memory is held as long."""
        return replace(
            self,
            routes=tuple(route.mirrored() for route in self.routes),
            times=self.times[::-1],
            extra=self.extra[::-1],
        )


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each visit of a step starts, an order that gives each rank's, and the last end."""

    starts: list[float]
    order: list[int]
    end: float

    def mirrored(self, step: Step) -> Timetable:
        """The same in reversed time, where visits start as they ended here."""
        length = step.visits
        starts: list[float] = [0] * len(self.starts)
        mirror = [visit + length - 1 - 2 * (visit % length) for visit in range(len(starts))]
        for visit, start in enumerate(self.starts):
            starts[mirror[visit]] = self.end - start - step.times[visit % length]
        return Timetable(starts, [mirror[visit] for visit in reversed(self.order)], self.end)


def list_schedule(
    step: Step, priority: Sequence[float], cautious: bool, patience: float
) -> Timetable:
    """Give each rank, whenever it is free, the visit of lowest priority number that may start.

    A forward takes memory, and where two microbatches wait for each other's the step would be
    stuck. So one microbatch is senior to another by the priority of its first visit, and a
    forward may start only if every senior one could still end, were it alone to go on (the
    banker's algorithm of Dijkstra, 1965).

    Args:
        step: What is to be ordered; each microbatch alone keeps to the caps.
        priority: By visit; the lowest goes first.
        cautious: Keep memory free for all senior microbatches at once.
        patience: How long a rank waits for a visit of lower number that is on its way, as a
            share of the time of what it could do instead: 0 never idles (a *non-delay*
            schedule), 1 gives Giffler and Thompson's *active* schedules (1960).
    """
    return _ListScheduler(step, priority, cautious, patience).run()


class _ListScheduler:
    """The state of all ranks while visits are placed in the order of time."""

    def __init__(
        self, step: Step, priority: Sequence[float], cautious: bool, patience: float
    ) -> None:
        self._step = step
        self._priority = priority
        self._cautious = cautious
        self._patience = patience
        microbatches, ranks = len(step.replica_of), len(step.caps)
        self._starts: list[float] = [-1] * (step.visits * microbatches)
        self._order: list[int] = []
        self._lacking = [
            len(before) for replica in step.replica_of for before in step.routes[replica].before
        ]
        self._arrival: dict[int, float] = {}  # of visits whose predecessors have all started
        self._candidates: list[list[int]] = [[] for _ in range(ranks)]
        self._alarms: list[tuple[float, int]] = []  # when to look at which rank
        self._running: list[int | None] = [None] * ranks
        # Of each replica, a microbatch is looked at only once the one before it has started.
        seniority = sorted(range(microbatches), key=lambda each: priority[step.visits * each])
        self._queues = [deque[int]() for _ in step.routes]
        for microbatch in seniority:
            self._queues[step.replica_of[microbatch]].append(microbatch)
        self._newest = [-1 for _ in step.routes]
        self._memory = [_Memory(step, rank, seniority) for rank in range(ranks)]

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
        assert min(self._starts) >= 0, "a microbatch alone exceeds a cap"
        return Timetable(self._starts, self._order, end)

    def _end(self, visit: int) -> float:
        return self._starts[visit] + self._step.times[visit % self._step.visits]

    def _enter(self, replica: int, now: float) -> None:
        if self._queues[replica]:
            self._newest[replica] = self._queues[replica].popleft()
            first = self._step.visits * self._newest[replica]
            for visit in range(first, first + self._step.visits):
                if not self._lacking[visit]:
                    self._announce(visit, now)

    def _announce(self, visit: int, arrival: float) -> None:
        rank = self._step.home(visit)
        self._arrival[visit] = arrival
        self._candidates[rank].append(visit)
        heapq.heappush(self._alarms, (arrival, rank))

    def _choose(self, rank: int, now: float) -> int | None:
        """The best visit that may start, unless a better one is worth waiting for."""
        step, arrival, memory = self._step, self._arrival, self._memory[rank]
        fitting = [
            visit for visit in self._candidates[rank] if memory.allows(visit, self._cautious)
        ]
        shortest = min(
            (step.times[visit % step.visits] for visit in fitting if arrival[visit] <= now),
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
        step = self._step
        microbatch = visit // step.visits
        replica = step.replica_of[microbatch]
        if microbatch == self._newest[replica]:
            self._enter(replica, now)
        self._candidates[rank].remove(visit)
        self._memory[rank].start(visit)
        self._running[rank] = visit
        self._starts[visit] = now
        self._order.append(visit)
        end = self._end(visit)
        heapq.heappush(self._alarms, (end, rank))
        for following, delay in step.after(visit):
            self._lacking[following] -= 1
            self._arrival[following] = max(self._arrival.get(following, 0), end + delay)
            if not self._lacking[following]:
                self._announce(following, self._arrival[following])


class _Memory:
    """What is held on one rank, and who may take more of it."""

    def __init__(self, step: Step, rank: int, seniority: Sequence[int]) -> None:
        self._step = step
        self._cap = step.caps[rank]
        self._used = 0
        stages = len(step.held)
        # By replica: what a microbatch holds here at most, and beyond that while it runs.
        self._whole: list[int] = []
        self._extra: list[int] = []
        self._visits: list[int] = []
        for route in step.routes:
            mine = [index for index, home in enumerate(route.homes) if home == rank]
            self._whole.append(sum(step.held[index] for index in mine if index < stages))
            self._extra.append(max((step.extra[index] for index in mine), default=0))
            self._visits.append(len(mine))
        # Microbatches with visits still to come here, the senior first: bytes held, visits left.
        self._held = {each: 0 for each in seniority if self._visits[step.replica_of[each]]}
        self._left = {each: self._visits[step.replica_of[each]] for each in self._held}

    def allows(self, visit: int, cautious: bool) -> bool:
        step = self._step
        microbatch, index = divmod(visit, step.visits)
        taken = step.taken(visit)
        if self._used + taken + step.extra[index] > self._cap:
            return False
        if not taken:
            return True
        free = self._cap - self._used
        owed = extra = 0
        for other, held in self._held.items():
            replica = step.replica_of[other]
            owed += self._whole[replica] - held
            extra = max(extra, self._extra[replica])
            if cautious:
                needed = owed + extra
            else:
                free += held  # now all that juniors of this one do not hold
                needed = self._whole[replica] + self._extra[replica]
                needed += taken if other != microbatch else 0
            if needed > free:
                return False
            if other == microbatch:
                break
        return True

    def start(self, visit: int) -> None:
        taken = self._step.taken(visit)
        self._used += taken
        self._held[visit // self._step.visits] += taken

    def end(self, visit: int) -> None:
        microbatch = visit // self._step.visits
        freed = self._step.freed(visit)
        self._used -= freed
        self._held[microbatch] -= freed
        self._left[microbatch] -= 1
        if not self._left[microbatch]:
            del self._held[microbatch]


def _turned(
    neighbours: tuple[tuple[tuple[int, float], ...], ...],
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Neighbours of visits, with the visits numbered from the other end."""
    last = len(neighbours) - 1
    return tuple(
        tuple((last - index, delay) for index, delay in own) for own in reversed(neighbours)
    )
