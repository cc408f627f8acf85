"""Fits layer times on a device by polynomials of the layers' features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.linear_model import LinearRegression, Ridge, RidgeCV
from sklearn.preprocessing import PolynomialFeatures

from pathoseg.parallel.cost.calibration_layers import Case
from pathoseg.parallel.cost.cost_model import LayerTime, scaled
from pathoseg.parallel.cost.features import BASIC, OTHER, amounts, arithmetic, family, features
from pathoseg.parallel.cost.hardware import CostFit, Hardware, Regression
from pathoseg.parallel.cost.timing import Alone, Timing, measure_sequence, time_in_turn
from pathoseg.parallel.graph.layer_graph import Layer, Work

# A kind of fewer layers is not told from the others, and a basic family of fewer hardly described.
_FEWEST = 8
# Passes that move most bytes show the bandwidth of memory, others that of caches.
_LARGEST = 8
_PENALTIES = np.logspace(-4, 3, 15)
# What rates are off by at most; a layer that none of its amounts explains would be off endlessly.
_FURTHEST_OFF = 100.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A layer and its measured time when it ran alone."""

    layer: Layer
    time: LayerTime

    @property
    def passes(self) -> Iterator[tuple[str, Work, float]]:
        """Yield name ("forward", "backward"), work and seconds of each pass that runs kernels."""
        for name, work, seconds in (
            ("forward", self.layer.forward, self.time.forward),
            ("backward", self.layer.backward, self.time.backward),
        ):
            if work.written:
                yield name, work, seconds


def learn(
    samples: Sequence[Sample], hardware: Hardware, in_sequence: LayerTime | None = None
) -> Hardware:
    """Fit the times of layers.

    Peaks of other dtypes than float32 are taken to be off by as much as its own.

    Args:
        samples: Layers, float32; some of each of the basic families.
        hardware: The device's other figures.
        in_sequence: Time of a pass in a sequence of layers over its time alone.

    Returns:
        The hardware with the peaks that the samples show, and with a fit of them.
    """
    in_sequence = in_sequence or LayerTime(1.0, 1.0)
    passes = [
        (arithmetic(sample.layer, work), work.read + work.written, seconds)
        for sample in samples
        for _, work, seconds in sample.passes
    ]
    largest = sorted(passes, key=lambda item: item[1])[-_LARGEST:]
    gain = max(flops / taken for flops, _, taken in passes) / hardware.flops["float32"]
    seen = replace(
        hardware,
        flops={dtype: gain * peak for dtype, peak in hardware.flops.items()},
        bandwidth=max(moved / taken for _, moved, taken in largest),
        overhead=min(taken for _, _, taken in passes),
    )
    groups: dict[tuple[str, str], list[_Point]] = {}
    for sample in samples:
        layer = sample.layer
        for name, work, seconds in sample.passes:
            point = _Point(amounts(layer, work), features(layer, work), seconds)
            groups.setdefault((family(layer), name), []).append(point)
            if not layer.forward.flops:
                groups.setdefault((OTHER, name), []).append(point)
    regressions = {
        f"{kind} {name}": _regression(points)
        for (kind, name), points in groups.items()
        if kind in BASIC or len(points) >= _FEWEST
    }
    return replace(seen, fit=CostFit(regressions, in_sequence.forward, in_sequence.backward))


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured pass."""

    amounts: tuple[float, ...]
    features: tuple[float, ...]
    seconds: float


def _regression(points: Sequence[_Point]) -> Regression:
    """Rates by least squares of relative errors, then ridge regression of what they are off.

    The ridge's penalty is chosen by leaving one out, where there are enough.
    """
    seconds = np.array([point.seconds for point in points])
    done = np.array([point.amounts for point in points])
    unit = np.maximum(done.max(0), 1.0)
    shares = done / unit / seconds[:, None]
    model = LinearRegression(positive=True, fit_intercept=False).fit(shares, np.ones(len(points)))
    rates = model.coef_ / unit
    offs = np.log(seconds / np.maximum(done @ rates, seconds / _FURTHEST_OFF))
    described = np.array([point.features for point in points])
    low, high = (tuple(edge.tolist()) for edge in (described.min(0), described.max(0)))
    units = [scaled(point.features, low, high) for point in points]
    terms = PolynomialFeatures(2, include_bias=False).fit_transform(units)
    known = len(points) >= _FEWEST
    ridge = (RidgeCV(_PENALTIES) if known else Ridge(_PENALTIES[-1])).fit(terms, offs)
    coefficients = (float(ridge.intercept_), *ridge.coef_.tolist())
    return Regression(
        _short(rates), low, high, _short(coefficients), float(offs.min()), float(offs.max())
    )


def _short(values: Iterable[float]) -> tuple[float, ...]:
    """Six digits, that a file of them is small."""
    return tuple(float(f"{value:.6g}") for value in values)


@dataclass(frozen=True, slots=True)
class TimedCase:
    """A layer and the spread of its measured times when it ran alone."""

    layer: Layer
    timing: Timing

    @property
    def sample(self) -> Sample:
        """The layer with the lower quartile of its times, as the regression learns it."""
        forward, backward = self.timing.forward.quartile, self.timing.backward.quartile
        return Sample(self.layer, LayerTime(forward, backward))


def time_cases(
    cases: Sequence[Case],
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[TimedCase]:
    """Times the last layer of each case.

    Args:
        cases: The layers.
        device: The device on which they run.
        rounds: Number of visits of each.
        advance: Called `rounds` + 1 times for each case; it may raise to end the work.
    """
    layers, alone = [], []
    for case in cases:
        traced = case.traced(device)
        graph = traced.graph
        last = max(at for at, layer in enumerate(graph.layers) if not layer.is_free)
        layers.append(graph.layers[last])
        alone.append(Alone(traced, last))
        advance()
    timings = time_in_turn(alone, rounds, advance)
    return [TimedCase(layer, timing) for layer, timing in zip(layers, timings, strict=True)]


def calibrated(
    hardware: Hardware,
    timed: Sequence[TimedCase],
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> Hardware:
    """Fit the times of layers, and measure how much longer passes take in a sequence of layers.

    Args:
        hardware: The device's other figures.
        timed: Layers of the device.
        device: The device on which networks are timed.
        rounds: Number of visits of each network.
        advance: Called often; it may raise to end the work.

    Returns:
        The hardware with this fit.
    """
    samples = [item.sample for item in timed]
    return learn(samples, hardware, measure_sequence(device, rounds, advance))
