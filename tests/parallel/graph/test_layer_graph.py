"""Tests the plain data of a model: its structure, edges, readers and bytes."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given

from pathoseg.parallel.graph.layer_graph import Colocation, Layer, LayerGraph
from tests.parallel.networks.random_graphs import layer_graphs
from tests.parallel.networks.small import small_graph


def test_the_structure_of_a_model_has_no_prices() -> None:
    graph = small_graph("unet")
    first = graph.layers[0]
    dearer = replace(first, backward=replace(first.backward, read=1), saved=(), gradients=())
    again = replace(graph, layers=(dearer, *graph.layers[1:]), storages=graph.storages[1:])
    assert again.structure == graph.structure
    assert first.kind == "convolution"
    for change in (
        {"name": "other"},
        {"attributes": {**first.attributes, "dilation": (2, 2)}},
        {"inputs": ()},
        {"outputs": (replace(first.outputs[0], dtype="bfloat16"),)},
        {"parameters": ()},
        {"buffers": ("other",)},
        {"scope": ()},
        {"sendable": False},
    ):
        other = replace(graph, layers=(replace(first, **change), *graph.layers[1:]))
        assert other.structure != graph.structure, change
    for change in (
        {"model": "other"},
        {"inputs": {}},
        {"outputs": ()},
        {"parameters": {}},
        {"buffers": {"other": 1}},
        {"modules": {}},
        {"ties": (Colocation(0, 1, "they are tied"),)},
        {"order": (1, 0)},
    ):
        assert replace(graph, **change).structure != graph.structure, change
    told = {"name", "kind", "attributes", "scope", "inputs", "outputs", "sendable"}
    told |= {"parameters", "buffers"}
    prices = {"forward", "backward", "saved", "gradients"}
    assert {each.name for each in fields(Layer)} == told | prices, "what is new is told, or a price"


@given(layer_graphs())
def test_readers_are_the_edges(graph: LayerGraph) -> None:
    size = len(graph.layers)
    edges = {
        (name, graph.layers[reader].name)
        for name, readers in graph.readers.items()
        for reader in readers
        if reader < size
    }
    assert edges == {(edge.source, edge.target) for edge in graph.edges}
    assert {name for name, readers in graph.readers.items() if size in readers} == set(
        graph.outputs
    )


@given(layer_graphs())
def test_saved_bytes_count_a_storage_once(graph: LayerGraph) -> None:
    parts = [graph.saved_bytes(index, index + 1) for index in range(len(graph.layers))]
    assert max(parts) <= graph.saved_bytes() <= sum(parts)
    every = {storage for layer in graph.layers for storage in layer.saved}
    assert graph.saved_bytes() == sum(graph.storages[storage].bytes for storage in every)
