"""Tests the planner: what it returns runs as it says, fits, and nothing it left out was faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import Roofline
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.orders import AUTO, ORDERS, PLACEMENTS, OrderSetting
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import least_bytes, least_seconds, plan
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.schedule.action import Edge, numbered
from pathoseg.parallel.schedule.costs import Costs, Link, StageCost
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.validate import validate

SLOW = 1e-6  # seconds a byte
DEVICE = Hardware(
    "toy",
    "cpu",
    2**30,
    {"float32": 1e10},
    1e9,
    per_node=4,
    inside=Link(1e-6, 1e-11),
    between=Link(1e-6, 1e-10),
    host=Link(1e-6, 1e-10),
)


@cache
def _graph(microbatch: int, side: int) -> LayerGraph:
    with torch.device("meta"):
        return Traced(UNet(3, width=8, depth=3), torch.empty(microbatch, 3, side, side)).graph


def _price(device: Hardware = DEVICE, microbatch: int = 1, side: int = 64) -> StageCosts:
    return StageCosts(_graph(microbatch, side), Roofline(device), device)


@cache
def _linked(beta: float) -> StageCosts:
    """The U-Net where all links take so many seconds a byte."""
    return _price(replace(DEVICE, inside=Link(0, beta), between=Link(0, beta)))


UNET = _price()
WHOLE = UNET.cutter.least_caps(1)[0]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 6),
    st.floats(0.2, 4),
    st.integers(1, 8),
    st.sampled_from([AUTO, *ORDERS]),
)
def test_a_plan_runs_as_it_says(ranks: int, share: float, batch: int, order: str) -> None:
    request = PlanRequest(ranks, int(share * WHOLE), batch, order)
    plans = plan([UNET], request)
    assert all(earlier.seconds <= later.seconds for earlier, later in pairwise(plans))
    for each in plans:
        assert each.order == order or order == AUTO
        assert each.ranks <= ranks
        assert each.batch == batch
        assert max(each.memory) <= request.memory
        validate(each.schedule)
        partition = each.partition(UNET.graph)
        costs = UNET.costs(partition, each.ranks, each.retention, each.window)
        found = simulate(each.schedule, costs)
        assert (float(found.time), found.peak_memory) == (each.seconds, each.memory)
        assert found.host_memory == each.host_memory
        assert found.bytes_sent == each.messages
        assert Plan.from_json(each.to_json()) == each


@cache
def _chain() -> StageCosts:
    """A network of which a plan takes seconds where layers are offloaded and recomputed."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for channels, following in ((8, 16), (16, 4), (4, 8)):
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, following, 3)]
    with torch.device("meta"):
        graph = Traced(nn.Sequential(*layers), torch.empty(1, 3, 64, 64)).graph
    return StageCosts(graph, Roofline(DEVICE), DEVICE)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["sequential", "gpipe", "1f1b"]),
    st.integers(1, 3),
    st.floats(0.2, 1),
    st.floats(0.2, 1),
)
def test_what_fits_in_some_memory_fits_in_more(
    order: str, ranks: int, one: float, other: float
) -> None:
    def planned(memory: int) -> list[Plan]:
        return plan([_chain()], PlanRequest(ranks, memory, 4, order))

    whole = max((max(each.memory) for each in planned(2**40)), default=2**20)
    smaller, larger = (planned(int(share * whole)) for share in sorted((one, other)))
    assert larger or not smaller


def test_a_byte_less_than_a_plan_takes_is_planned_for_too() -> None:
    """The next leaner policy takes thousands of bytes less, of which one alone was asked for."""
    request = PlanRequest(2, 2**40, 4, "gpipe", ways=AllowedPolicies(offload=False))
    found = plan([_chain()], request)
    for _ in range(6):
        memory = max(found[0].memory)
        found = plan([_chain()], replace(request, memory=memory - 1))
        assert found
        assert max(found[0].memory) < memory - 1000


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(ORDERS)),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0, 1e-11, SLOW]),
)
def test_no_order_beats_the_bounds(
    name: str, width: int, microbatches: int, groups: int, beta: float
) -> None:
    order = ORDERS[name]
    priced = _linked(beta)
    for placement in order.placements:
        ranks = width if order.staged else 1
        stages = 2 * ranks if placement == "folded" else ranks
        partition = priced.cutter.balance(stages)
        costs = priced.costs(partition, ranks * groups)
        edges = stage_edges(partition)
        setting = OrderSetting(PLACEMENTS[placement](ranks), microbatches, costs, edges, 2**40)
        for family in order.families(setting):
            for variant in family:
                lowered = lower(replace(variant.order, groups=groups), edges, variant.recompute)
                found = simulate(lowered, costs)
                assert least_seconds(setting, groups) <= float(found.time) * (1 + 1e-9)
                assert least_bytes(setting) <= max(found.peak_memory)


