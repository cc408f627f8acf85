"""Host memory that is taken once, pinned, and given out again and again."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathoseg.device import PinnedMemory, is_pinned_for

_ALIGNMENT = 512  # bytes


@dataclass(frozen=True, slots=True, order=True)
class Room:
    """A part of an arena that is taken.

    Attributes:
        slab: Number of the slab.
        start: First byte of the part in its slab.
        bytes: Size, a multiple of 512.
    """

    slab: int
    start: int
    bytes: int


class Arena:
    """Slabs of host memory, of which parts are taken and given back.

    Args:
        size: Bytes of the first slab; another is added where that is not enough.
        device: Copies from and to it; slabs are pinned where that serves it.

    Attributes:
        held: Bytes that are taken now.
        peak: Most that were taken at once.

    Raises:
        PathosegError: The host has not as much memory to pin; so does `take`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.held = self.peak = 0
        self._device = device
        self._slabs: list[Tensor] = []
        self._pinned: list[PinnedMemory] = []
        self._free: list[Room] = []
        self._marks: dict[Room, Any] = {}
        if size:
            self._grow(_aligned(size))

    @property
    def bytes(self) -> int:
        """The total size of all slabs in bytes."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, size: int) -> tuple[Room, Any]:
        """Take the smallest free part of at least `size` bytes, or one of a new slab.

        Returns:
            The part, and the mark after which it may be written; None where it was never used.

        Raises:
            PathosegError: The host has not as much memory to pin.
        """
        needed = _aligned(size)
        fitting = [room for room in self._free if room.bytes >= needed]
        if not fitting:
            self._grow(needed)
            fitting = self._free[-1:]
        room = min(fitting, key=lambda each: each.bytes)
        self._free.remove(room)
        mark = self._marks.pop(room, None)
        taken = Room(room.slab, room.start, needed)
        if room.bytes > needed:
            rest = Room(room.slab, room.start + needed, room.bytes - needed)
            insort(self._free, rest)
            self._marks[rest] = mark
        self.held += needed
        self.peak = max(self.peak, self.held)
        return taken, mark

    def give_back(self, room: Room, mark: Any) -> None:
        """Give a part back, to be written by its next owner once `mark` is passed.

        Marks come in the order of their lane, so that of parts that are joined the last mark
        counts.
        """
        self.held -= room.bytes
        at = bisect_left(self._free, room)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        # The mark of the joined part is the latest, which is this one.
        for other in (before, after):
            if other is not None and _touch(room, other):
                self._free.remove(other)
                self._marks.pop(other, None)
                room = Room(room.slab, min(room.start, other.start), room.bytes + other.bytes)
        insort(self._free, room)
        self._marks[room] = mark

    def tensor(self, room: Room, size: int) -> Tensor:
        """Return a view of the first `size` bytes of a part: uint8, one dimension."""
        return self._slabs[room.slab][room.start : room.start + size]

    def _grow(self, size: int) -> None:
        if is_pinned_for(self._device):
            self._pinned.append(PinnedMemory(size, self._device))
            self._slabs.append(self._pinned[-1].bytes)
        else:
            self._slabs.append(torch.empty(size, dtype=torch.uint8))
        self._free.append(Room(len(self._slabs) - 1, 0, size))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _touch(one: Room, other: Room) -> bool:
    first, second = sorted((one, other))
    return first.slab == second.slab and first.start + first.bytes == second.start
