"""Tests that the drawing and the adjacency list show every layer and every edge."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given

from pathoseg.parallel.graph.draw import adjacency, svg
from pathoseg.parallel.graph.layer_graph import LayerGraph
from tests.parallel.networks.random_graphs import layer_graphs
from tests.parallel.networks.small import SMALL, small_graph

_SVG = "{http://www.w3.org/2000/svg}"


@given(layer_graphs())
def test_the_adjacency_list_has_every_edge(graph: LayerGraph) -> None:
    found, source = set(), ""
    for line in adjacency(graph).splitlines():
        if line.startswith("  -> "):
            found.add((source, line.split()[1]))
        else:
            source = line.split()[0]
    edges = {(edge.source, edge.target) for edge in graph.edges}
    assert found == edges | {(name, "output") for name in graph.outputs}


@given(layer_graphs())
def test_any_graph_can_be_drawn(graph: LayerGraph) -> None:
    ElementTree.fromstring(svg(graph))


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_and_module_has_a_row(name: str) -> None:
    graph = small_graph(name)
    rows = ElementTree.fromstring(svg(graph)).findall(f"{_SVG}g[@class='row']")
    layers = [row for row in rows if "pointer" not in row.attrib["style"]]
    shown = [row for row in rows if "none" not in row.attrib["style"]]
    assert len(layers) == len(graph.layers)
    assert 1 < len(shown) <= 40
    assert all("translate" in row.attrib["transform"] for row in shown)


def test_a_unet_opens_at_its_blocks_with_its_skips() -> None:
    drawing = ElementTree.fromstring(svg(small_graph("unet")))
    titles = [title.text for title in drawing.iter(f"{_SVG}title")]
    assert titles == [
        "encoder.2 → decoder.0, 64 KiB",
        "encoder.1 → decoder.1, 128 KiB",
        "encoder.0 → decoder.2, 256 KiB",
    ]


def test_costs_are_sums_of_the_layers() -> None:
    graph = small_graph("vgg19")
    text = svg(graph)
    flops = sum(layer.forward.flops + layer.backward.flops for layer in graph.layers[:37])
    assert re.search(rf">0 <tspan[^>]*>Sequential<.*?>{flops / 1e6:.3g} MFLOP<", text)
