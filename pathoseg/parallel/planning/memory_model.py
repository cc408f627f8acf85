"""Peak memory of a stage, computed from its layers without running them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathoseg.parallel.graph.layer_graph import Gradient, Layer, LayerGraph, lifetimes

Bytes = NDArray[np.int64]


class Distinct:
    """Running sums of the bytes of distinct items, such as parameters, that a stage's layers use.

    The stages all begin with one layer, which moves up from the model's last: `bytes[stop]` is the
    sum for the stage that ends before `stop`.

    Args:
        size: Number of layers.

    Attributes:
        bytes: Shape (size + 1,).
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size + 1, np.int64)
        self._since: dict[str, int] = {}

    def use(self, item: str, position: int, size: int) -> None:
        """Count an item for all stages that reach the layer at `position`.

        Args:
            item: Its name.
            position: Below that of every earlier call, or equal.
            size: Its bytes.
        """
        since = min(position + 1, len(self.bytes) - 1)
        self.bytes[since : self._since.get(item, len(self.bytes))] += size
        self._since[item] = since

    def forget(self, item: str, size: int) -> None:
        """Uncount an item, which from now on is made inside the stage."""
        if item in self._since:
            self.bytes[self._since.pop(item) :] -= size


class Maxima:
    """Maxima of intervals of an array, by a sparse table (Bender and Farach-Colton, 2000)."""

    def __init__(self, values: Bytes) -> None:
        levels = [values]
        while (width := 2 ** len(levels)) <= len(values):
            starts = len(values) - width + 1
            longer = values.copy()
            longer[:starts] = np.maximum(
                levels[-1][:starts], levels[-1][width // 2 : width // 2 + starts]
            )
            levels.append(longer)
        self._levels = np.array(levels)

    def __call__(self, starts: Bytes, stops: Bytes) -> Bytes:
        """Return the maximum from each start to before its stop, which is above it."""
        level = np.frexp(stops - starts)[1] - 1
        found: Bytes = np.maximum(
            self._levels[level, starts], self._levels[level, stops - 2**level]
        )
        return found


class PassedGradients:
    """The gradients that the backwards of layers pass to one another.

    In the backward of the whole model a gradient lives from its maker to the layer that frees it.
    In a stage before its maker's, a message (counted elsewhere) stands in its place until a layer's
    own gradient is added: autograd may not write into a message, so the sum takes memory.

    Args:
        graph: The model's layers.
        own: Most bytes that each layer's backward takes beyond what is held when it begins.
    """

    def __init__(self, graph: LayerGraph, own: Bytes) -> None:
        size = len(graph.layers)
        self._own = own
        self._held = own.copy()
        absent: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
        for maker, layer in enumerate(graph.layers):
            for gradient in layer.gradients:
                self._held[max(gradient.until, 0) : maker] += gradient.bytes
                for stop, since in _absences(gradient, maker):
                    absent[stop].append((since, gradient.bytes))
        # By stop: from which layers on gradients are absent, ascending, and their running sum.
        most = max(map(len, absent))
        self._since = np.full((size + 1, most), size, np.int64)
        self._sum = np.zeros((size + 1, most + 1), np.int64)
        for stop, gradients in enumerate(absent):
            for index, (since, nbytes) in enumerate(sorted(gradients)):
                self._since[stop, index] = since
                self._sum[stop, index + 1] = self._sum[stop, index] + nbytes

    def there(self, stop: int) -> Bytes:
        """Return the bytes of gradients that are there when a layer's backward begins.

        Args:
            stop: Position after the stage's last layer.

        Returns:
            By position of the layer.
        """
        held: Bytes = self._held - self._own
        for since, nbytes in zip(self._since[stop], np.diff(self._sum[stop]), strict=True):
            held[since:] -= nbytes
        return held

    def peaks(self, saved: Bytes, left: Bytes, first: int) -> Bytes:
        """Find the most bytes while the backward runs, for all stages that begin with `first`.

        Args:
            saved: By layer, bytes saved for backward when its backward begins.
            left: By layer, bytes of parameters' gradients that its backward makes, and that stay.
            first: Position of the first layer.

        Returns:
            By the position after the stage's last layer, shape (layers + 1,).
        """
        size = len(saved)
        # What stays of layers t to the stage's last is a difference of running sums, so that the
        # maximum over t need not know the last.
        stays = np.concatenate([[0], np.cumsum(left)])
        tops = Maxima(self._held + saved - stays[1:])
        stops = np.arange(size + 1)
        found: Bytes = np.full(size + 1, np.iinfo(np.int64).min)
        start = np.full(size + 1, first)
        for index in range(self._sum.shape[1]):
            ends = self._since[:, index] if index < self._since.shape[1] else stops
            end = np.minimum(ends, stops)
            some = end > start
            top = tops(start[some], end[some]) - self._sum[some, index]
            found[some] = np.maximum(found[some], top)
            start = np.maximum(start, end)
        found[: first + 1] = 0
        found += stays
        return found


def _absences(gradient: Gradient, maker: int) -> Iterator[tuple[int, int]]:
    """The stops of stages that a gradient crosses, and from which layer on it is absent there."""
    sums = list(gradient.sums)
    for stop in range(maker, gradient.until, -1):
        while sums and sums[0] >= stop:
            sums.pop(0)
        yield stop, max(gradient.until, 0, *sums[:1])


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
        activations: Bytes that the forward saves beyond that.
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
        """The bytes of parameters, gradients, optimizer state and buffers."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    def peak(self, in_flight: int = 1) -> int:
        """Return the most bytes at once.

        Args:
            in_flight: Microbatches between their forward and their backward.
        """
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
        fields: The fields of `StageMemory`, in its order, each of shape (layers + 1,).
    """

    first: int
    fields: tuple[Bytes, ...]

    def stage(self, stop: int) -> StageMemory:
        """Return the memory of the stage of the layers from `first` to before `stop`."""
        return StageMemory(*(int(values[stop]) for values in self.fields))

    def peaks(self, in_flight: int = 1) -> Bytes:
        """Return `StageMemory.peak` of each stage, by the position after its last layer."""
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
        workspace: Returns the bytes that a device's kernels take for a layer's forward and
            backward.
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
        """Return the memory of one stage, given the positions of its layers."""
        return next(self.rows([layers.start])).stage(layers.stop)

    def by_layer(self, layers: range) -> tuple[list[int], list[int], list[int]]:
        """Return the parts of a stage's memory by layer, each indexed by position in the model.

        Args:
            layers: Positions of the stage's layers.

        Returns:
            The peak bytes of each layer's forward, those of its backward, and the bytes of
            gradients that are there when its backward begins.
        """
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
        """Compute the memory of all stages that begin with given layers.

        Args:
            firsts: Positions of first layers.

        Yields:
            One row for each, the last layer's first.
        """
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
