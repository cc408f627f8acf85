"""Copies of a stage's storages to host memory and back, in six modes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pathoseg.device import is_pinned_for
from pathoseg.parallel.activations.pinned_arena import Arena, Room
from pathoseg.parallel.activations.streams import Lane, Streams


class OffloadMode(StrEnum):
    """The offload modes: how copies to and from the host are made.

    The first five are those of the offload study; they copy on the stream that computes, when a
    tensor is saved and when it is used. On a CPU all of them copy within host memory.
    """

    NONE = "none"  # everything stays on the device
    NAIVE = "naive"  # pageable memory, the process waits
    PINNED = "pinned"  # freshly pinned memory, the process waits
    NON_BLOCKING = "non-blocking"  # pageable memory, the process goes on
    PINNED_NON_BLOCKING = "pinned-non-blocking"  # freshly pinned memory, the process goes on
    OVERLAPPED = "overlapped"  # streams of their own, pinned memory that is used again, prefetch

    @property
    def pins(self) -> bool:
        """Return True if host memory is pinned."""
        return self in (OffloadMode.PINNED, OffloadMode.PINNED_NON_BLOCKING, OffloadMode.OVERLAPPED)


class Label(NamedTuple):
    """The owner of bytes that are copied, as events show it.

    Attributes:
        stage: The stage.
        microbatch: The microbatch whose forward saved them; None for what the stage itself
            offloads.
        layer: The layer that made them; without a microbatch the kind of tensor (`Park`).
    """

    stage: int
    microbatch: int | None
    layer: str


class Copied(NamedTuple):
    """One copy between device and host.

    Attributes:
        lane: Its direction.
        label: The owner of its bytes.
        bytes: Their number.
        begin: A mark (`Streams.mark`) ahead of it.
        end: A mark after it.
    """

    lane: Lane
    label: Label
    bytes: int
    begin: Any
    end: Any


class Ticket:
    """Bytes that left the device.

    Attributes:
        label: Their owner.
        size: Their number.
        source: Their device memory, until it is free.
        room: Their host memory, until they have come back, or, if lasting, are dropped.
        lasting: Whether they stay on the host when they have come back.
        left: The mark after the copy to the host.
        device: Their device memory once they are back.
        back: The mark after the copy from the host.
        used: Whether the compute has waited for that.
        gone: Whether they are needed no more.
    """

    __slots__ = (
        "back",
        "device",
        "gone",
        "label",
        "lasting",
        "left",
        "room",
        "size",
        "source",
        "used",
    )

    def __init__(self, label: Label, source: Tensor, room: Room, left: Any, lasting: bool) -> None:
        self.label, self.size, self.lasting = label, source.numel(), lasting
        self.source: Tensor | None = source
        self.room: Room | None = room
        self.left = left
        self.device: Tensor | None = None
        self.back: Any = None
        self.used = self.gone = False


class Overlapped:
    """The copies of one rank.

    A storage is copied out as soon as it is given. Its device memory is let go once that copy is
    over, or, where more than a window would wait, once the compute lane has been told to wait for
    the oldest copy: whatever takes that memory next then runs after it, and the process need not
    wait. Copies back begin when they are asked for, at most a window ahead of their use; where the
    directions take turns, the compute lane has then been told to wait for all that is leaving, so
    that one window of memory serves both. Device memory is taken and given back in the order of
    the compute lane alone.

    Args:
        streams: The lanes of the device.
        device: The device.
        arena: Host memory.
        window: Bytes, for each direction; a larger storage travels alone.
        shares_window: Whether nothing leaves while anything is back ahead of its use.
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        arena: Arena,
        window: int,
        shares_window: bool = False,
    ) -> None:
        self.copied: list[Copied] | None = None
        self._streams, self._device, self._arena = streams, device, arena
        self._window, self._shares_window = window, shares_window
        self._leaving: deque[Ticket] = deque()
        self._leaving_bytes = 0
        self._asked: deque[Ticket] = deque()
        self._ahead_bytes = 0
        self._last_back: Any = None

    @property
    def peak(self) -> int:
        return self._arena.peak

    def leave(self, source: Tensor, label: Label, lasting: bool = False) -> Ticket:
        size = source.numel()
        self.let_go()
        while self._leaving and self._leaving_bytes + size > self._window:
            self._await_oldest()
        room, given_back = self._arena.take(size)
        if given_back is not None:
            self._streams.wait(Lane.OUT, given_back)
        self._streams.wait(Lane.OUT, self._streams.mark(Lane.COMPUTE))
        left = self._copy(Lane.OUT, self._arena.tensor(room, size), source, label)
        ticket = Ticket(label, source, room, left, lasting)
        self._leaving.append(ticket)
        self._leaving_bytes += size
        return ticket

    def let_go(self) -> None:
        while self._leaving and self._streams.passed(self._leaving[0].left):
            self._free_oldest()

    def ask(self, tickets: Sequence[Ticket]) -> None:
        self._asked.extend(tickets)
        self._bring_back()

    def fetch(self, ticket: Ticket) -> Tensor:
        if ticket.device is None:
            self._start(ticket)
        if not ticket.used:
            self._use(ticket)
        assert ticket.device is not None
        return ticket.device

    def release(self, ticket: Ticket) -> None:
        if ticket.device is not None and not ticket.used:
            self._use(ticket)
        ticket.device, ticket.used = None, False

    def drop(self, ticket: Ticket) -> None:
        ticket.gone = True
        self.release(ticket)
        if ticket.room is not None:
            # A later copy to the host comes after this one's; it may have to wait for one back.
            self._arena.give_back(ticket.room, self._last_back)
            ticket.room = None

    def _await_oldest(self) -> None:
        self._streams.wait(Lane.COMPUTE, self._leaving[0].left)
        self._free_oldest()

    def _free_oldest(self) -> None:
        ticket = self._leaving.popleft()
        self._leaving_bytes -= ticket.size
        ticket.source = None

    def _bring_back(self) -> None:
        while self._asked:
            ticket = self._asked[0]
            if not (ticket.gone or ticket.device is not None):
                if self._ahead_bytes and self._ahead_bytes + ticket.size > self._window:
                    return
                self._start(ticket)
            self._asked.popleft()

    def _start(self, ticket: Ticket) -> None:
        assert ticket.room is not None
        while self._shares_window and self._leaving:
            self._await_oldest()
        ticket.device = torch.empty(ticket.size, dtype=torch.uint8, device=self._device)
        self._streams.wait(Lane.BACK, self._streams.mark(Lane.COMPUTE))
        self._streams.wait(Lane.BACK, ticket.left)
        host = self._arena.tensor(ticket.room, ticket.size)
        ticket.back = self._last_back = self._copy(Lane.BACK, ticket.device, host, ticket.label)
        if not ticket.lasting:
            self._arena.give_back(ticket.room, ticket.back)
            ticket.room = None
        self._ahead_bytes += ticket.size

    def _use(self, ticket: Ticket) -> None:
        """Make the compute lane wait for a copy back, and begin the next ones."""
        self._streams.wait(Lane.COMPUTE, ticket.back)
        ticket.used = True
        self._ahead_bytes -= ticket.size
        self._bring_back()

    def _copy(self, lane: Lane, into: Tensor, source: Tensor, label: Label) -> Any:
        begin = None if self.copied is None else self._streams.mark(lane)
        self._streams.copy(lane, into, source)
        end = self._streams.mark(lane)
        if self.copied is not None:
            self.copied.append(Copied(lane, label, source.numel(), begin, end))
        return end


