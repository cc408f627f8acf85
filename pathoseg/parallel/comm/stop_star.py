"""Tells all ranks of a signal to one, and ends them together while they are within a step.

A rank that is in a long kernel takes part in nothing that a transport does. So a thread beside it
(`Interruption`) talks to those of the other ranks by connections of their own:

    rank 1      rank 0      rank 2
      |--- 15 --->|             |      (1) a signal, by its number: all are told, and have some time
      |<-- 15 ----|---- 15 ---->|          to come to an end in order
      |-- ready ->|<--- ready --|      (2) may this be left? Again and again, until all say so:
      |<-- leave -|--- leave -->|          ranks that are all within a step are within the same one,
      |           |             |          as they speak with each other between two
      |-- bytes ->|<--- bytes --|      (3) each one's part of the state, which rank 0 saves
      |<-- end ---|---- end --->|      (4) rank 0 has ended, so may the others
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.heartbeat import meet

if TYPE_CHECKING:
    from pathoseg.parallel.comm.process_transport import ProcessTransport

# Words of a byte; lower ones are signals.
_READY, _BUSY, _LEAVE, _GO_ON = 200, 201, 202, 203
_LEAST_WORD = 200
_SIZE = struct.Struct("<Q")
_PIECE = 2**20  # bytes
_ANSWER = 10.0  # seconds, after which a rank that says nothing counts as ended
_SAVED = 300.0  # seconds that parts may be on their way, and that rank 0 may take to save them


class StopStar:
    """One rank's connections, to rank 0 or from it to all others; implements Interruption's Peers.

    One thread uses it.

    Args:
        connections: By rank, as `meet` makes them.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._leads = 0 not in connections
        self.connections = tuple(connections[rank] for rank in sorted(connections))
        for each in self.connections:
            each.settimeout(_ANSWER)

    @classmethod
    def of(cls, transport: ProcessTransport) -> Self:
        """Make the connections of a transport's ranks; all of them call it.

        Raises:
            PathosegError: The ranks do not meet within a minute.
        """
        try:
            return cls(
                meet(
                    transport.rank,
                    transport.ranks,
                    transport.host,
                    lambda text: transport.gather(text)[0],
                )
            )
        except OSError as error:
            raise PathosegError(
                f"Rank {transport.rank} cannot meet the other ranks: {error}.",
                "Start the same command again.",
            ) from error

    def tell(self, number: int) -> None:
        """(1) Tell the others of a signal: all of them on rank 0, which tells the rest of its own
        accord."""
        for each in self.connections:
            _say(each, number)

    def hear(self, connection: socket.socket) -> int | None:
        """(1) Return the signal of which another rank tells; None where it has ended."""
        return _word(connection)

    def agree(self, ready: bool) -> bool | None:
        """(2) Return whether all ranks are ready, on all of them; None where one has ended."""
        if not self._leads:
            _say(self.connections[0], _READY if ready else _BUSY)
            answer = _answer(self.connections[0])
            return None if answer is None else answer == _LEAVE
        answers = [_answer(each) for each in self.connections]
        if None in answers:
            return None
        agreed = ready and all(answer == _READY for answer in answers)
        for each in self.connections:
            _say(each, _LEAVE if agreed else _GO_ON)
        return agreed

    def gather(self, part: bytes) -> list[bytes]:
        """(3) Join the parts of all ranks on rank 0, once they agree.

        Returns:
            The parts by rank; on other ranks none, once rank 0 has ended (4).

        Raises:
            PathosegError: Rank 0 goes on instead, or on it: another rank is lost.
        """
        for each in self.connections:
            each.settimeout(_SAVED)
        if self._leads:
            return [part, *map(_receive, self.connections)]
        [to] = self.connections
        try:
            to.sendall(_SIZE.pack(len(part)))
            to.sendall(part)
        except OSError as error:
            raise _lost() from error
        if _word(to) is not None:
            raise PathosegError("Rank 0 cannot save.", "It says why.")
        return []

    def go_on(self) -> None:
        """Tell the ranks that wait for the end of rank 0 that there is none."""
        if self._leads:
            for each in self.connections:
                _say(each, _GO_ON)

    def close(self) -> None:
        """End the connections; who waits at one is woken."""
        for each in self.connections:
            with suppress(OSError):  # the other end was first
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _say(connection: socket.socket, word: int) -> None:
    with suppress(OSError):  # it has ended, as the next answer shows
        connection.sendall(bytes([word]))


def _word(connection: socket.socket) -> int | None:
    try:
        came = connection.recv(1)
    except OSError:
        return None
    return came[0] if came else None


def _answer(connection: socket.socket) -> int | None:
    """The next word that is no signal."""
    word = _word(connection)
    while word is not None and word < _LEAST_WORD:
        word = _word(connection)
    return word


def _receive(connection: socket.socket) -> bytes:
    """The bytes that another rank sends."""
    [size] = _SIZE.unpack(_exactly(connection, _SIZE.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    came = bytearray(size)
    view = memoryview(came)
    while view:
        try:
            count = connection.recv_into(view[:_PIECE])
        except OSError as error:
            raise _lost() from error
        if not count:
            raise _lost()
        view = view[count:]
    return bytes(came)


def _lost() -> PathosegError:
    return PathosegError("A rank has ended within a step.", "Go on with --resume.")
