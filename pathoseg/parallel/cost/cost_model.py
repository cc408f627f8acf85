"""The time of a layer's forward and backward on a device: by its fit, or by its datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import exp
from typing import Protocol

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.features import amounts, arithmetic, family, features, stand_in
from pathoseg.parallel.cost.hardware import CostFit, Hardware, Regression
from pathoseg.parallel.graph.layer_graph import Layer, Work


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of one layer's passes, for the microbatch with which it was traced.

    Attributes:
        forward: Seconds.
        backward: Seconds.
    """

    forward: float
    backward: float


class CostModel(Protocol):
    """Predicts the seconds of a layer's forward and backward on one device; never below 0.

    Attributes:
        note: The origin of the figures, for the reader of a plan.
    """

    @property
    def note(self) -> str: ...

    def time(self, layer: Layer) -> LayerTime: ...


def cost_model(hardware: Hardware) -> CostModel:
    """Return a device's cost model: its fit if it was calibrated, else its datasheet's roofline."""
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
        """Return a lower bound of a layer's time: the slower of FLOPs and bytes, each at its peak.

        Raises:
            PathosegError: The hardware states no FLOP/s for the layer's dtype.
        """
        return LayerTime(
            self.pass_time(layer, layer.forward), self.pass_time(layer, layer.backward)
        )

    def pass_time(self, layer: Layer, work: Work) -> float:
        """Return the seconds of a layer's forward or backward with this work; 0 without kernels."""
        if not work.written:
            return 0.0
        memory = (work.read + work.written) / self.hardware.bandwidth
        flops = arithmetic(layer, work)
        return max(memory, flops / self.peak(layer) if flops else 0.0) + self.hardware.overhead

    def peak(self, layer: Layer) -> float:
        """Return the device's peak FLOP/s in the layer's dtype.

        Raises:
            PathosegError: The hardware states none.
        """
        # Beside what an opaque layer computes it may return indices.
        floats = (value.dtype for value in layer.outputs if "int" not in value.dtype)
        dtype = next(floats, "float32")
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
            PathosegError: The hardware states no FLOP/s for the layer's dtype.
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
        own = family(layer)
        regression = known.get(f"{own} {name}") or known[f"{stand_in(own)} {name}"]
        slowness = 1.0
        if work.flops:
            slowness = self.hardware.flops["float32"] / Roofline(self.hardware).peak(layer)
        return predict(regression, amounts(layer, work, slowness), features(layer, work))


def predict(regression: Regression, amounts: Sequence[float], features: Sequence[float]) -> float:
    """Predict the seconds of a pass: amounts at fitted rates, times a fitted correction.

    Args:
        regression: The fit of the layer's family.
        amounts: FLOPs and bytes of the pass (`features.amounts`).
        features: The variables of the correction, a polynomial (`features.features`).
    """
    units = scaled(features, regression.low, regression.high)
    products = (one * other for one, other in combinations_with_replacement(units, 2))
    off = sumprod(regression.coefficients, (1.0, *units, *products))
    seconds = sumprod(regression.rates, amounts)
    return seconds * exp(min(max(off, regression.least), regression.most))


def scaled(
    features: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[float, ...]:
    """Map features linearly from their ranges to -1…1; values outside count as the edge.

    Args:
        features: The values.
        low: The lower end of each one's range.
        high: The upper end.
    """
    return tuple(
        2 * (min(max(value, least), most) - least) / (most - least) - 1 if most > least else 0.0
        for value, least, most in zip(features, low, high, strict=True)
    )


def sumprod(factors: Sequence[float], values: Sequence[float]) -> float:
    """Return the sum of the products of two sequences of equal length."""
    return sum(factor * value for factor, value in zip(factors, values, strict=True))
