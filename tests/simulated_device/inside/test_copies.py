"""Copies between device and host in the product: lanes, offload modes, pixels, arrivals.

Each wait of the product that is taken out makes one of these fail, or one of test_messages.py:
see mutants.md.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathoseg.device import MEAN, STD, Arrival, PinnedMemory, record, synchronize, to_input
from pathoseg.parallel.activations.offload import Copies, Label, OffloadMode, copies_of
from pathoseg.parallel.activations.streams import DeviceStreams, Lane, streams_of
from tests.simulated_device import device as sim

SIM = torch.device("sim")
LABEL = Label(0, 0, "layer")
MODES = [mode for mode in OffloadMode if mode is not OffloadMode.NONE]


def _bytes(size: int, value: int) -> Tensor:
    return torch.full((size,), value % 251, dtype=torch.uint8, device=SIM)


def _copies(mode: OffloadMode, window: int, host: int, shares_window: bool = False) -> Copies:
    copies = copies_of(mode, streams_of(SIM), SIM, window, host, shares_window)
    assert copies is not None
    return copies


@settings(max_examples=120)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    visits=st.integers(1, 4),
    mode=st.sampled_from([*MODES, *[OffloadMode.OVERLAPPED] * 5]),
    window=st.sampled_from([0, 30, 100, 10_000]),
    host=st.sampled_from([0, 512, 2_000, 20_000]),
    shares_window=st.booleans(),
    passes=st.sampled_from([0.0, 0.3, 1.0]),
    data=st.data(),
)
def test_bytes_come_back_as_they_left(
    sizes: list[int],
    visits: int,
    mode: OffloadMode,
    window: int,
    host: int,
    shares_window: bool,
    passes: float,
    data: st.DataObject,
) -> None:
    """Visits come back in the order in which they left, asked for ahead or not, one by one or not.

    All that is computed meanwhile takes the memory that was freed, and writes to it.
    """
    sim.reset()
    sim.set_passes(passes)
    copies = _copies(mode, window, host, shares_window)
    held: deque[list[tuple[int, bool, Any]]] = deque()
    value = 0
    while visits or held:
        if visits and (not held or data.draw(st.booleans())):
            visits -= 1
            left = []
            if held and data.draw(st.booleans()):
                copies.ask([ticket for *_, ticket in held[0][::-1]])
            for size in sizes:
                value += 1
                lasting = data.draw(st.booleans())
                made = _bytes(size, value)
                left.append((value, lasting, copies.leave(made, LABEL, lasting)))
                del made
            held.append(left)
            copies.let_go()
            continue
        back = held.popleft()[::-1]
        if data.draw(st.booleans()):
            copies.ask([ticket for *_, ticket in back])
        if data.draw(st.booleans()):
            back = data.draw(st.permutations(back))
        for expected, lasting, ticket in [*back, *(each for each in back if each[1])]:
            if data.draw(st.integers(0, 5)):
                assert (copies.fetch(ticket) == expected % 251).all()
            (copies.release if lasting else copies.drop)(ticket)
        for _, lasting, ticket in back:
            if lasting:
                copies.drop(ticket)
    synchronize(SIM)
    assert sim.problems() == []


@pytest.mark.parametrize("mode", MODES)
def test_only_modes_that_go_on_let_the_process_go_on(mode: OffloadMode) -> None:
    copies = _copies(mode, 10_000, 10_000)
    sources = [_bytes(100, value) for value in range(4)]
    before = sim.counts()
    tickets = [copies.leave(source, LABEL) for source in sources]
    brought = [copies.fetch(ticket) for ticket in tickets]
    taken = sim.counts().host_syncs - before.host_syncs
    # Pageable memory makes the process wait for what comes from the device, whoever asked.
    waits = {
        OffloadMode.NAIVE: 8,
        OffloadMode.PINNED: 8,
        OffloadMode.NON_BLOCKING: 4,
        OffloadMode.PINNED_NON_BLOCKING: 0,
        OffloadMode.OVERLAPPED: 0,
    }
    assert taken == waits[mode]
    for value, found in enumerate(brought):
        assert (found == value).all()


def test_a_clock_begins_when_all_is_done_and_tells_when_marks_were_passed() -> None:
    sim.set_passes(0.0)
    streams = DeviceStreams(SIM)
    host = torch.zeros(8, dtype=torch.uint8, pin_memory=True)
    source = _bytes(8, 1)
    streams.wait(Lane.OUT, streams.mark(Lane.COMPUTE))
    streams.copy(Lane.OUT, host, source)
    earlier = torch.Event(SIM, enable_timing=True)
    earlier.record(streams._stream(Lane.OUT))
    streams.start_clock()
    assert host.all(), "all lanes are empty"
    assert earlier.elapsed_time(streams._zero) >= 0, "they were so when the clock began"
    began = time.perf_counter()
    streams.copy(Lane.OUT, host, source)
    mark = streams.mark(Lane.OUT)
    computed = streams.mark(Lane.COMPUTE)
    assert not streams.passed(mark)
    host.zero_()
    streams.settle()
    assert host.all(), "all lanes are empty"
    assert streams.passed(mark)
    for each in (mark, computed):
        assert began <= streams.seconds(each) <= time.perf_counter()
    untimed = streams.mark(Lane.COMPUTE)
    synchronize(SIM)
    with pytest.raises(ValueError, match="enable_timing"):
        streams.seconds(untimed)


def test_an_arrival_is_waited_for_when_it_is_read() -> None:
    sim.set_passes(0.0)
    source = torch.arange(8, device=SIM)
    arrival = Arrival(source)
    source.zero_()
    assert not arrival.is_here
    assert arrival.array().tolist() == [*range(8)]
    assert arrival.is_here


def test_an_arrival_that_is_here_costs_no_wait() -> None:
    sim.set_passes(1.0)
    arrival = Arrival(torch.arange(8, device=SIM))
    before = sim.counts().host_syncs
    assert arrival.is_here
    assert arrival.array().tolist() == [*range(8)]
    assert sim.counts().host_syncs - before <= 1


def test_an_event_stands_at_the_end_of_the_stream_that_is_current() -> None:
    sim.set_passes(0.0)
    stream, source = torch.Stream(SIM), _bytes(8, 3)
    host = torch.zeros(8, dtype=torch.uint8, pin_memory=True)
    stream.wait_event(record(SIM))
    with stream:
        host.copy_(source, non_blocking=True)
        done = record(SIM)
    assert not done.query()
    done.synchronize()
    assert (host == 3).all()


def test_pixels_travel_as_bytes_and_nobody_waits() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    expected = to_input(images, MEAN, STD, torch.device("cpu"))
    before = sim.counts()
    found = to_input(images, MEAN, STD, SIM)
    after = sim.counts()
    assert after.bytes_to_device - before.bytes_to_device == images.nbytes + 2 * 3 * 4
    assert torch.equal(found.cpu(), expected)


def test_pinned_memory_is_of_the_size_that_was_asked_for() -> None:
    memory = PinnedMemory(1_000, SIM)
    assert memory.bytes.numel() == 1_000
    assert memory.bytes.is_pinned()
