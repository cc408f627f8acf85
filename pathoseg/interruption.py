"""Ctrl-C and SIGTERM as a question that long work asks itself between two parts of it.

A part can be one kernel that takes minutes, and Python calls no handler before it is over. So a
command, which may end its own process, has a thread that a signal wakes all the same:

    main thread  --- kernel ---------------------------------------------------
    watcher      ....... signal: told ....... `_PATIENCE` later: `leave`, exit

(1) It leaves nothing that must be whole: the main thread holds `_busy`, but for the contexts of
    `abandonable`.
(2) Of several ranks none leaves alone: `peers.agree` says when all are in such a context.
(3) What is under way is given up; `leave` saves what was there before, and the process ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Protocol, Self

from pathoseg.errors import PathosegError, StoppedError

_HEARD = b"\nStopping, as soon as what is under way can be saved. Ctrl-C again stops at once.\n"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_OVER = 0  # is no signal
_PATIENCE = 2.0  # seconds that the work has to come to a question, of five in which all is saved
_TURN = 0.2  # seconds
_FAREWELL = 1.0  # seconds
_READ = 256  # bytes, one a signal


class Peers(Protocol):
    """The other ranks' watchers."""

    @property
    def connections(self) -> Sequence[socket.socket]:
        """Readable when another rank has been asked to stop, or has ended."""
        ...

    def tell(self, number: int) -> None:
        """Tell all of a signal."""

    def hear(self, connection: socket.socket) -> int | None:
        """Return the signal of which another rank has told; None where it has ended."""

    def agree(self, ready: bool) -> bool | None:
        """Return whether all ranks are ready, on all of them; None where one has ended."""

    def go_on(self) -> None:
        """Tell ranks that are ready, and wait for this one's end, that there is none."""

    def close(self) -> None:
        """End it; another rank takes that for the end of this one."""


class NoPeers:
    """A process alone: implements Peers."""

    connections = ()

    def tell(self, number: int) -> None: ...
    def hear(self, connection: socket.socket) -> int | None:
        raise AssertionError("there is no connection")

    def agree(self, ready: bool) -> bool | None:
        return ready

    def go_on(self) -> None: ...
    def close(self) -> None: ...


def _nothing() -> None: ...


class Interruption:
    """While entered, holds back SIGINT and SIGTERM; a second SIGINT ends the work at once.

    Handlers are process-wide, so only the main thread installs them.

    Args:
        advice: How the user goes on after a signal.
        ends_process: Whether the process ends, with exit code 128 + the signal, where the work
            does not come to a question within `_PATIENCE` seconds. A library must not do so.
        peers: The other ranks, which then end together with this one.

    Attributes:
        advice: As given; the work changes it as it gets further.
        leave: Saves what is finished and tells of it, called by another thread than that of the
            work, ahead of the end of the process; the work sets it.
        number: The signal that came, or None.
    """

    def __init__(self, advice: str, ends_process: bool = False, peers: Peers | None = None) -> None:
        self.advice = advice
        self.leave: Callable[[], None] = _nothing
        self.number: int | None = None
        self._ends_process, self._peers = ends_process, peers or NoPeers()
        self._came = 0  # signals to this process
        self._before: dict[int, signal._HANDLER] = {}
        self._watcher: _Watcher | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._ends_process:
                self._watcher = _Watcher(self, self._peers)
            for number in _STOPS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watcher is not None:
            self._watcher.close()

    def is_asked(self) -> bool:
        """Return True once a signal has come; what takes long asks this within itself."""
        return self.number is not None

    def raise_if_asked(self) -> None:
        """End the work if a signal came.

        Raises:
            StoppedError: A signal came.
        """
        if self.number is not None:
            raise StoppedError(self.number, self.advice)

    def ask(self, number: int) -> None:
        """Stop as if this signal had come; any thread may call it."""
        self.number = self.number or number
        if self._watcher is not None:
            self._watcher.wake(number)

    @contextmanager
    def abandonable(self, tidy: Callable[[], None] = _nothing) -> Iterator[Callable[[], None]]:
        """Make a context in which the process may end at any moment, after `leave`; the main
        thread does.

        Args:
            tidy: Called ahead of `leave`.

        Yields:
            Ends that ahead of the context's end: to be called before anything is changed that
            `leave` reads. It waits for a `leave` that is under way, after which nothing follows.
        """
        if self._watcher is None:
            yield _nothing
            return
        with self._watcher.abandonable(tidy) as commit:
            yield commit

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        if self._came > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number
        if self._watcher is None or not self._watcher.is_watching:
            say_heard()


def say_heard() -> None:
    """Tell the user that a signal came."""
    # Not print: the work may be within one. And there may be no file behind the stream.
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), _HEARD)


class _Watcher:
    """The thread that ends the process; it is woken by the system's own handler of a signal.

    Args:
        work: What is to be left.
        peers: The other ranks.
    """

    def __init__(self, work: Interruption, peers: Peers) -> None:
        self._work, self._peers = work, peers
        self._busy = threading.Lock()
        self._busy.acquire()
        self._tidy = _nothing
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()

    @property
    def is_watching(self) -> bool:
        return self._thread.is_alive()

    def wake(self, number: int) -> None:
        with suppress(OSError):  # it is awake, or gone
            self._waker.send(bytes([number]))

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self.wake(_OVER)
        self._thread.join(_FAREWELL)
        self._peers.close()  # which wakes the thread where it waits for a rank that is lost
        self._wake.close()
        self._waker.close()

    @contextmanager
    def abandonable(self, tidy: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """(1) Make a context as that of `Interruption`."""
        is_over = False

        def commit() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._busy.acquire()

        self._tidy = tidy
        self._busy.release()
        try:
            yield commit
        finally:
            commit()

    def _watch(self) -> None:
        try:
            number = self._signal()
            if number is not None and not self._is_over(_PATIENCE):
                self._leave(number)
        finally:
            self._peers.close()  # none of them waits for an answer of this one

    def _leave(self, number: int) -> None:
        """Wait until the work may be left, and leave it."""
        while not self._is_over(_TURN / 2):
            ready = self._busy.acquire(timeout=_TURN)
            try:
                agreed = self._peers.agree(ready)  # (2)
                if agreed:
                    self._end(number)
                if agreed is not False:
                    return
            finally:
                if ready:
                    self._busy.release()

    def _signal(self) -> int | None:
        """Wait for the first signal, to this rank or another; None at the end of the work."""
        with selectors.DefaultSelector() as selector:
            for each in (self._wake, *self._peers.connections):
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._wake:
                        assert isinstance(key.fileobj, socket.socket)
                        number = self._peers.hear(key.fileobj)
                        if number is not None:
                            self._work.number = self._work.number or number
                            self._peers.tell(number)
                        return number
                    came = self._wake.recv(_READ)
                    if _OVER in came:
                        return None
                    for number in came:
                        if number in _STOPS:
                            say_heard()
                            self._peers.tell(number)
                            return number

    def _is_over(self, seconds: float) -> bool:
        """Wait for so long, or until the work is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            end = time.monotonic() + seconds
            while selector.select(max(0.0, end - time.monotonic())):
                if _OVER in self._wake.recv(_READ):
                    return True
        return False

    def _end(self, number: int) -> None:
        """(3) Save and end the process; or return where it cannot be saved."""
        try:
            self._tidy()
            self._work.leave()
        except (OSError, PathosegError):
            # The work finds it, too, once its kernel is over, and tells of it.
            self._peers.go_on()
            return
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            os.write(sys.stderr.fileno(), f"Stopped. {self._work.advice}\n".encode())
        os._exit(128 + number)
