"""Messages that wait for a device begin in the order of the calls; a lost rank is named."""

from __future__ import annotations

import random
from collections import deque
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.heartbeat import Heartbeat
from pathoseg.parallel.comm.process_transport import DeviceReady, ProcessTransport, Wire


class Stream:
    """A device's work, which may go on whenever somebody looks."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._come = 0
        self._recorded = 0

    def record(self) -> Point:
        self._recorded += 1
        return Point(self, self._recorded)

    def has_come_to(self, point: int) -> bool:
        self._come += self._chance.random() < 0.3
        return self._come >= point


class Point:
    """An event."""

    def __init__(self, stream: Stream, at: int) -> None:
        self._stream, self._at = stream, at

    def query(self) -> bool:
        return self._stream.has_come_to(self._at)


@given(st.integers(1, 8), st.integers(1, 2), st.randoms(use_true_random=False))
def test_turns_end_in_the_order_in_which_they_began(
    messages: int, streams: int, chance: random.Random
) -> None:
    devices = [Stream(chance) for _ in range(streams)]
    waiting: deque[DeviceReady] = deque()
    requests = [DeviceReady(chance.choice(devices).record(), waiting) for _ in range(messages)]
    ended: list[DeviceReady] = []
    looked_at = list(requests)
    while looked_at:
        for request in [*looked_at, chance.choice(looked_at)]:  # all of them, then one that waits
            if request in looked_at and request.done():
                looked_at.remove(request)
                ended.append(request)
    assert ended == requests


class ClosedWire:
    """A wire whose connections are closed, as the other rank has ended."""

    rank, ranks = 0, 2
    reads: frozenset[str] = frozenset()

    def sum(self, *_: object) -> None:
        return None

    def send(self, *_: object) -> None:
        raise PathosegError("connection closed by peer", "")

    receive = send


class LateHeartbeat:
    """A heartbeat that hears why the other rank has ended a moment after its connections do."""

    host = "127.0.0.1"

    def check(self, patience: float = 0) -> None:
        if patience:
            raise PathosegError("Rank 1 has no slides.", "")


@pytest.mark.parametrize("what", ["send", "receive", "sum"])
def test_a_message_to_a_closed_connection_names_the_cause(what: str) -> None:
    wire, heartbeat = cast(Wire, ClosedWire()), cast(Heartbeat, LateHeartbeat())
    transport = ProcessTransport(wire, heartbeat)
    arguments: tuple[object, ...] = ((0, 1),) if what == "sum" else (1, 0)
    with pytest.raises(PathosegError, match=r"^Rank 1 has no slides\. \(Rank 0 waited for"):
        getattr(transport, what)(torch.zeros(2), *arguments)
