"""Runs a rank's list of actions: stages compute, messages fly, sums begin as early as may be.

The middle rank of three, one microbatch (`lowering` has written the list, from left to right):

    list     RECV 0>1  F  SEND 1>2  RECV 2>1  B  SEND 1>0  REDUCE  WAIT_REDUCE  STEP
                |      ^ |   ^         |      ^ |   ^         |         |          |
             (3)|  (4) | |(5)|(6)   (3)|  (4) | |(5)|(6)   (7)|         |(7)       |(8)
                v      | v   |         v      | v   |         v         v          v
             a stage holds what it has received   outbox      GradientReduction    ClippedStep

Ahead of every action: (1) the receives due until the visit after it are posted (`Messages.post`);
(2) what it needs of a stage in host memory comes back (`StageOffload.during`). Then the action
runs: (3) a tensor is awaited and given to its stage; (4) the stage computes; (5) each tensor that
leaves is put into the outbox, or given at once to a stage of this same rank, for which the list has
no message; (6) a tensor leaves the outbox without anybody waiting; (7) a sum is started by the last
copy of the stage on this rank, in parts already while its last backward runs (7b), and awaited much
later; (8) the last STEP of the list updates all parameters, as clipping needs every gradient.

In the first step of a kind, sums begin after all that computes. On a GPU a sum lasts until all its
ranks have begun it, and what is done for the first time may wait until the GPU is idle (cuDNN frees
memory once it has timed its kernels, CUDA loads code). A rank of GEMS that waited so ahead of its
second stage would keep the rank waiting that has yet to begin the sum.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.giving_up import Commit, GivenUpError, IsGivenUp, at_any_time
from pathoseg.gradient_step import StepVerdict
from pathoseg.parallel.activations.offload import Copies
from pathoseg.parallel.activations.stage_offload import StageOffload, changed_by
from pathoseg.parallel.activations.streams import Streams
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.runtime.grad_clip import ClippedStep
from pathoseg.parallel.runtime.messages import MessageChannel, MessageRoute, Messages
from pathoseg.parallel.runtime.reduction import GradientReduction
from pathoseg.parallel.runtime.stage import Pass, Stage, edge_values
from pathoseg.parallel.runtime.step_trace import StepTrace
from pathoseg.parallel.schedule.action import COMPUTE, Action, Edge, Kind
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.schedule import Schedule, visit_of
from pathoseg.parallel.schedule.validate import validate


@dataclass(frozen=True)
class Microbatches:
    """The samples of a step or prediction, asked for only where they are needed.

    Attributes:
        sizes: Samples of each microbatch, the same on all ranks; one of 0 samples is left out.
        inputs: Returns the model's inputs of a microbatch, by name, each (samples, …).
        targets: Returns the loss function's second argument for a microbatch.
    """

    sizes: Sequence[int]
    inputs: Callable[[int], Mapping[str, Tensor]]
    targets: Callable[[int], Any]


@dataclass(frozen=True)
class RankSetup:
    """All that one rank runs its list of actions with, step after step.

    Attributes:
        transport: Joins the ranks.
        schedule: Lowered, its groups written out.
        stages: The stages on this rank, by number.
        reductions: The sums of their gradients over the ranks with a copy, by stage.
        update: The optimizer's step.
        device: The device on which they run.
        streams: The device's lanes.
        copies: Copies to the host, where stages offload.
        stage_offload: Parameters, gradients and optimizer state in host memory of stages that wait.
        strips: Whether gradients are those of strips, to be summed where no REDUCE does.
    """

    transport: Transport
    schedule: Schedule
    stages: Mapping[int, Stage]
    reductions: Mapping[int, GradientReduction]
    update: ClippedStep
    device: torch.device
    streams: Streams
    copies: Copies | None
    stage_offload: StageOffload
    strips: bool = False

    @property
    def host_copies(self) -> list[Copies]:
        """Return the copies to the host, of activations and of stages that wait."""
        return [each for each in (self.copies, self.stage_offload.copies) if each is not None]


class Executor:
    """Runs one rank's part of a schedule again and again, each time as an `_Execution`.

    Args:
        setup: The rank, its list, and what runs it.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._step = setup.schedule.lists[setup.transport.rank]
        self._first_step = _sums_last(self._step)
        self._known = set[tuple[int, ...]]()  # samples of the microbatches of steps so far
        self._prediction = [each for each in self._step if _is_forward(each)]
        without_gradient = {
            edge
            for stage in setup.stages.values()
            for edge, sent in (stage.entering | stage.leaving).items()
            if not sent.gradient
        }
        route = MessageRoute.of(setup.schedule, setup.transport.rank)
        self._channel = MessageChannel(setup.transport, setup.device, route, without_gradient)
        self._under_way: _Execution | None = None

    @property
    def doing(self) -> Action | None:
        """Return the action that is under way, or at which the last step failed; else None."""
        return None if self._under_way is None else self._under_way.doing

    def step(
        self,
        this: Pass,
        microbatches: Microbatches,
        trace: bool,
        is_given_up: IsGivenUp,
        commit: Commit,
    ) -> tuple[StepVerdict, tuple[Event, ...]]:
        """Run the whole list.

        Args:
            this: The step.
            microbatches: Its samples.
            trace: Whether to record events.
            is_given_up: Asked ahead of every visit; what computes may raise GivenUpError too.
            commit: Called ahead of the update, once no rank has given up.

        Returns:
            The step's loss and norm, the same on all ranks, and this rank's events, in seconds from
            a moment common to the ranks of a host; none without `trace`.

        Raises:
            GivenUpError: This rank or another has given up, on all ranks; no parameter is updated.
        """
        setup, record = self._setup, None
        if trace:
            replicas = setup.schedule.replica_of
            record = StepTrace(setup.transport, setup.streams, setup.host_copies, replicas)
        sizes = tuple(microbatches.sizes)
        actions = self._step if sizes in self._known else self._first_step
        execution = self._run(actions, this, microbatches, record, is_given_up, commit)
        self._known.add(sizes)
        if execution.verdict is None:
            raise GivenUpError
        return execution.verdict, () if record is None else record.events()

    def predict(
        self, this: Pass, microbatches: Microbatches, is_given_up: IsGivenUp
    ) -> dict[int, Any]:
        """Run the forwards alone.

        Returns:
            The model's output by microbatch, of those whose last stage is on this rank.

        Raises:
            GivenUpError: As `step`.
        """
        execution = self._run(self._prediction, this, microbatches, None, is_given_up)
        if any(self._setup.transport.gather("given up" * execution.given_up)):
            raise GivenUpError
        return execution.predicted

    def _run(
        self,
        actions: Sequence[Action],
        this: Pass,
        microbatches: Microbatches,
        trace: StepTrace | None,
        is_given_up: IsGivenUp,
        commit: Commit = at_any_time,
    ) -> _Execution:
        sizes, overlaps = microbatches.sizes, actions is not self._first_step
        if not all(sizes):
            actions = [a for a in actions if a.microbatch is None or sizes[a.microbatch]]
        for stage in self._setup.stages.values():
            stage.begin()
        execution = _Execution(
            self._setup,
            self._channel,
            actions,
            this,
            microbatches,
            trace=trace,
            overlaps=overlaps,
            is_given_up=is_given_up,
            commit=commit,
        )
        self._under_way = execution
        execution.run()
        self._under_way = None
        return execution


