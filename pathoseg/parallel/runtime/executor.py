"""Runs a rank's list of actions: stages compute, messages fly, sums begin as early as may be."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.offload import Copied, Copies
from pathoseg.parallel.activations.stage_offload import StageOffload, changed_by
from pathoseg.parallel.activations.streams import Lane, Streams
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.runtime.messages import MessageRoute, Messages
from pathoseg.parallel.runtime.reduction import GradientReduction
from pathoseg.parallel.runtime.stage import Pass, Stage, stage_edges
from pathoseg.parallel.schedule.action import COMPUTE, Action, Edge, Kind
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.schedule import Schedule, visit_of
from pathoseg.parallel.schedule.validate import validate


@dataclass(frozen=True)
class Microbatches:
    """The samples of a step or prediction, asked for only where they are needed.

    Attributes:
        sizes: Samples of each microbatch, the same on all ranks; one of 0 samples is left out.
        inputs: The model's inputs by name, of a microbatch.
        targets: What the loss compares with, of a microbatch.
    """

    sizes: Sequence[int]
    inputs: Callable[[int], Mapping[str, Tensor]]
    targets: Callable[[int], Any]


class Executor:
    """One rank's part of a schedule, run again and again.

    Args:
        transport: Joins the ranks.
        schedule: Lowered, its groups written out.
        stages: The stages on this rank, by number.
        reductions: The sums of their gradients.
        device: Where they run.
        streams: The device's lanes.
        copies: Copies to the host, where stages offload.
        parking: What waits in host memory of stages that are not at work.

    Attributes:
        doing: The action that is under way.
    """

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        reductions: Mapping[int, GradientReduction],
        device: torch.device,
        streams: Streams,
        copies: Copies | None,
        parking: StageOffload,
    ) -> None:
        self.doing: Action | None = None
        self._parking = parking
        self._transport, self._device = transport, device
        self._streams = streams
        self._host_copies = [each for each in (copies, parking.copies) if each is not None]
        self._replica_of = schedule.replica_of
        self._stages, self._reductions = stages, reductions
        self._setting = schedule.setting
        self._step = schedule.lists[transport.rank]
        self._prediction = [each for each in self._step if _is_forward(each)]
        self._steps = sum(each.kind is Kind.STEP for each in self._step)
        self._copies = Counter(
            (each.stage, each.bucket) for each in self._step if each.kind is Kind.REDUCE
        )
        gradient = {
            edge: sent.gradient
            for stage in stages.values()
            for edge, sent in (stage.entering | stage.leaving).items()
        }
        self._messages = Messages(
            transport,
            device,
            MessageRoute.of(schedule, transport.rank),
            lambda send: (
                send.edge is not None and send.stage == send.edge.target and not gradient[send.edge]
            ),
        )
        self._run_kind: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.RECOMPUTE: self._recompute,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.OFFLOAD: lambda action: self._stages[action.stage].let_go(),
            Kind.PREFETCH: self._prefetch,
            Kind.REDUCE: self._reduce,
            Kind.WAIT_REDUCE: self._wait_reduce,
            Kind.STEP: self._end_of_step,
        }
        self._pass: Pass
        self._microbatches: Microbatches
        self._update: Callable[[], None]
        self._outbox: dict[Action, Tensor | None] = {}
        self._joined: dict[tuple[int, int | None], list[tuple[Action, float]]] = {}
        self._steps_left = 0
        self._events: list[Event] | None = None
        self._zero = 0.0
        self._predicted: dict[int, Any] = {}

    def step(
        self,
        this: Pass,
        microbatches: Microbatches,
        update: Callable[[], None],
        events: list[Event] | None = None,
    ) -> None:
        """Runs the whole list.

        Args:
            this: The step.
            microbatches: Its samples.
            update: Called at the last STEP.
            events: Gains what happened when, in seconds from a moment common to the ranks of a
                host.
        """
        self._update = update
        self._run(self._step, this, microbatches, events)

    def predict(self, this: Pass, microbatches: Microbatches) -> dict[int, Any]:
        """Runs the forwards; what the model returns of each microbatch whose last stage is here."""
        self._predicted = {}
        self._run(self._prediction, this, microbatches, None)
        predicted, self._predicted = self._predicted, {}
        return predicted

    def _run(
        self,
        actions: Sequence[Action],
        this: Pass,
        microbatches: Microbatches,
        events: list[Event] | None,
    ) -> None:
        sizes = microbatches.sizes
        if not all(sizes):
            actions = [a for a in actions if a.microbatch is None or sizes[a.microbatch]]
        self._pass, self._microbatches, self._events = this, microbatches, events
        self._outbox.clear()
        self._joined.clear()
        self._steps_left = self._steps
        for stage in self._stages.values():
            stage.begin()
        if events is not None:
            self._transport.barrier()
            self._streams.start_clock()
            self._zero = time.perf_counter()
            for copies in self._host_copies:
                copies.copied = []
        turns = self._parking.turns(actions)
        marks: list[tuple[Action, Any, Any]] = []
        record = None if events is None else self._record
        self._messages.begin(actions, sizes, this.training, record)
        for position, action in enumerate(actions):
            self.doing = action
            self._messages.post(position)
            with self._parking.during(turns.get(position), changed_by(action.kind)):
                self._perform(action, marks)
        self._messages.finish()
        if events is not None:
            self._record_marks(marks)
        self.doing = None

    def _perform(self, action: Action, marks: list[tuple[Action, Any, Any]]) -> None:
        if self._events is None:
            self._run_kind[action.kind](action)
            return
        start, begin = time.perf_counter(), self._streams.mark(Lane.COMPUTE)
        self._run_kind[action.kind](action)
        if action.kind in (Kind.RECV, Kind.WAIT_REDUCE):
            self._record(action, start)
        elif action.kind in (*COMPUTE, Kind.STEP):
            marks.append((action, begin, self._streams.mark(Lane.COMPUTE)))

    def _record(self, action: Action, start: float) -> None:
        """Something that the process waited for."""
        assert self._events is not None
        rank, zero = self._transport.rank, self._zero
        self._events.append(Event(rank, action, start - zero, time.perf_counter() - zero))

    def _record_marks(self, marks: Sequence[tuple[Action, Any, Any]]) -> None:
        """Record the events of the device, copies included; those of one layer are one event."""
        self._streams.settle()
        times = {
            action: (self._streams.seconds(begin), self._streams.seconds(end))
            for action, begin, end in marks
        }
        copied: list[Copied] = []
        for copies in self._host_copies:
            copied += copies.copied or []
            copies.copied = None
        parked: list[tuple[Action, tuple[float, float]]] = []
        for lane, label, _, first, last in copied:
            replica = 0 if label.microbatch is None else self._replica_of[label.microbatch]
            kind = Kind.OFFLOAD if lane is Lane.OUT else Kind.PREFETCH
            action = Action(kind, replica, label.stage, label.microbatch, tensor=label.layer)
            begin, end = self._streams.seconds(first), self._streams.seconds(last)
            if label.microbatch is None:
                parked.append((action, (begin, end)))
                continue
            known = times.get(action, (begin, end))
            times[action] = min(begin, known[0]), max(end, known[1])
        assert self._events is not None
        for action, (begin, end) in [*times.items(), *parked]:
            place = self._transport.rank, action
            self._events.append(Event(*place, begin - self._zero, end - self._zero))

    def _forward(self, action: Action) -> None:
        _, stage_number, microbatch = visit_of(action)
        stage = self._stages[stage_number]
        if stage.inputs:
            inputs = self._microbatches.inputs(microbatch)
            stage.feed(microbatch, {name: inputs[name].to(self._device) for name in stage.inputs})
        if not self._pass.training:
            leaving, returned = stage.predict(microbatch)
            if stage.is_last:
                self._predicted[microbatch] = returned
        else:
            if stage.is_last:
                stage.compare(microbatch, self._microbatches.targets(microbatch))
            keep = visit_of(action) not in self._setting.recomputed
            leaving = stage.forward(microbatch, self._pass, keep)
        for edge in stage.leaving:
            self._hand_on(action, edge, edge.target, leaving.get(edge))

    def _recompute(self, action: Action) -> None:
        _, stage, microbatch = visit_of(action)
        self._stages[stage].recompute(microbatch, self._pass)

    def _backward(self, action: Action) -> None:
        _, stage, microbatch = visit_of(action)
        for edge, gradient in self._stages[stage].backward(microbatch).items():
            self._hand_on(action, edge, edge.source, gradient)

    def _prefetch(self, action: Action) -> None:
        _, stage, microbatch = visit_of(action)
        self._stages[stage].prefetch(microbatch)

    def _hand_on(self, action: Action, edge: Edge, to: int, tensor: Tensor | None) -> None:
        """Keeps a tensor for its SEND, or gives it to the stage of this rank that needs it."""
        if (action.replica, edge) in self._setting.messages:
            self._outbox[action._replace(kind=Kind.SEND, edge=edge)] = tensor
        else:
            assert action.microbatch is not None
            self._stages[to].receive(action.microbatch, edge, tensor)

    def _send(self, action: Action) -> None:
        self._messages.send(action, self._outbox.pop(action, None))

    def _receive(self, action: Action) -> None:
        assert action.edge is not None
        _, stage, microbatch = visit_of(action)
        self._stages[stage].receive(microbatch, action.edge, self._messages.receive(action))

    def _reduce(self, action: Action) -> None:
        """A rank with several copies of a stage joins the sum once, with the last of them."""
        assert action.bucket is not None
        part = action.stage, action.bucket
        joined = self._joined.setdefault(part, [])
        joined.append((action, time.perf_counter()))
        if len(joined) == self._copies[part]:
            self._reductions[action.stage].start(action.bucket)

    def _wait_reduce(self, action: Action) -> None:
        assert action.bucket is not None
        self._reductions[action.stage].wait(action.bucket)
        for reduction, start in self._joined.pop((action.stage, action.bucket), ()):
            if self._events is not None:
                self._record(reduction, start)

    def _end_of_step(self, action: Action) -> None:
        """All copies step together: clipping needs every gradient."""
        self._steps_left -= 1
        if not self._steps_left:
            self._update()


def _is_forward(action: Action) -> bool:
    """Return True if a prediction needs the action."""
    if action.kind in (Kind.SEND, Kind.RECV):
        assert action.edge is not None
        return (action.stage == action.edge.source) == (action.kind is Kind.SEND)
    return action.kind is Kind.FORWARD


def refused(schedule: Schedule) -> PathosegError | None:
    """Why a schedule cannot be run."""
    if not schedule.lowered:
        return PathosegError(
            f"The schedule {schedule.name} has no messages and steps.", "Lower it first."
        )
    return None


def check_fit(partition: Partition, schedule: Schedule, transport: Transport) -> None:
    """Refuses a schedule that is for other stages or ranks.

    Raises:
        PathosegError: It is, or no rank can run it.
    """
    problem = refused(schedule)
    if problem is not None:
        raise problem
    if schedule.ranks != transport.ranks:
        raise PathosegError(
            f"The schedule {schedule.name} is for {schedule.ranks} ranks, not {transport.ranks}.",
            f"Start {schedule.ranks} ranks.",
        )
    edges = set(stage_edges(partition))
    if schedule.stages != partition.stages or set(schedule.edges) != edges:
        raise PathosegError(
            f"The schedule {schedule.name} is for other stages than these {partition.stages}.",
            "Lower it with the edges of the partition.",
        )
    validate(schedule)


def compare_ranks(transport: Transport, own: Mapping[str, str]) -> None:
    """Refuses ranks that would not run the same; all ranks call this.

    Args:
        transport: Joins the ranks.
        own: What must be the same, by what it is called.

    Raises:
        PathosegError: It is not; on all ranks.
    """
    digests = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in own.items()}
    told = [json.loads(text) for text in transport.gather(json.dumps(digests))]
    for rank, theirs in enumerate(told):
        for what, digest in told[0].items():
            if theirs.get(what) != digest:
                raise PathosegError(
                    f"Rank {rank} has not the {what} of rank 0.",
                    "Start all ranks with the same version, configuration and first weights.",
                )
