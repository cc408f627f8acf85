"""The transport between processes: what MPI and torch.distributed have in common."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from pathoseg.device import current_stream, record
from pathoseg.errors import LostRankError, MemoryExhaustedError, PathosegError
from pathoseg.parallel.comm.heartbeat import Heartbeat
from pathoseg.platform_support import yield_core


def own_address(host: str) -> str:
    """Return the address of the interface by which this machine reaches `host`.

    Raises:
        OSError: The name of `host` is not known, or no route leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def reached_by(hosts: Iterable[str]) -> str:
    """Return this machine's address on the route to the first of the hosts that is another machine.

    A machine's own name says little: Debian gives it a loopback address.

    Args:
        hosts: Names or addresses; as many are looked at as needed.

    Returns:
        An address, or this machine's name where none of these is another.
    """
    for host in hosts:
        with suppress(OSError):
            own = own_address(host)
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return socket.gethostname()


TAGS = 2**20  # the callers' tags lie below; those of sums, texts and barriers from here to 2**21
ALL_TAGS = 5 * TAGS  # those of a wire, words about messages (`OrderedWire`) included
_LOOKS = 2000  # at a request in a row, before a waiting rank sleeps between them
_NAP = 1e-4  # seconds
_LEAVES = "\0leaves"  # the text of a rank that closes its transport
_Steps = Iterator[Sequence["Request"]]


class Request(Protocol):
    """A send or receive that a library has begun."""

    def done(self) -> bool:
        """Return True if the message is complete at this end; never blocks.

        Raises:
            PathosegError: It failed, or had another size than its buffer.
        """


class CopyEvent(Protocol):
    """A point in a device's work; torch.Event is one."""

    def query(self) -> bool:
        """Return True if the device has passed the event."""


class Wire(Protocol):
    """Messages of bytes between processes, by one library.

    Messages with the same sender, receiver and tag arrive in the order in which they were sent.

    Attributes:
        rank: This rank.
        ranks: The number of ranks.
        reads: Types of accelerators whose memory it sends and receives.
    """

    rank: int
    ranks: int
    reads: frozenset[str]

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Connect these pairs and groups of ranks as directly as the library can.

        All ranks call it with the same arguments, and nothing is under way.
        """

    def carries(self, device: torch.device, other: int) -> bool:
        """Return True if device memory goes to and from rank `other` without a copy on the host."""

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> Request | None:
        """Begin the library's own sum in place, after what the current stream has to do.

        Returns:
            None where the library has none for this tensor and these ranks.
        """

    def send(self, data: Tensor, to: int, tag: int) -> Request:
        """Begin to send a tensor: uint8, one dimension; it must not change until that is done."""

    def receive(self, into: Tensor, source: int, tag: int) -> Request:
        """Begin to receive a message of as many bytes as `into` (uint8, one dimension) has."""

    def pause(self, looks: int) -> None:
        """Let other threads and processes run for a moment, between two looks at a request.

        Args:
            looks: Number of calls in a row without success.
        """

    def close(self, well: bool) -> None:
        """End the use of the library.

        Args:
            well: False where other ranks may be gone, so that nothing may wait for them.
        """


class _Chain:
    """Steps, each of requests that must all be done before the next begins: itself a request."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._open: Sequence[Request] | None = next(steps)

    def done(self) -> bool:
        while self._open is not None:
            self._open = [request for request in self._open if not request.done()]
            if self._open:
                return False
            self._open = next(self._steps, None)
        return True


class Operation:
    """A message or sum that a process transport has begun: implements Pending."""

    def __init__(self, transport: ProcessTransport, what: str, chain: _Chain) -> None:
        self._transport = transport
        self._what = what
        self._chain = chain

    def done(self) -> bool:
        return self._transport.moved(self._chain, self._what)

    def wait(self) -> None:
        looks = 0
        while not self.done():
            self._transport.pause(looks)
            looks += 1


