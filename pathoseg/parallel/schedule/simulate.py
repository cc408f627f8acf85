"""Replays a schedule against costs: time, bubble, memory, messages, copies to the host.

    rank 0      |-- F0 --|-- F1 --|                        |-- B0 --|
    0 to 1               |= 0 =|  |= 1 =|                  .
    rank 1                     .~~|-- F0 --|--- B0 ---|    .
    1 to 0                     . .                    |= 0=|~
                              (2)(3)                       (4)

(1) An action starts once its rank's clock has come to it and all that must precede it is done.
(2) A message starts when its tensor is made and the rank's last one has left (`_outgoing`); the
    rank computes on. It is there a latency (~) after it has left.
(3) RECV moves the clock of its rank to that moment. WAIT_REDUCE does so for sums (`_summing`).
(4) A visit waits for its copies to and from the host, too: `HostCopies`, two more channels a rank.

Memory is kept apart, as changes of so many bytes at such a time, and added up in the end (`_peak`):

    activations   + at a forward's start                                 - at its backward's end
    boundary      + at the start of the visit ahead of its RECV          - likewise
    sent tensor   + at SEND                           - when it has left
    workspace     + at a visit's start                - at that visit's end
    bucket        at a REDUCE alone: its gradients are concatenated, and then dropped; of strips of
                  tiles at the STEP of a stage that no REDUCE sums
    update        at a STEP alone: the temporaries of the optimizer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import COMPUTE, Action, Kind, Visit
from pathoseg.parallel.schedule.costs import Costs, Link, Saved
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.schedule import Placement, Schedule, visit_of
from pathoseg.parallel.schedule.validate import runnable


def take_turns(actions: Iterable[Action]) -> bool:
    """Return True if no OFFLOAD runs between a PREFETCH and its backward.

    Then one staging buffer serves both directions in turn; otherwise each direction has its own.
    """
    coming: set[Visit] = set()
    for action in actions:
        if action.kind is Kind.PREFETCH:
            coming.add(visit_of(action))
        elif action.kind is Kind.BACKWARD:
            coming.discard(visit_of(action))
        elif action.kind is Kind.OFFLOAD and coming:
            return False
    return True


class HostCopies:
    """The two channels of one rank, one in each direction, each with a window of device memory.

    A tensor leaves as soon as it is made, the oldest first; the forward waits where more than a
    window would be waiting to leave. It comes back in the order in which the backwards need them,
    from its PREFETCH on, as soon as it fits into the window beside what came before it and is not
    yet used; the backward waits for what is not there. Where the directions take turns, it waits
    until all has left, too.

    Args:
        rank: The rank.
        link: Latency and bandwidth of a copy.
        window: Bytes.
        shares_window: Whether the directions share it (`take_turns`).

    Attributes:
        events: An OFFLOAD or PREFETCH for each copy, while it is on its way.
        changes: When so many bytes more (or fewer) are in host memory.
    """

    def __init__(self, rank: int, link: Link, window: int, shares_window: bool) -> None:
        self.events: list[Event] = []
        self.changes: list[tuple[float, int]] = []
        self._rank, self._link = rank, link
        self._window, self._shares_window = window, shares_window
        self._leaving, self._returning = _StagingBuffer(window), _StagingBuffer(window)
        self._free: dict[Kind, float] = {Kind.OFFLOAD: 0, Kind.PREFETCH: 0}
        self._away: dict[tuple[Visit, str | None], float] = {}  # when it was whole on the host
        self._asked: dict[Action, float] = {}

    def leave(self, start: float, copies: Sequence[tuple[Action, Saved]]) -> float:
        """Return the total wait of a forward that begins now, caused by its OFFLOADs.

        Raises:
            PathosegError: A tensor does not fit into the window.
        """
        stall: float = 0
        for action, saved in sorted(copies, key=lambda copy: copy[1].made):
            if saved.bytes > self._window:
                raise PathosegError(
                    f"Tensor {action.tensor} of stage {action.stage} has {saved.bytes} bytes, and "
                    f"the window for copies to the host {self._window}.",
                    "Give the copies a window of at least the largest tensor that is offloaded.",
                )
            made = start + saved.made + stall
            fits = self._leaving.fits(saved.bytes, made)
            stall += fits - made
            begin, end = self._copy(action, saved.bytes, fits)
            self._leaving.hold(saved.bytes, end)
            self._away[visit_of(action), action.tensor] = end
            self.changes.append((begin, saved.bytes))
        return stall

    def ask(self, action: Action, now: float) -> None:
        """Note that the tensor of a PREFETCH may come back from `now` on."""
        self._asked[action] = now

    def come_back(self, start: float, copies: Sequence[tuple[Action, Saved]]) -> float:
        """Return the total wait of a backward that begins now, caused by its PREFETCHes."""
        left = self._free[Kind.OFFLOAD] if self._shares_window and copies else 0
        stall: float = max(0, left - start)
        for action, saved in sorted(copies, key=lambda copy: copy[1].needed):
            possible = max(
                self._asked.pop(action),
                self._away.pop((visit_of(action), action.tensor)),
                self._free[Kind.PREFETCH],
                left,
            )
            _, end = self._copy(action, saved.bytes, self._returning.fits(saved.bytes, possible))
            stall = max(stall, end - start - saved.needed)
            self._returning.hold(saved.bytes, start + saved.needed + stall)
            self.changes.append((end, -saved.bytes))
        return stall

    def _copy(self, action: Action, size: int, earliest: float) -> tuple[float, float]:
        begin = max(earliest, self._free[action.kind])
        time = self._link.alpha + self._link.transfer(self._rank, self._rank, size)
        end = self._free[action.kind] = begin + time
        self.events.append(Event(self._rank, action, begin, end))
        return begin, end


class _StagingBuffer:
    """Device memory for what is on its way, by when it is given back."""

    def __init__(self, size: int) -> None:
        self._room = size
        self._held: deque[tuple[float, int]] = deque()

    def fits(self, size: int, earliest: float) -> float:
        """Return the earliest time from `earliest` on at which `size` bytes are free."""
        while self._held and (self._held[0][0] <= earliest or size > self._room):
            given_back, freed = self._held.popleft()
            self._room += freed
            earliest = max(earliest, given_back)
        return earliest

    def hold(self, size: int, until: float) -> None:
        """Take `size` bytes until a time, which is never below that of an earlier call."""
        self._room -= size
        self._held.append((until, size))


@dataclass(frozen=True, slots=True)
class Simulation:
    """The costs of a schedule: time, bubble, memory, bytes sent.

    Tuples are by rank, of one group of ranks.

    Attributes:
        events: The actions of all ranks with their times, in no particular order between ranks.
        time: From the start of the first action to the end of the last.
        busy: Time of forward, backward and recomputation, without what copies made them wait.
        peak_memory: Bytes of weights, activations, boundary tensors, workspace and the windows of
            copies, at the worst moment.
        peak_activations: Bytes that forwards keep on the device (or for recomputation), at the
            worst moment.
        bytes_sent: Bytes of all messages that leave the rank; sums over copies not counted.
        host_memory: Bytes that wait in host memory, at the worst moment.
    """

    events: tuple[Event, ...]
    time: float
    busy: tuple[float, ...]
    peak_memory: tuple[int, ...]
    peak_activations: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    host_memory: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they compute nothing."""
        return 1 - sum(self.busy) / (self.time * len(self.busy)) if self.time else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a schedule on paper. Exact in exact numbers: give integers or fractions to be so.

    An action starts when its rank is free and all that must precede it (`action.predecessors`)
    is done. A rank's messages leave one after another while it computes on; so do its sums, and
    its copies to and from the host, each direction by itself (`HostCopies` says when they make
    it wait). An order of F and B alone is replayed as if tensors moved by themselves in no time.

    Memory: a copy's weights are always held; activations from the start of the forward (or of the
    recomputation) to the end of the backward; a tensor from another stage, or its gradient, to
    the end of the backward that uses it: from the start of the visit ahead of its RECV, when its
    buffer is posted (`messages`); and at its sender until it has left.

    Of equal groups one is replayed. Its ranks are numbered from 0, so that with several groups on
    nodes of a `Nodes` network the ranks of a group should fill nodes.

    Raises:
        PathosegError: Nothing can move any more (it names what each rank waits for), or the
            schedule offloads a tensor that the costs do not know or that exceeds their window.
    """
    replay = _Replay(schedule, costs)
    for rank, action, needed in runnable(schedule):
        replay.run(rank, action, needed)
    return replay.result()


class _Replay:
    """The state of all ranks while a schedule is replayed."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ranks = range(schedule.placement.ranks)
        self._schedule = schedule
        self._costs = costs
        self._setting = schedule.setting
        self._finished: dict[Action, float] = {}
        self._events: list[Event] = []
        self._clock: list[float] = [0 for _ in ranks]
        self._busy: list[float] = [0 for _ in ranks]
        self._visited: list[float] = [0 for _ in ranks]  # when the last visit began
        # Channels of each rank: when their last transfer ends.
        self._outgoing: list[float] = [0 for _ in ranks]
        self._summing: list[float] = [0 for _ in ranks]
        shared = [take_turns(actions) for actions in schedule.lists]
        self._host = [HostCopies(rank, costs.host, costs.window, shared[rank]) for rank in ranks]
        self._leaving = _by_visit(each for each in schedule if each.kind is Kind.OFFLOAD)
        self._sent = [0 for _ in ranks]
        self._sums: dict[tuple[int, int | None], list[tuple[int, Action, float]]] = {}
        self._activations: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self._others: list[list[tuple[float, int]]] = [[] for _ in ranks]
        for rank, weights in enumerate(weights_by_rank(schedule.placement, costs)):
            self._others[rank].append((0, weights))
        self._moments: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self._update = _updates(schedule, costs)
        for rank, actions in enumerate(schedule.lists):
            if any(action.kind is Kind.OFFLOAD for action in actions):
                self._others[rank].append((0, costs.window if shared[rank] else 2 * costs.window))

    def run(self, rank: int, action: Action, needed: Iterable[Action]) -> None:
        """Replay one action (1), of which all predecessors have run."""
        ready = self._clock[rank]
        for each in needed:
            ready = max(ready, self._finished[each])
        if action.kind in COMPUTE:
            self._compute(rank, action, ready)
        elif action.kind is Kind.SEND:
            self._send(rank, action)
        elif action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
            if action.kind is Kind.PREFETCH:
                self._host[rank].ask(action, self._clock[rank])
            self._finished[action] = self._clock[rank]
        elif action.kind is Kind.REDUCE:
            self._add(rank, action)
        elif action.kind is Kind.STEP:
            self._moments[rank].append((ready, self._update[rank]))
            taken = self._costs.stages[action.stage].step
            if (size := _strips_sum(self._schedule, self._costs, action.stage)) > 0:
                self._moments[rank].append((ready, size))
                taken += self._costs.network.all_reduce([rank], size)
            self._occupy(rank, action, ready, ready + taken)
        else:  # RECV and WAIT_REDUCE
            if action.edge is not None:
                size = self._costs.size(action.edge, action.stage == action.edge.target)
                self._others[rank].append((self._visited[rank], size))
            self._occupy(rank, action, self._clock[rank], ready)

    def _occupy(self, rank: int, action: Action, start: float, end: float) -> None:
        self._clock[rank] = end
        self._finished[action] = end
        self._events.append(Event(rank, action, start, end))

    def _compute(self, rank: int, action: Action, start: float) -> None:
        cost = self._costs.stages[action.stage]
        activations, others = self._activations[rank], self._others[rank]
        visit = visit_of(action)
        recomputed = visit in self._setting.recomputed
        saves = action.kind is (Kind.RECOMPUTE if recomputed else Kind.FORWARD)
        stall: float = 0
        if saves:
            stall = self._host[rank].leave(start, self._copies(self._leaving.get(visit, ())))
        if action.kind is Kind.BACKWARD:
            asked = self._setting.prefetched.get(visit, ())
            stall = self._host[rank].come_back(start, self._copies(asked))
            time, workspace = cost.backward, cost.backward_workspace
        elif action.kind is Kind.RECOMPUTE:
            time, workspace = cost.recomputation, cost.forward_workspace
            activations.append((start, cost.activations - cost.checkpoint))
        else:
            time, workspace = cost.forward, cost.forward_workspace
            activations.append((start, cost.checkpoint if recomputed else cost.activations))
        end = start + time + stall
        if action.kind is Kind.BACKWARD:
            activations.append((end, -cost.activations))
            self._release_boundaries(action, end)
        others += [(start, workspace), (end, -workspace)]
        self._occupy(rank, action, start, end)
        self._busy[rank] += time
        self._visited[rank] = start
        self._bridge(action, end)

    def _bridge(self, action: Action, end: float) -> None:
        """Hold what an F or B has made for the stages that need no message to get it."""
        if action.kind is Kind.RECOMPUTE:
            return
        forward = action.kind is Kind.FORWARD
        edges = self._setting.outputs if forward else self._setting.inputs
        for edge in edges[action.stage]:
            if (action.replica, edge) not in self._setting.messages:
                consumer = edge.target if forward else edge.source
                home = self._schedule.placement.homes[action.replica][consumer]
                self._others[home].append((end, self._costs.size(edge, forward)))

    def _release_boundaries(self, backward: Action, end: float) -> None:
        """Free the inputs of a stage and the gradients of its outputs."""
        rank = self._schedule.placement.homes[backward.replica][backward.stage]
        for edges, forward in ((self._setting.inputs, True), (self._setting.outputs, False)):
            for edge in edges[backward.stage]:
                self._others[rank].append((end, -self._costs.size(edge, forward)))

    def _send(self, rank: int, action: Action) -> None:
        edge = action.edge
        assert edge is not None
        home, forward = self._schedule.placement.homes[action.replica], action.stage == edge.source
        receiver = home[edge.target if forward else edge.source]
        size = self._costs.size(edge, forward)
        made = self._clock[rank]
        if not forward and edge in self._costs.one_way:  # nothing is sent
            self._finished[action] = made
            self._events.append(Event(rank, action, made, made))
            return
        start = max(made, self._outgoing[rank])
        end = start + self._costs.network.transfer(rank, receiver, size)
        self._outgoing[rank] = end
        self._sent[rank] += size
        self._others[rank] += [(made, size), (end, -size)]
        self._finished[action] = end + self._costs.network.latency(rank, receiver)
        self._events.append(Event(rank, action, start, end))

    def _copies(self, actions: Iterable[Action]) -> list[tuple[Action, Saved]]:
        """Return the tensors that the OFFLOADs or PREFETCHes copy."""
        copies = []
        for action in actions:
            assert action.tensor is not None
            saved = self._costs.stages[action.stage].tensors.get(action.tensor)
            if saved is None:
                raise PathosegError(
                    f"The costs of stage {action.stage} know no tensor {action.tensor!r}.",
                    "Offload only tensors that the stage saves.",
                )
            copies.append((action, saved))
        return copies

    def _add(self, rank: int, action: Action) -> None:
        """Join the sum; the last copy to join starts it.

        Sums that share some ranks but not all would be placed in the order in which they are
        complete; the placements of this package have no such sums.
        """
        joined = self._sums.setdefault((action.stage, action.bucket), [])
        joined.append((rank, action, self._clock[rank]))
        self._moments[rank].append(
            (self._clock[rank], _bucket(self._schedule, self._costs, action))
        )
        if len(joined) < len(self._setting.microbatches):
            return
        holders = self._schedule.placement.holders(action.stage)
        own = self._schedule.placement.ranks
        everyone = [
            holder + group * own for group in range(self._schedule.groups) for holder in holders
        ]
        size = _bucket(self._schedule, self._costs, action)
        start = max(max(posted, self._summing[holder]) for holder, _, posted in joined)
        end = start + self._costs.network.all_reduce(everyone, size)
        for holder, reduction, _ in joined:
            self._summing[holder] = self._finished[reduction] = end
            self._events.append(Event(holder, reduction, start, end))

    def result(self) -> Simulation:
        memory = zip(self._activations, self._others, self._moments, strict=True)
        events = [*self._events, *(event for host in self._host for event in host.events)]
        return Simulation(
            tuple(events),
            max((event.end for event in events), default=0),
            tuple(self._busy),
            tuple(
                _peak([*activations, *others], moments) for activations, others, moments in memory
            ),
            tuple(_peak(activations) for activations in self._activations),
            tuple(self._sent),
            tuple(_peak(host.changes) for host in self._host),
        )


