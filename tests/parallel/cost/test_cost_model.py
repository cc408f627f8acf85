"""Tests predicted times: never negative, right where the law is known, better than the seed's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.calibration_layers import Case, draw_cases
from pathoseg.parallel.cost.cost_model import Analytical, CostModel, LayerTime, Roofline, cost_model
from pathoseg.parallel.cost.features import ATTENTION, arithmetic, family
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.cost.regression import Sample, learn
from pathoseg.parallel.graph.layer_graph import Layer, Work
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.schedule.costs import Link
from tests.parallel.networks.odd import TRACEABLE, between
from tests.parallel.networks.small import SMALL, small_graph

FREE = Link()
PASSES = ("forward", "backward")
TOY = Hardware("toy", "cpu", 10, {"float32": 1e9}, 1e8, 1, FREE, FREE, FREE, 1e-6)


def _convolution(
    inputs: int, outputs: int, kernel: int, side: int, batch: int, groups: int = 1
) -> Layer:
    module = nn.Conv2d(inputs * groups, outputs * groups, kernel, padding=3, groups=groups)
    image = torch.empty(batch, inputs * groups, side, side, device="meta", requires_grad=True)
    (layer,) = Traced(module.to("meta"), image).graph.layers
    return layer


class _Together(nn.Module):
    """Several cases, each on inputs of its own: read at once in a third of the time."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = nn.ModuleList(case.module for case in cases)
        self.counts = [len(case.shapes) for case in cases]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(inputs)
        return tuple(
            module(*islice(given, count))
            for module, count in zip(self.cases, self.counts, strict=True)
        )


@cache
def _drawn() -> tuple[Layer, ...]:
    """Return the layers that a calibration would time, of a small draw."""
    found = []
    cases = draw_cases(0.1)
    for first in range(0, len(cases), 24):
        some = cases[first : first + 24]
        graph = Traced(
            _Together(some),
            tuple(each for case in some for each in case.example(torch.channels_last)),
        ).graph
        own: dict[str, Layer] = {}
        for layer in graph.layers:
            if not layer.is_free:
                own[layer.scope[0]] = layer  # the last one stays
        found += own.values()
    assert len(found) == len(cases)
    return tuple(found)


@cache
def _samples() -> tuple[Sample, ...]:
    """Layers of an imaginary device with a law of its own, which ours is not told."""
    noise = np.random.default_rng(0)
    samples = []
    for layer in _drawn():

        def seconds(work: Work, layer: Layer = layer) -> float:
            moved = work.read + work.written
            law = arithmetic(layer, work) / 2e10 + moved / 5e9 * (1 + (moved > 1e6)) + 1e-5
            return law * float(noise.uniform(0.95, 1.05))

        samples.append(Sample(layer, LayerTime(seconds(layer.forward), seconds(layer.backward))))
    return tuple(samples)


@cache
def _known() -> Hardware:
    """The imaginary device after its calibration."""
    return learn(_samples(), replace(TOY, measured="a Sunday"), LayerTime(1.25, 0.5))


@cache
def _models() -> tuple[CostModel, ...]:
    shipped = cost_model(load_hardware("cpu"))
    return Roofline(TOY), cost_model(_known()), shipped


@pytest.mark.slow
def test_the_layers_of_a_calibration_can_be_traced() -> None:
    kinds = {layer.kind for layer in _drawn()}
    assert {"convolution", "native_batch_norm", "max_pool2d_with_indices"} <= kinds
    assert {"_scaled_dot_product_flash_attention_for_cpu", "mul", "gelu"} <= kinds


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    layer = _convolution(16, 16, 3, 32, 1)
    work = layer.forward
    slow_arithmetic = replace(TOY, bandwidth=1e15)
    slow_memory = replace(TOY, flops={"float32": 1e15})
    assert Roofline(slow_arithmetic).time(layer).forward == pytest.approx(1e-6 + work.flops / 1e9)
    moved = work.read + work.written
    assert Roofline(slow_memory).time(layer).forward == pytest.approx(1e-6 + moved / 1e8)


