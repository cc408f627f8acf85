"""Prices a model by timing each of its distinct layers once, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.calibration_layers import reference_networks
from pathoseg.parallel.cost.cost_model import CostModel, LayerTime
from pathoseg.parallel.cost.timing import (
    Alone,
    Timing,
    Whole,
    can_run_alone,
    device_of,
    time_in_turn,
)
from pathoseg.parallel.graph.fx_tracer import Module, mode
from pathoseg.parallel.graph.layer_graph import Layer, LayerGraph
from pathoseg.parallel.graph.traced import Traced

_ROUNDS = 3


class Profiled:
    """A cost model of one model, from its own layers.

    Args:
        traced: The model, on the device that is timed; it is left as it was.
        otherwise: Prices the layers that cannot be run alone, as they read whole numbers.
        in_sequence: What a forward and a backward take among others over what they take alone;
            None measures it.
        rounds: How often each layer is visited.
        advance: Called after each visit.

    Attributes:
        timings: What each distinct layer took, by `signature`.

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
        """What the layer takes among others."""
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
    """Equal for layers that do the same work."""
    shapes = tuple((value.shape, value.dtype) for value in layer.outputs)
    return layer.kind, tuple(layer.attributes.items()), shapes, layer.forward, layer.backward


def distinct(graph: LayerGraph) -> dict[Hashable, int]:
    """The first position of each distinct layer that runs a kernel."""
    found: dict[Hashable, int] = {}
    for position, layer in enumerate(graph.layers):
        if _works(layer):
            found.setdefault(signature(layer), position)
    return found


def measure_sequence(
    device: torch.device, rounds: int = _ROUNDS, advance: Callable[[], None] = lambda: None
) -> LayerTime:
    """What a forward and a backward take among others over what they take alone.

    Caches are warm for a layer alone, and memory is at hand that a sequence has to ask for. The
    figures are medians over small networks.

    Args:
        device: Where they run.
        rounds: How often each network, and each of its layers, is visited.
        advance: Called after each visit; it may raise to end the work.
    """
    factors = []
    for case in reference_networks():
        traced = Traced(case.module.to(device), case.example())
        firsts = distinct(traced.graph)
        tensors = [torch.rand(shape, device=device) for shape in case.shapes]
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
    return LayerTime(*(_median(column) for column in zip(*factors, strict=True)))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


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
