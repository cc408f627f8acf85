"""Records the events of one step on one rank: waits by the host's clock, work by the device's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pathoseg.parallel.activations.offload import Copied, Copies
from pathoseg.parallel.activations.streams import Lane, Streams
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.schedule.action import COMPUTE, Action, Kind
from pathoseg.parallel.schedule.event import Event


class StepTrace:
    """The events of one step, in seconds from a moment common to the ranks of a host.

    Made at the step's start by all ranks together: they meet at a barrier, and begin to count.

    Args:
        transport: Joins the ranks.
        streams: The device's lanes; their marks are timed until `events`.
        copies: The copies to the host that are recorded.
        replica_of: By microbatch, its replica.
    """

    def __init__(
        self,
        transport: Transport,
        streams: Streams,
        copies: Sequence[Copies],
        replica_of: Sequence[int],
    ) -> None:
        self._rank, self._streams = transport.rank, streams
        self._copies, self._replica_of = copies, replica_of
        self._waits: list[Event] = []
        self._marks: list[tuple[Action, Any, Any]] = []
        transport.barrier()
        streams.start_clock()
        self._zero = time.perf_counter()
        for each in copies:
            each.copied = []

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Time an action that runs within this context, if it computes or waits."""
        start, begin = time.perf_counter(), self._streams.mark(Lane.COMPUTE)
        yield
        if action.kind in (Kind.RECV, Kind.WAIT_REDUCE):
            self.waited(action, start)
        elif action.kind in (*COMPUTE, Kind.STEP):
            self._marks.append((action, begin, self._streams.mark(Lane.COMPUTE)))

    def waited(self, action: Action, start: float) -> None:
        """Record an action that has just ended.

        Args:
            action: An action of the process, or a transfer beside it.
            start: When it began, by `time.perf_counter`.
        """
        self._waits.append(self._event(action, start, time.perf_counter()))

    def events(self) -> tuple[Event, ...]:
        """Wait for the device and return the events of this rank, in no particular order.

        Copies of one layer for one microbatch are one event, from the first's begin to the last's
        end.
        """
        self._streams.settle()
        seconds = self._streams.seconds
        times = {action: (seconds(begin), seconds(end)) for action, begin, end in self._marks}
        copied: list[Copied] = []
        for copies in self._copies:
            copied += copies.copied or []
            copies.copied = None
        parked: list[tuple[Action, tuple[float, float]]] = []
        for lane, label, _, first, last in copied:
            replica = 0 if label.microbatch is None else self._replica_of[label.microbatch]
            kind = Kind.OFFLOAD if lane is Lane.OUT else Kind.PREFETCH
            action = Action(kind, replica, label.stage, label.microbatch, tensor=label.layer)
            begin, end = seconds(first), seconds(last)
            if label.microbatch is None:
                parked.append((action, (begin, end)))
                continue
            known = times.get(action, (begin, end))
            times[action] = min(begin, known[0]), max(end, known[1])
        worked = (self._event(action, *span) for action, span in [*times.items(), *parked])
        return (*self._waits, *worked)

    def _event(self, action: Action, start: float, end: float) -> Event:
        return Event(self._rank, action, start - self._zero, end - self._zero)