class ProcessTransport:
    """One rank's end of a wire: implements Transport.

    Where the wire has no sum of its own, sums are taken by exchange: each rank adds up one part of
    the tensor, in the order of the ranks, and sends it to the others (a reduce-scatter and an
    all-gather in two rounds; a rank sends 2 (n - 1) / n of the tensor, as in a ring). So the result
    is equal to the bit on all ranks, in every run and with every library. 16-bit floats are added
    up in float32.

    An accelerator's tensors go through pinned memory unless the wire carries them; what is received
    is ready for work enqueued on the stream that was current when the receive was posted.

    Args:
        wire: Carries the bytes.
        heartbeat: Tells of lost ranks.

    Attributes:
        host: This rank's address, at which the others reach it.
    """

    def __init__(self, wire: Wire, heartbeat: Heartbeat) -> None:
        self.host = heartbeat.host
        self.rank = wire.rank
        self.ranks = wire.ranks
        self.reads = wire.reads
        self._wire = wire
        self._heartbeat = heartbeat
        self._well = True
        self._shared: Counter[int] = Counter()  # sums and texts shared with each rank so far
        self._waiting: deque[DeviceReady] = deque()  # messages that wait for the device
        self._moving: list[_Chain] = []  # chains of several steps, moved at every call
        self._held: set[_Chain] = set()  # the others, kept with their buffers until they are done

    def prepare(self, peers: Collection[int], groups: Collection[tuple[int, ...]]) -> None:
        told = [json.loads(text) for text in self.gather(json.dumps([[*peers], [*groups]]))]
        pairs = {
            (min(rank, peer), max(rank, peer)) for rank, (own, _) in enumerate(told) for peer in own
        }
        together = sorted({tuple(each) for _, own in told for each in own if len(each) > 1})
        try:
            self._wire.open(sorted(pairs), together)
        except PathosegError:
            self._check("all ranks to connect", patience=2)  # as in `moved`
            raise

    def send(self, tensor: Tensor, to: int, tag: int) -> Operation:
        what = f"rank {to} to take message {tag}"
        return self._begin(what, self._send(tensor, to, tag), not tensor.is_cpu)

    def receive(self, into: Tensor, source: int, tag: int) -> Operation:
        what = f"message {tag} of rank {source}"
        return self._begin(what, self._receive(into, source, tag), not into.is_cpu)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Operation:
        return self._begin(f"the sum over ranks {ranks}", self._sum(tensor, ranks), True)

    def gather(self, text: str) -> list[str]:
        found = self._gathered(text)
        if _LEAVES in found:
            self._check("all ranks", patience=2)  # that rank may have told why
            raise _left(found.index(_LEAVES), self.rank)
        return found

    def _gathered(self, text: str) -> list[str]:
        found: list[str] = []
        self._begin("all ranks", self._gather(text.encode(), found), True).wait()
        return found

    def barrier(self) -> None:
        self.gather("")

    def abort(self, reason: str, fits: int | None = None) -> None:
        self._heartbeat.abort(reason, fits)
        self._well = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the other ranks; an error of this one ends them, too."""
        if isinstance(error, PathosegError):
            fits = error.fits if isinstance(error, MemoryExhaustedError) else None
            self.abort(f"Rank {self.rank}: {error.problem} {error.hint}", fits)
        elif error is not None:
            told = ": ".join(each for each in (type(error).__name__, str(error)) if each)
            self.abort(f"Rank {self.rank} ended ({told}).")
        self.close()

    def close(self) -> None:
        try:
            # No rank leaves while another still needs it.
            self._well &= all(text == _LEAVES for text in self._gathered(_LEAVES))
        except PathosegError:
            self._well = False
        self._heartbeat.close()
        self._wire.close(self._well)

    def moved(self, chain: _Chain, what: str) -> bool:
        """Advance all operations of several steps, and `chain`.

        Args:
            chain: The operation that somebody waits for.
            what: What it waits for, as part of an error message.

        Returns:
            Whether it is done.

        Raises:
            PathosegError: A rank is lost or has given up, or the message failed.
        """
        self._check(what)
        try:
            self._moving = [each for each in self._moving if not each.done()]
            done = chain.done()
        except PathosegError:
            self._check(what, patience=2)  # the heartbeat may know the cause of the wire's failure
            raise
        if done:
            self._held.discard(chain)
        return done

    def pause(self, looks: int) -> None:
        self._wire.pause(looks)

    def _check(self, what: str, patience: float = 0) -> None:
        try:
            self._heartbeat.check(patience)
        except MemoryExhaustedError:
            raise
        except PathosegError as lost:
            problem = f"{lost.problem} (Rank {self.rank} waited for {what}.)"
            if isinstance(lost, LostRankError):
                raise LostRankError(problem, lost.hint, lost.rank) from None
            raise PathosegError(problem, lost.hint) from None

    def _begin(self, what: str, steps: _Steps, several: bool) -> Operation:
        self._check(what)
        try:
            chain = _Chain(steps)
        except PathosegError:
            self._check(what, patience=2)  # as in `moved`
            raise
        (self._moving.append if several else self._held.add)(chain)
        return Operation(self, what, chain)

    def _send(self, tensor: Tensor, to: int, tag: int) -> _Steps:
        data = _bytes(tensor)
        if not tensor.is_cpu:
            if not self._wire.carries(tensor.device, to):
                data = torch.empty_like(data, device="cpu", pin_memory=True)
                data.copy_(_bytes(tensor), non_blocking=True)
            yield [DeviceReady(record(tensor.device), self._waiting)]
        yield [self._wire.send(data, to, tag)]

    def _receive(self, into: Tensor, source: int, tag: int) -> _Steps:
        data = _bytes(into)
        if into.is_cpu:
            yield [self._wire.receive(data, source, tag)]
        elif self._wire.carries(into.device, source):
            # Work that was enqueued earlier may still use this memory.
            yield [DeviceReady(record(into.device), self._waiting)]
            yield [self._wire.receive(data, source, tag)]
        else:
            stream = current_stream(into.device)
            pinned = torch.empty_like(data, device="cpu", pin_memory=True)
            yield [self._wire.receive(pinned, source, tag)]
            with stream:
                data.copy_(pinned, non_blocking=True)

    def _sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> _Steps:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        request = None if half else self._wire.sum(tensor.detach(), ranks)
        if request is not None:
            yield [request]
            return
        parts = dict(zip(ranks, tensor.detach().view(-1).tensor_split(len(ranks)), strict=True))
        mine = parts[self.rank]
        tags = {rank: self._next_tag(rank) for rank in ranks if rank != self.rank}
        came = {rank: torch.empty_like(mine) for rank in tags}
        yield [_Chain(self._send(parts[rank], rank, tag)) for rank, tag in tags.items()] + [
            _Chain(self._receive(came[rank], rank, tag)) for rank, tag in tags.items()
        ]
        came[self.rank] = mine
        first, *rest = ranks
        total = came[first].float() if half else came[first]
        for rank in rest:
            total += came[rank]
        mine.copy_(total)  # which it is already on the first rank
        del came, total
        yield [_Chain(self._send(mine, rank, tag + 1)) for rank, tag in tags.items()] + [
            _Chain(self._receive(parts[rank], rank, tag + 1)) for rank, tag in tags.items()
        ]

    def _gather(self, text: bytes, found: list[str]) -> _Steps:
        """Through rank 0: lengths and texts, there and back."""
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _bytes_of(0)
        lengths = torch.zeros(self.ranks, dtype=torch.int64)
        lengths[self.rank] = len(text)
        if self.rank:
            tag = self._next_tag(0)
            length = _bytes(lengths[self.rank])
            yield [self._wire.send(length, 0, tag), self._wire.send(own, 0, tag)]
            yield [self._wire.receive(_bytes(lengths), 0, tag + 1)]
            joined = _bytes_of(int(lengths.sum()))
            yield [self._wire.receive(joined, 0, tag + 1)]
        else:
            tags = {rank: self._next_tag(rank) for rank in range(1, self.ranks)}
            yield [self._wire.receive(_bytes(lengths[rank]), rank, tags[rank]) for rank in tags]
            joined = _bytes_of(int(lengths.sum()))
            texts = torch.split(joined, lengths.tolist())
            texts[0].copy_(own)
            yield [self._wire.receive(texts[rank], rank, tags[rank]) for rank in tags]
            yield [
                self._wire.send(data, rank, tags[rank] + 1)
                for rank in tags
                for data in (_bytes(lengths), joined)
            ]
        found += (bytes(each.numpy()).decode() for each in torch.split(joined, lengths.tolist()))

    def _next_tag(self, rank: int) -> int:
        """The first of two tags for what this rank and another begin together.

        Both count alike, as they call sums and gathers in the same order.
        """
        tag = TAGS + 2 * self._shared[rank] % TAGS
        self._shared[rank] += 1
        return tag


class DeviceReady:
    """A request that is done once the device has come to an event and all earlier ones are done.

    Without this order the later of two messages, looked at a moment later, could begin first.

    Args:
        event: The point to which the device must come.
        waiting: All that are not done, the earliest first; gains this one.
    """

    def __init__(self, event: CopyEvent, waiting: deque[DeviceReady]) -> None:
        self._event = event
        self._waiting = waiting
        waiting.append(self)

    def done(self) -> bool:
        if self._waiting[0] is not self or not self._event.query():
            return False
        self._waiting.popleft()
        return True


def _left(rank: int, own: int) -> PathosegError:
    return PathosegError(
        f"Rank {rank} has left, and rank {own} waited for all ranks.",
        f"Look for the first error of rank {rank}; let all ranks make the same calls.",
    )


def look_again(looks: int) -> None:
    """Pause between two looks at a request of a library that wakes nobody when it is done.

    The core is given to other ranks, at first by yielding it, after many looks by sleeping.

    Args:
        looks: Number of calls in a row without success.
    """
    if looks < _LOOKS:
        yield_core()
    else:
        time.sleep(_NAP)


def wrong_size(came: int, expected: int) -> PathosegError:
    """Make the error of a message of `came` bytes where `expected` were expected."""
    return PathosegError(
        f"A message of {came} bytes came where {expected} were expected.",
        "Start all ranks with the same version, configuration and model.",
    )


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, not a copy; one of a single element has any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes_of(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)
