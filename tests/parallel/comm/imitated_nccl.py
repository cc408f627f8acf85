"""Stands in for torch's NCCL group on a machine without GPUs: gloo, with NCCL's manners."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from pathoseg.parallel.comm import nccl
from pathoseg.parallel.comm.gloo import GlooWire, join_gloo
from pathoseg.parallel.comm.heartbeat import MEETING, Heartbeat
from pathoseg.parallel.comm.launcher import find_world
from pathoseg.parallel.comm.mpi import MpiWire, join_mpi
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.comm.transport import Transport


def prepare_all(transport: Transport) -> None:
    """Connect all pairs, and the groups whose sums the conformance suite takes."""
    everyone = tuple(range(transport.ranks))
    groups = [everyone, (0, everyone[-1]), everyone[:-1]]
    others = [rank for rank in everyone if rank != transport.rank]
    transport.prepare(others, [group for group in groups if transport.rank in group])


def connect_imitated() -> ProcessTransport:
    """As `connect("nccl")`, in host memory, and on top of MPI under its launcher."""
    world = find_world()
    words: GlooWire | MpiWire
    if world.launcher == "mpirun":
        words = join_mpi(world.ranks)
    else:
        words = join_gloo(
            world.rank, world.ranks, world.host, world.port, local=world.local, hosted=world.hosted
        )
    for name in ("Stream", "synchronize"):
        mock.patch.object(torch.cuda, name).start()
    nothing = contextlib.nullcontext()
    mock.patch.object(torch.cuda, "stream", return_value=nothing).start()
    mock.patch.object(torch.distributed, "is_nccl_available", return_value=True).start()
    mock.patch.object(nccl, "share_devices", return_value=torch.device("cpu")).start()
    mock.patch.object(nccl, "card_identity", return_value=f"GPU {words.rank}").start()
    mock.patch.object(distributed_c10d, "ProcessGroupNCCL", Group, create=True).start()
    if words.rank:
        words.host = "192.0.2.1"  # its own on another host (RFC 5737: nobody's)
    heartbeat = Heartbeat(words.rank, words.ranks, words.host, words.announce)
    transport = nccl.by_nccl(words, heartbeat, torch.device("cuda"), asked=True)
    prepare_all(transport)
    return transport


class Group:
    """Some ranks; the first message or sum connects them, and blocks while it does."""

    class Options:
        _timeout: timedelta

        def __init__(self, is_high_priority_stream: bool) -> None:
            assert is_high_priority_stream

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        assert options._timeout > timedelta(days=1)
        self._store, self._rank, self._size = store, rank, size
        self._made: Any = None

    def send(self, data: list[Tensor], to: int, tag: int) -> Sent:
        assert (self._rank, to, self._size) == (0, 1, 2)
        return Sent(self._group().send(data, to, 0))

    def recv(self, into: list[Tensor], source: int, tag: int) -> Sent:
        assert (self._rank, source, self._size) == (1, 0, 2)
        return Sent(self._group().recv(into, source, 0))

    def allreduce(self, data: list[Tensor]) -> Sent:
        return Sent(self._group().allreduce(data))

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        print("aborted", flush=True)

    def _group(self) -> Any:
        if self._made is None:
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=MEETING)
            self._made = gloo(self._store, self._rank, self._size, options)
        return self._made


class Sent:
    """A message that can be asked whether it is there."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._over = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta) -> None:
        assert self._over.is_set()

    def _wait(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._work.wait(timedelta(days=1))
            self._over.set()
