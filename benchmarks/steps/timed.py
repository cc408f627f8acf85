"""Prices a model by its layers, timed alone, and by the whole of it."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.steps.ways import LOSS
from pathoseg.parallel.cost.cost_model import LayerTime, Roofline
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.cost.timing import Profiled, Whole, time_in_turn
from pathoseg.parallel.graph.layer_graph import Layer
from pathoseg.parallel.graph.traced import Traced


class Timed:
    """Each distinct layer timed alone, scaled to what the whole model takes: a CostModel.

    The loss is timed too, and counts with the last layer.
    """

    def __init__(self, traced: Traced, images: Tensor, targets: Tensor) -> None:
        self._alone = Profiled(traced, Roofline(load_hardware("cpu")), LayerTime(1, 1))
        logits = traced.model(images).detach().requires_grad_()
        parts = [Whole(traced.model, images), Whole(_Loss(targets), logits)]
        whole, self._loss = time_in_turn(parts, rounds=5)
        layers = [self._alone.time(layer) for layer in traced.graph.layers]
        self._forward = whole.forward.median / sum(layer.forward for layer in layers)
        self._backward = whole.backward.median / sum(layer.backward for layer in layers)
        self._last = traced.graph.layers[-1].name
        self.note = self._alone.note

    def time(self, layer: Layer) -> LayerTime:
        alone = self._alone.time(layer)
        forward, backward = alone.forward * self._forward, alone.backward * self._backward
        if layer.name == self._last:
            forward += self._loss.forward.median
            backward += self._loss.backward.median
        return LayerTime(forward, backward)


class _Loss(nn.Module):
    def __init__(self, targets: Tensor) -> None:
        super().__init__()
        self._targets = targets

    def forward(self, logits: Tensor) -> Tensor:
        return LOSS(logits, self._targets).sum()
