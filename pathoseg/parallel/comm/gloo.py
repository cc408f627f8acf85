"""Messages by torch.distributed over gloo: under torchrun, srun or a launch of our own."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.heartbeat import MEETING
from pathoseg.parallel.comm.process_transport import own_address, reached_by

LONG = timedelta(days=365)  # the heartbeat, not a time limit, ends the wait for a lost rank
_NAP = 0.05  # seconds
_FAREWELL = 5  # seconds
_NOBODYS = 2**30  # a tag that no message has


def join_gloo(
    rank: int, ranks: int, host: str, port: int, *, local: bool, hosted: bool = False
) -> GlooWire:
    """Join ranks that know where to meet; each process may call this more than once.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        host: Address of the store at which they meet, kept by rank 0 or by the launcher.
        port: Its port.
        local: Whether all ranks are on one machine: then they meet on the loopback interface.
        hosted: Whether the launcher keeps the store, as torchrun does.

    Raises:
        PathosegError: The ranks do not meet within a minute.
    """
    patience = timedelta(seconds=MEETING)
    keeps = rank == 0 and not hosted
    if local and not hosted:
        host = "127.0.0.1"
    try:
        store: Store
        if local and keeps:
            store, _ = keep_store(port)
            store.set_timeout(patience)
        else:
            store = TCPStore(host, port, is_master=keeps, wait_for_workers=False, timeout=patience)
        # A rank that connects for the n-th time meets others that do. Where one agent of torchrun
        # has all ranks it counts its starts of them: not each may have come so far before.
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if local else "0"
        start = f"pathoseg/{count}"
        turn = store.add(f"{start}/turn/{rank}", 1)
        store = PrefixStore(f"{start}/{turn}", store)
        own = "127.0.0.1" if local else _address(store, rank, ranks, host)
        return GlooWire(store, rank, ranks, own)
    except (RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
        raise PathosegError(
            f"Rank {rank} of {ranks} cannot meet the others at {host}:{port}: "
            f"{str(error).splitlines()[0]}",
            "Check that every rank has started, that MASTER_ADDR names an address of the first "
            "node that all nodes reach, and that no other program has the port.",
        ) from error


def keep_store(port: int = 0, host: str = "127.0.0.1") -> tuple[TCPStore, int]:
    """Open a store that listens at one address of this machine, at which ranks can meet.

    Args:
        port: Its port; 0 takes a free one.
        host: The address; by default only this machine reaches it.

    Returns:
        The store, which ends with its last reference, and its port.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """
    # A store that opens its own socket listens at all addresses, whatever it is told.
    listening = socket.create_server((host, port))
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


class GlooWire:
    """A group of gloo: implements Wire.

    gloo moves messages in threads of its own. It cannot be asked whether one is done, only waited
    for, and nothing but the end of a peer wakes who waits: so each message has a waiting thread.

    Args:
        store: The store at which the ranks meet.
        rank: This rank.
        ranks: Number of ranks.
        host: The address of this rank.

    Attributes:
        store: The store at which the ranks meet.
        host: The address of this rank.
    """

    reads = frozenset[str]()

    def __init__(self, store: Store, rank: int, ranks: int, host: str) -> None:
        self.rank = rank
        self.ranks = ranks
        self.host = host
        self.store = store
        # The only public way to choose gloo's address is the environment of the process. Torch's
        # stubs know neither this one nor `send` and `recv`.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=MEETING)
        self._group = gloo(store, rank, ranks, options)
        self._waiters = _Waiters()
        atexit.register(self._end)

    def announce(self, text: str) -> str:
        """Return rank 0's text on every rank; the other ranks' own are ignored."""
        if self.rank == 0:
            self.store.set("heartbeat", text)
        return str(self.store.get("heartbeat").decode())

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        pass  # all ranks are connected

    def carries(self, device: torch.device, other: int) -> bool:
        return False

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> None:
        return None

    def send(self, data: Tensor, to: int, tag: int) -> GlooRequest:
        return self._begin(lambda: self._group.send([data], to, tag))

    def receive(self, into: Tensor, source: int, tag: int) -> GlooRequest:
        return self._begin(lambda: self._group.recv([into], source, tag))

    def pause(self, looks: int) -> None:
        # Nothing wakes who waits for a GPU to come so far: a short wait is looked at often.
        self._waiters.pause(min(_NAP, 1e-4 * (looks + 1)))

    def close(self, well: bool) -> None:
        atexit.unregister(self._end)
        self._end(well)

    def again(self) -> GlooWire:
        """Join the same ranks anew; all of them call it, after a `close` that was not well.

        Raises:
            PathosegError: A rank does not come within a minute.
        """
        try:
            return GlooWire(PrefixStore("again", self.store), self.rank, self.ranks, self.host)
        except RuntimeError as error:
            raise PathosegError(
                f"Rank {self.rank} does not find the other ranks again: "
                f"{str(error).splitlines()[0]}",
                "Look for the first error of another rank.",
            ) from error

    def _end(self, well: bool = False) -> None:
        # A thread that still waits when Python has ended would bring the process down. What
        # wakes all of them is a wait that lasts too long.
        if not well and self.ranks > 1:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                work = self._group.recv([nothing], (self.rank + 1) % self.ranks, _NOBODYS)
                work.wait(timedelta(milliseconds=1))
        self._waiters.close()

    def _begin(self, start: Callable[[], Work]) -> GlooRequest:
        try:
            request = GlooRequest(start())
        except RuntimeError as error:
            raise _failure(error) from error
        self._waiters.wait_for(request)
        return request


class GlooRequest:
    """A send or receive of gloo: implements Request."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._over = False
        self._error: RuntimeError | None = None

    def done(self) -> bool:
        if self._error is not None:
            raise _failure(self._error) from self._error
        return self._over

    def wait(self) -> None:
        """Block until it is done; called by a thread of its own."""
        try:
            self._work.wait(LONG)
        except RuntimeError as error:
            self._error = error
        self._over = True


class _Waiters:
    """Threads, as many as there are messages under way, each of which waits for one."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[GlooRequest | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._changed = threading.Event()

    def wait_for(self, request: GlooRequest) -> None:
        if not self._idle.acquire(blocking=False):
            self._threads.append(threading.Thread(target=self._wait, name="gloo", daemon=True))
            self._threads[-1].start()
        self._requests.put(request)

    def pause(self, seconds: float) -> None:
        """Return when a request has become done since the last time, or after so long."""
        self._changed.wait(seconds)
        self._changed.clear()

    def close(self) -> None:
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join(_FAREWELL)

    def _wait(self) -> None:
        while (request := self._requests.get()) is not None:
            request.wait()
            self._changed.set()
            self._idle.release()


def _failure(error: RuntimeError) -> PathosegError:
    return PathosegError(
        f"gloo cannot deliver a message: {str(error).splitlines()[0]}",
        "Look for the first error of another rank.",
    )


def _address(store: Store, rank: int, ranks: int, host: str) -> str:
    """Return the address at which the other ranks reach this one."""
    own = own_address(host)
    store.set(f"address/{rank}", own)
    if not ipaddress.ip_address(own).is_loopback:
        return own
    return reached_by(store.get(f"address/{each}").decode() for each in range(ranks))
