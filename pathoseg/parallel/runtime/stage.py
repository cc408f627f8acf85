"""One stage of a model on one rank: runs its layers forward and backward, visit by visit.

A visit is one microbatch at this stage; `_Visit` is what is held for it from (1) to (4):

    (1) feed, receive                     (2) forward
        received: x, a leaf of autograd  -->  [ layer -> layer -> ... ]  -->  y.detach() leaves
                                                saved tensors      |
                                                            roots: graph's end at y, not y itself
    (4) backward                                                   |
        x.grad leaves  <--  [ layer <- layer <- ... ]  <--  sum of dL/dy over y's consumers
                              parameters' .grad grow            (3) receive: gradients, by edge

(1) The model's inputs and other stages' values come, each cut from the graph that made it.
(2) The layers run. What they save for (4) is autograd's, or the business of `SavedTensorHooks`.
    At the last stage the loss follows, and is a root. A visit that is to be recomputed runs
    without a graph here, and once more with one in `recompute`, ahead of (4).
(3) Each consumer of y sends its gradient; they are added at (4), the deepest consumer first, which
    is the order of one process.
(4) One call of `torch.autograd.backward` from all roots; the visit is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pathoseg.device import widest
from pathoseg.errors import PathosegError
from pathoseg.gradient_step import loss_sum
from pathoseg.parallel.activations.offload import Copies
from pathoseg.parallel.activations.rematerialize import OffloadedPiece, Piece
from pathoseg.parallel.activations.running_statistics import (
    STATISTICS,
    RunningStatistics,
    norms_at,
)
from pathoseg.parallel.activations.saved_tensor_hooks import SavedTensorHooks
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import Partition, StageEdge
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.rng import Randomness
from pathoseg.parallel.schedule.action import Edge, numbered
from pathoseg.parallel.shards.sharding import Sharding
from pathoseg.parallel.shards.strip import whole

# (model output, targets) -> losses of shape (samples,)
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Training:
    """The rule by which a model is trained; the same on all ranks.

    Attributes:
        loss: Takes what the model returns and the targets of a microbatch; returns the loss of each
            sample, shape (samples,).
        optimizer: Makes the optimizer of some of the model's trained parameters.
        seed: Seed of the random numbers that layers draw, together with step, microbatch and layer.
        dtype: Autocast precision, or None; with float16 the loss is scaled.
        clip: Largest global L2 norm of the gradient; 0 leaves it.
        compiles: Whether the layers are compiled, in blocks between those that draw or are
            offloaded, of stages that recompute none and have whole tiles.
    """

    loss: Loss
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    seed: int = 0
    dtype: torch.dtype | None = None
    clip: float = 0.0
    compiles: bool = False


def edge_values(partition: Partition) -> dict[Edge, StageEdge]:
    """Return the schedule's edges between the stages of a partition, each with its value."""
    edges = numbered((sent.source, sent.target) for sent in partition.edges)
    return dict(zip(edges, partition.edges, strict=True))


@dataclass
class Pass:
    """The facts that all visits of one step, or of one prediction, share.

    Attributes:
        step: Number of the step.
        sizes: Samples of each microbatch.
        scale: Factor of the loss ahead of its backward.
        training: True for a step, False for a prediction.
    """

    step: int
    sizes: Sequence[int]
    scale: float
    training: bool

    @property
    def samples(self) -> int:
        """The number of samples in all microbatches together."""
        return sum(self.sizes)


@dataclass
class _Visit:
    """One microbatch between its forward and its backward.

    Attributes:
        received: Values of the model's inputs and other stages, by name, which gather gradients.
        targets: The loss function's second argument.
        roots: The graph's ends, from which the backward begins, by name of the value; "" is the
            loss.
        gradients: Received gradients, by edge.
        away: Saved tensors in host memory, in the order in which the backward needs them.
        heard: What ranks that share the tile have sent, where the layers are to run again.
    """

    received: dict[str, Tensor] = field(default_factory=dict)
    targets: Any = None
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    gradients: dict[Edge, Tensor | None] = field(default_factory=dict)
    away: list[ref[Piece]] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)


