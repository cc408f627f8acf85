"""Messages by NCCL, from GPU to GPU, matched in order where channels know no tags."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.gloo import LONG, join_gloo
from pathoseg.parallel.comm.heartbeat import MEETING, Heartbeat
from pathoseg.parallel.comm.process_transport import (
    TAGS,
    ProcessTransport,
    Request,
    Wire,
    look_again,
    wrong_size,
)

# Tags of words, beyond those of all messages: one says that a message comes, the others ask for one
# and lie as far above the first of them as the message's own tag above 0.
_COMES = 2 * TAGS
_ASKED = _COMES + 1


class Channels(Protocol):
    """A channel from each rank to each other one, on which only the order of the calls counts.

    The n-th send and the n-th receive of a channel belong together. A message need not move
    before both have been called; once they have, it moves whatever other channels do.
    """

    def carries(self, data: Tensor) -> bool:
        """Return True if this tensor is sent over an NCCL channel."""

    def send(self, data: Tensor, to: int) -> Request:
        """Begin to send a tensor (uint8, one dimension, not empty) to rank `to`; never blocks."""

    def receive(self, into: Tensor, source: int) -> Request:
        """Begin to receive from rank `source` as many bytes as `into` has; never blocks."""

    def pause(self, turns: int) -> None:
        """Let others run for a moment; called `turns` times in a row without success."""

    def close(self, well: bool) -> None:
        """End the use of the channels.

        Args:
            well: False where messages may be under way that never arrive.
        """


class OrderedWire:
    """Channels with a tagged wire beside them for a word about each message: implements Wire.

    Two ranks begin their messages in orders of their own, and neither knows the other's. So the
    receiver asks for each message when its buffer is there. The sender looks for what it was
    asked for among what it has, begins the channel's messages in the order in which it finds
    them, and tells the receiver, which begins them in the same order. Nothing begins that the
    other end has not agreed to, so that no message waits behind one that cannot move yet.
    A buffer that is posted ahead is asked for ahead: then a message waits for one word only.

    Words are read when somebody looks at a request of a channel.

    Args:
        words: Carries the words, and the tensors that no channel carries.
        channels: Carry the others.
    """

    reads = frozenset({"cuda"})

    def __init__(self, words: Wire, channels: Channels) -> None:
        self.rank = words.rank
        self.ranks = words.ranks
        self._words = words
        self._channels = channels
        others = [rank for rank in range(words.ranks) if rank != words.rank]
        self._leaving = {rank: _Leaving(words, channels, rank) for rank in others}
        self._coming = {rank: _Coming(words, channels, rank) for rank in others}

    def send(self, data: Tensor, to: int, tag: int) -> Request:
        if not self._channels.carries(data):
            return self._words.send(data, to, tag)
        return self._leaving[to].begin(_Message(self, data), tag)

    def receive(self, into: Tensor, source: int, tag: int) -> Request:
        if not self._channels.carries(into):
            return self._words.receive(into, source, tag)
        return self._coming[source].begin(_Message(self, into), tag)

    def move(self) -> None:
        """Read the words that have come, and begin the messages on which both ends have agreed."""
        for leaving in self._leaving.values():
            leaving.move()
        for coming in self._coming.values():
            coming.move()

    def pause(self, turns: int) -> None:
        self._channels.pause(turns)

    def close(self, well: bool) -> None:
        self._channels.close(well)
        self._words.close(well)


class _Message:
    """One message: implements Request.

    Attributes:
        data: Its bytes.
        size: Number of the sender's bytes, once the two ends have agreed.
        begun: Requests of which it consists; all must be done.
    """

    def __init__(self, wire: OrderedWire, data: Tensor) -> None:
        self._wire = wire
        self.data = data
        self.size: int | None = None
        self.begun: list[Request] = []

    def done(self) -> bool:
        self._wire.move()
        self.begun = [request for request in self.begun if not request.done()]
        if self.size is not None and self.size != self.data.numel():
            raise wrong_size(self.size, self.data.numel())
        return self.size is not None and not self.begun


class _Leaving:
    """The channel to another rank."""

    def __init__(self, words: Wire, channels: Channels, to: int) -> None:
        self._words, self._channels, self._to = words, channels, to
        # A receiver that asks for more than is here yet must not hide what is: so the words about
        # each tag have a tag of their own.
        self._offered: dict[int, deque[tuple[_Message, _Word]]] = {}

    def begin(self, message: _Message, tag: int) -> _Message:
        asked = _Word(self._words, self._to, _ASKED + tag)
        self._offered.setdefault(tag, deque()).append((message, asked))
        return message

    def move(self) -> None:
        for tag, offered in [*self._offered.items()]:
            while offered and offered[0][1].done():
                message, asked = offered.popleft()
                message.size = message.data.numel()
                # One of another size stays here: its receiver, which is told the size, reports it.
                if message.size == asked.size > 0:
                    message.begun.append(self._channels.send(message.data, self._to))
                message.begun.append(_say(self._words, self._to, _COMES, tag, message.size))
            if not offered:
                del self._offered[tag]


class _Coming:
    """The channel from another rank."""

    def __init__(self, words: Wire, channels: Channels, source: int) -> None:
        self._words, self._channels, self._source = words, channels, source
        self._wanted: dict[int, deque[_Message]] = defaultdict(deque)
        self._heard: deque[_Word] = deque()

    def begin(self, message: _Message, tag: int) -> _Message:
        self._wanted[tag].append(message)
        size = message.data.numel()
        message.begun.append(_say(self._words, self._source, _ASKED + tag, tag, size))
        self._heard.append(_Word(self._words, self._source, _COMES))
        return message

    def move(self) -> None:
        while self._heard and self._heard[0].done():
            comes = self._heard.popleft()
            message = self._wanted[comes.tag].popleft()
            message.size = comes.size
            if message.data.numel() == message.size > 0:
                message.begun.append(self._channels.receive(message.data, self._source))


class _Word:
    """A word that another rank says: the tag of a message and its size. Implements Request."""

    def __init__(self, wire: Wire, source: int, kind: int) -> None:
        self._numbers = torch.empty(2, dtype=torch.int64)
        self._request = wire.receive(self._numbers.view(torch.uint8), source, kind)

    def done(self) -> bool:
        return self._request.done()

    @property
    def tag(self) -> int:
        return int(self._numbers[0])

    @property
    def size(self) -> int:
        return int(self._numbers[1])


def _say(wire: Wire, to: int, kind: int, tag: int, size: int) -> Request:
    numbers = torch.tensor([tag, size], dtype=torch.int64)
    return wire.send(numbers.view(torch.uint8), to, kind)


_MOST_RANKS = (
    17  # torch has 32 streams for communicators; two that share one could block each other
)
_FAREWELL = 5  # seconds
_USE_ANOTHER = "Use the transport 'gloo', or 'mpi' (one that reads CUDA memory copies GPU to GPU)."


def refuse_without_gpus(ranks: int) -> None:
    """Check that this machine has NCCL and a GPU for each of `ranks` local ranks.

    Args:
        ranks: Ranks on the machine; 1 where each process sees a GPU of its own.

    Raises:
        PathosegError: It has not.
    """
    gpus = torch.cuda.device_count()
    if not torch.distributed.is_nccl_available():
        raise PathosegError(f"This torch ({torch.__version__}) has no NCCL.", _USE_ANOTHER)
    if gpus < ranks:
        raise PathosegError(
            f"NCCL needs a GPU for each rank: {ranks} {'ranks have' if ranks > 1 else 'rank has'} "
            f"{gpus or 'none'} here.",
            _USE_ANOTHER,
        )


def connect_nccl(
    rank: int, ranks: int, host: str, port: int, *, local: bool, hosted: bool = False
) -> ProcessTransport:
    """Joins ranks that know where to meet, each with a GPU of its own, which becomes the current.

    CUDA tensors go by NCCL, all else by gloo.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        host: As `connect_gloo`.
        port: As `connect_gloo`.
        local: As `connect_gloo`.
        hosted: As `connect_gloo`.

    Raises:
        PathosegError: The ranks do not meet within a minute, or do not each have a GPU.
    """
    refuse_without_gpus(1)
    # Fewer queues than streams would let one channel wait for another. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # The heartbeat, not torch's watchdog, ends the ranks, and says why.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    words = join_gloo(rank, ranks, host, port, local=local, hosted=hosted)
    heartbeat = Heartbeat(rank, ranks, words.host, words.announce)
    meeting = ProcessTransport(words, heartbeat)
    hosts = meeting.gather(socket.gethostname())
    index = hosts[:rank].count(hosts[rank]) % torch.cuda.device_count()
    told = [hosts[rank], str(torch.cuda.get_device_properties(index).uuid)]
    problem = shared_gpu(meeting.gather(json.dumps(told)))
    if problem is not None:
        meeting.close()
        raise problem
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    channels = NcclChannels(PrefixStore("nccl", words.store), rank, ranks, device)
    channels.open()
    return ProcessTransport(OrderedWire(words, channels), heartbeat)


def shared_gpu(gpus: Sequence[str]) -> PathosegError | None:
    """Return the error of ranks that NCCL cannot join: too many, or two with one GPU; else None.

    Args:
        gpus: By rank, a text that identifies its GPU.
    """
    if len(gpus) > _MOST_RANKS:
        return PathosegError(
            f"NCCL joins at most {_MOST_RANKS} ranks here, not {len(gpus)}.", _USE_ANOTHER
        )
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            return PathosegError(
                f"NCCL needs a GPU for each rank: ranks {first} and {rank} have the same.",
                _USE_ANOTHER,
            )
    return None


class NcclChannels:
    """A group of two ranks for each channel of this rank: implements Channels.

    NCCL puts a message on the GPU as work of a stream and comes back; this work waits there for
    the other end's. So each channel has a stream, and no stream waits for what a rank computes:
    what is sent has been computed, and what is received into is free (see `ProcessTransport`).

    Args:
        store: The store at which the ranks meet.
        rank: This rank.
        ranks: Number of ranks.
        device: This rank's GPU.
    """

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device) -> None:
        # Only a torch that was built with NCCL has this name; torch's stubs lack `send`, `recv`.
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl: Any = ProcessGroupNCCL
        self._rank = rank
        self._device = device
        # A group lets its stream wait for the current one.
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._groups: dict[tuple[int, int], Any] = {}
        for source, to in permutations(range(ranks), 2):
            if rank in (source, to):
                options = nccl.Options(is_high_priority_stream=True)
                options._timeout = LONG  # the heartbeat ends the wait for a lost rank
                place = PrefixStore(f"{source}-{to}", store)
                self._groups[source, to] = nccl(place, int(rank == to), 2, options)
        atexit.register(self.close, False)

    def open(self) -> None:
        """Make the communicator of every channel, by one byte through each.

        NCCL blocks both ends while it makes one; in an order common to all ranks none waits for
        another.

        Raises:
            PathosegError: NCCL cannot join two ranks.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        for source, to in self._groups:
            deadline = time.monotonic() + MEETING
            request = self.send(byte, to) if source == self._rank else self.receive(byte, source)
            while not request.done():
                if time.monotonic() > deadline:
                    raise _failure(f"rank {to} did not hear rank {source} within {MEETING:.0f} s")
                time.sleep(1e-3)

    def carries(self, data: Tensor) -> bool:
        if data.device.type != self._device.type:
            return False
        if data.device != self._device:
            raise _failure(f"a tensor is on {data.device}, this rank's GPU is {self._device}")
        return True

    def send(self, data: Tensor, to: int) -> NcclRequest:
        group = self._groups[self._rank, to]
        return self._begin(lambda: group.send([data], 1, 0))

    def receive(self, into: Tensor, source: int) -> NcclRequest:
        group = self._groups[source, self._rank]
        return self._begin(lambda: group.recv([into], 0, 0))

    def pause(self, turns: int) -> None:
        look_again(turns)

    def close(self, well: bool) -> None:
        atexit.unregister(self.close)
        groups = [*self._groups.values()]
        self._groups = {}
        if well:
            for group in groups:
                group.shutdown()
            return
        # All at once: an abort may wait for the work of other communicators.
        aborts = [threading.Thread(target=group.abort, daemon=True) for group in groups]
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while it ends
            for abort in aborts:
                abort.start()
            for abort in aborts:
                abort.join(_FAREWELL)

    def _begin(self, start: Callable[[], Work]) -> NcclRequest:
        try:
            with torch.cuda.stream(self._idle):
                return NcclRequest(start())
        except RuntimeError as error:
            raise _failure(str(error).splitlines()[0]) from error


class NcclRequest:
    """A send or receive of NCCL: implements Request."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait(timedelta(seconds=MEETING))  # raises what failed; lets go of the tensor
        except RuntimeError as error:
            raise _failure(str(error).splitlines()[0]) from error
        return True


def _failure(problem: str) -> PathosegError:
    return PathosegError(
        f"NCCL cannot deliver a message: {problem}.",
        "Look for the first error of another rank; NCCL_DEBUG=INFO makes NCCL tell more.",
    )