class Copies(Protocol):
    """The copies of one rank. A ticket stands for bytes that were given to `leave`.

    Attributes:
        copied: Gains every copy, where it is a list.
        peak: Most bytes that were in host memory at once.
    """

    copied: list[Copied] | None

    @property
    def peak(self) -> int: ...

    def leave(self, source: Tensor, label: Label, lasting: bool = False) -> Any:
        """Copy device memory to the host, and hold it there.

        Args:
            source: The bytes: uint8, one dimension; nobody else may use them from now on.
            label: Their owner.
            lasting: Whether they stay on the host when they have come back, until `drop`.

        Returns:
            The ticket for the other calls.
        """

    def let_go(self) -> None:
        """Free the device memory of tickets whose copy to the host is done."""

    def ask(self, tickets: Sequence[Any]) -> None:
        """Allow tickets to come back to the device, in the order in which they will be fetched."""

    def fetch(self, ticket: Any) -> Tensor:
        """Return a ticket's bytes on the device (uint8, one dimension); waits for their copy back.

        Until `drop` they may be fetched again.
        """

    def release(self, ticket: Any) -> None:
        """Free the device memory of a lasting ticket that is unchanged since it came back.

        It may be asked for and fetched again.
        """

    def drop(self, ticket: Any) -> None:
        """Free a ticket's memory on host and device; it must not be used again."""


