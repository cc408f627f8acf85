"""Tests that the drawing and the adjacency list show every layer and every edge."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.graph.draw import adjacency, svg
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.planning.partition import cut
from tests.parallel.networks.random_graphs import layer_graphs
from tests.parallel.networks.small import SMALL, small_graph
from tests.parallel.networks.stages import cut_places

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
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


def _rows(drawing: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in drawing.iter(f"{_SVG}g") if group.get("class", "").startswith("row")]


def _number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, 0))


def _everything_has_its_place(drawing: ElementTree.Element) -> None:
    """Rows lie below each other, texts and bars beside each other, all within the drawing."""
    width, height = _number(drawing, "width"), _number(drawing, "height")
    tops = []
    for row in _rows(drawing):
        texts = sorted(row.iter(f"{_SVG}text"), key=lambda text: _number(text, "x"))
        # The widest sans-serif fonts take 0.6 em for a letter on average.
        ends = [_number(text, "x") + 0.6 * 11 * len("".join(text.itertext())) for text in texts]
        starts = [_number(text, "x") for text in texts]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= width
        bars = [bar for bar in row.findall(f"{_SVG}rect") if bar.get("class") != "stage"]
        for bar in bars:
            right = _number(bar, "x") + _number(bar, "width")
            assert all(right < start for start in starts if start > _number(bar, "x"))
        for stage in row.findall(f"{_SVG}rect[@class='stage']"):
            assert 0 <= _number(stage, "y") <= _number(stage, "y") + _number(stage, "height") < 18.1
        if "none" not in row.attrib["style"]:
            tops.append(float(row.attrib["transform"].removeprefix("translate(0 ")[:-1]))
    assert all(below - above == 18 for above, below in pairwise(tops))
    assert tops[-1] + 18 <= height
    for path in drawing.iter(f"{_SVG}path"):
        corners = [float(number) for number in re.findall(r"[\d.]+", path.attrib["d"])]
        assert max(corners[::2]) <= width
        assert max(corners[1::2]) <= height


@given(layer_graphs(), st.data())
def test_any_graph_can_be_drawn(graph: LayerGraph, data: st.DataObject) -> None:
    size = len(graph.layers)
    inner = sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    seconds = {layer.name: (data.draw(st.floats(0, 1e4)), 0.0) for layer in graph.layers}
    partition = cut(graph, [0, *inner, size])
    _everything_has_its_place(ElementTree.fromstring(svg(graph)))
    drawing = ElementTree.fromstring(svg(graph, seconds=seconds, partition=partition))
    _everything_has_its_place(drawing)
    closed = [row for row in _rows(drawing) if "pointer" not in row.attrib["style"]]
    assert sum(len(row.findall(f"{_SVG}g/{_SVG}line")) for row in closed) == len(inner)


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_and_module_has_a_row(name: str) -> None:
    graph = small_graph(name)
    drawing = ElementTree.fromstring(svg(graph))
    _everything_has_its_place(drawing)
    rows = _rows(drawing)
    layers = [row for row in rows if "pointer" not in row.attrib["style"]]
    shown = [row for row in rows if "none" not in row.attrib["style"]]
    assert len(layers) == len(graph.layers)
    assert 1 < len(shown) <= 40
    assert all("translate" in row.attrib["transform"] for row in shown)


def test_a_unet_opens_at_its_blocks_with_its_skips() -> None:
    drawing = ElementTree.fromstring(svg(small_graph("unet")))
    titles = [title.text for title in drawing.iterfind(f".//{_SVG}path/{_SVG}title")]
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


def test_stages_have_colours_and_say_what_they_receive() -> None:
    graph = small_graph("unet")
    inside = [
        place
        for place in cut_places(graph)
        if graph.layers[place - 1].scope[0] == graph.layers[place].scope[0] == "encoder.3"
    ]
    partition = cut(graph, [0, inside[0], len(graph.layers)])
    colours, words = {}, {}
    for row in _rows(ElementTree.fromstring(svg(graph, partition=partition))):
        if "none" not in row.attrib["style"]:
            title = row.findtext(f"{_SVG}title")
            stages = row.findall(f"{_SVG}rect[@class='stage']")
            colours[title] = [stage.get("fill") for stage in stages]
            words[title] = row.findtext(f"{_SVG}g[@class='cut']/{_SVG}text")
    one, two = colours["encoder.3 (Sequential)"]
    assert colours["encoder.0 (Sequential)"] == [one]
    assert colours["head (convolution)"] == [two]
    assert words.pop("encoder.3 (Sequential)") == f"{partition.bytes_sent / 1024:.3g} KiB"
    assert set(words.values()) == {None}


def test_seconds_are_sums_of_the_layers() -> None:
    graph = small_graph("unet")
    seconds = {layer.name: (0.25, 0.75) for layer in graph.layers}
    drawing = svg(graph, seconds=seconds)
    encoder = sum(layer.scope[:1] == ("encoder.0",) for layer in graph.layers)
    assert re.search(rf">encoder.0 <tspan[^>]*>Sequential<.*?>{encoder} s<", drawing)
    assert f"{len(graph.layers)} s<" in drawing
