"""Gradients on their way from layer to layer, and the peak of the backward of every stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pathoseg.parallel.graph.layer_graph import Gradient, LayerGraph
from pathoseg.parallel.planning.intervals import Bytes, Maxima


class PassedGradients:
    """What the backwards of layers leave to one another.

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
        """By layer of a stage that ends before `stop`, what is there when its backward begins."""
        held: Bytes = self._held - self._own
        for since, nbytes in zip(self._since[stop], np.diff(self._sum[stop]), strict=True):
            held[since:] -= nbytes
        return held

    def peaks(self, saved: Bytes, left: Bytes, first: int) -> Bytes:
        """Most bytes while the backward of each stage that begins with `first` runs, by stop.

        Args:
            saved: By layer, what is saved when its backward begins.
            left: By layer, gradients of parameters that are made in its backward, and stay.
            first: Position of the first layer.
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
