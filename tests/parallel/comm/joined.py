"""Joins the ranks of a test: by a library, or by gloo without its tags, as NCCL has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pathoseg.parallel.comm.gloo import GlooRequest, GlooWire, join_gloo
from pathoseg.parallel.comm.heartbeat import Heartbeat
from pathoseg.parallel.comm.launcher import connect, find_world
from pathoseg.parallel.comm.nccl import OrderedWire
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.comm.transport import Pending, Transport
from tests.parallel.comm.imitated_nccl import connect_imitated, prepare_all

Library = Literal["gloo", "mpi", "ordered", "imitated"]
_ONLY_TAG = 2**22


def join(library: str) -> Transport:
    """The transport of a rank that a test has started."""
    if library == "ordered":
        return connect_ordered()
    if library == "imitated":
        return connect_imitated()
    if library == "nccl":
        transport = connect("nccl")
        prepare_all(transport)
        return OnDevice(transport, torch.device("cuda", torch.cuda.current_device()))
    return connect()


def connect_ordered() -> ProcessTransport:
    """All tensors by channels of gloo, texts of `gather` included: the paths that NCCL takes."""
    world = find_world()
    wire = join_gloo(
        world.rank, world.ranks, world.host, world.port, local=world.local, hosted=world.hosted
    )
    ordered = OrderedWire(wire, GlooChannels(wire))
    return ProcessTransport(ordered, Heartbeat(wire.rank, wire.ranks, wire.host, wire.announce))


class GlooChannels:
    """All messages of two ranks under one tag: implements Channels."""

    def __init__(self, wire: GlooWire) -> None:
        self._wire = wire

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        pass  # all are

    def carries(self, device: torch.device, other: int) -> bool:
        return True

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> None:
        return None

    def send(self, data: Tensor, to: int) -> GlooRequest:
        return self._wire.send(data, to, _ONLY_TAG)

    def receive(self, into: Tensor, source: int) -> GlooRequest:
        return self._wire.receive(into, source, _ONLY_TAG)

    def pause(self, looks: int) -> None:
        self._wire.pause(looks)

    def close(self, well: bool) -> None:
        pass  # the wire of the words is closed with it


class OnDevice:
    """Lets tensors of the host travel from device to device: implements Transport."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.rank, self.ranks, self.reads = transport.rank, transport.ranks, transport.reads
        self._transport, self._device = transport, device
        self.gather, self.barrier = transport.gather, transport.barrier
        self.prepare = transport.prepare
        self.abort, self.close = transport.abort, transport.close

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        return self._transport.send(tensor.to(self._device, copy=True), to, tag)

    def receive(self, into: Tensor, source: int, tag: int) -> Pending:
        there = torch.empty_like(into, device=self._device)
        return _Back(self._transport.receive(there, source, tag), there, into)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        there = tensor.to(self._device, copy=True)
        return _Back(self._transport.sum(there, ranks), there, tensor)


class _Back:
    """Copies what has come on the device to the host, once: implements Pending."""

    def __init__(self, pending: Pending, there: Tensor, here: Tensor) -> None:
        self._pending, self._there, self._here = pending, there, here
        self._copied = False

    def done(self) -> bool:
        if self._pending.done() and not self._copied:
            self._here.copy_(self._there)
            self._copied = True
        return self._copied

    def wait(self) -> None:
        self._pending.wait()
        self.done()
