"""A layer graph for the eye: its adjacency list as text, and its modules as a foldable drawing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from pathoseg.parallel.graph.layer_graph import LayerGraph

# The drawing opens as many levels of modules as fit into so many rows.
_ROWS = 40

_ROW, _INDENT, _TOP = 18, 14, 40
# Where the columns begin, and how long a bar for the whole model is.
_COLUMNS = {"layer": 8, "output": 330, "parameters": 480, "FLOPs": 580, "saved": 700}
_ARCS, _WIDTH, _BAR = 830, 1000, 100

_SCRIPT = """
const rows = [...document.querySelectorAll('g.row')], arcs = document.getElementById('arcs');
const shown = row => row < 0 || (open[parent[row]] !== false && shown(parent[row]));
const seen = row => shown(row) ? row : seen(parent[row]);
function lay() {
  const y = {}, order = {};
  let next = TOP, count = 0;
  rows.forEach((row, i) => {
    row.style.display = shown(i) ? '' : 'none';
    if (shown(i)) {
      y[i] = next;
      order[i] = open[i] ? count : count++;
      row.setAttribute('transform', `translate(0 ${next})`);
      next += ROW;
    }
    if (i in open) row.querySelector('.sign').textContent = open[i] ? '\\u25be' : '\\u25b8';
  });
  document.documentElement.setAttribute('height', next + ROW);
  const sums = {};
  for (const [from, to, bytes] of edges) {
    const key = [seen(from), seen(to)];
    if (order[key[1]] - order[key[0]] > 1) sums[key] = (sums[key] || 0) + bytes;
  }
  const most = Math.max(1, ...Object.values(sums));
  arcs.replaceChildren(...Object.entries(sums).map(([key, bytes]) => {
    const [top, end] = key.split(',').map(row => y[row] + ROW / 2);
    const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    const out = ARCS + Math.min(WIDTH - ARCS - 10, 12 + (end - top) / 4);
    path.setAttribute('d', `M${ARCS} ${top}C${out} ${top} ${out} ${end} ${ARCS} ${end}`);
    path.setAttribute('stroke-width', 1 + 4 * bytes / most);
    return path;
  }));
}
rows.forEach((row, i) => {
  if (i in open) row.onclick = () => { open[i] = !open[i]; lay(); };
});
"""


def adjacency(graph: LayerGraph) -> str:
    """Each layer with its cost, and below it what reads it and how many bytes that takes."""
    readers: dict[str, list[str]] = {}
    for edge in graph.edges:
        readers.setdefault(edge.source, []).append(f"  -> {edge.target} {_bytes(edge.bytes)}")
    for name in graph.outputs:
        readers.setdefault(name, []).append(f"  -> output {_bytes(graph.bytes_of(name))}")
    lines = []
    for name, value in graph.inputs.items():
        lines += [f"{name} input {_shape(value.shape)}", *readers.get(name, [])]
    for layer in graph.layers:
        shapes = " ".join(_shape(value.shape) for value in layer.outputs)
        saved = sum(graph.storages[storage].bytes for storage in layer.saved)
        flops = layer.forward.flops + layer.backward.flops
        lines.append(f"{layer.name} {layer.kind} {shapes} {_flops(flops)} {_bytes(saved)} saved")
        lines += readers.get(layer.name, [])
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Row:
    """A layer, or a module with layers inside: its place in the tree, and its layers."""

    name: str
    kind: str
    parent: int
    depth: int
    layers: range
    is_block: bool


def svg(graph: LayerGraph) -> str:
    """The modules in the order of execution, with arcs for values that skip a row.

    A click on a module opens or closes it, where the viewer runs scripts; elsewhere the drawing
    stays as it opens. Bars are shares of the model's FLOPs and saved bytes.
    """
    rows: list[_Row] = []
    _grow(graph, rows, range(len(graph.layers)), 1, -1)
    depths = [row.depth for row in rows]
    level = max(d for d in (1, *depths) if d == 1 or sum(e <= d for e in depths) <= _ROWS)
    is_open = {index: row.depth < level for index, row in enumerate(rows) if row.is_block}
    leaf = {row.layers.start: index for index, row in enumerate(rows) if not row.is_block}
    edges = [
        (leaf[graph.position[edge.source]], leaf[graph.position[edge.target]], edge.bytes)
        for edge in graph.edges
        if edge.source in graph.position
    ]
    shown = [index for index, row in enumerate(rows) if row.depth <= level]
    tops = {index: _TOP + _ROW * place for place, index in enumerate(shown)}
    constants = {
        "open": is_open,
        "parent": [row.parent for row in rows],
        "edges": edges,
        "TOP": _TOP,
        "ROW": _ROW,
        "ARCS": _ARCS,
        "WIDTH": _WIDTH,
    }
    script = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in constants.items())
    head = "".join(
        f'<text x="{x}" y="{_TOP - 10}" font-weight="bold">{escape(name)}</text>'
        for name, x in _COLUMNS.items()
    )
    size = f'width="{_WIDTH}" height="{_TOP + _ROW * (len(shown) + 1)}"'
    font = 'font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="8" y="14" font-size="13">{escape(graph.model)}</text>{head}',
            *_drawn(graph, rows, is_open, tops),
            '<g id="arcs" fill="none" stroke="#c60" stroke-opacity="0.6">',
            *_arcs(rows, edges, is_open, tops),
            f"</g>\n<script><![CDATA[\n{script}{_SCRIPT}]]></script>\n</svg>\n",
        ]
    )


def _grow(graph: LayerGraph, rows: list[_Row], layers: range, level: int, parent: int) -> None:
    """Appends the rows of layers that run in the same modules above `level`."""

    def call(position: int) -> str:
        scope = graph.layers[position].scope
        return scope[level - 1] if len(scope) >= level else str(position)

    runs = [list(run) for _, run in groupby(layers, call)]
    if len(runs) == 1 and len(layers) > 1:
        # A module that holds all there is says nothing.
        return _grow(graph, rows, layers, level + 1, parent)
    depth = rows[parent].depth + 1 if parent >= 0 else 1
    for run in runs:
        own, layer = range(run[0], run[-1] + 1), graph.layers[run[0]]
        if len(run) == 1:
            rows.append(_Row(layer.name, layer.kind, parent, depth, own, False))
        else:
            name = layer.scope[level - 1]
            kind = graph.modules[name.partition("@")[0]]
            rows.append(_Row(name, kind, parent, depth, own, True))
            _grow(graph, rows, own, level + 1, len(rows) - 1)
    return None


def _drawn(
    graph: LayerGraph, rows: Sequence[_Row], is_open: Mapping[int, bool], tops: Mapping[int, int]
) -> Iterator[str]:
    everything = range(len(graph.layers))
    all_flops, all_saved = _work(graph, everything), graph.saved_bytes()
    for index, row in enumerate(rows):
        first, stop = row.layers.start, row.layers.stop
        prefix = f"{rows[row.parent].name}." if row.parent >= 0 else ""
        sign = ("▾" if is_open[index] else "▸") if row.is_block else ""
        label = (
            f"{escape(row.name.removeprefix(prefix))} <tspan fill='#888'>{escape(row.kind)}</tspan>"
        )
        shapes = ", ".join(_shape(value.shape) for value in graph.layers[stop - 1].outputs)
        flops, saved = _work(graph, row.layers), graph.saved_bytes(first, stop)
        cells = [
            f'<text x="{8 + _INDENT * (row.depth - 1)}" y="13" class="sign">{sign}</text>',
            f'<text x="{20 + _INDENT * (row.depth - 1)}" y="13">{label}</text>',
            _text("output", shapes),
            _text("parameters", _bytes(graph.parameter_bytes(first, stop))),
            _bar("FLOPs", flops, all_flops, _flops(flops), "#8bd"),
            _bar("saved", saved, all_saved, _bytes(saved), "#bd8"),
        ]
        where = f'transform="translate(0 {tops[index]})"' if index in tops else ""
        style = f"{'cursor:pointer;' * row.is_block}{'display:none' * (index not in tops)}"
        yield f'<g class="row" {where} style="{style}">{"".join(cells)}</g>'


def _arcs(
    rows: Sequence[_Row],
    edges: Sequence[tuple[int, int, int]],
    is_open: Mapping[int, bool],
    tops: Mapping[int, int],
) -> Iterator[str]:
    """The same arcs as the script draws: of what goes further than to the next row with layers."""
    closed = [row for row in tops if not is_open.get(row)]
    order = {row: place for place, row in enumerate(closed)}
    sums: dict[tuple[int, int], int] = {}
    for *ends, size in edges:
        for place, row in enumerate(ends):
            while row not in tops:
                row = rows[row].parent
            ends[place] = row
        if order[ends[1]] - order[ends[0]] > 1:
            sums[ends[0], ends[1]] = sums.get((ends[0], ends[1]), 0) + size
    for (source, target), size in sums.items():
        top, end = tops[source] + _ROW / 2, tops[target] + _ROW / 2
        out = _ARCS + min(_WIDTH - _ARCS - 10, 12 + (end - top) / 4)
        title = f"{rows[source].name} → {rows[target].name}, {_bytes(size)}"
        yield (
            f'<path d="M{_ARCS} {top}C{out} {top} {out} {end} {_ARCS} {end}" '
            f'stroke-width="{1 + 4 * size / max(1, *sums.values()):.2f}">'
            f"<title>{escape(title)}</title></path>"
        )


def _text(column: str, words: str) -> str:
    return f'<text x="{_COLUMNS[column]}" y="13">{words}</text>'


def _bar(column: str, share: int, whole: int, words: str, colour: str) -> str:
    width = _BAR * share / max(1, whole)
    x = _COLUMNS[column]
    bar = f'<rect x="{x}" y="3" width="{width:.1f}" height="13" fill="{colour}"/>'
    return bar + _text(column, words)


def _work(graph: LayerGraph, layers: range) -> int:
    own = graph.layers[layers.start : layers.stop]
    return sum(layer.forward.flops + layer.backward.flops for layer in own)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _bytes(size: float) -> str:
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flops(count: float) -> str:
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:.3g} {unit}"
        number /= step
    return f"{number:.3g} {units[-1]}"
