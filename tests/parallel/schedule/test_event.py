"""Tests that events reach another process as they were."""

from __future__ import annotations

from pathoseg.parallel.schedule.action import Action, Edge, Kind
from pathoseg.parallel.schedule.event import Event, from_json, to_json


def test_events_survive_the_way() -> None:
    events = [
        Event(0, Action(Kind.FORWARD, 0, 2, 5), 0.25, 1.5),
        Event(1, Action(Kind.RECV, 1, 2, 5, Edge(2, 3, 1)), 1.5, 1.75),
        Event(1, Action(Kind.OFFLOAD, 0, 1, 3, tensor="conv"), 1.75, 2.0),
        Event(2, Action(Kind.PREFETCH, 0, 1, tensor="parameters"), 2.0, 2.5),
        Event(2, Action(Kind.REDUCE, 0, 1, bucket=0), 2.5, 3.0),
    ]
    again = from_json(to_json(events))
    assert again == events
    assert [type(each.action.edge) for each in again[:2]] == [type(None), Edge]
    assert {type(each.action.kind) for each in again} == {Kind}