@st.composite
def _stage_graphs(draw: st.DrawFn, stages: int) -> tuple[Costs, tuple[Edge, ...]]:
    """Stages of any cost, some of which read each other: branches, skips, ends that none reads."""
    numbers = st.integers(0, 6)
    costs = [
        StageCost(draw(numbers), draw(numbers), gradients=draw(numbers), step=draw(numbers))
        for _ in range(stages)
    ]
    pairs = [(source, target) for target in range(stages) for source in range(target)]
    edges = numbered(draw(st.lists(st.sampled_from(pairs), unique=True)))
    link = Link(draw(st.sampled_from([0, 1])), draw(st.sampled_from([0, 1])))
    return Costs(tuple(costs), dict.fromkeys(edges, 1), link), edges


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(ORDERS)), st.integers(1, 4), st.integers(1, 2))
def test_no_order_beats_the_bound_where_stages_branch(
    data: st.DataObject, name: str, microbatches: int, groups: int
) -> None:
    order = ORDERS[name]
    placement = PLACEMENTS[data.draw(st.sampled_from(order.placements))]
    ranks = data.draw(st.integers(2, 4)) if order.staged else 1
    home = placement(ranks)
    if home.stages > 1:
        costs, edges = data.draw(_stage_graphs(home.stages))
    else:
        costs, edges = Costs.equal(1, 1, 2), ()
    setting = OrderSetting(home, microbatches, costs, edges, 2**40)
    for family in order.families(setting):
        for variant in family:
            lowered = lower(replace(variant.order, groups=groups), edges, variant.recompute)
            found = simulate(lowered, costs)
            assert least_seconds(setting, groups) <= float(found.time) * (1 + 1e-9)


