"""Fits layer times by a plain polynomial of the layers' sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from pathoseg.parallel.cost.cost_model import LayerTime
from pathoseg.parallel.cost.features import OTHER, family
from pathoseg.parallel.cost.regression import Sample
from pathoseg.parallel.graph.layer_graph import Layer


class RawPolynomial:
    """A plain polynomial of a layer's sizes: the model that ours has to beat.

    Its variables are input channels, output channels, kernel, image side and batch. What it
    predicts below 0 counts as 0.

    Args:
        samples: The layers to fit.
        degree: Degree of the polynomial.
    """

    def __init__(self, samples: Sequence[Sample], degree: int = 2) -> None:
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(family(sample.layer), []).append(sample)
            groups.setdefault(OTHER, []).append(sample)
        self._models = {
            kind: make_pipeline(PolynomialFeatures(degree), LinearRegression()).fit(
                [_plain(sample.layer) for sample in group],
                [[sample.time.forward, sample.time.backward] for sample in group],
            )
            for kind, group in groups.items()
        }

    @property
    def note(self) -> str:
        return "plain polynomial of sizes, measured on this device"

    def time(self, layer: Layer) -> LayerTime:
        """Return the time that the polynomial predicts for the layer."""
        if layer.is_free:
            return LayerTime(0.0, 0.0)
        return LayerTime(*np.maximum(0.0, self.raw(layer)).tolist())

    def raw(self, layer: Layer) -> NDArray[np.float64]:
        """Predict forward and backward, shape (2,), in seconds, not clipped at 0."""
        model: Any = self._models.get(family(layer), self._models[OTHER])
        predicted: NDArray[np.float64] = model.predict([_plain(layer)])[0]
        return predicted


def _plain(layer: Layer) -> tuple[float, ...]:
    shape: Any = layer.attributes.get("input") or layer.outputs[0].shape
    weight: Any = layer.attributes.get("weight") or ()
    kernel: Any = weight[2:] or layer.attributes.get("kernel_size") or (1,)
    target = layer.outputs[0].shape
    return shape[1] if len(shape) > 1 else 1, target[1], kernel[-1], target[-1], target[0]