class _HostCopy(NamedTuple):
    host: Tensor
    label: Label


class Direct:
    """Copies on the stream that computes, when a tensor is saved and when it is used.

    Args:
        streams: The lanes of the device.
        device: The device.
        mode: One of the four modes that copy at once.
    """

    def __init__(self, streams: Streams, device: torch.device, mode: OffloadMode) -> None:
        self.copied: list[Copied] | None = None
        self.peak = 0
        self._held = 0
        self._streams, self._device = streams, device
        self._pins = mode.pins and is_pinned_for(device)
        self._goes_on = mode in (OffloadMode.NON_BLOCKING, OffloadMode.PINNED_NON_BLOCKING)

    def leave(self, source: Tensor, label: Label, lasting: bool = False) -> _HostCopy:
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self._pins)
        self._copy(Lane.OUT, host, source, label)
        self._held += host.numel()
        self.peak = max(self.peak, self._held)
        return _HostCopy(host, label)

    def let_go(self) -> None:
        """Do nothing: no copy is ever on its way."""

    def ask(self, tickets: Sequence[_HostCopy]) -> None:
        """Do nothing: no copy back begins ahead of its use."""

    def fetch(self, ticket: _HostCopy) -> Tensor:
        device = torch.empty(ticket.host.numel(), dtype=torch.uint8, device=self._device)
        self._copy(Lane.BACK, device, ticket.host, ticket.label)
        return device

    def release(self, ticket: _HostCopy) -> None:
        """Do nothing: bytes that came back are held by who fetched them."""

    def drop(self, ticket: _HostCopy) -> None:
        self._held -= ticket.host.numel()

    def _copy(self, lane: Lane, into: Tensor, source: Tensor, label: Label) -> None:
        begin = self._streams.mark(Lane.COMPUTE)
        into.copy_(source, non_blocking=self._goes_on)
        if self.copied is not None:
            end = self._streams.mark(Lane.COMPUTE)
            self.copied.append(Copied(lane, label, into.numel(), begin, end))


def copies_of(
    mode: OffloadMode,
    streams: Streams,
    device: torch.device,
    window: int,
    host_bytes: int,
    shares_window: bool = False,
) -> Copies | None:
    """Make the copies of one rank in an offload mode; None in the mode `NONE`.

    Args:
        mode: The mode.
        streams: The lanes of the device.
        device: The device on which the rank computes.
        window: Bytes on the device that may wait to leave, and as many that may be back early.
        host_bytes: Bytes of host memory that are taken at once.
        shares_window: Whether nothing leaves while anything is back early.

    Raises:
        PathosegError: The host has not as much memory to pin.
    """
    if mode is OffloadMode.NONE:
        return None
    if mode is OffloadMode.OVERLAPPED:
        arena = Arena(host_bytes, device)
        return Overlapped(streams, device, arena, window, shares_window)
    return Direct(streams, device, mode)