class Stage:
    """The layers of one stage with what is held for the microbatches under way.

    Copies of the stage on one rank share it: microbatches are numbered over all replicas.

    Args:
        traced: The model.
        partition: Its stages.
        number: The stage's number.
        training: Its loss (used by the last stage), seed and precision.
        device: The device on which it runs.
        alone: Whether there is one copy, which runs each forward once and in the order of the
            microbatches: then layers keep running state of any kind by themselves.
        policy: The layers whose saved tensors are offloaded or recomputed.
        copies: Copies to the host, where it offloads.
        parks: Whether its parameters may leave the device between its visits.
        sharding: Cuts its tiles into strips, of which this rank has one; None leaves them whole.
            Then what it is fed, receives and sends are rows of this rank.

    Attributes:
        number: The stage's number.
        inputs: Names of the model's inputs that it reads.
        entering: The edges that end here, and their values.
        leaving: The edges that start here, and their values.
        statistics: Its norms' running statistics.
        losses: By microbatch of this step, the sum of its samples' losses, where it is the last.
    """

    def __init__(
        self,
        traced: Traced,
        partition: Partition,
        number: int,
        training: Training,
        device: torch.device,
        alone: bool,
        policy: ActivationPolicy,
        copies: Copies | None,
        parks: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        layers, edges = partition.layers(number), edge_values(partition)
        self.number = number
        self.inputs = partition.inputs[number]
        self.entering = {edge: sent for edge, sent in edges.items() if edge.target == number}
        self.leaving = {edge: sent for edge, sent in edges.items() if edge.source == number}
        self.is_last = number == partition.stages - 1
        watched = range(0) if alone else layers
        self.statistics = RunningStatistics(traced.model, traced.graph, watched)
        self.losses: dict[int, Tensor] = {}
        self._traced, self._loss = traced, training.loss
        self._device, self._dtype = device, training.dtype
        self._layers = layers
        self._segment = self._segment_of_steps = traced.segment(layers)
        self._compiles = training.compiles and not policy.runs_again and sharding is None
        self._randomness = Randomness(traced, layers, training.seed, device)
        self._returned = set(traced.graph.outputs) if self.is_last else set()
        self._visits: dict[int, _Visit] = {}
        self._hooks = SavedTensorHooks(traced, layers, number, policy, copies, parks)
        self._copies = copies
        self._sharding = sharding
        self._to_check: dict[str, Tensor] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        if not alone or policy.runs_again:
            used = (name for at in layers for name in traced.graph.layers[at].parameters)
            untrained = (name for name in used if not traced.graph.parameters[name].trained)
            self._frozen = {name: traced.model.get_parameter(name) for name in untrained}
            names = (name for at in layers for name in traced.graph.layers[at].buffers)
            norms = (norm for at in layers for norm in norms_at(traced.model, traced.graph, at))
            counted = {id(norm._buffers[name]) for norm in norms for name in STATISTICS}
            buffers = {name: traced.model.get_buffer(name) for name in names}
            known = {name: b for name, b in buffers.items() if b is not None}  # made in a forward
            self._to_check = {name: b for name, b in known.items() if id(b) not in counted}

    def begin(self) -> None:
        """Forget the visits and losses of earlier steps."""
        self._visits.clear()
        self.losses.clear()
        self._hooks.begin()
        if self._compiles and self._segment_of_steps is self._segment:
            apart = {*self._hooks.leaving, *self.statistics.watched}
            self._segment_of_steps = self._traced.compiled_segment(self._layers, apart)

    def feed(self, microbatch: int, inputs: Mapping[str, Tensor]) -> None:
        """(1) Take the model's inputs that this stage reads.

        Args:
            microbatch: Its number in the step.
            inputs: The model's inputs by name, each (samples, …) on the stage's device.
        """
        visit = self._visits.setdefault(microbatch, _Visit())
        for name in self.inputs:
            visit.received[name] = inputs[name]

    def compare(self, microbatch: int, targets: Any) -> None:
        """Take the loss function's second argument; the last stage alone needs it."""
        self._visits.setdefault(microbatch, _Visit()).targets = targets

    def receive(self, microbatch: int, edge: Edge, tensor: Tensor | None) -> None:
        """Take the value of an edge that ends here (1), or the gradient of one that starts (3).

        Args:
            microbatch: Its number in the step.
            edge: One of `entering` or `leaving`.
            tensor: On the stage's device; None where the edge has none.
        """
        visit = self._visits.setdefault(microbatch, _Visit())
        if edge in self.leaving:
            visit.gradients[edge] = tensor
        elif tensor is not None:
            sent = self.entering[edge]
            visit.received[sent.value] = tensor.detach().requires_grad_(sent.gradient)

    def predict(self, microbatch: int) -> tuple[dict[Edge, Tensor], Any]:
        """Run the layers without a graph.

        Returns:
            The value of each leaving edge; the model's output at the last stage, None elsewhere.
        """
        visit = self._visits.pop(microbatch, _Visit())
        with torch.no_grad():
            values = self._run(visit)
            model_output = self._assemble(visit, values) if self.is_last else None
            if self._sharding is not None:
                model_output = whole(model_output)
            values = self._rows(values)
        return self._leaving(values), model_output

    def forward(self, microbatch: int, this: Pass, keep: bool) -> dict[Edge, Tensor]:
        """(2) Run the layers, and at the last stage the loss.

        Args:
            microbatch: Its number in the step; all that it reads has been received.
            this: The step.
            keep: Whether the backward is to find what it needs; else `recompute` comes first.

        Returns:
            The value of each leaving edge, without a graph.

        Raises:
            PathosegError: The loss has not one number a sample, or a layer that runs twice or in
                several copies writes into its inputs or changes a buffer, or a parameter that is
                not trained.
        """
        visit = self._visits.setdefault(microbatch, _Visit())
        row = self.statistics.lend()
        versions = {} if keep else {name: each._version for name, each in visit.received.items()}
        state = {name: buffer.clone() for name, buffer in self._to_check.items()}
        marks = {name: _mark(parameter) for name, parameter in self._frozen.items()}
        with torch.set_grad_enabled(keep), nullcontext() if keep else self._hearing(visit):
            values = self._run(visit, this.step, microbatch, keep)
            if self.is_last:
                self.losses[microbatch] = self._finish(visit, values, this, microbatch, keep)
            values = self._rows(values)
        self.statistics.keep(microbatch, row)
        if keep:
            self._hold(visit, values)
        self._check(visit, versions, state, marks)
        return self._leaving(values)

    def recompute(self, microbatch: int, this: Pass) -> None:
        """Run the layers of (2) once more, with a graph, for the backward alone."""
        visit = self._visits[microbatch]
        self.statistics.lend()
        with torch.enable_grad(), self._hearing(visit):
            values = self._run(visit, this.step, microbatch, keep=True)
            if self.is_last:
                self._finish(visit, values, this, microbatch, keep=True)
            values = self._rows(values)
        self._hold(visit, values)

    def _hearing(self, visit: _Visit) -> AbstractContextManager[None]:
        """Make the context of layers that run twice: the second time other ranks send nothing."""
        sharding = self._sharding
        return nullcontext() if sharding is None else sharding.team.hearing(visit.heard)

    def backward(self, microbatch: int) -> dict[Edge, Tensor | None]:
        """(4) Add to the parameters' gradients.

        Returns:
            By entering edge, the gradient of the value that was received; None where it has none,
            zeros where this time the loss has none.
        """
        visit = self._visits.pop(microbatch)
        owed = self._owed(visit)
        if "" in visit.roots:
            owed[""] = torch.ones_like(self.losses[microbatch])
        roots = [visit.roots[name] for name in owed]
        if roots:
            self.statistics.discard()
            torch.autograd.backward(roots, list(owed.values()))
        elif self.is_last:
            # As where no label counts: zeros go out, for the receiver to learn the layout.
            for value in visit.received.values():
                if value.requires_grad:
                    value.grad = torch.zeros_like(value)
        return {
            edge: visit.received[sent.value].grad if sent.value in visit.received else None
            for edge, sent in self.entering.items()
            if sent.gradient
        }

    def let_go(self) -> None:
        """Free the device memory of saved tensors whose copy to the host is done."""
        if self._copies is not None:
            self._copies.let_go()

    def prefetch(self, microbatch: int) -> None:
        """Allow a microbatch's saved tensors to come back from the host: its backward is near."""
        visit = self._visits.get(microbatch)
        if self._copies is None or visit is None or not visit.away:
            return
        pieces = [known() for known in visit.away]
        self._copies.ask([piece.ticket for piece in pieces if isinstance(piece, OffloadedPiece)])
        visit.away = []

    def _run(
        self, visit: _Visit, step: int | None = None, microbatch: int = 0, keep: bool = False
    ) -> dict[str, Tensor]:
        """Run the layers, without randomness and statistics in a prediction (`step` is None).

        Returns:
            By name, the values that other stages or the model's output need.
        """
        with ExitStack() as stack:
            before = None
            if step is not None:
                before = stack.enter_context(self._randomness.of(step, microbatch))
            if self.statistics.watched:
                before = _both(self.statistics.enter, before)
            stack.enter_context(self._autocast())
            given, sharding = self._given(visit), self._sharding
            if sharding is not None:
                sharding.team.waiting = self._randomness.paused
            segment = self._segment if step is None else self._segment_of_steps
            if step is None or not keep or not self._hooks.active:
                return segment(given, before, None if sharding is None else sharding.run)

            @contextmanager
            def again() -> Iterator[Callable[[int], None] | None]:
                with self._randomness.of(step, microbatch) as before, self._autocast():
                    yield before

            recording = self._hooks.recording(microbatch, visit.received, again)
            run = recording.run if sharding is None else sharding.recorded(recording.run)
            with recording.hooks():
                values = segment(given, before, run)
            visit.away = recording.finish()
            return values

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()  # one of torch's would take microseconds of each layer that reruns
        return torch.autocast(self._device.type, self._dtype)

    def _check(
        self,
        visit: _Visit,
        versions: Mapping[str, int],
        state: Mapping[str, Tensor],
        marks: Mapping[str, tuple[Any, ...]],
    ) -> None:
        """Refuse layers that cannot run twice or in copies; state is compared once, in the first
        forward."""
        written = [name for name, old in versions.items() if visit.received[name]._version != old]
        buffer = self._traced.model.get_buffer  # a forward may set another tensor in its place
        changed = [name for name, old in state.items() if not old.equal(buffer(name))]
        changed += [name for name, old in marks.items() if _mark(self._frozen[name]) != old]
        self._to_check, self._frozen = {}, {}
        if written:
            raise PathosegError(
                f"Stage {self.number} writes into {written[0]}, so it cannot run it again.",
                "Plan it without recomputation.",
            )
        if changed:
            raise PathosegError(
                f"A forward of stage {self.number} changes {changed[0]}, which is no norm's "
                "running statistic, so the stage can neither have copies nor be run twice.",
                "Choose an order with one replica and no recomputation, such as 1f1b.",
            )

    def _assemble(self, visit: _Visit, values: Mapping[str, Tensor]) -> Any:
        return self._traced.assemble({**self._given(visit), **values})

    def _given(self, visit: _Visit) -> Mapping[str, Any]:
        """Return the received tensors by name, with rows of a tile as strips of it."""
        if self._sharding is None:
            return visit.received
        received = self._sharding.received
        return {name: received(name, value) for name, value in visit.received.items()}

    def _finish(
        self,
        visit: _Visit,
        values: Mapping[str, Tensor],
        this: Pass,
        microbatch: int,
        keep: bool,
    ) -> Tensor:
        """The loss of the microbatch; where the backward begins, if that is to be kept."""
        shards, targets, sharding = 1, visit.targets, self._sharding
        if sharding is not None:
            shards, targets = sharding.team.shards, sharding.targets(targets)
        with self._autocast():
            returned = self._assemble(visit, values)
            if sharding is not None:
                returned = sharding.returned(returned)
            each = self._loss(returned, targets)
        losses = loss_sum(each, this.sizes[microbatch])
        if sharding is not None:
            sharding.check_loss(returned, losses)
        if keep:
            visit.targets = None
            scaled = losses / (this.samples * shards) * this.scale
            if scaled.requires_grad:
                visit.roots[""] = get_gradient_edge(scaled)
        return losses.detach()

    def _hold(self, visit: _Visit, values: Mapping[str, Tensor]) -> None:
        """Keep where the backward begins, and not the tensors themselves."""
        for sent in self.leaving.values():
            value = values.get(sent.value)
            if sent.gradient and value is not None and value.requires_grad:
                visit.roots[sent.value] = get_gradient_edge(value)

    def _rows(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that leave by name, with this rank's rows in place of strips."""
        if self._sharding is None:
            return values
        leaving = {sent.value for sent in self.leaving.values()}
        return {
            name: self._sharding.sent(value) for name, value in values.items() if name in leaving
        }

    def _leaving(self, values: Mapping[str, Tensor]) -> dict[Edge, Tensor]:
        return {
            edge: values[sent.value].detach().to(self._device)
            for edge, sent in self.leaving.items()
            if sent.value in values
        }

    def _owed(self, visit: _Visit) -> dict[str, Tensor]:
        """Sum, for each value that left, the gradients of its consumers: the deepest first, as one
        process."""
        owed: dict[str, Tensor] = {}
        for edge, sent in sorted(self.leaving.items(), key=_depth):
            gradient = visit.gradients.pop(edge, None)
            if gradient is None or sent.value not in visit.roots:
                continue
            known = owed.get(sent.value)
            owed[sent.value] = gradient if known is None else known.add_(gradient)
        return owed


def _mark(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return what changes where a parameter is written into, without a copy of it.

    Its version is blind to what is written by `.data`; its place and its sum are not.
    """
    values = parameter.detach()
    total = values.sum(dtype=widest(values.device) if values.is_floating_point() else None)
    return parameter._version, parameter.data_ptr(), str(total.item())


def _depth(item: tuple[Edge, StageEdge]) -> int:
    return -item[0].target


def _both(
    first: Callable[[int], None], second: Callable[[int], None] | None
) -> Callable[[int], None]:
    def before(position: int) -> None:
        first(position)
        if second is not None:
            second(position)

    return before
