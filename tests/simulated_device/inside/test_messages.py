"""Messages of device tensors, through pinned memory: in one process, and between two over gloo."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathoseg.parallel.comm.heartbeat import Heartbeat
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.comm.transport import Pending
from tests.simulated_device import device as sim

SIM = torch.device("sim")
_Route = tuple[int, int, int]


class _Sent:
    """A message that is taken when somebody looks: implements Request."""

    def __init__(self, box: deque[Tensor], data: Tensor, *, comes: bool) -> None:
        self._box, self._data, self._comes = box, data, comes
        if not comes:
            box.append(data.clone())

    def done(self) -> bool:
        if self._comes:
            if not self._box:
                return False
            self._data.copy_(self._box.popleft())
        return True


class _MemoryWire:
    """Messages between ranks of one thread, which reads no device's memory: implements Wire."""

    reads = frozenset[str]()

    def __init__(self, rank: int, boxes: defaultdict[_Route, deque[Tensor]]) -> None:
        self.rank, self.ranks, self._boxes = rank, 2, boxes

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None: ...

    def carries(self, device: torch.device, other: int) -> bool:
        return False

    def sum(self, data: Tensor, ranks: tuple[int, ...]) -> None:
        return None

    def send(self, data: Tensor, to: int, tag: int) -> _Sent:
        assert data.is_cpu
        return _Sent(self._boxes[self.rank, to, tag], data, comes=False)

    def receive(self, into: Tensor, source: int, tag: int) -> _Sent:
        assert into.is_cpu
        return _Sent(self._boxes[source, self.rank, tag], into, comes=True)

    def pause(self, looks: int) -> None:
        pass

    def close(self, well: bool) -> None:
        pass


class _Alive(Heartbeat):
    """A heartbeat that finds every rank alive: threads cannot be lost."""

    def __init__(self) -> None:
        self.host = "127.0.0.1"

    def check(self, patience: float = 0) -> None:
        pass


def _ranks() -> list[ProcessTransport]:
    boxes: defaultdict[_Route, deque[Tensor]] = defaultdict(deque)
    return [ProcessTransport(_MemoryWire(rank, boxes), _Alive()) for rank in range(2)]


def _finish(*pending: Pending) -> None:
    waiting = [*pending]
    while waiting:
        waiting = [each for each in waiting if not each.done()]


@settings(max_examples=40)
@given(
    messages=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8
    ),
    passes=st.sampled_from([0.2, 0.6, 1.0]),
)
def test_messages_are_sent_once_their_bytes_are_there(
    messages: list[tuple[int, int, int]], passes: float
) -> None:
    """Tensors are overwritten as soon as they are sent: the copy to the host came before."""
    sim.reset()
    sim.set_passes(passes)
    ranks, pending, came = _ranks(), [], []
    for at, (sender, tag, size) in enumerate(messages):
        tensor = torch.full((size,), float(at), device=SIM)
        into = torch.empty(size, device=SIM)
        pending.append(ranks[sender].send(tensor, 1 - sender, tag))
        pending.append(ranks[1 - sender].receive(into, sender, tag))
        tensor.fill_(-1)
        came.append(into)
    before = sim.counts().host_syncs
    _finish(*pending)
    assert sim.counts().host_syncs == before
    for at, into in enumerate(came):
        assert (into == at).all()


@settings(max_examples=20)
@given(size=st.integers(1, 9), passes=st.sampled_from([0.2, 1.0]))
def test_sums_are_equal_on_both_ranks(size: int, passes: float) -> None:
    sim.reset()
    sim.set_passes(passes)
    ranks = _ranks()
    parts = [torch.arange(size, dtype=torch.float32, device=SIM) * (at + 1) for at in range(2)]
    _finish(*(rank.sum(part, (0, 1)) for rank, part in zip(ranks, parts, strict=True)))
    for part in parts:
        assert part.tolist() == [3.0 * at for at in range(size)]


def test_texts_of_both_ranks_are_awaited() -> None:
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda rank: rank.gather(f"of {rank.rank}"), _ranks())]
    assert found == [["of 0", "of 1"]] * 2


def test_what_is_received_is_ready_in_the_stream_that_asked_for_it() -> None:
    ranks, stream = _ranks(), torch.Stream(SIM)
    into = torch.empty(8, device=SIM)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        receiving = ranks[1].receive(into, 0, 0)
    _finish(ranks[0].send(torch.ones(8, device=SIM), 1, 0), receiving)
    with stream:
        doubled = into * 2
    torch.accelerator.current_stream().wait_stream(stream)
    assert (doubled == 2).all()


def test_two_processes_conform_and_train_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).with_name("rank.py")
    code = start_local(2, [sys.executable, str(script)], "gloo")
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.split()[-2:] == ["branches-gems-master-2", "unet-1f1b-recomputed-2"]
