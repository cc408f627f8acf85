"""Messages and sums by NCCL, from GPU to GPU, beside another library that tells who is ready.

    what                         by                                   matched by
    a message, GPU to GPU        a channel of its two ranks           an order agreed by words
    a sum over GPUs              a communicator of its ranks          the order of the calls
    what `prepare` did not name, the other library (gloo, MPI),       tags
    and all in host memory       through host memory

NCCL blocks while it connects ranks, and may wait then for work that is on the device. So all are
connected ahead of the first message, one pair and group after the other in an order that is common
to all ranks (`NcclChannels.open`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from pathoseg.device import cuda_properties, device_identity, share_devices
from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.gloo import LONG, keep_store
from pathoseg.parallel.comm.heartbeat import MEETING, Heartbeat
from pathoseg.parallel.comm.process_transport import (
    ALL_TAGS,
    TAGS,
    ProcessTransport,
    Request,
    Wire,
    look_again,
    wrong_size,
)

# Tags of words, beyond those of all messages: those that ask for one lie as far above the first of
# them as the message's own tag above 0; the last says that a message comes.
_ASKED = 2 * TAGS
_COMES = ALL_TAGS - 1


class Channels(Protocol):
    """Channels between ranks, and groups of them, on which only the order of the calls counts.

    The n-th send and the n-th receive of a channel belong together, and so do the n-th sums of a
    group. Nothing need move before all its ranks have made the call; once they have, it moves
    whatever other channels and groups do.
    """

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Connect pairs and groups; all ranks call it with the same, nothing being under way."""

    def carries(self, device: torch.device, other: int) -> bool:
        """Return True if there are channels to and from a rank for tensors of this device."""

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> Request | None:
        """Begin to sum a tensor in place, once the current stream has come here; never blocks.

        Returns:
            None where these ranks are no group.
        """

    def send(self, data: Tensor, to: int) -> Request:
        """Begin to send a tensor (uint8, one dimension, not empty) to rank `to`; never blocks."""

    def receive(self, into: Tensor, source: int) -> Request:
        """Begin to receive from rank `source` as many bytes as `into` has; never blocks."""

    def pause(self, looks: int) -> None:
        """Let others run for a moment; called `looks` times in a row without success."""

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

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        self._channels.open(pairs, groups)

    def carries(self, device: torch.device, other: int) -> bool:
        return self._channels.carries(device, other) or self._words.carries(device, other)

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> Request | None:
        request = self._channels.sum(data, ranks)
        return None if request is None else _Sum(self, request)

    def send(self, data: Tensor, to: int, tag: int) -> Request:
        if not self._channels.carries(data.device, to):
            return self._words.send(data, to, tag)
        return self._leaving[to].begin(_Message(self, data), tag)

    def receive(self, into: Tensor, source: int, tag: int) -> Request:
        if not self._channels.carries(into.device, source):
            return self._words.receive(into, source, tag)
        return self._coming[source].begin(_Message(self, into), tag)

    def move(self) -> None:
        """Read the words that have come, and begin the messages on which both ends have agreed."""
        for leaving in self._leaving.values():
            leaving.move()
        for coming in self._coming.values():
            coming.move()

    def pause(self, looks: int) -> None:
        self._channels.pause(looks)

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


class _Sum:
    """A sum: implements Request. Who waits for it moves the messages that others wait for."""

    def __init__(self, wire: OrderedWire, request: Request) -> None:
        self._wire, self._request = wire, request

    def done(self) -> bool:
        self._wire.move()
        return self._request.done()


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


