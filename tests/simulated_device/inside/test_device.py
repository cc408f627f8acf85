"""The device itself: late copies, order by events, freed memory, its counters and its numbers."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.computing_device import equal_to_the_bit
from tests.parallel.networks.runtime_models import MODELS, SIDE, per_sample_loss, samples
from tests.simulated_device import device as sim

SIM = torch.device("sim")
finds_problems = pytest.mark.finds_problems


def _numbers(first: int = 0) -> Tensor:
    return torch.arange(first, first + 8, dtype=torch.int32, device=SIM)


def _pinned() -> Tensor:
    return torch.zeros(8, dtype=torch.int32, pin_memory=True)


def test_a_copy_on_another_stream_is_done_when_the_host_waits_for_it() -> None:
    stream, source, host = torch.Stream(SIM), _numbers(), _pinned()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(source, non_blocking=True)
    assert not host.any()
    stream.synchronize()
    assert host.tolist() == [*range(8)]


def test_a_copy_of_the_default_stream_reaches_the_host_when_an_event_is_waited_for() -> None:
    source, host = _numbers(), _pinned()
    host.copy_(source, non_blocking=True)
    copied = torch.accelerator.current_stream().record_event()
    source.add_(100)  # comes after the copy, which keeps what it read
    assert not host.any()
    copied.synchronize()
    assert host.tolist() == [*range(8)]


def test_pageable_memory_is_there_at_once_for_the_host_waits() -> None:
    host = torch.zeros(8, dtype=torch.int32)
    before = sim.counts().host_syncs
    host.copy_(_numbers(), non_blocking=True)
    assert host.tolist() == [*range(8)]
    assert sim.counts().host_syncs == before + 1


@finds_problems
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_brought_back_is_read_after_a_wait(waits: bool) -> None:
    stream, host = torch.Stream(SIM), torch.arange(8, dtype=torch.int32).pin_memory()
    back = torch.empty(8, dtype=torch.int32, device=SIM)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        back.copy_(host, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().wait_stream(stream)
        assert back.tolist() == [*range(8)]
    else:
        with pytest.raises(RuntimeError, match=r"default stream of sim:0 reads memory that stream"):
            back.tolist()


@finds_problems
@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_waits_for_what_makes_its_bytes(waits: bool) -> None:
    """It would find them all the same, as the default stream is at once: the clocks tell."""
    stream, source, host = torch.Stream(SIM), _numbers(), _pinned()
    if waits:
        stream.wait_event(torch.accelerator.current_stream().record_event())
    with stream:
        if waits:
            host.copy_(source, non_blocking=True)
        else:
            with pytest.raises(RuntimeError, match="no event orders the two"):
                host.copy_(source, non_blocking=True)


@finds_problems
@pytest.mark.parametrize("waits", [False, True])
def test_kernels_of_another_stream_are_late_too(waits: bool) -> None:
    stream, source = torch.Stream(SIM), _numbers()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        doubled = source * 2
        doubled += 1  # in the same stream: it comes after
    if waits:
        torch.accelerator.current_stream().wait_stream(stream)
        assert doubled.tolist() == [*range(1, 16, 2)]
    else:
        with pytest.raises(RuntimeError, match="no event orders the two"):
            doubled.sum()


@finds_problems
@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_freed_after_the_copies_of_it(waits: bool) -> None:
    stream, source, host = torch.Stream(SIM), _numbers(), _pinned()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().wait_stream(stream)
    del source
    if waits:
        stream.synchronize()
        assert host.tolist() == [*range(8)]
    else:
        with pytest.raises(RuntimeError, match="memory that was freed"):
            stream.synchronize()
        assert not host.any()


def test_memory_that_is_lent_to_a_stream_may_be_freed_before_it_is_done() -> None:
    stream, source, host = torch.Stream(SIM), _numbers(), _pinned()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(source, non_blocking=True)
        made = _numbers(100)  # of the stream's own
        host.copy_(made, non_blocking=True)
        del made
    source.record_stream(stream)
    del source
    stream.synchronize()
    assert host.tolist() == [*range(100, 108)]


def test_freed_memory_is_poisoned() -> None:
    source = torch.ones(8, device=SIM)
    stays = torch.ones(8, device=SIM)
    stays.set_(source.untyped_storage(), 0, (8,))
    assert stays.tolist() == [1.0] * 8
    assert torch.empty(8, device=SIM).isnan().all()


@finds_problems
def test_a_host_that_writes_to_what_a_copy_still_reads_is_found() -> None:
    host = _pinned()
    brought = host.to(SIM, non_blocking=True)
    host += 1
    with pytest.raises(RuntimeError, match="host wrote to pinned memory that a copy still reads"):
        torch.accelerator.synchronize()
    assert not brought.any()


@finds_problems
@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)).filter(
            lambda step: step[1] != step[2]
        ),
        min_size=2,
        max_size=12,
    ),
    data=st.data(),
)
def test_ordered_copies_are_those_of_one_stream_and_each_missing_wait_is_found(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """A chain: each copy, on a stream and between two buffers, waits for the one ahead of it."""
    missing = data.draw(st.integers(0, len(steps) - 1))
    for without in (None, missing):
        sim.reset()
        lanes = [torch.accelerator.current_stream(), *(torch.Stream(SIM) for _ in range(3))]
        # Two lie on the host; where both ends do, nothing is copied.
        buffers = [_numbers(0), _numbers(10), _pinned(), _pinned().fill_(5)]
        expected = [buffer.tolist() for buffer in buffers]
        lanes[0].synchronize()
        done = lanes[0].record_event()
        copies: list[tuple[int, int, int]] = []
        for at, (lane, source, target) in enumerate(steps):
            if min(source, target) >= 2:
                continue
            if at != without:
                lanes[lane].wait_event(done)
            elif _races((lane, source, target), copies):
                with pytest.raises(RuntimeError, match="no event orders the two"), lanes[lane]:
                    buffers[target].copy_(buffers[source], non_blocking=True)
                return
            with lanes[lane]:
                buffers[target].copy_(buffers[source], non_blocking=True)
            expected[target] = expected[source]
            copies.append((lane, source, target))
            done = lanes[lane].record_event()
            if at == without:
                break  # what comes later could race with what came before
        torch.accelerator.synchronize()
        assert [buffer.tolist() for buffer in buffers] == expected
        assert sim.problems() == []


def _races(copy: tuple[int, int, int], ahead: list[tuple[int, int, int]]) -> bool:
    """Return True if a copy shares bytes, written by one, with those since its stream's last."""
    lane, source, target = copy
    for other, read, written in reversed(ahead):
        if other == lane:
            return False
        if written in (source, target) or read == target:
            return True
    return False


