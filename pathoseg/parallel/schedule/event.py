"""What happened when: the same noun from the simulator and from the executor."""

from __future__ import annotations

from typing import NamedTuple

from pathoseg.parallel.schedule.action import Action


class Event(NamedTuple):
    """One action of one rank in time.

    For a SEND, OFFLOAD, PREFETCH or REDUCE it is the time on the wire, for a RECV or WAIT_REDUCE
    the time the rank waited, for the others the time it computed.
    """

    rank: int
    action: Action
    start: float
    end: float