class _Forked(nn.Module):
    """Four equal branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(16, 16, 9, padding=4) for _ in range(4))
        self.join = nn.Conv2d(64, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = self.stem(images)
        joined: torch.Tensor = self.join(torch.cat([each(stem) for each in self.branches], 1))
        return joined


def test_branches_are_planned_side_by_side() -> None:
    """One microbatch on six ranks takes the time of its longest chain: the bound is exact."""
    free = replace(DEVICE, inside=Link(), between=Link())
    with torch.device("meta"):
        graph = Traced(_Forked(), torch.empty(1, 3, 64, 64)).graph
    priced = StageCosts(graph, Roofline(free), free)
    [best, *_] = plan([priced], PlanRequest(6, 2**40, 1, "gpipe"))
    assert priced.critical_seconds <= best.seconds < 0.35 * priced.seconds
    partition = best.partition(graph)
    costs, edges = priced.costs(partition, best.ranks), stage_edges(partition)
    setting = OrderSetting(PLACEMENTS[best.placement](best.ranks), 1, costs, edges, 2**40)
    assert least_seconds(setting, 1) == pytest.approx(best.seconds, rel=0.05)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_update_costs_its_calls(kind: str) -> None:
    """One for each parameter on a CPU, one for all on a GPU; those that are frozen have none."""
    network = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 1) for _ in range(4)))
    network[2].requires_grad_(requires_grad=False)
    graph = Traced(network, torch.empty(1, 3, 8, 8)).graph
    partition = cut(graph, [0, 1, 4])

    def steps(overhead: float) -> list[float]:
        device = replace(DEVICE, device=kind, overhead=overhead)
        costs = StageCosts(graph, Roofline(device), device).costs(partition, 2)
        return [each.step for each in costs.stages]

    calls = [more - less for more, less in zip(steps(1.0), steps(0.0), strict=True)]
    assert calls == pytest.approx([2, 4] if kind == "cpu" else [1, 1])


@pytest.mark.slow
def test_what_fits_on_one_device_is_not_cut() -> None:
    free = _linked(0)
    best, *others = plan([free], PlanRequest(4, 2 * int(WHOLE), 4))
    assert (best.order, best.groups) == ("data-parallel", 4)
    assert {"sequential", "1f1b", "gpipe"} <= {each.order for each in others}
    assert plan([UNET], PlanRequest(1, 2 * int(WHOLE), 4))[0].order == "sequential"
    slow = _linked(SLOW)
    assert plan([slow], PlanRequest(4, 2 * int(WHOLE), 4))[0].order == "sequential"


def test_what_does_not_fit_is_cut() -> None:
    kept = PlanRequest(4, int(0.7 * WHOLE), 4, ways=AllowedPolicies(offload=False, recompute=False))
    best = plan([UNET], kept)[0]
    assert best.stages > 1
    assert plan([UNET], replace(kept, ranks=1, memory=int(WHOLE) - 1)) == []


def test_what_does_not_fit_alone_is_recomputed_or_offloaded() -> None:
    [alone] = plan([UNET], PlanRequest(1, int(0.7 * WHOLE), 4, ways=AllowedPolicies(offload=False)))
    assert alone.order == "sequential"
    assert alone.retention[0].recomputed
    [mixed] = plan([UNET], PlanRequest(1, int(0.7 * WHOLE), 4))
    assert mixed.retention != (ActivationPolicy(),)
    assert mixed.seconds <= alone.seconds
    [keeping] = plan([UNET], PlanRequest(1, int(WHOLE) + 2**20, 4))
    assert keeping.retention == (ActivationPolicy(),)
    assert keeping.seconds < alone.seconds
    big = _price(side=256)
    whole = big.cutter.least_caps(1)[0]
    copied = PlanRequest(1, int(0.8 * whole), 4, ways=AllowedPolicies(recompute=False))
    [away] = plan([big], copied)
    assert away.retention[0].offloaded
    assert not away.retention[0].recomputed
    assert away.host_memory[0] > 0
    assert max(away.memory) <= copied.memory


def test_policies_are_chosen_only_for_what_could_be_fastest_with_all_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    choose = StageCosts.choose

    def watched(self: StageCosts, partition: Partition, stage: int, *rest: Any) -> Any:
        asked.append(partition.stages)
        return choose(self, partition, stage, *rest)

    monkeypatch.setattr(StageCosts, "choose", watched)
    best = plan([_linked(SLOW)], PlanRequest(4, int(0.7 * WHOLE), 4))[0]
    assert (best.order, set(asked)) == ("sequential", {1})


def test_more_ranks_than_stages_are_groups() -> None:
    [best, *_] = plan([UNET], PlanRequest(8, 2**40, 16, "gems-master", stages=4))
    assert (best.stages, best.groups, best.placement) == (4, 2, "mirrored")
    gradients = UNET.costs(best.partition(UNET.graph), 8).stages
    both = [gradients[rank].gradients + gradients[3 - rank].gradients for rank in range(4)]
    # Four copies of each stage: two of each group.
    assert best.sums == pytest.approx([2 * 3 / 4 * size for size in both], abs=2)


@pytest.mark.parametrize("stages", [9, 10, 11])
def test_any_number_of_stages_may_be_asked_for(stages: int) -> None:
    plans = plan([UNET], PlanRequest(11, 2**40, 11, "gpipe", stages=stages))
    assert {each.stages for each in plans} == {stages}


def test_a_prime_number_of_ranks_can_all_have_work() -> None:
    everyone = PlanRequest(11, int(0.5 * WHOLE), 4, "1f1b-recompute", all_ranks=True)
    assert {each.stages for each in plan([UNET], everyone)} == {11}


@pytest.mark.slow
def test_a_given_cut_is_kept() -> None:
    plans = plan([UNET], PlanRequest(4, 2**40, 4, cut=("encoder.1", "decoder.0")))
    assert plans
    for each in plans:
        assert each.stages == 3
        scopes = [UNET.graph.layers[bound].scope for bound in each.bounds[1:-1]]
        assert all(any(name in scope for scope in scopes) for name in ("encoder.1", "decoder.0"))


@pytest.mark.slow
def test_the_larger_microbatch_is_taken_where_it_is_faster() -> None:
    costly = replace(DEVICE, overhead=0.1)
    sizes = [_price(costly, 1), _price(costly, 4)]
    assert plan(sizes, PlanRequest(1, 2**40, 4))[0].microbatch == 4
    assert plan(sizes[:1], PlanRequest(1, 2**40, 4))[0].microbatch == 1


def test_counts_may_be_of_numpy() -> None:
    assert PlanRequest(2, np.int64(2**40), np.int32(4)).batch == 4  # type: ignore[arg-type]  # as a program has them


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"memory": 0}, "memory is 0"),
        ({"memory": "1 GiB"}, "memory is '1 GiB'"),
        ({"stages": 0}, "stages is 0"),
        ({"batch": 3}, "no multiple of a microbatch of 2"),
        ({"order": "gems"}, "no order 'gems'"),
        ({"cut": ("nowhere",)}, "no layer or module 'nowhere'"),
        ({"stages": 99}, "cannot be cut into 99 stages"),
        ({"stages": 3, "cut": ("decoder.0",)}, "1 cuts make 2 stages, not 3"),
    ],
)
def test_what_cannot_be_planned_is_said(change: dict[str, object], problem: str) -> None:
    pair = _price(microbatch=2)
    with pytest.raises(PathosegError, match=problem):
        plan([pair], replace(PlanRequest(4, 2**40, 4), **change))  # type: ignore[arg-type]  # one of its fields
