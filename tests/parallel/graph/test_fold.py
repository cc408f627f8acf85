"""Tests that folding keeps what a graph says: costs, what is saved and sent, memory."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pathoseg.parallel.graph.fold import fold
from pathoseg.parallel.graph.layer_graph import LayerGraph, Work
from pathoseg.parallel.planning.memory_model import MemoryModel
from tests.parallel.networks.small import SMALL, small_graph


def _total(graph: LayerGraph, way: str, field: str) -> int:
    return sum(getattr(getattr(layer, way), field) for layer in graph.layers)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_folds_keep_sums(name: str, depth: int) -> None:
    graph = small_graph(name)
    folded = fold(graph, depth)
    assert len(folded.layers) <= len(graph.layers)
    for way in ("forward", "backward"):
        for field in fields(Work):
            if field.name != "peak":
                assert _total(folded, way, field.name) == _total(graph, way, field.name)
    assert folded.saved_bytes() == graph.saved_bytes()
    assert folded.parameter_bytes() == graph.parameter_bytes()
    names = [layer.name for layer in folded.layers]
    assert len(names) == len(set(names))
    for position, layer in enumerate(folded.layers):
        for source in layer.inputs:
            assert source in folded.inputs or folded.position[source] < position


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_folds_keep_the_memory_of_stages(name: str, depth: int) -> None:
    graph = small_graph(name)
    folded = fold(graph, depth)
    whole, coarse = MemoryModel(graph), MemoryModel(folded)
    size = len(folded.layers)
    starts = [graph.position[_first(graph, layer.name, depth)] for layer in folded.layers]
    starts.append(len(graph.layers))
    for first, stop in ((0, size), (0, size // 2), (size // 3, size), (size // 3, 2 * size // 3)):
        if first < stop:
            fine = whole.stage(range(starts[first], starts[stop]))
            assert coarse.stage(range(first, stop)).peak(2) == pytest.approx(fine.peak(2), rel=0.03)


def _first(graph: LayerGraph, name: str, depth: int) -> str:
    """The first layer of a fold."""
    return next(
        layer.name
        for layer in graph.layers
        if layer.name == name or layer.scope[depth - 1 : depth] == (name,)
    )


def test_nothing_folds_at_the_greatest_depth() -> None:
    graph = small_graph("unet")
    assert fold(graph, 9).layers == graph.layers


def test_levels_of_a_residual_network() -> None:
    graph = small_graph("resnet20-v2")
    assert [layer.name for layer in fold(graph, 1).layers] == [
        "stem",
        "groups",
        "norm",
        "relu",
        "head",
    ]
    blocks = [layer for layer in fold(graph, 3).layers if layer.kind == "_Unit"]
    assert [block.name for block in blocks] == [
        f"groups.{group}.{unit}" for group in range(3) for unit in range(2)
    ]
    assert blocks[1].inputs == ("groups.0.0",)
    assert blocks[1].parameters[0] == "groups.0.1.residual.norm1.weight"
