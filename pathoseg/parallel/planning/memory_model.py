"""What a stage needs at its peak, computed from its layers without running them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from pathoseg.parallel.graph.layer_graph import Layer, LayerGraph
from pathoseg.parallel.graph.lifetimes import lifetimes
from pathoseg.parallel.planning.intervals import Bytes, Distinct
from pathoseg.parallel.planning.passed_gradients import PassedGradients

# Bytes that a layer's kernels take for themselves in forward and in backward, on some device.
Workspace = Callable[[Layer], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage.

    Attributes:
        parameters: Parameters.
        buffers: Buffers of modules.
        gradients: Gradients of parameters that exist all the time.
        optimizer: The optimizer's state.
        received: What a microbatch's forward is given by other stages and the data; autograd holds
            it until the backward has ended.
        activations: What the forward saves beyond that.
        forward_workspace: Most that a forward holds beyond these two.
        backward_workspace: Most that a backward does, gradients of the stage's outputs and inputs
            included, which are held until it has ended.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    received: int
    activations: int
    forward_workspace: int
    backward_workspace: int

    @property
    def weights(self) -> int:
        """What is there all the time."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    def peak(self, in_flight: int = 1) -> int:
        """Most bytes at once, with so many microbatches between their forward and backward."""
        held = self.received + self.activations
        return (
            self.weights + in_flight * held + max(self.forward_workspace, self.backward_workspace)
        )


@dataclass(frozen=True)
class Row:
    """The memory of all stages that begin with one layer.

    The arrays are indexed by the position after a stage's last layer.

    Attributes:
        first: Position of the first layer.
        fields: What `StageMemory` has, in its order.
    """

    first: int
    fields: tuple[Bytes, ...]

    def stage(self, stop: int) -> StageMemory:
        """The stage of the layers `first` to before `stop`."""
        return StageMemory(*(int(values[stop]) for values in self.fields))

    def peaks(self, in_flight: int = 1) -> Bytes:
        """`StageMemory.peak` of each stage."""
        *weights, received, activations, forward, backward = self.fields
        total: Bytes = np.sum(weights, 0) + in_flight * (received + activations)
        return total + np.maximum(forward, backward)


class MemoryModel:
    """Computes the memory of stages of a graph, whose layers run one after the other.

    A storage lives from the layer that makes it to its last reader, or, if it is saved, to the end
    of the backward of the first layer that saved it. Messages are held as long as autograd holds
    them: what a forward receives, and the gradients of what it sends, to the end of the backward.

    Args:
        graph: The model's layers.
        optimizer_slots: How many tensors of a parameter's size the optimizer keeps for each: 0 for
            SGD, 1 with momentum, 2 for AdamW.
        fresh_gradients: No parameter has a gradient when a backward begins, as in a step of one
            microbatch after `zero_grad`; else gradients are summed into those that are there.
        workspace: What the device's kernels take for themselves.
    """

    def __init__(
        self,
        graph: LayerGraph,
        optimizer_slots: int = 2,
        fresh_gradients: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self._graph = graph
        self._slots = optimizer_slots
        self._fresh = fresh_gradients
        own = [workspace(layer) if workspace else (0, 0) for layer in graph.layers]
        self._forward = np.array([layer.forward.peak for layer in graph.layers], np.int64)
        self._forward += np.array([forward for forward, _ in own], np.int64)
        backward = np.array([layer.backward.peak for layer in graph.layers], np.int64)
        backward += np.array([backward for _, backward in own], np.int64)
        self._backward = backward
        self._gradients = PassedGradients(graph, backward)
        self._lives = lifetimes(graph)

    def stage(self, layers: range) -> StageMemory:
        """The stage of the layers at these positions."""
        return next(self.rows([layers.start])).stage(layers.stop)

    def by_layer(self, layers: range) -> tuple[list[int], list[int], list[int]]:
        """By position in the model: most bytes that a layer's forward takes, likewise its backward,
        and the gradients that are there when its backward begins, in a stage of these layers."""
        graph = self._graph
        there = self._gradients.there(layers.stop)
        for at in layers:
            name = graph.layers[at].name
            if graph.readers.get(name, (at,))[-1] >= layers.stop:
                there += graph.gradient_bytes(name)
        if self._fresh:
            first: dict[str, int] = {}
            for at in reversed(layers):
                first.update(dict.fromkeys(graph.layers[at].parameters, at))
            for name, at in first.items():
                if graph.parameters[name].trained:
                    there[:at] += graph.parameters[name].bytes
        return self._forward.tolist(), self._backward.tolist(), there.tolist()

    def rows(self, firsts: Collection[int]) -> Iterator[Row]:
        """The stages that begin with each of these layers, last ones first."""
        graph, size = self._graph, len(self._graph.layers)
        parameters, trained = Distinct(size), Distinct(size)
        buffers, received = Distinct(size), Distinct(size)
        alive, saved, left = np.zeros((3, size), np.int64)
        leaves: dict[str, int] = {}
        returned = np.zeros(size + 1, np.int64)
        for name in graph.outputs:
            received.use(name, size, graph.bytes_of(name))
        for first in reversed(range(min(firsts), size)):
            layer = graph.layers[first]
            for life in self._lives[first]:
                alive[first + 1 : life.end + 1] += life.bytes
                saved[life.saved :] += life.bytes
            last = graph.readers.get(layer.name, (first,))[-1]
            returned[first + 1 : last + 1] += graph.gradient_bytes(layer.name)
            received.forget(layer.name, graph.bytes_of(layer.name))
            for name in layer.inputs:
                received.use(name, first, graph.bytes_of(name))
            for name in layer.buffers:
                buffers.use(name, first, graph.buffers[name])
            for name in layer.parameters:
                nbytes, is_trained = graph.parameters[name].bytes, graph.parameters[name].trained
                parameters.use(name, first, nbytes)
                if is_trained and self._fresh:
                    # All that share it are on one stage; the sum is left by the first of them.
                    left[first] += nbytes
                    left[leaves.get(name, first)] -= nbytes * (name in leaves)
                    leaves[name] = first
                trained.use(name, first, nbytes * is_trained)
            if first not in firsts:
                continue
            activations, forward = np.zeros((2, size + 1), np.int64)
            activations[1:] = saved
            forward[first + 1 :] = np.maximum.accumulate((alive + self._forward)[first:])
            backward = self._gradients.peaks(saved, left, first) + returned
            gradients = trained.bytes
            yield Row(
                first,
                (
                    parameters.bytes.copy(),
                    buffers.bytes.copy(),
                    gradients * (not self._fresh),
                    gradients * self._slots,
                    received.bytes.copy(),
                    activations,
                    forward - activations,
                    backward - activations,
                ),
            )
