"""Tests the memory model against torch's CPU allocator, which really runs each stage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from benchmarks.networks.resnet import resnet50
from benchmarks.networks.transformer import transformer
from benchmarks.networks.vgg import vgg19
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace, vector_lanes
from pathoseg.parallel.planning.memory_model import MemoryModel, Workspace
from pathoseg.parallel.retention.policy_options import AllowedPolicies, retain
from pathoseg.parallel.retention.policy_search import Chooser
from pathoseg.parallel.retention.stage_liveness import stage_facts, units_of
from pathoseg.parallel.schedule.costs import Link
from tests.parallel.networks.small import SMALL, short_amoebanet, small_graph
from tests.parallel.networks.stages import (
    allocated,
    allocated_by_stage,
    cut_places,
    run_on_messages,
    saved_by_hooks,
)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(3, width=16, depth=3), (1, 3, 128, 128)),
    "unet-group-norm": (lambda: UNet(3, width=16, depth=3, norm="group"), (2, 3, 64, 64)),
    "resnet20-v2": (lambda: ResNetV2(3, depth=20), (1, 3, 128, 128)),
    "resnet20-v2-tiles": (lambda: ResNetV2(3, "classify", depth=20), (2, 3, 64, 64)),
    "resnet50": (lambda: resnet50(width=1 / 2, blocks=(1, 1, 1, 1)), (2, 3, 128, 128)),
    "vgg19": (lambda: vgg19(width=1 / 4), (2, 3, 112, 112)),
    "amoebanet-d": (lambda: short_amoebanet(64), (1, 3, 128, 128)),
    "transformer": (lambda: transformer(64, heads=4, blocks=3), (4, 64, 64)),
}

FULL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(2), (1, 3, 128, 128)),
    "resnet110-v2": (lambda: ResNetV2(2, depth=110), (1, 3, 64, 64)),
}


def _workspace() -> Workspace:
    lanes = vector_lanes()
    if lanes is None:
        pytest.skip("oneDNN's blocks of channels are known for AVX2 and AVX-512")
    return cpu_workspace(lanes, torch.get_num_threads())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_of_stages_are_the_allocators(name: str) -> None:
    make, shape = NETWORKS[name]
    traced = Traced(make(), torch.randn(shape))
    model = MemoryModel(traced.graph, fresh_gradients=True, workspace=_workspace())
    size = len(traced.graph.layers)
    places = [0, *cut_places(traced.graph), size]
    third = len(places) // 3
    for bounds in ([0, size], [0, places[third], places[2 * third], size]):
        for first, stop in pairwise(bounds):
            traced.model.zero_grad()
            really = allocated(lambda layers=range(first, stop): run_on_messages(traced, layers))
            stage = model.stage(range(first, stop))
            assert stage.peak() - stage.weights == pytest.approx(really, rel=0.01)


RETAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(3, width=16, depth=3), (1, 3, 128, 128)),
    "resnet29-v2": (lambda: ResNetV2(2, depth=29), (1, 3, 64, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RETAINED)
def test_peaks_of_what_is_recomputed_are_the_allocators(name: str) -> None:
    make, shape = RETAINED[name]
    traced = Traced(make(), torch.randn(shape))
    graph = traced.graph
    whole = range(len(graph.layers))
    model = MemoryModel(graph, fresh_gradients=True, workspace=_workspace())
    received = model.stage(whole).received
    # Where layers are equally slow the fewest are recomputed.
    times = [1.0] * len(whole)
    facts = stage_facts(graph, whole, model.by_layer(whole), (times, times))
    chooser = Chooser(facts, Link(), AllowedPolicies(offload=False))
    everything = retain(facts, ActivationPolicy())
    for share in (1.0, 0.75, 0.6):
        choice = chooser.choose(int(share * everything.peak))
        assert choice is not None
        assert bool(choice.policy.recomputed) == (share < 1)
        traced.model.zero_grad()
        really = allocated_by_stage(traced, choice.policy, shape)
        assert choice.retained.peak + received == pytest.approx(really, rel=0.02)


@pytest.mark.slow
def test_peaks_of_what_is_recomputed_twice_are_the_allocators() -> None:
    """Test that predicted peaks are within 2% of the allocator's, layers recomputed once or twice.

    In a chain of blocks all layers are recomputed once; or the blocks' sums once and the layers
    within blocks twice, which has to take less than half of that.
    """
    traced = Traced(ResNetV2(2, depth=38), torch.randn(1, 3, 128, 128))
    graph = traced.graph
    whole = range(len(graph.layers))
    model = MemoryModel(graph, fresh_gradients=True, workspace=_workspace())
    facts = stage_facts(graph, whole, model.by_layer(whole), ([1.0] * len(whole),) * 2)
    names = [graph.layers[unit.maker].name for unit in units_of(facts)]
    between = tuple(name for name in names if name.endswith(".add"))
    within = tuple(name for name in names if name not in between)
    peaks = []
    for policy in (
        ActivationPolicy((), (*between, *within)),
        ActivationPolicy((), between, within),
    ):
        found = retain(facts, policy)
        traced.model.zero_grad()
        really = allocated_by_stage(traced, policy, (1, 3, 128, 128))
        assert found.peak + model.stage(whole).received == pytest.approx(really, rel=0.02)
        peaks.append(really)
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_networks_save_and_peak_as_they_really_do(name: str) -> None:
    make, shape = FULL[name]
    traced = Traced(make(), torch.randn(shape))
    whole = range(len(traced.graph.layers))
    assert traced.graph.saved_bytes() == saved_by_hooks(traced.model, torch.randn(shape))
    stage = MemoryModel(traced.graph, fresh_gradients=True, workspace=_workspace()).stage(whole)
    really = allocated(lambda: run_on_messages(traced, whole))
    assert stage.peak() - stage.weights == pytest.approx(really, rel=0.01)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_of_stages_are_those_of_cuda(name: str) -> None:
    make, (_, *sizes) = NETWORKS[name]
    traced = Traced(make().cuda(), torch.randn(4, *sizes))
    size = len(traced.graph.layers)
    places = cut_places(traced.graph)
    place = places[len(places) // 3]
    for layers in (range(size), range(place), range(place, size)):
        run_on_messages(traced, layers, "cuda")  # what libraries set up once
        traced.model.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_on_messages(traced, layers, "cuda")
        really = torch.cuda.max_memory_allocated() - before
        stage = MemoryModel(traced.graph, fresh_gradients=True).stage(layers)
        assert stage.peak() - stage.weights == pytest.approx(really, rel=0.05)


@pytest.mark.parametrize("name", SMALL)
def test_stages_keep_what_the_whole_keeps(name: str) -> None:
    graph = small_graph(name)
    model, size = MemoryModel(graph), len(graph.layers)
    whole = model.stage(range(size))
    saved = {storage for layer in graph.layers for storage in layer.saved}
    given = [graph.storages[storage] for storage in saved if graph.storages[storage].layer < 0]
    assert whole.activations + sum(storage.bytes for storage in given) == graph.saved_bytes()
    assert whole.received == sum(value.bytes for value in graph.inputs.values())
    place = cut_places(graph)[-1]
    halves = [model.stage(range(place)), model.stage(range(place, size))]
    assert sum(half.parameters for half in halves) == whole.parameters == graph.parameter_bytes()
    assert sum(half.buffers for half in halves) == whole.buffers
    assert sum(half.activations + half.received for half in halves) >= whole.activations


def test_weights_count_what_the_optimizer_keeps() -> None:
    network = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    network[0].requires_grad_(False)
    graph = Traced(network, torch.randn(2, 8)).graph
    frozen, trained = 4 * 8 * 8, 4 * 8 * 4
    sgd = MemoryModel(graph, optimizer_slots=0).stage(range(2))
    assert (sgd.parameters, sgd.gradients, sgd.optimizer) == (frozen + trained, trained, 0)
    adam = MemoryModel(graph, optimizer_slots=2, fresh_gradients=True).stage(range(2))
    assert (adam.parameters, adam.gradients, adam.optimizer) == (frozen + trained, 0, 2 * trained)


def test_each_microbatch_in_flight_holds_its_own() -> None:
    graph = Traced(UNet(2, width=4, depth=2), torch.randn(1, 3, 16, 16)).graph
    for row in MemoryModel(graph).rows(range(len(graph.layers))):
        one, two, five = (row.peaks(count) for count in (1, 2, 5))
        held = two - one
        assert (five - one == 4 * held).all()
        stop = len(graph.layers)
        assert row.stage(stop).peak(2) == two[stop]
        assert row.stage(stop).received + row.stage(stop).activations == held[stop]


def test_views_in_place_layers_and_norms_are_not_counted_twice() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
    )
    graph = Traced(network, torch.randn(2, 3, 16, 16)).graph
    features, statistics = 2 * 8 * 256 * 4, 2 * 8 * 4
    stage = MemoryModel(graph).stage(range(4))
    # The convolution's output for the norm; the norm's for the ReLU, which writes into it.
    assert stage.activations == 2 * features + statistics