# CUDA reads them when it begins.
_VARIABLES = {
    # Kernels that are loaded at their first call wait for the device, which may wait for a message.
    "CUDA_MODULE_LOADING": "EAGER",
    # Fewer queues than streams would let one channel wait for another.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_STREAMS = 32  # that torch has for communicators; two that share one could block each other
_FAREWELL = 5  # seconds
_NAP = 0.05  # seconds between two looks at the heartbeat while ranks are connected
_USE_ANOTHER = (
    "Use the transport 'mpi' under an MPI's launcher (an MPI that reads CUDA memory copies GPU to "
    "GPU), 'gloo' under another."
)


def prepare_cuda(ranks: int) -> None:
    """Set what CUDA reads when it begins, where each rank of this machine can have a GPU.

    It is called before anything asks for a device (`pick_device`). Variables that are set already
    stay as they are.

    Args:
        ranks: Ranks on the machine.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        return
    # The heartbeat, not torch's watchdog, ends the ranks, and says why.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # Slurm shows each task its own GPU alone (--gpus-per-task, --gpu-bind=single:1), and so do
    # scripts that set CUDA_VISIBLE_DEVICES. The second variable names cores, too.
    own = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    of_step = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if own or ranks <= max(gpus, int(of_step) if of_step.isdecimal() else 0):
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)


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


def by_nccl(
    words: Wire, heartbeat: Heartbeat, device: torch.device, asked: bool
) -> ProcessTransport:
    """Join ranks by NCCL where each has a GPU of its own, which becomes its current device.

    All ranks of `words` call it. No two of them are connected yet: `ProcessTransport.prepare`.

    Args:
        words: Joins the ranks already; carries what NCCL does not.
        heartbeat: Tells of lost ranks.
        device: The accelerator that this rank is to use (`pick_device`), or the CPU.
        asked: Whether the user wants NCCL or nothing.

    Returns:
        A transport that has NCCL, or where it does not suit all ranks, one of `words` alone.

    Raises:
        PathosegError: It was asked for, and does not suit.
    """
    plain = ProcessTransport(words, heartbeat)
    hosts = plain.gather(socket.gethostname())
    gpu = ""
    if device.type == "cuda" and torch.distributed.is_nccl_available():
        device = share_devices(device, hosts[: words.rank].count(hosts[words.rank]))
        gpu = json.dumps([hosts[words.rank], card_identity(device)])
    problem = not_one_each(plain.gather(gpu))
    if problem is not None and asked:
        plain.close()
        raise problem
    if problem is not None:
        return plain
    where = ""
    if not words.rank:
        store, port = keep_store(host=heartbeat.host)
        where = f"{heartbeat.host} {port}"
    host, opened = plain.gather(where)[0].split()
    if words.rank:
        store = TCPStore(host, int(opened), timeout=timedelta(seconds=MEETING))
    channels = NcclChannels(store, words.rank, device, heartbeat.check)
    return ProcessTransport(OrderedWire(words, channels), heartbeat)


def card_identity(device: torch.device) -> str:
    """Return what tells a GPU's card from the others of its host: its place on the PCI bus.

    NCCL joins one rank of a card, though MIG slices of it have UUIDs of their own. Where torch does
    not tell the place, it is the UUID.
    """
    told = cuda_properties(device)
    place = [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return device_identity(device) if None in place else ":".join(map(str, place))


def not_one_each(gpus: Sequence[str]) -> PathosegError | None:
    """Return the error of ranks that NCCL cannot join as they have no GPU each, else None.

    Args:
        gpus: By rank, a text that identifies its GPU; empty where it has none, or no NCCL.
    """
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if not gpu or first != rank:
            problem = f"ranks {first} and {rank} have the same" if gpu else f"rank {rank} has none"
            return PathosegError(f"NCCL needs a GPU for each rank: {problem}.", _USE_ANOTHER)
    return None


class NcclChannels:
    """Communicators of two ranks for channels, and of several for sums: implements Channels.

    NCCL puts a message or sum on the GPU as work of a stream and comes back; this work waits there
    for the other ranks'. So each communicator has a stream, and what is computed waits for none of
    them. A message waits for nothing: what is sent has been computed, and what is received into is
    free (see `ProcessTransport`). A sum is begun ahead of that, and its stream waits for the
    current one: the ranks of a group begin its sums in one order.

    Torch has streams for 32 communicators of a rank. Those beyond are left out, on all their ranks
    alike: what they would carry goes by the words' wire.

    Args:
        store: A store at which the ranks meet.
        rank: This rank.
        device: This rank's GPU.
        check: Raises once a rank is lost (`Heartbeat.check`).
    """

    def __init__(
        self, store: Store, rank: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._check = check
        # A communicator lets its stream wait for the current one.
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._channels: dict[tuple[int, int], Any] = {}  # by sender and receiver
        self._groups: dict[tuple[int, ...], Any] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._taken: Counter[int] = Counter()  # streams of each rank
        atexit.register(self.close, False)

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Connect pairs and groups of ranks, by one byte through each.

        NCCL blocks the ranks of each while it connects them. They are connected in one order, so
        of those that are not yet, the first has all its ranks waiting for it alone: none hangs.

        Raises:
            PathosegError: NCCL cannot join some ranks, or one is lost.
        """
        torch.cuda.synchronize(self._device)
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for ranks in groups:
            if self._is_new("group", ranks, 1) and self._rank in ranks:
                self._groups[ranks] = self._communicator("group", ranks)
                self._await(partial(self.sum, byte, ranks), f"the sum of ranks {ranks}")
        for pair in pairs:
            if self._is_new("pair", pair, 2) and self._rank in pair:
                for source, to in (pair, pair[::-1]):
                    self._channels[source, to] = self._communicator("channel", (source, to))
                    is_mine = source == self._rank
                    move, other = (self.send, to) if is_mine else (self.receive, source)
                    self._await(
                        partial(move, byte, other), f"a message from rank {source} to rank {to}"
                    )

    def carries(self, device: torch.device, other: int) -> bool:
        if device.type != self._device.type or (self._rank, other) not in self._channels:
            return False
        if device != self._device:
            raise _failure(f"a tensor is on {device}, this rank's GPU is {self._device}")
        return True

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> NcclRequest | None:
        group = self._groups.get(ranks)
        if group is None or data.device != self._device or not data.numel():
            return None
        return _begin(lambda: group.allreduce([data]), data)

    def send(self, data: Tensor, to: int) -> NcclRequest:
        group = self._channels[self._rank, to]
        with torch.cuda.stream(self._idle):
            return _begin(lambda: group.send([data], 1, 0), data)

    def receive(self, into: Tensor, source: int) -> NcclRequest:
        group = self._channels[source, self._rank]
        with torch.cuda.stream(self._idle):
            return _begin(lambda: group.recv([into], 0, 0), into)

    def pause(self, looks: int) -> None:
        look_again(looks)

    def close(self, well: bool) -> None:
        atexit.unregister(self.close)
        groups = [*self._channels.values(), *self._groups.values()]
        self._channels, self._groups = {}, {}
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

    def _is_new(self, kind: str, ranks: tuple[int, ...], streams: int) -> bool:
        """Return True, the first time, if each rank has so many streams left; counts them."""
        if (kind, ranks) in self._seen:
            return False
        self._seen.add((kind, ranks))
        has_room = all(self._taken[rank] + streams <= _STREAMS for rank in ranks)
        if has_room:
            self._taken.update(dict.fromkeys(ranks, streams))
        return has_room

    def _communicator(self, kind: str, ranks: tuple[int, ...]) -> Any:
        # Only a torch that was built with NCCL has this name; torch's stubs lack `send`, `recv`.
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl: Any = ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = LONG  # the heartbeat ends the wait for a lost rank
        place = PrefixStore(f"{kind} {ranks}", self._store)
        return nccl(place, ranks.index(self._rank), len(ranks), options)

    def _await(self, begin: Callable[[], NcclRequest | None], what: str) -> None:
        """Begin what connects a communicator's ranks, and wait until it is done.

        Raises:
            PathosegError: NCCL cannot join the ranks, or one of all ranks is lost.
        """
        begun: Future[NcclRequest | None] = Future()

        def connect() -> None:
            try:
                share_devices(self._device, 0)  # each thread has a current device
                begun.set_result(begin())
            except BaseException as error:
                begun.set_exception(error)

        # In a thread, as NCCL blocks for ever where the other rank is lost; it is left behind then.
        threading.Thread(target=connect, name="nccl", daemon=True).start()
        while not wait([begun], _NAP).done:
            self._check()
        request = begun.result()
        deadline = time.monotonic() + MEETING
        while request is not None and not request.done():
            self._check()
            if time.monotonic() > deadline:
                raise _failure(f"{what} did not come within {MEETING:.0f} s")
            time.sleep(1e-3)


class NcclRequest:
    """A send, receive or sum of NCCL: implements Request; holds the tensor until it is done."""

    def __init__(self, work: Work, data: Tensor) -> None:
        self._work = work
        self._data: Tensor | None = data

    def done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait(timedelta(seconds=MEETING))  # raises what failed; lets go of the tensor
        except RuntimeError as error:
            raise _failure(_told(error)) from error
        self._data = None
        return True


def _begin(start: Callable[[], Work], data: Tensor) -> NcclRequest:
    try:
        return NcclRequest(start(), data)
    except RuntimeError as error:
        raise _failure(_told(error)) from error


def _told(error: RuntimeError) -> str:
    """Return the first line of an error of NCCL, and its cause, where it names one lines below."""
    text = str(error)
    cause = re.search(r"Last error:[ \t]*\n?[ \t]*(\S.*)", text)
    return text.partition("\n")[0] + (f": {cause[1]}" if cause else "")


def _failure(problem: str) -> PathosegError:
    return PathosegError(
        f"NCCL cannot deliver a message: {problem}.",
        "Look for the first error of another rank; NCCL_DEBUG=INFO makes NCCL tell more. "
        '[parallel] transport = "gloo" or "mpi" does without NCCL.',
    )
