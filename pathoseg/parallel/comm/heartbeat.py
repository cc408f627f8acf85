"""Tells every rank within seconds that one has died, hangs or gives the run up."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pathoseg.errors import LostRankError, MemoryExhaustedError, PathosegError

BEAT = 1.0  # seconds between two signs of life
# Own signs of life without one of another rank, after which that counts as lost: turns, not
# seconds, so that a host that pauses as a whole loses nobody.
SILENCE = 10
MEETING = 60.0  # seconds that the ranks have to meet
_FAREWELL = 2.0  # seconds that a rank which leaves waits for its word to be heard
_TOKEN = 32
_NOWHERE = "nowhere"  # what rank 0 announces where it cannot listen
_GREETING = _TOKEN + 8  # the token and the rank
_GREETED = 10.0  # seconds in which a rank that has connected sends it
_HINT = "Mend the cause and start again; `pathoseg train --resume` goes on from its checkpoint."


class Reason(NamedTuple):
    """Why a rank has given up, or is lost.

    Attributes:
        told: In words.
        fits: Where an accelerator ran out of memory, the bytes that another plan may fill.
        lost: The rank that is lost, if that is the reason.
    """

    told: str
    fits: int | None = None
    lost: int | None = None


class Heartbeat:
    """A star of connections through rank 0, with a thread on each rank that beats and listens.

    It stands beside the library that carries the tensors, because such a library is silent about
    a dead peer until somebody waits for exactly this peer. A long computation keeps beating:
    torch lets other threads run while it computes.

    Args:
        rank: This rank.
        ranks: Number of ranks; one alone has nobody to listen to.
        host: This rank's address: the loopback interface, or one that all ranks reach. They meet at
            that of rank 0.
        announce: Tells all ranks a text of rank 0; each rank calls it once, its own text counts
            on rank 0 alone.

    Attributes:
        host: As given.

    Raises:
        PathosegError: The ranks do not meet within a minute.
    """

    def __init__(self, rank: int, ranks: int, host: str, announce: Callable[[str], str]) -> None:
        self.host = host
        self._reason: Reason | None = None
        self._left = threading.Event()
        self._parted = threading.Event()
        self._peers: list[_Peer] = []
        self._alone = ranks == 1
        if self._alone:
            return
        try:
            met = meet(rank, ranks, host, announce)
        except OSError as error:
            raise PathosegError(
                f"Rank {rank} cannot meet the other ranks at {host}: {error}.",
                "Check that every rank has started and that MASTER_ADDR, where it is set, names "
                "an address of the first node that all nodes reach.",
            ) from error
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers = [_Peer(connection, other) for other, connection in met.items()]
        self._selector.register(self._wake, selectors.EVENT_READ)
        for peer in self._peers:
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def check(self, patience: float = 0) -> None:
        """Raise if a rank is lost or has given up.

        Args:
            patience: Seconds to wait first for news of such a rank.

        Raises:
            PathosegError: Which rank, and why; LostRankError where a rank is lost.
        """
        if patience:
            self._parted.wait(patience)
        if self._reason is None:
            return
        if self._reason.fits is not None:
            raise MemoryExhaustedError(self._reason.told, _HINT, self._reason.fits)
        if self._reason.lost is not None:
            raise LostRankError(self._reason.told, _HINT, self._reason.lost)
        raise PathosegError(self._reason.told, _HINT)

    def abort(self, reason: str, fits: int | None = None) -> None:
        """Make `check` fail with this reason on every rank; returns once all know it."""
        self._blame(Reason(reason, fits))
        if not self._alone:
            self._leave()

    def close(self) -> None:
        """Tell the other ranks that this one ends as planned."""
        if not self._alone:
            self._leave()
            self._selector.close()
            self._wake.close()
            self._waker.close()

    def _leave(self) -> None:
        self._left.set()
        self._waker.send(b"!")
        self._parted.wait(_FAREWELL + 1)

    def _live(self) -> None:
        beat = time.monotonic()
        while self._peers and not self._left.is_set() and self._reason is None:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                if key.data is not None:
                    self._hear(key.data)
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT
                for peer in self._peers:
                    peer.say("beat")
                    peer.silent += 1
                    if peer.silent > SILENCE:
                        self._blame(
                            Reason(
                                f"Rank {peer.rank} has given no sign of life for "
                                f"{SILENCE * BEAT:.0f} s: it is stopped, or its machine is.",
                                lost=peer.rank,
                            )
                        )
        self._part()

    def _hear(self, peer: _Peer) -> None:
        words = peer.listen()
        if words is None:
            self._drop(peer)
            died = f"Rank {peer.rank} ended without a word: it was killed, or it crashed."
            self._blame(Reason(died, lost=peer.rank))
        elif "bye" in words:
            self._drop(peer)
        else:
            for reason in (word for word in words if isinstance(word, list)):
                self._blame(Reason(*reason))

    def _blame(self, reason: Reason) -> None:
        # The first reason is the cause, later ones follow from it.
        if self._reason is None:
            self._reason = reason

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.connection.close()

    def _part(self) -> None:
        """Speaks the last word and stays until it is heard: an early close could discard it."""
        for peer in self._peers:
            peer.say("bye" if self._reason is None else self._reason)
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _FAREWELL
        for peer in self._peers:
            peer.drain(deadline)
            peer.connection.close()
        self._parted.set()


class _Peer:
    """The connection to one rank: words, each a line of JSON: "beat", "bye" or a Reason."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.connection = connection
        self.silent = 0  # turns
        self._unread = b""

    def say(self, word: str | Reason) -> None:
        # A broken connection shows when it is read: as the loss of the rank.
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(word).encode() + b"\n")

    def listen(self) -> list[Any] | None:
        """Return the words that have come; None at the end of the connection."""
        try:
            came = self.connection.recv(65536)
        except OSError:
            return None
        if not came:
            return None
        self.silent = 0
        *lines, self._unread = (self._unread + came).split(b"\n")
        return [json.loads(line) for line in lines]

    def drain(self, deadline: float) -> None:
        with contextlib.suppress(OSError):
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            while self.connection.recv(65536):
                pass


