"""The time of a layer's forward and backward on a device: by its fit, or by its datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import exp
from typing import Protocol

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.features import OTHER, amounts, arithmetic, family, features
from pathoseg.parallel.cost.hardware import CostFit, Hardware, Regression
from pathoseg.parallel.graph.layer_graph import Layer, Work


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer's forward and backward, for the microbatch that it was traced with."""

    forward: float
    backward: float


class CostModel(Protocol):
    """Predicts what layers take; never less than nothing.

    Attributes:
        note: What the figures are, for the reader of a plan.
    """

    @property
    def note(self) -> str: ...

    def time(self, layer: Layer) -> LayerTime: ...


def cost_model(hardware: Hardware) -> CostModel:
    """The best that is known of a device."""
    if hardware.fit:
        return Analytical(hardware, hardware.fit)
    return Roofline(hardware)


@dataclass(frozen=True)
class Roofline:
    """The slower of arithmetic and memory, each at its peak (Williams et al., 2009)."""

    hardware: Hardware

    @property
    def note(self) -> str:
        return f"datasheet roofline of {self.hardware.name}: nothing was measured"

    def time(self, layer: Layer) -> LayerTime:
        """A lower bound of what the layer takes.

        Raises:
            PathosegError: The hardware states no arithmetic for the layer's dtype.
        """
        return LayerTime(
            self.pass_time(layer, layer.forward), self.pass_time(layer, layer.backward)
        )

    def pass_time(self, layer: Layer, work: Work) -> float:
        """Seconds of the layer's forward or backward; 0 where it runs no kernel."""
        if not work.written:
            return 0.0
        memory = (work.read + work.written) / self.hardware.bandwidth
        flops = arithmetic(layer, work)
        return max(memory, flops / self.peak(layer) if flops else 0.0) + self.hardware.overhead

    def peak(self, layer: Layer) -> float:
        """FLOP/s in the layer's dtype."""
        dtype = layer.outputs[0].dtype if layer.outputs else "float32"
        known = self.hardware.flops
        if dtype not in known:
            raise PathosegError(
                f"The hardware {self.hardware.name} states no FLOP/s for {dtype}, in which "
                f"{layer.name} computes.",
                f"Use {' or '.join(known)}, or add {dtype} under `flops` in its file.",
            )
        return known[dtype]


@dataclass(frozen=True)
class Analytical:
    """The time that the fit of a calibrated device predicts for a layer."""

    hardware: Hardware
    fit: CostFit

    @property
    def note(self) -> str:
        return f"fitted to layers measured on {self.hardware.measured}"

    def time(self, layer: Layer) -> LayerTime:
        """Return the time of the layer when it runs in a sequence of layers.

        Raises:
            PathosegError: The hardware states no arithmetic for the layer's dtype.
        """
        alone = self.alone(layer)
        return LayerTime(
            alone.forward * self.fit.forward_in_sequence,
            alone.backward * self.fit.backward_in_sequence,
        )

    def alone(self, layer: Layer) -> LayerTime:
        """Return the time of the layer when it runs alone, its data in the caches."""
        return LayerTime(
            self._pass_time(layer, layer.forward, "forward"),
            self._pass_time(layer, layer.backward, "backward"),
        )

    def _pass_time(self, layer: Layer, work: Work, name: str) -> float:
        if not work.written:
            return 0.0
        known = self.fit.regressions
        regression = known.get(f"{family(layer)} {name}") or known[f"{OTHER} {name}"]
        slowness = 1.0
        if work.flops:
            slowness = self.hardware.flops["float32"] / Roofline(self.hardware).peak(layer)
        return predict(regression, amounts(layer, work, slowness), features(layer, work))


def predict(regression: Regression, amounts: Sequence[float], features: Sequence[float]) -> float:
    """Seconds of a pass."""
    units = scaled(features, regression.low, regression.high)
    products = (one * other for one, other in combinations_with_replacement(units, 2))
    off = sumprod(regression.coefficients, (1.0, *units, *products))
    seconds = sumprod(regression.rates, amounts)
    return seconds * exp(min(max(off, regression.least), regression.most))


def scaled(
    features: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[float, ...]:
    """Features within -1…1, their ranges' edges; what is outside a range counts as its edge."""
    return tuple(
        2 * (min(max(value, least), most) - least) / (most - least) - 1 if most > least else 0.0
        for value, least, most in zip(features, low, high, strict=True)
    )


def sumprod(factors: Sequence[float], values: Sequence[float]) -> float:
    """The sum of products."""
    return sum(factor * value for factor, value in zip(factors, values, strict=True))
