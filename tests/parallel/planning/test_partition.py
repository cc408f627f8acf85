"""Tests the cuts against brute force over all cuts, on graphs of any shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.memory_size import memory_text
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.planning.partition import Cutter, MemoryLimit, balance, custom, cut, even
from tests.parallel.networks.random_graphs import layer_graphs
from tests.parallel.networks.series_parallel import graph_of


@pytest.fixture(scope="module")
def unet() -> LayerGraph:
    with torch.device("meta"):
        return Traced(UNet(3, width=8, depth=3), torch.empty(1, 3, 64, 64)).graph


def _every_cut(graph: LayerGraph, stages: int) -> Iterator[Partition]:
    size = len(graph.layers)
    for inner in combinations(range(1, size), stages - 1):
        if not any(tie.first < place <= tie.last for tie in graph.ties for place in inner):
            yield cut(graph, [0, *inner, size])


def _received(partition: Partition, stage: int) -> int:
    return sum(edge.bytes for edge in partition.edges if edge.target == stage)


@pytest.mark.slow
@given(layer_graphs(), st.integers(1, 4), st.floats(0, 2), st.data())
def test_no_cut_is_better_balanced(
    graph: LayerGraph, stages: int, byte_cost: float, data: st.DataObject
) -> None:
    count = len(graph.layers)
    weights = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    cuts = list(_every_cut(graph, stages))
    if not cuts:
        with pytest.raises(PathosegError, match=f"cannot be cut into {stages} stages"):
            balance(graph, stages, weights)
        return

    def worst(partition: Partition) -> float:
        return max(
            sum(weights[layer] for layer in partition.layers(stage))
            + byte_cost * _received(partition, stage)
            for stage in range(stages)
        )

    found = balance(graph, stages, weights, byte_cost=byte_cost)
    assert found in cuts
    least = min(map(worst, cuts))
    assert max(found.loads) == pytest.approx(worst(found)) == pytest.approx(least)
    good = [partition for partition in cuts if worst(partition) <= least * (1 - 1e-9)]
    assert all(found.bytes_sent <= partition.bytes_sent for partition in good)


@pytest.mark.slow
@given(layer_graphs(), st.integers(1, 4), st.integers(0, 400), st.data())
def test_a_cap_is_kept_and_nothing_that_fits_is_refused(
    graph: LayerGraph, stages: int, cap: int, data: st.DataObject
) -> None:
    cuts = list(_every_cut(graph, stages))
    assume(cuts)
    in_flight = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    model = MemoryModel(graph)
    limit = MemoryLimit(cap, tuple(in_flight))

    def peaks(partition: Partition) -> list[int]:
        return [
            model.stage(partition.layers(stage)).peak(in_flight[stage]) for stage in range(stages)
        ]

    def worst(partition: Partition) -> int:
        return max(
            sum(
                graph.layers[layer].forward.flops + graph.layers[layer].backward.flops
                for layer in partition.layers(stage)
            )
            for stage in range(stages)
        )

    fitting = [partition for partition in cuts if max(peaks(partition)) <= cap]
    if not fitting:
        with pytest.raises(PathosegError, match=r"[MK]iB"):
            balance(graph, stages, limit=limit)
        return
    found = balance(graph, stages, limit=limit)
    assert max(peaks(found)) <= cap
    assert worst(found) == min(map(worst, fitting))


@pytest.mark.slow
@given(layer_graphs(), st.integers(1, 4), st.integers(1, 3))
def test_memory_stages_and_places_are_those_of_every_cut(
    graph: LayerGraph, stages: int, in_flight: int
) -> None:
    cuts = list(_every_cut(graph, stages))
    _cuts_at_narrow_places(graph, stages, cuts)
    if not cuts:
        with pytest.raises(PathosegError):
            even(graph, stages)
        return
    _sends_every_value_once_to_each_stage_that_reads_it(graph, cuts)
    found = even(graph, stages)
    assert found in cuts
    assert sum(found.loads) == sum(not layer.is_free for layer in graph.layers)
    _needs_the_least_memory(graph, cuts, in_flight)


def _needs_the_least_memory(graph: LayerGraph, cuts: list[Partition], in_flight: int) -> None:
    """Assert that balanced memory is the least of all cuts, of recomputed stages as of others.

    A recomputed stage holds what it received of each further microbatch in flight.
    """
    model, stages = MemoryModel(graph), cuts[0].stages

    def worst(partition: Partition, in_flight: int) -> int:
        needs = (model.stage(partition.layers(stage)) for stage in range(stages))
        return max(need.peak() + (in_flight - 1) * need.received for need in needs)

    found = balance(graph, stages, "memory")
    assert max(found.loads) == worst(found, 1) == min(worst(each, 1) for each in cuts)
    limit = MemoryLimit(in_flight=(in_flight,) * stages, recompute=True)
    cutter = Cutter(graph, model)
    least = min(worst(each, in_flight) for each in cuts)
    assert max(cutter.balance(stages, "memory", limit).loads) == least
    assert cutter.least_caps(stages, limit)[-1] == least


def _cuts_at_narrow_places(graph: LayerGraph, stages: int, cuts: list[Partition]) -> None:
    cutter = Cutter(graph, most=2)
    if stages > cutter.most_stages:
        with pytest.raises(PathosegError, match="stages"):
            cutter.balance(stages)
        return
    assert cutter.balance(stages) in cuts
    assert cutter.least_caps(stages) >= Cutter(graph).least_caps(stages)


def _sends_every_value_once_to_each_stage_that_reads_it(
    graph: LayerGraph, partitions: Iterable[Partition]
) -> None:
    for partition in partitions:
        stages = partition.stages
        home = {
            graph.layers[layer].name: stage
            for stage in range(stages)
            for layer in partition.layers(stage)
        }
        wanted = {
            (name, home[layer.name])
            for layer in graph.layers
            for name in layer.inputs
            if name in home and home[name] != home[layer.name]
        }
        wanted |= {(name, stages - 1) for name in graph.outputs if home[name] != stages - 1}
        edges = [(edge.value, edge.target) for edge in partition.edges]
        assert len(edges) == len(set(edges))
        assert set(edges) == wanted
        for edge in partition.edges:
            (value,) = graph.made_by(edge.value)
            assert (edge.source, edge.bytes) == (home[edge.value], value.bytes)
            assert edge.gradient == (value.gradient and value.bytes > 0)
        for stage, names in enumerate(partition.inputs):
            reads = any("image" in graph.layers[layer].inputs for layer in partition.layers(stage))
            assert names == (("image",) if reads else ())


def test_a_long_skip_goes_straight_to_its_reader(unet: LayerGraph) -> None:
    partition = custom(unet, ["encoder.1", "encoder.2", "encoder.3", "decoder.1", "decoder.2"])
    assert partition.stages == 6
    skips = {(edge.source, edge.target) for edge in partition.edges if edge.value.endswith("relu2")}
    assert {(0, 5), (1, 4), (2, 3)} <= skips
    top = next(edge for edge in partition.edges if (edge.source, edge.target) == (0, 5))
    assert top.bytes == 8 * 64 * 64 * 4
    assert top.gradient


def test_even_is_worse_than_balanced(unet: LayerGraph) -> None:
    def worst(partition: Partition) -> int:
        work = [layer.forward.flops + layer.backward.flops for layer in unet.layers]
        return max(sum(work[first:stop]) for first, stop in pairwise(partition.bounds))

    assert worst(balance(unet, 4)) < worst(even(unet, 4))


def test_custom_cuts_take_layers_and_modules_in_any_order(unet: LayerGraph) -> None:
    partition = custom(unet, ["decoder.0.convolve", "encoder.2.conv2"])
    names = [unet.layers[first].name for first in partition.bounds[1:-1]]
    assert names == ["encoder.2.conv2", "decoder.0.convolve.conv1"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["encoder.1.conv3"], "no layer or module 'encoder.1.conv3'.*Did you mean encoder.1.conv"),
        (["nonsense"], "draw"),
        (["encoder.1.relu1"], "part encoder.1.norm1 .*writes in place.*before encoder.1.norm1 or"),
        (["encoder"], "without layers"),
        (["head", "head"], "without layers"),
        (["encoder.2", "encoder.2.pool"], "without layers"),
    ],
)
def test_bad_cuts_say_the_hint(unet: LayerGraph, names: list[str], words: str) -> None:
    with pytest.raises(PathosegError, match=words):
        custom(unet, names)


def test_a_cap_below_the_largest_layer_names_it(unet: LayerGraph) -> None:
    with pytest.raises(PathosegError, match=r"^encoder\.3\.conv2, which cannot be cut"):
        balance(unet, 4, limit=MemoryLimit(2**18))


def test_a_cap_that_no_cut_keeps_says_which_would(unet: LayerGraph) -> None:
    needed = max(balance(unet, 2, "memory").loads)
    with pytest.raises(PathosegError, match=f"ranks with {memory_text(needed)}"):
        balance(unet, 2, limit=MemoryLimit(int(needed) - 1))
    assert balance(unet, 2, limit=MemoryLimit(int(needed))).stages == 2


@pytest.mark.parametrize("weights", [[1.0], [-1.0] * 52, [float("nan")] * 52])
def test_weights_that_are_none_are_refused(unet: LayerGraph, weights: list[float]) -> None:
    with pytest.raises(PathosegError, match="one number, 0 or more"):
        balance(unet, 2, weights)


def _thousand_layers() -> LayerGraph:
    """A chain with a residual connection over every three layers, in three groups.

    As in a ResNet, layers of all groups take as long, and those of the first hold the most.
    """
    reads: list[list[int]] = [[]]
    reads += [[at - 1] if at % 3 else [at - 1, at - 3] for at in range(1, 1002)]
    graph = graph_of(reads, [2**20 >> (2 * (at // 334)) for at in range(1002)])
    layers = tuple(
        replace(
            layer,
            forward=replace(layer.forward, flops=100 + at % 5),
            backward=replace(layer.backward, flops=200),
            saved=tuple(source + 1 for source in reads[at]),
        )
        for at, layer in enumerate(graph.layers)
    )
    storages = tuple(replace(storage, until=len(layers)) for storage in graph.storages)
    return replace(graph, layers=layers, storages=storages)


@pytest.mark.slow
def test_a_thousand_layers_are_cut() -> None:
    graph = _thousand_layers()
    assert len(graph.layers) > 1000
    model = MemoryModel(graph)
    cutter = Cutter(graph, model)

    def peak(partition: Partition) -> int:
        return max(model.stage(partition.layers(stage)).peak() for stage in range(8))

    free = cutter.balance(8)
    assert max(free.loads) < 1.05 * sum(free.loads) / 8
    cap = int(0.7 * peak(free))
    assert peak(cutter.balance(8, limit=MemoryLimit(cap))) <= cap


class _ReturnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(self.first(images)), images


def test_the_last_stage_is_given_an_input_that_the_model_returns() -> None:
    graph = Traced(_ReturnsItsInput(), torch.empty(1, 3, 8, 8)).graph
    [image] = graph.inputs
    assert cut(graph, (0, 1, 2)).inputs == ((image,), (image,))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(PathosegError, match="Identity has no layers"):
        Traced(nn.Identity(), torch.empty(1, 3, 8, 8))
