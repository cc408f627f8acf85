"""Messages that wait for a device begin in the order of the calls."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.comm.process_transport import Turn


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
    waiting: deque[Turn] = deque()
    turns = [Turn(chance.choice(devices).record(), waiting) for _ in range(messages)]
    ended: list[Turn] = []
    looked_at = list(turns)
    while looked_at:
        for turn in [*looked_at, chance.choice(looked_at)]:  # all of them, then one that waits
            if turn in looked_at and turn.done():
                looked_at.remove(turn)
                ended.append(turn)
    assert ended == turns
