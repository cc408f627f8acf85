"""Times the forward and backward of layers and whole models on this device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from pathoseg.device import has_streams, is_pinned_for, record, synchronize, training_layout
from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.calibration_layers import laid_out, reference_networks
from pathoseg.parallel.cost.cost_model import CostModel, LayerTime
from pathoseg.parallel.graph.fx_tracer import Module, mode
from pathoseg.parallel.graph.layer_graph import Layer, LayerGraph, Value
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.schedule.costs import Link

# A visit to what is timed ends after so many seconds or runs.
_VISIT_SECONDS = 0.04
_VISIT_RUNS = 10
# Different numbers in made-up tensors.
_NUMBERS = 2**16
_REAL = ("float", "bfloat")
# Bytes of the two copies that a link's latency and bandwidth are computed from.
_SHORT, _LONG = 2**12, 2**26


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of the same work, run many times.

    Attributes:
        minimum: The quickest run.
        quartile: What a quarter of the runs beat. What else a host does makes runs slower, never
            quicker, so this moves less than the median.
        median: The middle one.
        maximum: The slowest.
    """

    minimum: float
    quartile: float
    median: float
    maximum: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> Spread:
        ordered = sorted(runs)
        quartile = ordered[(len(ordered) - 1) // 4]
        return cls(ordered[0], quartile, statistics.median(ordered), ordered[-1])


@dataclass(frozen=True, slots=True)
class Timing:
    """The measured times of the forward and the backward of a layer or model."""

    forward: Spread
    backward: Spread


# Runs something once and returns the seconds of its forward and of its backward.
Run = Callable[[], tuple[float, float]]


class Timed(Protocol):
    """A layer or model whose forward and backward can be timed."""

    def visit(self) -> Run:
        """Allocate inputs and gradients; return the function that runs both passes once.

        All memory is freed with that function.
        """


def time_in_turn(
    what: Sequence[Timed], rounds: int, advance: Callable[[], None] = lambda: None
) -> list[Timing]:
    """Time several things in turn, in rounds, so that a busy minute of the host spoils none.

    The first run of each visit does not count.

    Args:
        what: The things to time.
        rounds: Number of visits of each.
        advance: Called after each visit, for a progress bar.

    Returns:
        The spread of the seconds of each, in the order of `what`.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in what]
    for _ in range(rounds):
        for item, runs in zip(what, taken, strict=True):
            run = item.visit()
            run()
            end = perf_counter() + _VISIT_SECONDS
            for _ in range(_VISIT_RUNS):
                runs.append(run())
                if perf_counter() > end:
                    break
            advance()
    return [Timing(*(Spread.of(seconds) for seconds in zip(*runs, strict=True))) for runs in taken]


def can_run_alone(graph: LayerGraph, position: int) -> bool:
    """Return True if a layer's inputs can be drawn at random: float tensors only, no integers."""
    made = [graph.made_by(name) for name in graph.layers[position].inputs]
    return all(len(values) == 1 and values[0].dtype.startswith(_REAL) for values in made)


class Alone:
    """One layer of a model, on the device of the model's parameters.

    Its inputs lie in memory as they do in the model (`Traced.strides`): channels-last, in a part of
    a larger tensor, or otherwise. So do the gradients of its outputs, as far as the graph tells.
    Its backward includes adding the gradients of its inputs to those that later readers have made.

    Args:
        traced: The model; a run may change its buffers.
        position: The layer's position; `can_run_alone` has to be true of it.
    """

    def __init__(self, traced: Traced, position: int) -> None:
        graph, layer = traced.graph, traced.graph.layers[position]
        self._segment = traced.segment(range(position, position + 1))
        self._values = {name: graph.made_by(name)[0] for name in self._segment.inputs}
        self._strides = {name: traced.strides[name][0] for name in self._values}
        self._joined = {
            name
            for name, value in self._values.items()
            if value.gradient and graph.readers[name][-1] > position
        }
        known = dict(traced.model.named_parameters())
        self._parameters = [known[name] for name in layer.parameters if known[name].requires_grad]
        self._device = device_of(traced.model)
        self._clock = _clock(self._device)
        self._autocast = traced.autocast
        self._gradient_has_gaps = layer.attributes.get("gradient_has_gaps") is True

    def visit(self) -> Run:
        sources = {
            name: self._numbers(_extent(value.shape, self._strides[name]), _dtype(value))
            for name, value in self._values.items()
        }
        return partial(self._run, sources, {}, {})

    def _numbers(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers around 0, shape (count,)."""
        numbers = torch.rand(_NUMBERS, device=self._device, dtype=dtype).sub_(0.5)
        return numbers.repeat(-(-count // _NUMBERS))[:count]

    def _input(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """A copy of numbers as an input, since layers that write in place may not write into a
        leaf."""
        value, strides = self._values[name], self._strides[name]
        lying = source.detach().as_strided(value.shape, strides)
        if source.numel() == prod(value.shape):
            return lying.requires_grad_(value.gradient).clone()
        whole = source.detach().requires_grad_(value.gradient).clone()
        return whole.as_strided(value.shape, strides)

    def _gradient(self, root: torch.Tensor) -> torch.Tensor:
        """A gradient of an output, which lies in memory as that does, or in a larger tensor."""
        shape, strides = list(root.shape), root.stride()
        if not self._gradient_has_gaps:
            count = prod(shape)
            if _extent(shape, strides) != count:
                return self._numbers(count, root.dtype).view(shape)
            return self._numbers(count, root.dtype).as_strided(shape, strides)
        # After its first dimension with a length, a part of a tensor is not contiguous.
        dimension = 1 if len(shape) > 1 and shape[0] > 1 else len(shape) - 1
        longer = [size + (at == dimension) for at, size in enumerate(shape)]
        whole = self._numbers(prod(longer), root.dtype).view(longer)
        return whole.narrow(dimension, 0, shape[dimension])

    def _run(
        self,
        sources: dict[str, torch.Tensor],
        gradients: dict[int, torch.Tensor],
        others: dict[str, torch.Tensor],
    ) -> tuple[float, float]:
        """Run the layer; the first run adds what the backward needs to the mappings."""
        inputs = {name: self._input(name, source) for name, source in sources.items()}
        wanted = {
            name: get_gradient_edge(tensor)
            for name, tensor in inputs.items()
            if tensor.requires_grad
        }
        is_cast = self._autocast is not None
        begin = self._clock.mark()
        with torch.autocast(self._device.type, self._autocast, enabled=is_cast):
            made = self._segment(inputs)
        forward = self._clock.since(begin)
        roots = [root for root in tree_leaves(made) if root.requires_grad]
        if not roots:
            return forward, 0.0
        for index, root in enumerate(roots):
            if index not in gradients:
                gradients[index] = self._gradient(root)
        for name in self._joined - others.keys():
            others[name] = torch.ones_like(inputs[name])
        given = [gradients[index] for index in range(len(roots))]
        edges: list[Any] = [*wanted.values(), *self._parameters]
        begin = self._clock.mark()
        got = torch.autograd.grad(roots, edges, given, allow_unused=True)
        for name, gradient in zip(wanted, got, strict=False):
            if name in others and gradient is not None:
                torch.add(gradient, others[name])
        return forward, self._clock.since(begin)


class Whole:
    """A model as it is.

    Args:
        model: The model, in training mode; a run may change its buffers.
        inputs: Tensors that it is called with.
    """

    def __init__(self, model: torch.nn.Module, *inputs: torch.Tensor) -> None:
        self._model = model
        self._inputs = inputs
        self._clock = _clock(device_of(model))

    def visit(self) -> Run:
        return partial(self._run, {})

    def _run(self, gradients: dict[int, torch.Tensor]) -> tuple[float, float]:
        self._model.zero_grad(set_to_none=True)
        begin = self._clock.mark()
        made = self._model(*self._inputs)
        forward = self._clock.since(begin)
        roots = tree_leaves(made)
        for index, root in enumerate(roots):
            if index not in gradients:
                gradients[index] = torch.ones_like(root)
        given = [gradients[index] for index in range(len(roots))]
        del made
        begin = self._clock.mark()
        torch.autograd.backward(roots, given)
        return forward, self._clock.since(begin)


def time_copies(device: torch.device) -> Link:
    """Measure the link of a device to its host's memory by copies of two sizes.

    Host memory is pinned where that serves the device. The fastest of five copies counts.
    """
    clock = _clock(device)
    seconds = []
    for size in (_SHORT, _LONG):
        source = torch.ones(size, dtype=torch.uint8, pin_memory=is_pinned_for(device))
        target = torch.ones(size, dtype=torch.uint8, device=device)
        taken = []
        for _ in range(5):
            begin = clock.mark()
            target.copy_(source, non_blocking=True)
            taken.append(clock.since(begin))
        seconds.append(Spread.of(taken).minimum)
    beta = max(0.0, seconds[1] - seconds[0]) / (_LONG - _SHORT)
    return Link(max(0.0, seconds[0] - beta * _SHORT), beta)


def host_seconds() -> float:
    """Return a clock's seconds: the thread's own where torch has one thread, else the wall's.

    A thread's own seconds leave out the turns of other processes on its core.
    """
    return thread_time() if torch.get_num_threads() == 1 else perf_counter()


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class _Clock(Protocol):
    def mark(self) -> Any:
        """Now, in the order of the device's work."""

    def since(self, begin: Any) -> float:
        """Return the seconds that the work given to the device since then took."""


class _HostClock:
    def mark(self) -> float:
        return host_seconds()

    def since(self, begin: float) -> float:
        return host_seconds() - begin


class _StreamClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        return record(self._device, is_timed=True)

    def since(self, begin: torch.Event) -> float:
        end = self.mark()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class _QueueClock:
    """The clock of a device with one queue, which is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> float:
        synchronize(self._device)
        return perf_counter()

    def since(self, begin: float) -> float:
        return self.mark() - begin


def _clock(device: torch.device) -> _Clock:
    if device.type == "cpu":
        return _HostClock()
    return _StreamClock(device) if has_streams(device) else _QueueClock(device)


def _dtype(value: Value) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many numbers lie between the first and the last of a tensor, these included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


_ROUNDS = 3


class Profiled:
    """A cost model of one model, from its own layers.

    Args:
        traced: The model, on the device that is timed; it is left as it was.
        otherwise: Prices the layers that cannot be run alone, as they read whole numbers.
        in_sequence: What a forward and a backward take among others over what they take alone;
            None measures it.
        rounds: Number of visits of each layer.
        advance: Called after each visit.

    Attributes:
        timings: The times of each distinct layer, by `signature`.

    Raises:
        PathosegError: The model is on `meta`, where nothing can be timed.
    """

    def __init__(
        self,
        traced: Traced,
        otherwise: CostModel,
        in_sequence: LayerTime | None = None,
        rounds: int = _ROUNDS,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device_of(traced.model)
        if self._device.type == "meta":
            raise PathosegError(
                f"{type(traced.model).__name__} has no memory, so its layers cannot be timed.",
                "Build it on the device that it is trained on.",
            )
        self._otherwise = otherwise
        self._in_sequence = in_sequence or measure_sequence(self._device, rounds, advance)
        firsts = distinct(traced.graph)
        alone = {key: at for key, at in firsts.items() if can_run_alone(traced.graph, at)}
        self._guessed = len(firsts) - len(alone)
        with _left_as_it_was(traced.model):
            visits = [Alone(traced, position) for position in alone.values()]
            measured = time_in_turn(visits, rounds, advance)
        self.timings: dict[Hashable, Timing] = dict(zip(alone, measured, strict=True))

    @property
    def note(self) -> str:
        timed = f"{len(self.timings)} distinct layers timed on this device ({self._device})"
        return f"{timed}, {self._guessed} by: {self._otherwise.note}" if self._guessed else timed

    def time(self, layer: Layer) -> LayerTime:
        """Return the time of the layer when it runs in a sequence of layers."""
        if not _works(layer):
            return LayerTime(0.0, 0.0)
        timing = self.timings.get(signature(layer))
        if timing is None:
            return self._otherwise.time(layer)
        return LayerTime(
            timing.forward.quartile * self._in_sequence.forward,
            timing.backward.quartile * self._in_sequence.backward,
        )


def signature(layer: Layer) -> Hashable:
    """Return a key that is equal for layers of the same kind, attributes, shapes and work."""
    shapes = tuple((value.shape, value.dtype) for value in layer.outputs)
    return layer.kind, tuple(layer.attributes.items()), shapes, layer.forward, layer.backward


def distinct(graph: LayerGraph) -> dict[Hashable, int]:
    """Return, by `signature`, the first position of each distinct layer that runs a kernel."""
    found: dict[Hashable, int] = {}
    for position, layer in enumerate(graph.layers):
        if _works(layer):
            found.setdefault(signature(layer), position)
    return found


def measure_sequence(
    device: torch.device, rounds: int = _ROUNDS, advance: Callable[[], None] = lambda: None
) -> LayerTime:
    """Measure how much longer a forward and a backward take in a sequence than alone.

    Caches are warm for a layer alone, and memory is at hand that a sequence has to ask for. The
    figures are medians over small networks.

    Args:
        device: The device on which they run.
        rounds: Number of visits of each network and of each of its layers.
        advance: Called after each visit; it may raise to end the work.
    """
    factors = []
    for case in reference_networks():
        traced = case.traced(device)
        firsts = distinct(traced.graph)
        layout = training_layout(device.type)
        tensors = [laid_out(torch.rand(shape, device=device), layout) for shape in case.shapes]
        alone = [Alone(traced, position) for position in firsts.values()]
        whole, *parts = time_in_turn([Whole(case.module, *tensors), *alone], rounds, advance)
        by_key = dict(zip(firsts, parts, strict=True))
        layers = [by_key[signature(layer)] for layer in traced.graph.layers if _works(layer)]
        factors.append(
            (
                whole.forward.quartile / sum(part.forward.quartile for part in layers),
                whole.backward.quartile / sum(part.backward.quartile for part in layers),
            )
        )
    return LayerTime(*(statistics.median_high(column) for column in zip(*factors, strict=True)))


def _works(layer: Layer) -> bool:
    return bool(layer.forward.written or layer.backward.written)


@contextmanager
def _left_as_it_was(model: Module) -> Iterator[None]:
    """Training mode, after which buffers, modes and generators are as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with mode(model, training=True):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
