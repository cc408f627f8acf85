"""Leases on pieces of work that processes share through a folder, on one machine or many.

A lease is a file. Its content names its owner: host, process, and when that process began.

                     (1) take: create, O_EXCL
          no file ------------------------------> held ----.
             ^  ^                                  |  ^    | (2) touched every BEAT seconds
             |  '----------------------------------'  '----'
             |           (3) release: delete       |
             | (5) rename to a grave, delete       | (4) its process on this machine has ended, or
             '--------------- dead <---------------'     no touch for LEASE seconds

(1) The file system lets one of several processes create it. (4) is found by whoever wants the lease
next, by the file system's clock. Of several that do (5), rename lets one succeed; all go on to (1).
One that is late moves a lease away that another has made meanwhile, or whose owner gave a sign of
life: the grave tells, and it is linked back. For that moment there is no file, so that a third
process can do (1), or the owner do (3) in vain: then two do the same work, or a lease is left to
die by silence. Both cost time alone.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import psutil

from pathoseg.platform_support import process_space, touched_now

BEAT = 5.0  # seconds between two signs of life of an owner
LEASE = 60.0  # seconds without one, after which a lease is anybody's
_CLOCK = ".clock"


class Leases:
    """The leases of this process: each is a file that only one process can create.

    A lease lives while its owner touches it; times are the file system's, so that clocks of
    several hosts need not agree. A lease of a process of this machine that has ended is dead at
    once. Leases spare work: two processes can come to do the same piece (where one was paused for
    longer than the lease), so what they write must be the same and appear by rename.

    Args:
        folder: Of the work that is shared; made where it is missing.

    Raises:
        OSError: The folder cannot be written; `take` may raise it, too.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = folder / _CLOCK
        self._owner = {**_machine(), "pid": os.getpid(), "born": _born(os.getpid())}
        self._text = json.dumps(self._owner | {"token": uuid4().hex})
        self._held = set[Path]()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)
        self._thread.start()

    def take(self, path: Path) -> bool:
        """(1) Take the lease `path`, unless a living process has it; its folder must exist.

        Returns:
            Whether this process has it now.

        Raises:
            OSError: The folder is gone or cannot be written.
        """
        while True:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                found = read_lease(path)
                if found is not None:
                    if self._lives(found):
                        return False
                    _bury(path, found)
                continue
            with self._lock:
                self._held.add(path)
            with os.fdopen(descriptor, "w") as file:
                file.write(self._text)
            return True

    def is_taken(self, path: Path) -> bool:
        """Return True if a living process, this one included, holds the lease: not (4)."""
        found = read_lease(path)
        return found is not None and self._lives(found)

    def release(self, path: Path) -> None:
        """(3) Delete the lease, if this process still holds it."""
        with self._lock:
            self._held.discard(path)
        with suppress(OSError):
            if self.owns(path):
                path.unlink()

    def owns(self, path: Path) -> bool:
        """Return True if this process holds the lease: nobody has taken it over since (4)."""
        with suppress(OSError):
            return path.read_text(encoding="utf-8") == self._text
        return False

    @contextmanager
    def held(self, path: Path) -> Iterator[bool]:
        """Make a context that holds a lease, if it is free.

        Yields:
            Whether it was.

        Raises:
            OSError: As `take`.
        """
        taken = self.take(path)
        try:
            yield taken
        finally:
            if taken:
                self.release(path)

    def now(self) -> float:
        """Return the file system's time in seconds since 1970."""
        return touched_now(self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release all leases of this process."""
        self._ended.set()
        self._thread.join()
        for path in list(self._held):
            self.release(path)

    def _lives(self, found: LeaseFile) -> bool:
        with suppress(ValueError, LookupError, TypeError):  # its owner writes it just now
            if _has_ended(json.loads(found.text), self._owner):
                return False
        # Touched in the future: the file system's clock was set back, or has been wrong.
        return abs(self.now() - found.touched) < LEASE

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with self._lock:
                held = list(self._held)
            for path in held:
                with suppress(OSError):  # another has taken it over, or the disk is away for now
                    os.utime(path)


class LeaseFile(NamedTuple):
    """Content and time of last touch of a lease's file; equal while nobody takes or touches it."""

    text: str
    touched: float


def read_lease(path: Path) -> LeaseFile | None:
    """Read the file of a lease; None if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            touched = os.fstat(file.fileno()).st_mtime
            return LeaseFile(file.read(), touched)
    except FileNotFoundError:
        return None


def _bury(path: Path, dead: LeaseFile) -> None:
    """(5) Of several that find a lease dead, one moves it away; another lease is put back."""
    grave = path.with_name(f".{uuid4().hex[:8]}-{path.name}")
    try:
        path.rename(grave)
    except FileNotFoundError:
        return
    if read_lease(grave) not in (dead, None):
        try:
            os.link(grave, path)
        except FileExistsError:  # a third process has taken it in this moment
            pass
        except OSError:  # a disk without links, or the folder is gone
            with suppress(FileNotFoundError):
                grave.replace(path)
    grave.unlink(missing_ok=True)


def _machine() -> dict[str, Any]:
    """Return the identity of this machine, or of this container with its own process numbers."""
    return {"host": socket.gethostname(), **process_space()}


def _born(pid: int) -> float:
    """Return the time at which a process began, which tells reused numbers apart.

    Of one that has ended it is 0.0, also where its parent has not asked for its exit code yet.
    """
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return 0.0


def _has_ended(owner: Any, me: dict[str, Any]) -> bool:
    """Return True if the owner was a process of this machine that has ended."""
    here = all(owner[key] == me[key] for key in ("host", "boot", "pids"))
    # Two processes that look may differ in when a third was born, as the clock is set.
    return here and abs(_born(owner["pid"]) - owner["born"]) > 5
