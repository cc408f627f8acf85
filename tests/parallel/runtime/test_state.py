"""Gathering the state of all ranks while some of them are about to end."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from pathoseg.parallel.comm.transport import Pending
from pathoseg.parallel.runtime.state import State, gather
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks


class _Sent:
    """A message that has left into a buffer, as small ones of MPI do: implements Pending."""

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


class _Slow:
    """A transport whose sends are done at once, and whose receives begin late."""

    def __init__(self, transport: ThreadTransport) -> None:
        self.rank, self.ranks, self.reads = transport.rank, transport.ranks, transport.reads
        self._transport = transport
        self.prepare = transport.prepare
        self.sum, self.gather, self.barrier = transport.sum, transport.gather, transport.barrier
        self.abort, self.close = transport.abort, transport.close

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        self._transport.send(tensor.clone(), to, tag)
        return _Sent()

    def receive(self, into: Tensor, source: int, tag: int) -> Pending:
        if not self.rank:
            time.sleep(0.01)
        return self._transport.receive(into, source, tag)


def test_a_rank_that_ends_when_it_may_leaves_rank_0_the_whole_state() -> None:
    def save(transport: ThreadTransport) -> State:
        rank = transport.rank
        own = {f"{rank}.{at}": {"": torch.full((3,), float(rank))} for at in range(4)}
        whole = gather(own, _Slow(transport), torch.device("cpu"))
        if rank:
            transport.abort(f"Rank {rank} was stopped by a signal.")
        return whole

    whole, other = run_ranks(2, save)
    assert other == {}
    assert sorted(whole) == [f"{rank}.{at}" for rank in range(2) for at in range(4)]
    assert all(
        torch.equal(entry[""], torch.full((3,), float(name[0]))) for name, entry in whole.items()
    )
