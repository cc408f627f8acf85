"""A layer graph for the eye: its adjacency list as text, and its modules as a foldable drawing."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition

# The forward and the backward of each layer, in seconds, by its name.
Seconds = Mapping[str, tuple[float, float]]

# The drawing opens as many levels of modules as fit into so many rows.
_ROWS = 40

_ROW, _INDENT, _TOP = 18, 14, 40
# Columns and how wide they are; then come the arcs. A letter is this wide, or less.
_COLUMNS = {
    "layer": 310,
    "output": 180,
    "parameters": 90,
    "FLOPs": 110,
    "saved": 110,
    "seconds": 110,
    "stage": 50,
    "receives": 110,
}
_LEFT, _ARCS, _GAP, _LETTER = 8, 170, 10, 7
_BARS = {"FLOPs": "#8bd", "saved": "#bd8", "seconds": "#eb7"}
_DASHES = 'stroke="#333" stroke-dasharray="4 2"'
# Stages take these colours in turn.
_TINTS = ("#e6f0fb", "#fdeedd", "#e7f5e4", "#fbe7e9", "#f0eaf8", "#f2ece4", "#e3f5f6", "#f7f5d6")

_SCRIPT = """
const rows = [...document.querySelectorAll('g.row')], arcs = document.getElementById('arcs');
const shown = row => row < 0 || (open[parent[row]] !== false && shown(parent[row]));
const seen = row => shown(row) ? row : seen(parent[row]);
function lay() {
  const y = {}, order = {};
  let next = TOP, count = 0;
  rows.forEach((row, i) => {
    row.style.display = shown(i) ? '' : 'none';
    row.classList.toggle('open', Boolean(open[i]));
    if (shown(i)) {
      y[i] = next;
      order[i] = open[i] ? count : count++;
      row.setAttribute('transform', `translate(0 ${next})`);
      next += ROW;
    }
    if (i in open) row.querySelector('.sign').textContent = open[i] ? '\\u25be' : '\\u25b8';
  });
  arcs.ownerSVGElement.setAttribute('height', next + ROW);
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
    """Write a graph as text, for `pathoseg plan`.

    Returns:
        A line for each input and layer (name, kind, output shapes, FLOPs, bytes saved), each
        followed by an indented line for each reader with the bytes that it reads.
    """
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


def svg(
    graph: LayerGraph, *, seconds: Seconds | None = None, partition: Partition | None = None
) -> str:
    """Draw the model's modules in the order of execution, with arcs for values that skip a row.

    A click on a module opens or closes it, where the viewer runs scripts; elsewhere the drawing
    stays as it opens. Bars are shares of the whole model. Stages are coloured; a dashed line among
    the arcs is a cut, also inside of a closed module, and beside it stands what the stage below
    receives.

    Args:
        graph: The layers.
        seconds: Seconds of each layer's forward and backward; None draws no times.
        partition: The stages, or None.

    Returns:
        A whole SVG document.
    """
    sheet = _Sheet(graph, seconds, partition)
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
        "ARCS": sheet.arcs,
        "WIDTH": sheet.width,
    }
    script = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in constants.items())
    head = "".join(
        f'<text x="{x}" y="{_TOP - 10}" font-weight="bold">{escape(name)}</text>'
        for name, x in sheet.columns.items()
    )
    size = f'width="{sheet.width}" height="{_TOP + _ROW * (len(shown) + 1)}"'
    font = 'font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            "<style>.open > .cut { display: none }</style>",
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="14" font-size="13">{escape(sheet.title)}</text>{head}',
            *_drawn(sheet, rows, is_open, tops),
            '<g id="arcs" fill="none" stroke="#c60" stroke-opacity="0.6">',
            *_arcs(sheet, rows, edges, is_open, tops),
            f"</g>\n<script><![CDATA[\n{script}{_SCRIPT}]]></script>\n</svg>\n",
        ]
    )