def _by_visit(actions: Iterable[Action]) -> dict[Visit, list[Action]]:
    found: dict[Visit, list[Action]] = {}
    for action in actions:
        found.setdefault(visit_of(action), []).append(action)
    return found


def step_memory(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """Return, by rank, the bytes of weights and of what the step's end takes beside them.

    No choice of what is kept of activations brings the peak below it.
    """
    weights = weights_by_rank(schedule.placement, costs)
    updates = _updates(schedule, costs)
    return tuple(
        own
        + max(
            more,
            *(_bucket(schedule, costs, a) for a in actions if a.kind is Kind.REDUCE),
            *(_strips_sum(schedule, costs, a.stage) for a in actions if a.kind is Kind.STEP),
        )
        for own, more, actions in zip(weights, updates, schedule.lists, strict=True)
    )


def weights_by_rank(placement: Placement, costs: Costs) -> list[int]:
    """Return, by rank, the bytes of weights of the stages that it holds.

    Replicas that have a stage on the same rank, as in the middle of GEMS, share one copy there.
    """
    weights = [0] * placement.ranks
    for stage, cost in enumerate(costs.stages):
        for rank in placement.holders(stage):
            weights[rank] += cost.weights
    return weights


def _bucket(schedule: Schedule, costs: Costs, action: Action) -> int:
    """Return the bytes of gradients that a REDUCE concatenates and sums."""
    return costs.stages[action.stage].gradients // schedule.setting.buckets[action.stage]


def _strips_sum(schedule: Schedule, costs: Costs, stage: int) -> int:
    """Return the bytes of gradients that a STEP sums over strips, where no REDUCE does."""
    is_due = costs.shards > 1 and not schedule.setting.buckets[stage]
    return costs.stages[stage].gradients if is_due else 0


def _updates(schedule: Schedule, costs: Costs) -> list[int]:
    """Return, by rank, the temporaries of its optimizer, which updates all its stages at once."""
    held: list[set[int]] = [set() for _ in range(schedule.placement.ranks)]
    for home in schedule.placement.homes:
        for stage, rank in enumerate(home):
            held[rank].add(stage)
    return [sum(costs.stages[stage].update_workspace for stage in own) for own in held]


def _peak(changes: list[tuple[float, int]], moments: Sequence[tuple[float, int]] = ()) -> int:
    """The largest sum on the way.

    Args:
        changes: Of one instant, what is freed goes first.
        moments: Bytes that are taken for an instant, between what is freed and what is taken then.
    """
    held = peak = 0
    steps = [(time, 2 * (change > 0), change) for time, change in changes]
    for _, kind, size in sorted([*steps, *((time, 1, size) for time, size in moments)]):
        peak = max(peak, held + size)
        held += size * (kind != 1)
    return peak