def test_events_are_passed_late_and_in_the_order_of_their_stream() -> None:
    sim.set_passes(0.0)
    stream, source, host = torch.Stream(SIM), _numbers(1), _pinned()
    begin = torch.Event(SIM, enable_timing=True)
    end = torch.Event(SIM, enable_timing=True)
    stream.wait_stream(torch.accelerator.current_stream())
    begin.record(stream)
    with stream:
        host.copy_(source, non_blocking=True)
    end.record(stream)
    assert not begin.query()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.query()
    assert begin.elapsed_time(end) >= 0
    assert host.all()


def test_a_query_may_find_an_event_passed_which_then_is() -> None:
    sim.set_passes(1.0)
    host = _pinned()
    host.copy_(_numbers(1), non_blocking=True)
    assert torch.accelerator.current_stream().record_event().query()
    assert host.all()


def test_memory_is_counted_and_limited() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    kept = torch.empty(1_000, dtype=torch.uint8, device=SIM)
    assert torch.accelerator.memory_allocated() == before + 1_000
    sim.set_memory_limit(before + 3_000)
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == (2_000, before + 3_000)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as refused:
        torch.empty(2_001, dtype=torch.uint8, device=SIM)
    assert "total capacity" in str(refused.value)
    torch.empty(2_000, dtype=torch.uint8, device=SIM)
    del kept
    torch.empty(3_000, dtype=torch.uint8, device=SIM)
    torch.empty(4_000, dtype=torch.uint8, device="sim:1")  # the other device has its own
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 3_000


def test_host_synchronisations_and_bytes_are_counted() -> None:
    host = torch.arange(8, dtype=torch.int32).pin_memory()

    def counted(do: Any) -> tuple[int, int, int]:
        before = sim.counts()
        do()
        after = sim.counts()
        return tuple(b - a for a, b in zip(before[:3], after[:3], strict=True))

    there = host.to(SIM)
    assert counted(lambda: host.to(SIM, non_blocking=True)) == (0, 0, 32)
    assert counted(lambda: host.to(SIM)) == (1, 0, 32)
    assert counted(lambda: host.copy_(there, non_blocking=True)) == (0, 32, 0)
    assert counted(lambda: there.cpu()) == (1, 32, 0)
    assert counted(lambda: there.add(1).mul(2)) == (0, 0, 0)
    assert counted(lambda: there[3].item()) == (1, 0, 0)
    assert counted(lambda: there[there > 3])[0] > 0  # its size is known to the device alone
    assert counted(lambda: there.nonzero())[0] > 0
    assert counted(torch.accelerator.synchronize) == (1, 0, 0)


def test_a_backward_runs_on_the_devices_own_thread() -> None:
    seen = set()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            seen.add(threading.get_ident())
            return gradient

    Watched.apply(torch.ones(3, device=SIM, requires_grad=True)).sum().backward()
    assert seen
    assert threading.get_ident() not in seen


def test_tensors_of_two_devices_do_not_mix() -> None:
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="found sim:0 and sim:1"):
        here + there
    with pytest.raises(RuntimeError, match="found sim:0 and cpu"):
        here + torch.ones(3)
    assert (here + torch.tensor(1.0)).tolist() == [2.0] * 3
    assert (here + there.to("sim:0")).tolist() == [2.0] * 3


@pytest.mark.parametrize("name", equal_to_the_bit(MODELS))
def test_numbers_are_those_of_the_cpu_to_the_bit(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name].make()
    other = deepcopy(model).to(SIM)
    images, targets = samples(0, 0, 2, torch.float32)
    inputs = MODELS[name].inputs(images)
    _train(model, inputs, targets)
    _train(other, {each: seen.to(SIM) for each, seen in inputs.items()}, targets.to(SIM))
    assert images.shape[-1] == SIDE
    for (key, value), found in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(value, found.cpu()), key


def _train(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> None:
    """Takes three steps with random numbers of the same seed."""
    steps = torch.optim.AdamW(model.parameters())
    torch.manual_seed(2)
    for _ in range(3):
        steps.zero_grad()
        per_sample_loss(model(**inputs), targets).sum().backward()
        steps.step()