def meet(
    rank: int, ranks: int, host: str, announce: Callable[[str], str]
) -> dict[int, socket.socket]:
    """Connect every rank with rank 0; all ranks call it together.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        host: This rank's address; only that of rank 0 counts, as the others connect to it.
        announce: As for `Heartbeat`.

    Returns:
        Connections by rank: on rank 0 to all others, on these to rank 0.

    Raises:
        OSError: The ranks do not meet within a minute.
    """
    if rank:
        return {0: _join(rank, announce)}
    token = secrets.token_hex(_TOKEN // 2)
    met: dict[int, socket.socket] = {}
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family, backlog=ranks)
    except OSError:
        announce(_NOWHERE)  # the others wait for it
        raise
    with listening as server:
        announce(f"{host} {server.getsockname()[1]} {token}")
        deadline = time.monotonic() + MEETING
        while len(met) < ranks - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = server.accept()
            if (came := _greeted(connection, token, deadline)) is None:
                connection.close()
            else:
                met[came] = connection
    return met


def _greeted(connection: socket.socket, token: str, deadline: float) -> int | None:
    """Return the rank that has connected; None where it is a stranger on the network."""
    greeting = b""
    patience = min(deadline, time.monotonic() + _GREETED)
    with contextlib.suppress(OSError):
        while len(greeting) < _GREETING:
            connection.settimeout(max(0.01, patience - time.monotonic()))
            came = connection.recv(_GREETING - len(greeting))
            if not came:
                break
            greeting += came
        connection.settimeout(MEETING)
    if len(greeting) < _GREETING:
        return None
    known = hmac.compare_digest(greeting[:_TOKEN], token.encode())
    return int(greeting[_TOKEN:]) if known else None


def _join(rank: int, announce: Callable[[str], str]) -> socket.socket:
    told = announce("")
    if told == _NOWHERE:
        raise OSError("rank 0 cannot listen at its address; MASTER_ADDR may name another host")
    host, port, token = told.split()
    connection = socket.create_connection((host, int(port)), timeout=MEETING)
    connection.sendall(f"{token}{rank:8d}".encode())
    return connection
