"""Copies between one rank and its host's memory in time, and the waits that they cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Kind, Visit
from pathoseg.parallel.schedule.costs import Link, Saved
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.schedule import visit_of


def take_turns(actions: Iterable[Action]) -> bool:
    """Whether nothing leaves a rank between a PREFETCH and its backward: one window then serves
    both directions in turn, else each has its own."""
    coming: set[Visit] = set()
    for action in actions:
        if action.kind is Kind.PREFETCH:
            coming.add(visit_of(action))
        elif action.kind is Kind.BACKWARD:
            coming.discard(visit_of(action))
        elif action.kind is Kind.OFFLOAD and coming:
            return False
    return True


class HostCopies:
    """The two channels of one rank, one in each direction, each with a window of device memory.

    A tensor leaves as soon as it is made, the oldest first; the forward waits where more than a
    window would be waiting to leave. It comes back in the order in which the backwards need them,
    from its PREFETCH on, as soon as it fits into the window beside what came before it and is not
    yet used; the backward waits for what is not there. Where the directions take turns, it waits
    until all has left, too.

    Args:
        rank: Whose copies.
        link: What a copy takes.
        window: Bytes.
        turns: Whether the directions share it (`take_turns`).

    Attributes:
        events: An OFFLOAD or PREFETCH for each copy, while it is on its way.
        changes: When so many bytes more (or fewer) are in host memory.
    """

    def __init__(self, rank: int, link: Link, window: int, turns: bool) -> None:
        self.events: list[Event] = []
        self.changes: list[tuple[float, int]] = []
        self._rank, self._link, self._window, self._turns = rank, link, window, turns
        self._leaving, self._returning = _Window(window), _Window(window)
        self._free: dict[Kind, float] = {Kind.OFFLOAD: 0, Kind.PREFETCH: 0}
        self._away: dict[tuple[Visit, str | None], float] = {}  # when it was whole on the host
        self._asked: dict[Action, float] = {}

    def leave(self, start: float, copies: Sequence[tuple[Action, Saved]]) -> float:
        """How long a forward that begins now waits in all, given its OFFLOADs.

        Raises:
            PathosegError: A tensor does not fit into the window.
        """
        stall: float = 0
        for action, saved in sorted(copies, key=lambda copy: copy[1].made):
            if saved.bytes > self._window:
                raise PathosegError(
                    f"Tensor {action.tensor} of stage {action.stage} has {saved.bytes} bytes, and "
                    f"the window for copies to the host {self._window}.",
                    "Give the copies a window of at least the largest tensor that is offloaded.",
                )
            made = start + saved.made + stall
            fits = self._leaving.fits(saved.bytes, made)
            stall += fits - made
            begin, end = self._copy(action, saved.bytes, fits)
            self._leaving.hold(saved.bytes, end)
            self._away[visit_of(action), action.tensor] = end
            self.changes.append((begin, saved.bytes))
        return stall

    def ask(self, action: Action, now: float) -> None:
        """A PREFETCH: its tensor may come back from now on."""
        self._asked[action] = now

    def come_back(self, start: float, copies: Sequence[tuple[Action, Saved]]) -> float:
        """How long a backward that begins now waits in all, given its PREFETCHes."""
        left = self._free[Kind.OFFLOAD] if self._turns and copies else 0
        stall: float = max(0, left - start)
        for action, saved in sorted(copies, key=lambda copy: copy[1].needed):
            possible = max(
                self._asked.pop(action),
                self._away.pop((visit_of(action), action.tensor)),
                self._free[Kind.PREFETCH],
                left,
            )
            _, end = self._copy(action, saved.bytes, self._returning.fits(saved.bytes, possible))
            stall = max(stall, end - start - saved.needed)
            self._returning.hold(saved.bytes, start + saved.needed + stall)
            self.changes.append((end, -saved.bytes))
        return stall

    def _copy(self, action: Action, size: int, earliest: float) -> tuple[float, float]:
        begin = max(earliest, self._free[action.kind])
        time = self._link.alpha + self._link.transfer(self._rank, self._rank, size)
        end = self._free[action.kind] = begin + time
        self.events.append(Event(self._rank, action, begin, end))
        return begin, end


class _Window:
    """Device memory for what is on its way, by when it is given back."""

    def __init__(self, size: int) -> None:
        self._room = size
        self._held: deque[tuple[float, int]] = deque()

    def fits(self, size: int, earliest: float) -> float:
        """When so many bytes fit; what is given back until then is forgotten."""
        while self._held and (self._held[0][0] <= earliest or size > self._room):
            given_back, freed = self._held.popleft()
            self._room += freed
            earliest = max(earliest, given_back)
        return earliest

    def hold(self, size: int, until: float) -> None:
        """Takes so many bytes; times never fall."""
        self._room -= size
        self._held.append((until, size))
