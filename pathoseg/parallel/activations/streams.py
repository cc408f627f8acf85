"""The lanes of a device: its compute and the copies in both directions, ordered by marks."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from pathoseg.device import current_stream, has_streams, synchronize


class Lane(Enum):
    """A queue of work on the device, run in order; the three lanes run beside each other."""

    COMPUTE = 0  # the stream that the caller computes on
    OUT = 1  # copies to the host
    BACK = 2  # copies from the host


class Streams(Protocol):
    """The lanes of a device, and marks in them: passed when all work before them is done."""

    def copy(self, lane: Lane, into: Tensor, source: Tensor) -> None:
        """Append the copy of `source` into `into`, of the same size, to a lane; never waits."""

    def mark(self, lane: Lane) -> Any:
        """Return a mark at the present end of a lane."""

    def wait(self, lane: Lane, mark: Any) -> None:
        """Make the work that is appended to a lane from now on wait for a mark of another lane."""

    def passed(self, mark: Any) -> bool:
        """Return True if the work before a mark is done; never blocks."""

    def start_clock(self) -> None:
        """Empty all lanes, and time the marks that are made until `settle`."""

    def settle(self) -> None:
        """Wait until all lanes are empty, and time no further marks."""

    def seconds(self, mark: Any) -> float:
        """Return the time at which a timed mark was passed, on the clock of `time.perf_counter`."""


class HostStreams:
    """The streams of a device whose copies are done when they are issued; a mark is a time."""

    def copy(self, lane: Lane, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def mark(self, lane: Lane) -> Any:
        return time.perf_counter()

    def wait(self, lane: Lane, mark: Any) -> None:
        pass

    def passed(self, mark: Any) -> bool:
        return True

    def start_clock(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceStreams:
    """The streams of an accelerator; a mark is an event.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._timed = device, False
        self._side = {lane: torch.Stream(device) for lane in (Lane.OUT, Lane.BACK)}
        self._zero: Any = None
        self._zero_seconds = 0.0

    def copy(self, lane: Lane, into: Tensor, source: Tensor) -> None:
        with self._stream(lane):
            into.copy_(source, non_blocking=True)

    def mark(self, lane: Lane) -> Any:
        event = torch.Event(self._device, enable_timing=self._timed)
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Any) -> None:
        self._stream(lane).wait_event(mark)

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def start_clock(self) -> None:
        synchronize(self._device)
        self._timed = True
        self._zero = self.mark(Lane.COMPUTE)
        synchronize(self._device)
        self._zero_seconds = time.perf_counter()

    def settle(self) -> None:
        synchronize(self._device)
        self._timed = False

    def seconds(self, mark: Any) -> float:
        return self._zero_seconds + float(self._zero.elapsed_time(mark)) / 1e3

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane is Lane.COMPUTE:
            return current_stream(self._device)
        return self._side[lane]


def streams_of(device: torch.device) -> Streams:
    """Return the lanes of a device: its streams, or where it has none beside its one queue, none.

    A copy between the host and a device with one queue (MPS) is done when it is issued, as on a
    CPU.
    """
    return DeviceStreams(device) if has_streams(device) else HostStreams()
