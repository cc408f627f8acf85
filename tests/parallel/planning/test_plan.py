"""Tests plans as data: their text, and what they refuse to be read for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers, sampled_from

from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import balance
from pathoseg.parallel.planning.plan import Plan, digest, input_shape
from pathoseg.parallel.planning.stage_costs import stage_edges
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b


def _graph(width: int = 4, side: int = 32) -> LayerGraph:
    with torch.device("meta"):
        return Traced(UNet(3, width, depth=2), torch.empty(1, 3, side, side)).graph


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return _graph()


@pytest.fixture(scope="module")
def made(graph: LayerGraph) -> Plan:
    partition = balance(graph, 3)
    order = replace(one_f_one_b(3, 4), edges=stage_edges(partition))
    return Plan(
        model=graph.model,
        digest=digest(graph),
        input=input_shape(graph),
        order="1f1b",
        placement="linear",
        bounds=partition.bounds,
        starts=tuple(graph.layers[first].name for first in partition.bounds[:-1]),
        recompute=(0,),
        text=str(order),
        hardware="toy",
        note="made up",
        seconds=2.0,
        bubble=0.5,
        memory=(3, 4, 5),
        messages=(6, 7, 8),
        sums=(1, 0, 0),
        retention=(
            ActivationPolicy((graph.layers[0].name,)),
            ActivationPolicy(),
            ActivationPolicy(),
        ),
        window=2**16,
        host_memory=(9, 0, 0),
    )


def test_a_plan_is_rebuilt_from_its_text(graph: LayerGraph, made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    partition = balance(graph, 3)
    assert again.partition(graph) == partition
    away = {0: [graph.layers[0].name]}
    expected = lower(one_f_one_b(3, 4), stage_edges(partition), recompute=(0,), offload=away)
    assert again.schedule == expected
    assert (again.batch, again.images_per_second, again.sent) == (4, 2.0, 8)


def test_a_plan_from_before_branches_is_read(made: Plan) -> None:
    data = json.loads(made.to_json())
    assert data.pop("line") == []
    assert Plan.from_json(json.dumps(data)) == made


def test_a_plan_of_a_strip_is_one_of_whole_tiles(made: Plan) -> None:
    """Of twice as many ranks, and with the same stages; a strip with other layers has none."""
    with torch.device("meta"):
        tall = Traced(UNet(3, 4, depth=2), torch.empty(1, 3, 64, 32)).graph
    plan = made.in_strips(tall, 2)
    assert (plan.ranks, plan.shards, plan.memory) == (6, 2, made.memory)
    assert plan.partition(tall).bounds == made.bounds
    assert Plan.from_json(plan.to_json()) == plan
    with torch.device("meta"):
        other = Traced(UNet(3, 4, depth=1), torch.empty(1, 3, 64, 32)).graph
    with pytest.raises(PathosegError, match="has other layers for 2 strips"):
        made.in_strips(other, 2)


@pytest.mark.parametrize("other", [{"width": 8}, {"side": 64}])
def test_a_plan_of_another_model_or_tile_is_refused(made: Plan, other: dict[str, int]) -> None:
    with pytest.raises(PathosegError, match="and not for this UNet on") as refused:
        made.partition(_graph(**other))
    assert "Plan again" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 99}, "format 99"),
        ({"seconds": "soon"}, "seconds"),
        ({"colour": "red"}, "colour"),
        ({"memory": [1]}, "do not fit"),
        ({"bounds": [0, 5, 5, 9]}, "do not fit"),
        ({"bounds": [1, 5, 7, 9]}, "do not fit"),
        ({"bounds": []}, "do not fit"),
        ({"recompute": [7]}, "do not fit"),
        ({"retention": []}, "do not fit"),
        ({"host_memory": [1, 2]}, "do not fit"),
        ({"line": [0, 0, 1]}, "do not fit"),
        ({"text": "schedule x\n"}, "text has no line"),
    ],
)
def test_a_broken_plan_is_refused(made: Plan, change: dict[str, object], problem: str) -> None:
    with pytest.raises(PathosegError, match=problem):
        Plan.from_json(json.dumps({**json.loads(made.to_json()), **change}))


@given(data())
@settings(max_examples=40)
def test_a_plan_with_another_number_is_read_or_refused(made: Plan, drawn: DataObject) -> None:
    """In the text of its schedule, where any number is an index of something else."""
    found = [*re.finditer(r"\d+", made.text)]
    place = drawn.draw(sampled_from(found))
    changed = f"{made.text[: place.start()]}{drawn.draw(integers(0, 9))}{made.text[place.end() :]}"
    try:
        again = Plan.from_json(json.dumps({**json.loads(made.to_json()), "text": changed}))
    except PathosegError:
        return
    assert again.schedule.lowered


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PathosegError, match=r"plan\.json"):
        Plan.from_json(text, "plan.json")


def test_a_plan_that_would_hang_is_refused(made: Plan) -> None:
    data = json.loads(made.to_json())
    rank = next(line for line in made.text.splitlines() if line.startswith("rank 2:"))
    data["text"] = made.text.replace(rank, rank.replace("0:2F0 0:2B0", "0:2B0 0:2F0"))
    with pytest.raises(PathosegError, match="0:2B0 before 0:2F0"):
        Plan.from_json(json.dumps(data))
