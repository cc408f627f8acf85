"""Draws events in time: as text, as SVG, as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from pathoseg.parallel.schedule.action import COMPUTE, Kind
from pathoseg.parallel.schedule.event import Event

# What runs beside the rank's own work, each on a line of its own.
_CHANNELS = {
    Kind.SEND: "messages",
    Kind.REDUCE: "sums",
    Kind.OFFLOAD: "to host",
    Kind.PREFETCH: "from host",
}
_COLOURS = {
    Kind.FORWARD: ("#8ab4e8", "#4f86c6"),  # even replicas, odd replicas
    Kind.BACKWARD: ("#a5d6a0", "#5fa55a"),
    Kind.RECOMPUTE: ("#f3d27a", "#d9a92e"),
    Kind.STEP: ("#b9b9b9", "#8f8f8f"),
    Kind.SEND: ("#c9a0dc", "#8e5ba6"),
    Kind.REDUCE: ("#e39b9b", "#c05f5f"),
    Kind.OFFLOAD: ("#f0b27a", "#f0b27a"),
    Kind.PREFETCH: ("#d98f4e", "#d98f4e"),
}
# Pixels of the SVG.
_WIDTH, _MARGIN, _BOX, _THIN, _GAP = 1200, 130, 20, 4, 6


def draw_text(events: Sequence[Event], width: int = 100) -> str:
    """Draw a line per rank: a box per forward, backward and recomputation, dots for idle time.

    A box carries its kind and microbatch (`F3`, `B3`; `R3` recomputes), in small letters where
    the replica is odd. The scale is the smallest at which every label fits; where that would be
    wider than `width`, boxes lose the ends of their labels.

    Args:
        events: From `simulate` or from the executor.
        width: The most characters that the whole time may take.
    """
    shown = [event for event in events if event.action.kind in COMPUTE and event.end > event.start]
    if not shown:
        return ""
    begin, end = min(event.start for event in shown), max(event.end for event in shown)
    scale = max((len(_label(event)) + 1) / (event.end - event.start) for event in shown)
    scale = min(scale, width / (end - begin))
    ranks = max(event.rank for event in shown) + 1
    rows = [["·"] * round((end - begin) * scale) for _ in range(ranks)]
    for event in shown:
        first, last = (round((at - begin) * scale) for at in (event.start, event.end))
        if first < last:
            box = _label(event).ljust(last - first)[: last - first - 1] + "│"
            rows[event.rank][first:last] = box
    digits = len(str(ranks - 1))
    lines = (f"rank {rank:{digits}} │{''.join(row)}\n" for rank, row in enumerate(rows))
    return "".join(lines)


def _label(event: Event) -> str:
    label = f"{event.action.kind[0]}{event.action.microbatch}"
    return label.lower() if event.action.replica % 2 else label


def draw_svg(runs: Mapping[str, Sequence[Event]]) -> str:
    """Draw an SVG with a row per rank and run, the runs of a rank one above the other.

    Under a row, thin bars show messages, sums and copies. Hovering tells a box's action and time.

    Args:
        runs: Events by the name of their run, for example `planned` and `measured`; seconds.
    """
    every = [event for events in runs.values() for event in events]
    begin = min((event.start for event in every), default=0)
    end = max((event.end for event in every), default=0)
    scale = (_WIDTH - _MARGIN) / ((end - begin) or 1)
    ranks = max((event.rank for event in every), default=-1) + 1
    row = _BOX + _THIN * len(_CHANNELS) + _GAP
    height = row * ranks * len(runs) + 2 * _BOX
    tops = {
        (name, rank): (rank * len(runs) + index) * row
        for index, name in enumerate(runs)
        for rank in range(ranks)
    }
    size = f'width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect {size} fill="white"/>',
    ]
    for (name, rank), top in tops.items():
        parts.append(f'<text x="4" y="{top + 15}">rank {rank} {escape(name)}</text>')
    for name, events in runs.items():
        for event in events:
            left = _MARGIN + float(event.start - begin) * scale
            parts += _boxes(event, left, tops[name, event.rank], float(scale))
    for tick in range(6):
        at = _MARGIN + (_WIDTH - _MARGIN) * tick / 5
        text = f"{float(begin + (end - begin) * tick / 5):.4g}"
        anchor = "end" if tick == 5 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{height - 8}" text-anchor="{anchor}">{text} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _boxes(event: Event, left: float, top: float, scale: float) -> Iterator[str]:
    kind = event.action.kind
    if kind not in _COLOURS:
        return
    width = float(event.end - event.start) * scale
    thickness = _BOX
    if kind in _CHANNELS:
        top += _BOX + _THIN * list(_CHANNELS).index(kind)
        thickness = _THIN
    title = f"{event.action}: {float(event.start):.6g} to {float(event.end):.6g} s"
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{thickness - 1}" '
        f'fill="{_COLOURS[kind][event.action.replica % 2]}"><title>{escape(title)}</title></rect>'
    )
    label = _label(event)
    if kind in COMPUTE and width > 7 * len(label):
        yield f'<text x="{left + 2:.2f}" y="{top + 14}" pointer-events="none">{label}</text>'


def chrome_trace(runs: Mapping[str, Sequence[Event]]) -> str:
    """Write the JSON of chrome://tracing and Perfetto: a process per rank, a thread per channel.

    The same channel of all runs of a rank lies one above the other.

    Args:
        runs: Events by the name of their run, for example `planned` and `measured`; seconds.
    """
    channels = ["work", *_CHANNELS.values()]
    threads = {
        (name, channel): index
        for index, (channel, name) in enumerate(
            (channel, name) for channel in channels for name in runs
        )
    }
    entries: list[dict[str, object]] = []
    named: set[tuple[int, int]] = set()
    for name, events in runs.items():
        for event in events:
            channel = _CHANNELS.get(event.action.kind, "work")
            thread = threads[name, channel]
            if (event.rank, thread) not in named:
                named.add((event.rank, thread))
                entries += _names(event.rank, thread, f"{channel} {name}")
            entries.append(
                {
                    "name": str(event.action),
                    "cat": event.action.kind.value,
                    "ph": "X",
                    "ts": float(event.start) * 1e6,
                    "dur": float(event.end - event.start) * 1e6,
                    "pid": event.rank,
                    "tid": thread,
                }
            )
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"})


def _names(rank: int, thread: int, name: str) -> Iterator[dict[str, object]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    where = {"ph": "M", "pid": rank, "tid": thread}
    yield {"name": "thread_name", **where, "args": {"name": name}}
    yield {"name": "thread_sort_index", **where, "args": {"sort_index": thread}}