def test_a_dtype_without_arithmetic_is_refused() -> None:
    layer = _convolution(1, 1, 3, 8, 1)
    double = replace(layer, outputs=(replace(layer.outputs[0], dtype="float64"),))
    with pytest.raises(PathosegError, match="no FLOP/s for float64") as raised:
        Roofline(TOY).time(double)
    assert "float32" in raised.value.hint


def test_an_opaque_layer_may_return_whole_numbers_first() -> None:
    layer = _convolution(1, 1, 3, 8, 1)
    indices = replace(layer.outputs[0], dtype="int64")
    both = replace(layer, outputs=(indices, *layer.outputs))
    assert Roofline(TOY).peak(both) == Roofline(TOY).peak(layer)


@pytest.mark.slow
def test_without_a_fit_a_note_says_that_nothing_was_measured() -> None:
    for name in ("v100", "a100", "h200"):
        assert "nothing was measured" in cost_model(load_hardware(name)).note
    assert "a Sunday" in cost_model(_known()).note


@pytest.mark.slow
@settings(max_examples=40)  # those of networks and of a calibration are priced below
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.sampled_from([1, 3, 5, 7]),
    st.integers(1, 512),
    st.integers(1, 64),
    st.sampled_from([1, 1, 2, 8]),
)
def test_no_prediction_is_negative(
    inputs: int, outputs: int, kernel: int, side: int, batch: int, groups: int
) -> None:
    layer = _convolution(inputs, outputs, kernel, side, batch, groups)
    for model in _models():
        time = model.time(layer)
        assert 0 <= time.forward < np.inf
        assert 0 <= time.backward < np.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_layer_of_a_network_has_a_time(name: str) -> None:
    for layer in small_graph(name).layers:
        for model in _models():
            time = model.time(layer)
            assert min(time.forward, time.backward) >= 0
        time = _models()[1].time(layer)
        assert (time.forward > 0) == bool(layer.forward.written)


@pytest.mark.parametrize("make", TRACEABLE)
def test_every_layer_of_an_odd_network_has_a_time(make: type[nn.Module]) -> None:
    """Price layers without an output, too, such as a write into a slice."""
    models = [cost_model(load_hardware(name)) for name in ("cpu", "h100")]
    for layer in Traced(between(make()), torch.empty(2, 3, 32, 32)).graph.layers:
        for model in models:
            time = model.time(layer)
            assert min(time.forward, time.backward) >= 0


@pytest.mark.slow
def test_a_fit_finds_a_law() -> None:
    samples = _samples()
    rest, held_out = samples[::2], samples[1::2]
    known = learn(rest, TOY)
    assert known.fit
    model = Analytical(known, known.fit)
    off = [abs(model.alone(each.layer).forward / each.time.forward - 1) for each in held_out]
    assert np.mean(off) < 0.25


@pytest.mark.slow
def test_what_a_sequence_adds_scales_all_times() -> None:
    known = _known()
    assert known.fit
    model = Analytical(known, known.fit)
    layer = _convolution(16, 16, 3, 32, 1)
    alone, among = model.alone(layer), model.time(layer)
    assert among.forward == pytest.approx(1.25 * alone.forward)
    assert among.backward == pytest.approx(0.5 * alone.backward)


class _Attention(nn.Module):
    def forward(self, parts: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(parts, parts, parts)


def test_attention_is_priced_by_its_own_fit_or_as_a_product_where_none_was_measured() -> None:
    known = _known()
    assert known.fit
    parts = torch.empty(1, 4, 96, 64, device="meta", requires_grad=True)
    (layer,) = Traced(_Attention(), parts).graph.layers
    assert family(layer) == ATTENTION
    regressions = known.fit.regressions
    product = {f"{ATTENTION} {name}": regressions[f"product {name}"] for name in PASSES}
    older = {name: each for name, each in regressions.items() if not name.startswith(ATTENTION)}
    own, as_product, fallen_back = (
        Analytical(known, replace(known.fit, regressions=some)).time(layer)
        for some in (regressions, {**regressions, **product}, older)
    )
    assert fallen_back == as_product
    assert own != as_product


def test_the_backward_of_a_grouped_convolution_is_not_overcounted() -> None:
    layer = _convolution(1, 1, 3, 16, 1, groups=64)
    assert arithmetic(layer, layer.backward) <= 2 * layer.forward.flops
