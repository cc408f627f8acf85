"""Tests the layers of one strip against a real strip: its memory by torch's CPU allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pathoseg.errors import PathosegError
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace, vector_lanes
from pathoseg.parallel.planning.memory_model import MemoryModel, Workspace
from pathoseg.parallel.retention.policy_options import AllowedPolicies, retain
from pathoseg.parallel.retention.policy_search import Chooser
from pathoseg.parallel.retention.stage_liveness import stage_facts
from pathoseg.parallel.schedule.costs import Link
from pathoseg.parallel.shards.sharding import Sharding
from pathoseg.parallel.shards.strip import locals_of
from pathoseg.parallel.shards.strip_graph import Nowhere, strip_graph
from tests.parallel.networks.stages import allocated, allocated_by_stage, cut_places

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "unet": (lambda: UNet(3, width=16, depth=3), 128),
    "unet-group-norm": (lambda: UNet(3, width=16, depth=3, norm="group"), 128),
    "resnet20-v2": (lambda: ResNetV2(3, depth=20), 144),
}


@cache
def _traced(name: str) -> Traced:
    """Read a network; whoever runs it finds the gradients of the test before."""
    make, side = NETWORKS[name]
    return Traced(make(), torch.randn(1, 3, side, side))


def _workspace() -> Workspace:
    lanes = vector_lanes()
    if lanes is None:
        pytest.skip("oneDNN's blocks of channels are known for AVX2 and AVX-512")
    return cpu_workspace(lanes, torch.get_num_threads())


def _run_strip(traced: Traced, layers: range, shards: int, rank: int) -> None:
    """One forward and backward of a stage's strip, whose neighbours send anything."""
    sharding = Sharding(Nowhere(rank, shards), traced.graph)
    segment = traced.segment(layers)
    received = {}
    for name in segment.inputs:
        (value,) = traced.graph.made_by(name)
        shape = list(value.shape)
        if len(shape) > 2:
            shape[-2] = sharding.rows(shape[-2]).height
        message = torch.ones(shape, dtype=getattr(torch, value.dtype))
        received[name] = sharding.received(name, message.requires_grad_(value.gradient))
    sent = locals_of(segment(received, None, sharding.run))
    roots = [value for value in sent.values() if value.requires_grad]
    edges = [get_gradient_edge(root) for root in roots]
    shapes = [root.shape for root in roots]
    del sent, roots
    torch.autograd.backward(edges, [torch.ones(shape) for shape in shapes])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_of_strips_are_the_allocators(name: str, shards: int) -> None:
    traced = _traced(name)
    strip = strip_graph(traced, shards)
    model = MemoryModel(strip.graph, fresh_gradients=True, workspace=_workspace())
    size = len(strip.graph.layers)
    places = cut_places(traced.graph)
    middle = places[len(places) // 2]
    for layers in (range(size), range(middle), range(middle, size)):
        traced.model.zero_grad()
        really = allocated(lambda layers=layers: _run_strip(traced, layers, shards, 1 % shards))
        stage = model.stage(layers)
        found = stage.peak() - stage.weights
        # Three strips' lowest convolutions take less than the workspace counted for them.
        assert 0.99 * really <= found <= (1.03 if shards == 3 else 1.01) * really


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "unet-group-norm"])
def test_peaks_of_strips_that_are_recomputed_are_the_allocators(name: str) -> None:
    traced = _traced(name)
    strip = strip_graph(traced, 2)
    layers = range(len(strip.graph.layers))
    model = MemoryModel(strip.graph, fresh_gradients=True, workspace=_workspace())
    facts = stage_facts(strip.graph, layers, model.by_layer(layers), ([1.0] * len(layers),) * 2)
    chooser = Chooser(facts, Link(), AllowedPolicies(offload=False))
    everything = retain(facts, ActivationPolicy())
    for share in (0.75, 0.6):
        choice = chooser.choose(int(share * everything.peak))
        assert choice is not None
        assert choice.policy.recomputed
        traced.model.zero_grad()
        sharding = Sharding(Nowhere(strip.rank, 2), traced.graph)
        really = allocated_by_stage(traced, choice.policy, (1, 3, 64, 128), sharding)
        predicted = choice.retained.peak + model.stage(layers).received
        assert really <= (predicted + sum(strip.heard.values())) * 1.02
        assert really >= 0.98 * predicted


def test_layers_that_save_nothing_large_are_not_offloaded() -> None:
    """Test that the choice offloads no layer of which no storage is large enough to be copied."""
    with torch.device("meta"):
        traced = Traced(UNet(2, width=8), torch.empty(1, 3, 192, 192))
    graph = strip_graph(traced, 2).graph
    layers = range(len(graph.layers))
    peaks = MemoryModel(graph).by_layer(layers)
    facts = stage_facts(graph, layers, peaks, ([1e-3] * len(layers),) * 2)
    chooser = Chooser(facts, Link(1e-6, 1e-10), AllowedPolicies())
    peak = retain(facts, ActivationPolicy()).peak
    for share in (0.7, 0.5):
        choice = chooser.choose(int(share * peak))
        assert choice is not None
        assert choice.policy.offloaded
        assert choice.retained.tensors.keys() == set(choice.policy.offloaded)


def test_layers_that_are_read_again_are_the_same() -> None:
    traced = Traced(UNet(3, width=4, depth=1), torch.randn(1, 3, 32, 32))
    assert traced.measured(lambda name, tensor: tensor) == traced.graph


def test_a_strip_knows_what_is_gathered_and_where_it_would_be_too_low() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(4))
    traced = Traced(model, torch.randn(1, 3, 32, 32))
    found = strip_graph(traced, 4)
    assert found.rank == 1, "one with two neighbours"
    assert found.gathered == {"1": "adaptive_avg_pool2d"}
    deep = Traced(nn.Conv2d(3, 4, 7, padding=9, dilation=3), torch.randn(1, 3, 32, 32))
    with pytest.raises(PathosegError, match="looks 9 rows beyond its strip"):
        strip_graph(deep, 4)


class Shifted(nn.Module):
    """Takes numbers of each tile beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.of = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(5, 4)

    def forward(self, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(images) + self.of(numbers)[:, :, None, None]
        return made


def test_inputs_without_rows_are_whole_on_each_strip() -> None:
    example = {"images": torch.randn(2, 3, 32, 32), "numbers": torch.randn(2, 5)}
    found = strip_graph(Traced(Shifted(), example), 2)
    shapes = [value.shape for value in found.graph.inputs.values()]
    assert shapes == [(2, 3, 16, 32), (2, 5)]
    assert not found.gathered


class Writing(nn.Module):
    """Writes into rows that it has cut out, of what it reads again or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), again

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.first(images)
        part = first[:, :, 2:-2].mul_(0.5)
        made: torch.Tensor = self.last(first if self.again else part)
        return made


def test_a_write_that_a_strip_would_miss_is_refused_ahead_of_training() -> None:
    assert not strip_graph(Traced(Writing(again=False), torch.randn(1, 3, 12, 6)), 2).gathered
    with pytest.raises(PathosegError, match="writes in place into a part of a tile"):
        strip_graph(Traced(Writing(again=True), torch.randn(1, 3, 12, 6)), 2)
