"""Tests stages that are branches: cuts, orders on them, and plans that are no slower for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.networks.branched import FourResolutions, SplitTransformer, ThreeDecoders
from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.layer_graph import Colocation, LayerGraph
from pathoseg.parallel.graph.reorder import reordered
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.branches import BranchCut, Branches
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.planning.orders import (
    ORDERS,
    SYNTHESISED,
    OrderSetting,
    branch_placement,
    of_branches,
)
from pathoseg.parallel.planning.partition import cut, places
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import least_bytes, least_seconds, plan
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.schedule.action import Edge, chain
from pathoseg.parallel.schedule.costs import Link
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import warm_up
from pathoseg.parallel.schedule.schedule import Placement, linear
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.validate import validate
from tests.parallel.networks.random_graphs import layer_graphs
from tests.parallel.networks.runtime_models import TwoHeads
from tests.parallel.networks.series_parallel import Given, graph_of, series_parallel
from tests.parallel.networks.small import small_graph

NAMED = sorted(name for name, order in ORDERS.items() if of_branches(order))


def _device(beta: float = 0) -> Hardware:
    link = Link(beta, beta)
    return Hardware(
        "toy", "cpu", 2**40, {"float32": 1.0}, 1e9, per_node=8, inside=link, between=link, host=link
    )


def _priced(graph: LayerGraph, times: list[int], beta: float = 0) -> StageCosts:
    return StageCosts(graph, Given(tuple(times)), _device(beta))


def _is_cut(graph: LayerGraph, found: BranchCut, ranks: int) -> None:
    """Fail where a cut is no partition into stages whose graph has no circle."""
    assert sorted(found.line) == list(range(len(graph.layers)))
    assert found.bounds[0] == 0
    assert found.bounds[-1] == len(graph.layers)
    assert all(first < stop for first, stop in pairwise(found.bounds))
    assert set(found.home) == set(range(ranks))
    line = reordered(graph, found.line)  # refuses what is no topological order, or parts ties
    assert set(found.bounds) <= set(places(line))
    assert all(edge.source < edge.target for edge in cut(line, found.bounds).edges)


@settings(max_examples=60, deadline=None)
@given(series_parallel(), st.integers(2, 4), st.integers(1, 4), st.sampled_from([0, 0.1]))
def test_every_cut_is_a_partition_into_a_graph_without_circles(
    drawn: tuple[LayerGraph, list[int]], ranks: int, microbatches: int, beta: float
) -> None:
    graph, times = drawn
    backwards = [2 * time for time in times]
    for found in Branches(graph, times, backwards, Link(beta, beta)).cuts(ranks, microbatches):
        _is_cut(graph, found, ranks)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), layer_graphs(most=12), st.integers(2, 3), st.integers(1, 3))
def test_cuts_of_any_graph_keep_what_must_be_together(
    data: st.DataObject, graph: LayerGraph, ranks: int, microbatches: int
) -> None:
    times = [data.draw(st.integers(0, 5)) for _ in graph.layers]
    for found in Branches(graph, times, times, Link(0.1, 0)).cuts(ranks, microbatches):
        _is_cut(graph, found, ranks)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    series_parallel(),
    st.sampled_from(NAMED),
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from([0, 0.1]),
)
def test_every_order_runs_on_branches_within_its_bounds(
    data: st.DataObject,
    drawn: tuple[LayerGraph, list[int]],
    name: str,
    ranks: int,
    microbatches: int,
    groups: int,
    beta: float,
) -> None:
    graph, times = drawn
    priced, order = _priced(graph, times, beta), ORDERS[name]
    placed = data.draw(st.sampled_from(of_branches(order)))
    for found in priced.branch_cuts(ranks, microbatches, 2**40)[:2]:
        own = priced.reordered(found.line, found.bounds[:-1])
        partition = cut(own.graph, found.bounds)
        costs, edges = own.costs(partition, ranks * groups), stage_edges(partition)
        placement = branch_placement(placed, ranks, found.home)
        setting = OrderSetting(placement, microbatches, costs, edges, 2**40)
        for family in order.families(setting):
            for variant in family:
                lowered = lower(replace(variant.order, groups=groups), edges, variant.recompute)
                validate(lowered)
                made = simulate(lowered, costs)  # raises where nothing can move
                assert least_seconds(setting, groups) <= float(made.time) * (1 + 1e-9)
                # A visit that takes no time holds nothing in the simulation.
                if all(each.forward and each.backward for each in costs.stages):
                    assert least_bytes(setting) <= max(made.peak_memory)


@settings(max_examples=40, deadline=None)
@given(
    series_parallel(),
    st.sampled_from([name for name in NAMED if name != SYNTHESISED]),
    st.integers(2, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 0.1]),
)
def test_a_plan_with_branches_is_never_slower_than_one_without(
    drawn: tuple[LayerGraph, list[int]], name: str, ranks: int, batch: int, beta: float
) -> None:
    graph, times = drawn
    priced = _priced(graph, times, beta)
    wanted = PlanRequest(ranks, 2**40, batch, name)
    chains = plan([priced], replace(wanted, branches="none"))
    assert not any(each.line for each in chains)
    if chains:  # else the batch is too small, or all is one layer
        assert plan([priced], wanted)[0].seconds <= chains[0].seconds


@pytest.mark.slow
def test_two_branches_on_two_ranks_take_the_time_of_one() -> None:
    """A stem, two equal branches and a join; a chain of two stages has to wait at its cut."""
    reads: list[list[int]] = [[], [0], [1], [0], [3], [2, 4]]
    times = [1, 2, 2, 2, 2, 1]
    priced = _priced(graph_of(reads, [1] * 6), times)
    [best, *_] = plan([priced], PlanRequest(2, 2**40, 1))
    assert best.placement == "branched"
    assert best.seconds == pytest.approx(3 * (1 + 4 + 1), rel=1e-6)
    [without, *_] = plan([priced], PlanRequest(2, 2**40, 1, branches="none"))
    assert without.seconds == pytest.approx(3 * 10, rel=1e-6)


def test_warm_up_follows_the_longest_path() -> None:
    fork = (Edge(0, 1), Edge(0, 2), Edge(0, 3), Edge(1, 4), Edge(2, 4), Edge(3, 4))
    assert warm_up(linear(5), fork) == (3, 2, 2, 2, 1)
    assert warm_up(linear(4), chain(4)) == (4, 3, 2, 1)
    # Where a rank holds several stages, these count as one rank together.
    assert warm_up(Placement(2, ((0, 1, 0, 1),)), chain(4)) == (2, 2, 1, 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "three-decoders": lambda: ThreeDecoders(4),
    "resolutions": lambda: FourResolutions(4),
    "split-transformer": lambda: SplitTransformer(16),
}


def _real(graph: LayerGraph) -> StageCosts:
    """Priced by bytes alone, on fast links."""
    times = tuple(1 + layer.forward.read + layer.forward.written for layer in graph.layers)
    known = {layer.name: time for layer, time in zip(graph.layers, times, strict=True)}

    class _Bytes(Given):
        def time(self, layer):  # type: ignore[no-untyped-def]
            return Given((known[layer.name],)).time(replace(layer, name="layer0"))

    return StageCosts(graph, _Bytes(times), _device(1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_cut_into_branches(name: str) -> None:
    with torch.device("meta"):
        graph = Traced(NETWORKS[name](), torch.empty(1, 3, 32, 32)).graph
    priced = _real(graph)
    [best, *_] = plan([priced], PlanRequest(2, 2**40, 1))
    assert best.placement == "branched"
    assert best.seconds < 0.75 * priced.seconds
    again = Plan.from_json(best.to_json())
    assert again == best
    partition = again.partition(reordered(graph, again.line))
    assert partition.stages == again.stages
    with pytest.raises(PathosegError, match="The plan is for"):
        again.partition(graph)


@pytest.mark.parametrize("name", ["inception-v3", "amoebanet-d"])
def test_published_networks_are_cut_into_branches(name: str) -> None:
    graph = small_graph(name)
    priced = _real(graph)
    assert priced.longest_chain < 0.8
    for found in priced.branch_cuts(2, 1, 2**40):
        _is_cut(graph, found, 2)


def test_a_network_without_branches_is_refused_as_that() -> None:
    with pytest.raises(PathosegError, match="UNet has no branches to run side by side") as refused:
        plan([_real(small_graph("unet"))], PlanRequest(2, 2**40, 2, branches="only"))
    assert "branches" in refused.value.hint
    assert plan([_real(small_graph("unet"))], PlanRequest(2, 2**40, 2))[0].line == ()


def test_branches_that_share_weights_are_one_and_say_so() -> None:
    reads: list[list[int]] = [[], [0], [0], [1, 2]]
    graph = replace(graph_of(reads, [1] * 4), ties=(Colocation(1, 2, "all use shared.weight"),))
    with pytest.raises(PathosegError, match=r"has no branches.*all use shared\.weight"):
        plan([_priced(graph, [1, 3, 3, 1])], PlanRequest(2, 2**40, 1, branches="only"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stages": 3}, "cut the model themselves"),
        ({"cut": ("up",)}, "cut the model themselves"),
        ({"order": "data-parallel"}, "whole model on one rank"),
    ],
)
def test_what_contradicts_branches_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(PathosegError, match=problem):
        PlanRequest(2, 2**40, 4, branches="only", **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ((0, 1, 2), "does not name each of the 6 layers once"),
        ((0, 2, 1, 3, 4, 5), "layer2 would run before layer1"),
        ((0, 3, 1, 2, 4, 5), "parts layers that belong together: one cat"),
    ],
)
def test_what_is_no_order_of_the_layers_is_refused(order: tuple[int, ...], problem: str) -> None:
    reads: list[list[int]] = [[], [0], [1], [0], [3], [2, 4]]
    graph = replace(graph_of(reads, [1] * 6), ties=(Colocation(3, 4, "one cat"),))
    with pytest.raises(PathosegError, match=problem):
        reordered(graph, order)


def test_an_order_and_back_leaves_a_graph_as_it_was() -> None:
    graph = Traced(TwoHeads(), torch.empty(1, 3, 16, 16)).graph
    priced = _real(graph)
    [found, *_] = priced.branch_cuts(2, 1, 2**40)
    line = reordered(graph, found.line)
    assert line.numbers == found.line
    back = tuple(found.line.index(position) for position in range(len(graph.layers)))
    assert replace(reordered(line, back), order=()) == graph


class _Heads(nn.Module):
    """Three heads on a stem, whose layers run in the order that is given."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, width, 1)])
            for width in (2, 4, 8)
        )
        self.turns = turns

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [self.stem(images)] * 3
        done = [0] * 3
        for head in self.turns:
            values[head] = self.heads[head][done[head]](values[head])
            done[head] += 1
        return tuple(values)


@cache
def _heads(turns: tuple[int, ...]) -> LayerGraph:
    with torch.device("meta"):
        return Traced(_Heads([*turns]), torch.empty(1, 3, 16, 16)).graph


@settings(max_examples=5, deadline=None)
@given(st.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2]))
def test_memory_in_another_order_is_that_of_a_model_that_runs_so(turns: list[int]) -> None:
    graph, really = _heads((0, 0, 0, 1, 1, 1, 2, 2, 2)), _heads(tuple(turns))
    line = reordered(graph, [graph.position[layer.name] for layer in really.layers])
    assert [layer.inputs for layer in line.layers] == [layer.inputs for layer in really.layers]
    size = len(graph.layers)
    for first in range(size):
        for stop in range(first + 1, size + 1):
            stage = range(first, stop)
            assert MemoryModel(line).stage(stage) == MemoryModel(really).stage(stage)