class _Execution:
    """One pass over a rank's list, a step or a prediction, and all that is known of it alone.

    Attributes:
        doing: The action that is under way.
        predicted: The model's output by microbatch, in a prediction.
        verdict: The step's loss and norm, from its last STEP on; None where a rank has given up.
    """

    def __init__(
        self,
        setup: RankSetup,
        channel: MessageChannel,
        actions: Sequence[Action],
        this: Pass,
        microbatches: Microbatches,
        trace: StepTrace | None,
        overlaps: bool,
        is_given_up: IsGivenUp,
        commit: Commit,
    ) -> None:
        self._is_given_up, self._commit = is_given_up, commit
        self.doing: Action | None = None
        self.predicted: dict[int, Any] = {}
        self.verdict: StepVerdict | None = None
        self._setup, self._stages = setup, setup.stages
        self._actions, self._pass, self._microbatches = actions, this, microbatches
        self._trace = trace
        self._messages = Messages(channel, actions, microbatches.sizes, this.training, trace)
        self._outbox: dict[Action, Tensor | None] = {}
        self._joined: dict[tuple[int, int | None], list[tuple[Action, float]]] = {}
        self._copies = Counter(
            (each.stage, each.bucket) for each in actions if each.kind is Kind.REDUCE
        )
        # The sums that are still to be started, in the order in which the last copies join them.
        joins = {
            (each.stage, each.bucket): at
            for at, each in enumerate(actions)
            if each.kind is Kind.REDUCE
        }
        self._to_start = sorted(joins, key=joins.__getitem__)
        self._last_backward = {each.stage: each for each in actions if each.kind is Kind.BACKWARD}
        self._overlaps = overlaps  # sums and what computes
        self._steps_left = sum(each.kind is Kind.STEP for each in actions)

    def run(self) -> None:
        """Run all actions in turn, and wait until all that was sent has left."""
        stage_offload = self._setup.stage_offload
        needs = stage_offload.needs_by_position(self._actions)
        for position, action in enumerate(self._actions):
            self.doing = action
            self._messages.post(position)  # (1)
            with (
                stage_offload.during(needs.get(position), changed_by(action.kind)),  # (2)
                nullcontext() if self._trace is None else self._trace.during(action),
            ):
                self._perform(action)
        self._messages.finish()

    @property
    def given_up(self) -> bool:
        """True once this rank no longer computes."""
        return self._messages.given_up

    def _perform(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self._compute(action)
            return
        match action.kind:
            case Kind.REDUCE:
                self._reduce(action)
            case Kind.WAIT_REDUCE:
                self._wait_reduce(action)
            case Kind.STEP:
                self._end_of_step(action.stage)
            case _:
                self._visit(action)

    def _compute(self, action: Action) -> None:
        """Run an action that computes; one that is given up leaves nothing for anyone."""
        self._messages.given_up |= self._is_given_up()
        if not self.given_up:
            try:
                self._visit(action)
            except GivenUpError:
                self._messages.given_up = True
        if self.given_up:
            stage = self._stages[visit_of(action)[1]]
            if action.kind is Kind.FORWARD:
                for edge in stage.leaving:
                    self._hand_on(action, edge, edge.target, None)
            elif action.kind is Kind.BACKWARD:
                for edge, sent in stage.entering.items():
                    if sent.gradient:
                        self._hand_on(action, edge, edge.source, None)

    def _visit(self, action: Action) -> None:
        """Run an action of one microbatch at one stage."""
        _, number, microbatch = visit_of(action)
        stage = self._stages[number]
        match action.kind:
            case Kind.RECV:
                assert action.edge is not None
                stage.receive(microbatch, action.edge, self._messages.receive(action))  # (3)
            case Kind.FORWARD:
                self._forward(action, stage, microbatch)
            case Kind.RECOMPUTE:
                stage.recompute(microbatch, self._pass)
            case Kind.BACKWARD:
                with self._overlapping(action):
                    gradients = stage.backward(microbatch)  # (4)
                for edge, gradient in gradients.items():
                    self._hand_on(action, edge, edge.source, gradient)
            case Kind.SEND:
                self._messages.send(action, self._outbox.pop(action, None))  # (6)
            case Kind.OFFLOAD if not self.given_up:
                stage.let_go()
            case Kind.PREFETCH if not self.given_up:
                stage.prefetch(microbatch)

    def _forward(self, action: Action, stage: Stage, microbatch: int) -> None:
        if stage.inputs:
            inputs = self._microbatches.inputs(microbatch)
            device = self._setup.device
            stage.feed(microbatch, {name: inputs[name].to(device) for name in stage.inputs})
        if not self._pass.training:
            leaving, returned = stage.predict(microbatch)
            if stage.is_last:
                self.predicted[microbatch] = returned
        else:
            if stage.is_last:
                stage.compare(microbatch, self._microbatches.targets(microbatch))
            keep = visit_of(action) not in self._setup.schedule.setting.recomputed
            leaving = stage.forward(microbatch, self._pass, keep)  # (4)
        for edge in stage.leaving:
            self._hand_on(action, edge, edge.target, leaving.get(edge))

    def _hand_on(self, action: Action, edge: Edge, to: int, tensor: Tensor | None) -> None:
        """(5) Keep a tensor for its SEND, or give it to the stage of this rank that needs it."""
        if (action.replica, edge) in self._setup.schedule.setting.messages:
            self._outbox[action._replace(kind=Kind.SEND, edge=edge)] = tensor
        else:
            assert action.microbatch is not None
            self._stages[to].receive(action.microbatch, edge, tensor)

    def _overlapping(self, backward: Action) -> AbstractContextManager[None]:
        """(7b) Begin sums of the stage within its last backward, if they are next in the list.

        A sum ahead of them in the list may wait for a later backward; other ranks, on which that
        comes first, then begin it first. Sums over strips begin at their REDUCE, as the backward
        of a norm sums over strips itself.
        """
        stage = backward.stage
        if not self._overlaps or self._setup.strips or self._last_backward[stage] != backward:
            return nullcontext()
        own = takewhile(lambda each: each[0] == stage, self._to_start)
        buckets = [bucket for _, bucket in own if bucket is not None]
        return self._setup.reductions[stage].overlapping(buckets)

    def _reduce(self, action: Action) -> None:
        """(7) Join a sum; of several copies of a stage on this rank, the last one starts it."""
        assert action.bucket is not None
        part = action.stage, action.bucket
        joined = self._joined.setdefault(part, [])
        joined.append((action, time.perf_counter()))
        if len(joined) == self._copies[part]:
            self._to_start.remove(part)
            joined[-1] = action, self._setup.reductions[action.stage].start(action.bucket)

    def _wait_reduce(self, action: Action) -> None:
        assert action.bucket is not None
        self._setup.reductions[action.stage].wait(action.bucket)
        for reduction, start in self._joined.pop((action.stage, action.bucket), ()):
            if self._trace is not None:
                self._trace.waited(reduction, start)

    def _end_of_step(self, stage_number: int) -> None:
        """(8) Update all parameters at the last STEP."""
        if self._setup.strips and (stage_number, 0) not in self._copies:
            self._setup.reductions[stage_number].start(0)
            self._setup.reductions[stage_number].wait(0)
        self._steps_left -= 1
        if not self._steps_left:
            losses = dict[int, Tensor]()
            for stage in self._stages.values():
                losses |= stage.losses
            count = len(self._microbatches.sizes)
            self.verdict = self._setup.update.run(losses, count, self.given_up, self._commit)


def _sums_last(actions: Sequence[Action]) -> list[Action]:
    """Return a rank's list with its sums, in the same order, ahead of the first that is awaited."""
    kinds = [each.kind for each in actions]
    end = kinds.index(Kind.WAIT_REDUCE) if Kind.WAIT_REDUCE in kinds else len(actions)
    sums = [each for each in actions[:end] if each.kind is Kind.REDUCE]
    return [
        *(each for each in actions[:end] if each.kind is not Kind.REDUCE),
        *sums,
        *actions[end:],
    ]


def _is_forward(action: Action) -> bool:
    """Return True if a prediction needs the action."""
    if action.kind in (Kind.SEND, Kind.RECV):
        assert action.edge is not None
        return (action.stage == action.edge.source) == (action.kind is Kind.SEND)
    return action.kind is Kind.FORWARD


def check_fit(partition: Partition, schedule: Schedule, transport: Transport) -> None:
    """Check that a schedule is lowered, valid, and for these stages and ranks.

    Raises:
        PathosegError: It is not, or it would deadlock.
    """
    if not schedule.lowered:
        raise PathosegError(
            f"The schedule {schedule.name} has no messages and steps.", "Lower it first."
        )
    if schedule.ranks != transport.ranks:
        raise PathosegError(
            f"The schedule {schedule.name} is for {schedule.ranks} ranks, not {transport.ranks}.",
            f"Start {schedule.ranks} ranks.",
        )
    edges = set(edge_values(partition))
    if schedule.stages != partition.stages or set(schedule.edges) != edges:
        raise PathosegError(
            f"The schedule {schedule.name} is for other stages than these {partition.stages}.",
            "Lower it with the edges of the partition.",
        )
    validate(schedule)


def compare_ranks(transport: Transport, own: Mapping[str, str]) -> None:
    """Check that all ranks are about to run the same; all ranks call it.

    Args:
        transport: Joins the ranks.
        own: This rank's texts by name, such as its schedule; they are compared by their hashes.

    Raises:
        PathosegError: A text differs from that of rank 0; raised on all ranks.
    """
    digests = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in own.items()}
    told = [json.loads(text) for text in transport.gather(json.dumps(digests))]
    for rank, theirs in enumerate(told):
        for what, digest in told[0].items():
            if theirs.get(what) != digest:
                raise PathosegError(
                    f"Rank {rank} and rank 0 differ in: {what}.",
                    "Start all ranks with the same version, configuration and first weights.",
                )
