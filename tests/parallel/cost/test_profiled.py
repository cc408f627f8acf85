"""Tests the profile of a model: what it times, what it leaves alone, and what it falls back to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import LayerTime
from pathoseg.parallel.cost.timing import Profiled, distinct, measure_sequence, signature
from pathoseg.parallel.graph.layer_graph import Layer
from pathoseg.parallel.graph.traced import Traced
from tests.parallel.networks.small import small_traced


class _Guess:
    """Prices every layer alike, and remembers whom it was asked of."""

    note = "a guess"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def time(self, layer: Layer) -> LayerTime:
        self.asked.append(layer.kind)
        return LayerTime(7.0, 11.0)


ALONE = LayerTime(1.0, 1.0)


@pytest.mark.parametrize("name", ["unet", "resnet20-v2", "inception-v3", "transformer"])
def test_every_layer_of_the_model_has_a_time(name: str) -> None:
    traced = small_traced(name)
    profile = Profiled(traced, _Guess(), ALONE, rounds=1)
    for layer in traced.graph.layers:
        time = profile.time(layer)
        assert time.forward > 0 or not layer.forward.written
        assert time.backward >= 0


def test_layers_that_do_the_same_are_timed_once() -> None:
    graph = Traced(UNet(3, width=8, depth=3), torch.zeros(1, 3, 64, 64)).graph
    working = [layer for layer in graph.layers if layer.forward.written]
    found = distinct(graph)
    assert len(found) < len(working)
    assert {signature(layer) for layer in working} == found.keys()
    convolutions = {
        (layer.attributes["input"], layer.attributes["weight"])
        for layer in working
        if layer.kind == "convolution"
    }
    timed = [graph.layers[at] for at in found.values() if graph.layers[at].kind == "convolution"]
    assert {(layer.attributes["input"], layer.attributes["weight"]) for layer in timed} == (
        convolutions
    )


def test_the_factor_of_a_sequence_scales_what_was_timed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    traced = Traced(model, torch.zeros(1, 3, 16, 16))
    profile = Profiled(traced, _Guess(), LayerTime(2.0, 3.0), rounds=1)
    layer = traced.graph.layers[0]
    timing = profile.timings[signature(layer)]
    assert profile.time(layer) == LayerTime(
        2 * timing.forward.quartile, 3 * timing.backward.quartile
    )


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    Profiled(Traced(model, torch.zeros(2, 3, 16, 16)), _Guess(), ALONE, rounds=1)
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


class _Lookup(nn.Module):
    """Reads whole numbers, which cannot be made up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(self.table(words))
        return made


def test_what_cannot_run_alone_is_priced_otherwise() -> None:
    guess = _Guess()
    traced = Traced(_Lookup(), torch.zeros(5, dtype=torch.int64))
    profile = Profiled(traced, guess, ALONE, rounds=1)
    lookup, linear = (layer for layer in traced.graph.layers if layer.forward.written)
    assert profile.time(lookup) == LayerTime(7.0, 11.0)
    assert guess.asked == ["embedding"]
    assert profile.time(linear) != LayerTime(7.0, 11.0)
    assert "a guess" in profile.note


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Conv2d(3, 4, 3)
    traced = Traced(model, torch.empty(1, 3, 8, 8, device="meta"))
    with pytest.raises(PathosegError, match="no memory") as raised:
        Profiled(traced, _Guess(), ALONE)
    assert "device" in raised.value.hint


@pytest.mark.slow
def test_a_sequence_takes_a_time_of_the_order_of_its_layers() -> None:
    factor = measure_sequence(torch.device("cpu"), rounds=1)
    assert 0.1 < factor.forward < 10
    assert 0.1 < factor.backward < 10
