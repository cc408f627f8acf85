"""Learns what layers cost on the device at hand, by timing many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pathoseg.parallel.cost.calibration_layers import Case
from pathoseg.parallel.cost.cost_model import LayerTime
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.cost.profiled import measure_sequence
from pathoseg.parallel.cost.regression import Sample, learn
from pathoseg.parallel.cost.timing import Alone, Timing, time_in_turn
from pathoseg.parallel.graph.layer_graph import Layer
from pathoseg.parallel.graph.traced import Traced


@dataclass(frozen=True, slots=True)
class Timed:
    """A layer and what it took alone."""

    layer: Layer
    timing: Timing

    @property
    def sample(self) -> Sample:
        """What a regression learns from it."""
        forward, backward = self.timing.forward.quartile, self.timing.backward.quartile
        return Sample(self.layer, LayerTime(forward, backward))


def time_cases(
    cases: Sequence[Case],
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Timed]:
    """Times the last layer of each case.

    Args:
        cases: The layers.
        device: Where they run.
        rounds: How often each is visited.
        advance: Called `rounds` + 1 times for each case; it may raise to end the work.
    """
    layers, alone = [], []
    for case in cases:
        traced = Traced(case.module.to(device), case.example())
        graph = traced.graph
        last = max(at for at, layer in enumerate(graph.layers) if not layer.is_free)
        layers.append(graph.layers[last])
        alone.append(Alone(traced, last))
        advance()
    timings = time_in_turn(alone, rounds, advance)
    return [Timed(layer, timing) for layer, timing in zip(layers, timings, strict=True)]


def calibrated(
    hardware: Hardware,
    timed: Sequence[Timed],
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> Hardware:
    """The hardware with what the timings teach, and what layers cost in sequence.

    Args:
        hardware: What is known of the device beside.
        timed: Layers of the device.
        device: Where networks are timed.
        rounds: How often.
        advance: Called often; it may raise to end the work.
    """
    samples = [item.sample for item in timed]
    return learn(samples, hardware, measure_sequence(device, rounds, advance))
