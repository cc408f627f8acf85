"""The visits that a synthesised order puts in order, and their timetable, in time or against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Kind, predecessors
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.schedule import Schedule

# For each visit of a microbatch, some (visit, time).
Links = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one replica's microbatches, as visits 0 … 2S - 1: S forwards, S backwards.

    Visit k < S is the forward of stage k; visit 2S - 1 - k is its backward.

    Attributes:
        homes: The rank of each visit.
        before: By visit, the visits that must end before it, and the time from there to here;
            below 0 where a visit needs its input only after a while.
        after: The same read the other way: the visits that wait for it.
    """

    homes: tuple[int, ...]
    before: Links
    after: Links

    def mirrored(self) -> Route:
        """The way in reversed time."""
        last = len(self.homes) - 1

        def turned(links: Links) -> Links:
            turns = (tuple((last - visit, delay) for visit, delay in own) for own in links[::-1])
            return tuple(turns)

        return Route(self.homes, turned(self.after), turned(self.before))


@dataclass(frozen=True)
class Workload:
    """All visits of a step: visit k of microbatch m has the number 2S m + k.

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

    @cached_property
    def length(self) -> int:
        """Visits of one microbatch."""
        return len(self.times)

    def __len__(self) -> int:
        return self.length * len(self.replica_of)

    # By visit of the step, from here on.

    @cached_property
    def homes(self) -> list[int]:
        return [home for replica in self.replica_of for home in self.routes[replica].homes]

    @cached_property
    def durations(self) -> list[float]:
        return [*self.times] * len(self.replica_of)

    @cached_property
    def before(self) -> list[list[tuple[int, float]]]:
        """The visits that must end before this one, and the time from there to here."""
        return self._numbered([route.before for route in self.routes])

    @cached_property
    def after(self) -> list[list[tuple[int, float]]]:
        """The visits that wait for this one, and the time from here to there."""
        return self._numbered([route.after for route in self.routes])

    @cached_property
    def taken(self) -> list[int]:
        """Bytes that are held from the start of this visit on."""
        return [*self.held, *(0 for _ in self.held)] * len(self.replica_of)

    @cached_property
    def freed(self) -> list[int]:
        """Bytes that are no longer held when this visit ends."""
        return [*(0 for _ in self.held), *reversed(self.held)] * len(self.replica_of)

    @cached_property
    def mirrored(self) -> Workload:
        """The same in reversed time: backwards are forwards, and memory is held as long."""
        return replace(
            self,
            routes=tuple(route.mirrored() for route in self.routes),
            times=self.times[::-1],
            extra=self.extra[::-1],
        )

    def none_ends_before(self, end: float) -> bool:
        """Return True if `end` reaches the lower bound of every order, but for rounding."""
        return end <= self._shortest * (1 + 1e-12)

    @cached_property
    def _shortest(self) -> float:
        """A time below which no order ends, however much memory there is.

              ahead of its first visit   all its visits, none of which waits   after its last one
        rank  |------------------------|=====================================|-------------------|
        """
        ranks = range(len(self.caps))
        first, last, busy = ([inf] * len(ranks), [inf] * len(ranks), [0.0] * len(ranks))
        longest = 0.0  # way of a microbatch
        for replica in {*self.replica_of}:
            route, microbatches = self.routes[replica], self.replica_of.count(replica)
            ahead = _earliest(route.before, self.times)
            behind = _earliest(route.mirrored().before, self.times[::-1])[::-1]
            for home, time, head, tail in zip(route.homes, self.times, ahead, behind, strict=True):
                first[home], last[home] = min(first[home], head), min(last[home], tail)
                busy[home] += microbatches * time
                longest = max(longest, head + time + tail)
        whole = [first[rank] + busy[rank] + last[rank] for rank in ranks if first[rank] < inf]
        return max([longest, *whole])

    def _numbered(self, by_replica: list[Links]) -> list[list[tuple[int, float]]]:
        return [
            [(microbatch * self.length + visit, delay) for visit, delay in own]
            for microbatch, replica in enumerate(self.replica_of)
            for own in by_replica[replica]
        ]

    def needs(self, replica: int, rank: int) -> tuple[int, int]:
        """Return the bytes that one microbatch holds on a rank, and the most beyond as it runs."""
        homes = self.routes[replica].homes
        held = sum(size for home, size in zip(homes, self.held, strict=False) if home == rank)
        extra = (size for home, size in zip(homes, self.extra, strict=True) if home == rank)
        return held, max(extra, default=0)


def _earliest(before: Links, times: Sequence[float]) -> list[float]:
    """Return when each visit of a microbatch could start if nothing else were on the ranks."""
    starts: list[float] = []
    for own in before:
        ready = (starts[earlier] + times[earlier] + delay for earlier, delay in own)
        starts.append(max([0.0, *ready]))
    return starts


@dataclass(frozen=True, slots=True)
class Timetable:
    """The start of each visit of a step, the order of visits, and the end of the step.

    Attributes:
        starts: By visit, when it starts, in the unit of the costs.
        order: All visits; those of one rank are in the order in which it runs them.
        end: When the last visit ends.
    """

    starts: list[float]
    order: list[int]
    end: float

    def mirrored(self, work: Workload) -> Timetable:
        """The same in reversed time, where visits start as they ended here."""
        length = work.length
        mirror = [visit + length - 1 - 2 * (visit % length) for visit in range(len(work))]
        starts: list[float] = [0] * len(work)
        for visit, start in enumerate(self.starts):
            starts[mirror[visit]] = self.end - start - work.durations[visit]
        return Timetable(starts, [mirror[visit] for visit in reversed(self.order)], self.end)


def workload(
    schedule: Schedule, costs: Costs, cap: int, recompute: Collection[int], early: int = 0
) -> Workload:
    """The visits of a schedule whose lists are still to be written.

    Args:
        schedule: Placement, edges and microbatches; its lists are not looked at.
        costs: Times, bytes and links; messages are taken not to wait for each other.
        cap: Bytes on each rank.
        recompute: The stages that are to be recomputed.
        early: Bytes of the cap that are left to tensors which arrive ahead of their use.

    Raises:
        PathosegError: A single microbatch exceeds the cap.
    """
    placement = schedule.placement
    loads = [
        _load(schedule, costs, stage, stage in recompute) for stage in range(len(costs.stages))
    ]
    back = loads[::-1]
    work = Workload(
        tuple(_route(schedule, costs, loads, replica) for replica in range(placement.replicas)),
        schedule.replica_of,
        (*(load.forward for load in loads), *(load.backward for load in back)),
        tuple(load.held for load in loads),
        (*(load.forward_extra for load in loads), *(load.backward_extra for load in back)),
        (cap - early,) * placement.ranks,
    )
    for replica in range(placement.replicas):
        for rank in range(placement.ranks):
            needed = sum(work.needs(replica, rank)) + early
            if needed > cap:
                raise PathosegError(
                    f"One microbatch needs {needed:,} bytes on rank {rank}, above the "
                    f"cap of {cap:,}.",
                    "Allow more memory, cut the model into more stages or recompute them.",
                )
    return work


class _Load(NamedTuple):
    """The cost of the forward and the backward visit of one microbatch to a stage.

    Attributes:
        forward: Time of the forward visit.
        backward: Time of the backward visit.
        held: Bytes from the start of the one to the end of the other.
        forward_extra: Bytes beyond that during the forward visit.
        backward_extra: Bytes beyond that during the backward visit.
        head: Time from the start of the backward visit until it needs the gradient.
    """

    forward: float
    backward: float
    held: int
    forward_extra: int
    backward_extra: int
    head: float


def _load(schedule: Schedule, costs: Costs, stage: int, recomputed: bool) -> _Load:
    cost, setting = costs.stages[stage], schedule.setting
    entering = sum(costs.sizes.get(edge, 0) for edge in setting.inputs[stage])
    leaving = sum(costs.sizes.get(edge, 0) for edge in setting.outputs[stage])
    # What has been sent counts until its gradient is back, or a rank that holds little else
    # would send more than the next can store. In the backward both are there.
    boundary = max(entering, leaving)
    both = min(entering, leaving)
    workspaces = cost.forward_workspace, cost.backward_workspace + both
    if not recomputed:
        return _Load(cost.forward, cost.backward, cost.activations + boundary, *workspaces, 0)
    everything = cost.activations + max(workspaces)
    if not setting.outputs[stage]:
        # A stage that feeds no other goes backward at once, which spares the recomputation.
        return _Load(cost.forward + cost.backward, 0, entering, everything, 0, 0)
    again = cost.recomputation
    return _Load(
        cost.forward,
        again + cost.backward,
        cost.checkpoint + boundary,
        workspaces[0],
        everything - cost.checkpoint,
        again,
    )


def _route(schedule: Schedule, costs: Costs, loads: Sequence[_Load], replica: int) -> Route:
    """Return the delays between the visits of one microbatch of a replica."""
    home, setting = schedule.placement.homes[replica], schedule.setting
    stages = len(home)
    last = 2 * stages - 1
    before: list[tuple[tuple[int, float], ...]] = []
    after: list[list[tuple[int, float]]] = [[] for _ in range(2 * stages)]
    for visit in range(2 * stages):
        stage = min(visit, last - visit)
        kind = Kind.FORWARD if visit < stages else Kind.BACKWARD
        action = Action(kind, replica, stage, 0)
        own: list[tuple[int, float]] = []
        for needed in predecessors(action, setting):
            earlier = needed.stage if needed.kind is Kind.FORWARD else last - needed.stage
            delay = _delay(schedule, costs, home, needed, action)
            if needed.kind is Kind.BACKWARD:
                delay -= loads[stage].head
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
    ends, forward = {made.stage, used.stage}, made.stage < used.stage
    size = sum(costs.size(edge, forward) for edge in schedule.edges if set(edge[:2]) == ends)
    network = costs.network
    return network.latency(source, target) + network.transfer(source, target, size)