class _Sheet:
    """The columns of the drawing: their x positions, texts and bars."""

    def __init__(
        self, graph: LayerGraph, seconds: Seconds | None, partition: Partition | None
    ) -> None:
        self.graph = graph
        self._times = [sum(seconds[layer.name]) for layer in graph.layers] if seconds else []
        self._partition = partition
        given = {"seconds": seconds, "stage": partition, "receives": partition}
        widths = {
            name: width for name, width in _COLUMNS.items() if given.get(name, self) is not None
        }
        ends = [*accumulate(widths.values(), initial=_LEFT)]
        self.columns = dict(zip(widths, ends, strict=False))
        self.arcs = ends[-1]
        self.width = self.arcs + _ARCS
        self._whole = self._costs(range(len(graph.layers)))
        parameters, totals = _bytes(graph.parameter_bytes()), self._whole.items()
        words = (f"{cost}{' saved' * (column == 'saved')}" for column, (_, cost) in totals)
        self.title = f"{graph.model}: {parameters} of parameters, {', '.join(words)}"

    def cells(self, row: _Row, prefix: str, sign: str) -> Iterator[str]:
        """Return the SVG of a row's texts and bars."""
        left = _LEFT + _INDENT * (row.depth - 1)
        room = (_COLUMNS["layer"] + _LEFT - _GAP - left - 12) // _LETTER
        name = _short(row.name.removeprefix(prefix), room)
        kind = _short(row.kind, room - len(name) - 1)
        label = f"{escape(name)} <tspan fill='#888'>{escape(kind)}</tspan>"
        yield f"<title>{escape(row.name)} ({escape(row.kind)})</title>"
        yield f'<text x="{left}" y="13" class="sign">{sign}</text>'
        yield f'<text x="{left + 12}" y="13">{label}</text>'
        shapes = ", ".join(_shape(v.shape) for v in self.graph.layers[row.layers.stop - 1].outputs)
        yield self._text("output", shapes)
        parameters = self.graph.parameter_bytes(row.layers.start, row.layers.stop)
        yield self._text("parameters", _bytes(parameters))
        for column, (cost, words) in self._costs(row.layers).items():
            whole, _ = self._whole[column]
            width = (_COLUMNS[column] - _GAP) * cost / (whole or 1)
            bar = f'y="3" width="{width:.1f}" height="13" fill="{_BARS[column]}"'
            yield f'<rect x="{self.columns[column]}" {bar}/>{self._text(column, words)}'

    def stages(self, row: _Row) -> Iterator[str]:
        """The colours of a row's stages, and the cuts at its top and inside of it."""
        if self._partition is None:
            return
        bounds, first, size = self._partition.bounds, row.layers.start, len(row.layers)
        held = range(bisect(bounds, first) - 1, bisect(bounds, row.layers.stop - 1))
        lines, received = [], []
        for stage in held:
            start, stop = max(first, bounds[stage]), min(row.layers.stop, bounds[stage + 1])
            y, height = _ROW * (start - first) / size, _ROW * (stop - start) / size
            where = f'y="{y:.2f}" width="{self.arcs}" height="{height:.2f}"'
            yield f'<rect class="stage" {where} fill="{_TINTS[stage % len(_TINTS)]}"/>'
            if start == bounds[stage] > 0:
                edges = self._partition.edges
                received.append(_bytes(sum(edge.bytes for edge in edges if edge.target == stage)))
                ends = f'x1="{self.arcs}" x2="{self.width}" y1="{y:.2f}" y2="{y:.2f}"'
                lines.append(f"<line {ends} {_DASHES}/>")
        words = f"{held[0]}" if len(held) == 1 else f"{held[0]}–{held[-1]}"
        yield self._text("stage", words)
        if lines:
            lines.append(self._text("receives", ", ".join(received)))
            yield f'<g class="cut">{"".join(lines)}</g>'

    def _costs(self, layers: range) -> dict[str, tuple[float, str]]:
        """Return the cost of the layers for each column with bars: the number and its text."""
        own = self.graph.layers[layers.start : layers.stop]
        flops = sum(layer.forward.flops + layer.backward.flops for layer in own)
        saved = self.graph.saved_bytes(layers.start, layers.stop)
        costs = {"FLOPs": (float(flops), _flops(flops)), "saved": (float(saved), _bytes(saved))}
        if "seconds" in self.columns:
            time = sum(self._times[layers.start : layers.stop])
            costs["seconds"] = time, _seconds(time)
        return costs

    def _text(self, column: str, words: str) -> str:
        room = (_COLUMNS[column] - _GAP) // _LETTER
        return f'<text x="{self.columns[column]}" y="13">{escape(_short(words, room))}</text>'


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
            is_free = layer.is_free and layer.scope[-1:] == (layer.name,)
            kind = graph.modules.get(layer.module, layer.kind) if is_free else layer.kind
            rows.append(_Row(layer.name, kind, parent, depth, own, False))
        else:
            name = layer.scope[level - 1]
            kind = graph.modules[name.partition("@")[0]]
            rows.append(_Row(name, kind, parent, depth, own, True))
            _grow(graph, rows, own, level + 1, len(rows) - 1)
    return None


def _drawn(
    sheet: _Sheet, rows: Sequence[_Row], is_open: Mapping[int, bool], tops: Mapping[int, int]
) -> Iterator[str]:
    for index, row in enumerate(rows):
        around = rows[row.parent] if row.parent >= 0 else None
        prefix = f"{around.name}." if around else ""
        sign = ("▾" if is_open[index] else "▸") if row.is_block else ""
        inside = [*sheet.stages(row), *sheet.cells(row, prefix, sign)]
        where = f'transform="translate(0 {tops[index]})"' if index in tops else ""
        style = f"{'cursor:pointer;' * row.is_block}{'display:none' * (index not in tops)}"
        kind = "row open" if is_open.get(index) else "row"
        yield f'<g class="{kind}" {where} style="{style}">{"".join(inside)}</g>'


def _arcs(
    sheet: _Sheet,
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
        out = sheet.arcs + min(sheet.width - sheet.arcs - 10, 12 + (end - top) / 4)
        title = f"{rows[source].name} → {rows[target].name}, {_bytes(size)}"
        yield (
            f'<path d="M{sheet.arcs} {top}C{out} {top} {out} {end} {sheet.arcs} {end}" '
            f'stroke-width="{1 + 4 * size / max(1, *sums.values()):.2f}">'
            f"<title>{escape(title)}</title></path>"
        )


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _bytes(size: float) -> str:
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flops(count: float) -> str:
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 999.5:  # so that three digits never become 1e+03
            return f"{number:.3g} {unit}"
        number /= step
    return f"{number:.3g} {units[-1]}"


def _seconds(time: float) -> str:
    return _scaled(time * 1e6, 1000, ("µs", "ms", "s"))


def _short(words: str, room: int) -> str:
    """The words, cut to so many letters."""
    return words if len(words) <= room else f"{words[: max(0, room - 1)]}…"
