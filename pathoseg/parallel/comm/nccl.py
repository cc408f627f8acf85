"""Messages by NCCL, from GPU to GPU: a communicator for each ordered pair of ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.gloo import LONG, join_gloo
from pathoseg.parallel.comm.heartbeat import MEETING, Lifeline
from pathoseg.parallel.comm.ordered import OrderedWire
from pathoseg.parallel.comm.process_transport import ProcessTransport, look_again

_MOST_RANKS = (
    17  # torch has 32 streams for communicators; two that share one could block each other
)
_FAREWELL = 5  # seconds
_USE_ANOTHER = "Use the transport 'gloo', or 'mpi' (one that reads CUDA memory copies GPU to GPU)."


def refuse_without_gpus(ranks: int) -> None:
    """Checks that this machine can run so many ranks of NCCL; 1 where each sees a GPU of its own.

    Raises:
        PathosegError: It cannot, and why.
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
        ranks: How many there are.
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
    # The lifeline, not torch's watchdog, ends the ranks, and says why.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    words = join_gloo(rank, ranks, host, port, local=local, hosted=hosted)
    lifeline = Lifeline(rank, ranks, words.host, words.announce)
    meeting = ProcessTransport(words, lifeline)
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
    return ProcessTransport(OrderedWire(words, channels), lifeline)


def shared_gpu(gpus: Sequence[str]) -> PathosegError | None:
    """Why NCCL cannot join ranks with these GPUs, by rank; None where it can."""
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
        store: Where the ranks meet.
        rank: This rank.
        ranks: How many there are.
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
                options._timeout = LONG  # the lifeline ends the wait for a lost rank
                place = PrefixStore(f"{source}-{to}", store)
                self._groups[source, to] = nccl(place, int(rank == to), 2, options)
        atexit.register(self.close, False)

    def open(self) -> None:
        """Sends a byte by every channel, one after the other: each makes its communicator now.

        NCCL blocks both ends while it makes one; in a common order none waits for another.

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
    """One message: implements Request."""

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
