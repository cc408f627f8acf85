"""An action with its start and end: the one event type of simulator and executor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pathoseg.parallel.schedule.action import Action, Edge, Kind


class Event(NamedTuple):
    """One action of one rank with its times.

    For a SEND, OFFLOAD, PREFETCH or REDUCE they are those on the wire, for a RECV or WAIT_REDUCE
    those of the rank's wait, for the others those of the computation.

    Attributes:
        rank: The rank.
        action: The action.
        start: In seconds, or in the units of the costs that were simulated.
        end: Likewise.
    """

    rank: int
    action: Action
    start: float
    end: float


def to_json(events: Iterable[Event]) -> str:
    """Write events as JSON, for another process."""
    return json.dumps([*events])


def from_json(text: str) -> list[Event]:
    """Read the events that `to_json` wrote."""
    events = []
    for rank, fields, start, end in json.loads(text):
        action = Action(*fields)
        edge = action.edge and Edge(*action.edge)
        events.append(Event(rank, action._replace(kind=Kind(action.kind), edge=edge), start, end))
    return events
