"""Tests the drawings: the text to the letter, the others by what can be read back from them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from pathoseg.parallel.schedule.action import COMPUTE, Action, Edge, Kind, chain
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, Link, Saved, StageCost
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b, one_f_one_b_of
from pathoseg.parallel.schedule.schedule import Placement, Schedule, linear
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.timeline import chrome_trace, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"
LOWERED = lower(one_f_one_b(3, 4), recompute=[0], offload={0: ["<a>"], 1: ["b"]}, buckets=2)
STAGE = StageCost(0.5, 1.0, 10, gradients=6, step=0.25, tensors={"<a>": Saved(4), "b": Saved(4)})
RUN = simulate(
    LOWERED, Costs((STAGE,) * 3, dict.fromkeys(chain(3), 2), Link(0.1, 0.1), Link(0.1, 0.1), 4)
)


def test_gpipe_as_text() -> None:
    assert draw_text(simulate(gpipe(linear(3), 2), Costs.equal(3, 1, 2)).events) == (
        "rank 0 │F0│F1│··················B0   │B1   │\n"
        "rank 1 │···F0│F1│·········B0   │B1   │······\n"
        "rank 2 │······F0│F1│B0   │B1   │············\n"
    )


def test_gems_as_text_has_the_inverted_replica_in_small_letters() -> None:
    assert draw_text(simulate(lower(gems(2)), Costs.equal(2, 1, 2)).events) == (
        "rank 0 │F0│·········B0   │f1│b1   │······\nrank 1 │···F0│B0   │f1│············b1   │\n"
    )


def test_text_keeps_to_its_width() -> None:
    events = simulate(gpipe(linear(3), 20), Costs.equal(3, Fraction(1, 3), 2)).events
    for width in (10, 60, 200):
        assert {len(line) for line in draw_text(events, width).splitlines()} == {8 + width}
    assert draw_text([]) == ""


def _rows(svg: str) -> list[tuple[float, float, float, str]]:
    """Left, top, width and tooltip of every box but the background."""
    return [
        (
            float(box.get("x", 0)),
            float(box.get("y", 0)),
            float(box.get("width", 0)),
            title.text or "",
        )
        for box in Xml.fromstring(svg).iter(f"{SVG}rect")
        for title in box.iter(f"{SVG}title")
    ]


def test_svg_has_a_box_for_every_action_that_is_no_wait() -> None:
    boxes = _rows(draw_svg({"planned": RUN.events}))
    drawn = [
        str(event.action)
        for event in RUN.events
        if event.action.kind not in (Kind.RECV, Kind.WAIT_REDUCE)
    ]
    assert sorted(title.split(": ")[0] for *_, title in boxes) == sorted(drawn)
    assert any("<a>" in title for *_, title in boxes)


def test_svg_puts_the_runs_of_a_rank_one_above_the_other_on_one_scale() -> None:
    slower = [event._replace(start=2 * event.start, end=2 * event.end) for event in RUN.events]
    boxes = _rows(draw_svg({"planned": RUN.events, "measured & real": slower}))
    tops = {}
    for event in RUN.events:
        if event.action.kind in COMPUTE:
            planned, measured = (box for box in boxes if box[3].startswith(f"{event.action}:"))
            assert measured[2] - 2 * planned[2] < 0.02
            tops[event.rank] = (planned[1], measured[1])
    flat = [top for rank in sorted(tops) for top in tops[rank]]
    assert flat == sorted(flat)
    assert len(set(flat)) == 6


def test_chrome_trace_has_every_event_in_microseconds() -> None:
    trace = json.loads(chrome_trace({"planned": RUN.events, "measured": RUN.events}))
    entries = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(entries) == 2 * len(RUN.events)
    for event in RUN.events:
        mine = [each for each in entries if each["name"] == str(event.action)]
        assert [each["ts"] for each in mine] == [event.start * 1e6] * 2
        assert [each["dur"] for each in mine] == [(event.end - event.start) * 1e6] * 2
        assert {each["pid"] for each in mine} == {event.rank}
        assert len({each["tid"] for each in mine}) == 2


def test_chrome_trace_names_a_line_for_each_channel_and_run() -> None:
    entries = json.loads(chrome_trace({"planned": RUN.events, "measured": RUN.events}))
    names = {
        each["args"]["name"]
        for each in entries["traceEvents"]
        if each["name"] == "thread_name" and each["pid"] == 0
    }
    assert names >= {"work planned", "work measured", "messages planned", "to host measured"}


def test_no_events_are_drawn_as_nothing() -> None:
    assert _rows(draw_svg({"planned": []})) == []
    assert json.loads(chrome_trace({"planned": []}))["traceEvents"] == []


def test_a_step_without_duration_does_not_divide_by_zero() -> None:
    event = Event(0, Action(Kind.FORWARD, 0, 0, 0), 1, 1)
    assert draw_text([event]) == ""
    assert len(_rows(draw_svg({"": [event]}))) == 1


@pytest.mark.parametrize(
    "order",
    [
        mp_basic(linear(4), 2),
        gpipe(linear(4), 4),
        gpipe(linear(4), 4, flush=2),
        one_f_one_b(4, 4),
        lower(one_f_one_b(4, 4), recompute=range(4)),
        gems(4),
        gems(4, pairs=2),
        gems(4, per_visit=2),
        bidirectional(4, 4),
    ],
)
def test_the_documented_pictures_are_what_is_drawn(order: Schedule) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "parallel.md").read_text()
    assert draw_text(simulate(order, Costs.equal(4, 1, 2)).events, 130) in text


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_documented_branches_are_what_is_drawn(microbatches: int) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "parallel.md").read_text()
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3))
    times = [(1, 2), (3, 6), (3, 6), (1, 2)]
    order = one_f_one_b_of(Placement(2, ((0, 0, 1, 0),)), microbatches, edges, times)
    costs = Costs(tuple(StageCost(*each) for each in times))
    assert draw_text(simulate(lower(order, edges), costs).events) in text
    halves = Costs((StageCost(4, 8),) * 2)
    assert draw_text(simulate(one_f_one_b(2, microbatches), halves).events) in text
