"""A short table at the end of a command: its seconds by what they were spent on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pathoseg.errors import StoppedError
from pathoseg.progress import answer_table

T = TypeVar("T")
_END = object()


class TimeSpent:
    """Seconds by what they were spent on, of the thread that makes this and of others beside it.

    What is timed within something else counts for itself alone, so that the parts of a thread add
    up to no more than the whole.

    Args:
        clock: Seconds since any moment.
        is_wanted: Whether anybody is told.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, is_wanted: bool = False
    ) -> None:
        self._is_wanted = is_wanted
        self._clock, self._began = clock, clock()
        self._own = threading.get_ident()
        self._spent: dict[tuple[bool, str], float] = {}
        self._inner = threading.local()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Make a context whose time is spent on `what`; of one name in one thread alone."""
        began, outer = self._clock(), getattr(self._inner, "seconds", 0.0)
        self._inner.seconds = 0.0
        try:
            yield
        finally:
            took = self._clock() - began
            key = threading.get_ident() == self._own, what
            self._spent[key] = self._spent.get(key, 0.0) + took - self._inner.seconds
            self._inner.seconds = outer + took

    def waiting(self, items: Iterable[T], what: str) -> Iterator[T]:
        """Yield the items; the time until each one comes is spent on `what`."""
        iterator = iter(items)
        while True:
            with self.on(what):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # not the end, so a T

    def rows(self) -> list[tuple[str, float, float]]:
        """Return what was done, its seconds, and their share of all; last the work beside."""
        whole = self._clock() - self._began
        own = {what: seconds for (mine, what), seconds in self._spent.items() if mine}
        own |= {"the rest": max(0.0, whole - sum(own.values())), "all": whole}
        beside = {f"beside: {what}": s for (mine, what), s in self._spent.items() if not mine}
        return [(what, s, s / max(whole, 1e-9)) for what, s in (own | beside).items()]

    def tell(self) -> None:
        """Print a table of the rows, if it is wanted."""
        if self._is_wanted:
            cells = [
                (what, f"{seconds:.1f}", f"{100 * share:.0f} %")
                for what, seconds, share in self.rows()
            ]
            answer_table([("Time", False), ("Seconds", True), ("Share", True)], cells)


@contextmanager
def time_told(wanted: bool) -> Iterator[TimeSpent]:
    """Make a context at whose end, or stop by a signal, a table says where its time went.

    Args:
        wanted: False tells nothing.
    """
    spent = TimeSpent(is_wanted=wanted)
    try:
        yield spent
    except StoppedError:
        spent.tell()
        raise
    spent.tell()
