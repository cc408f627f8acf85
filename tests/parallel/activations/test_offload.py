"""The order of copies on a device that does everything as late as it may: a detector of races."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pathoseg.parallel.activations.offload import Copies, Label, OffloadMode, Overlapped, copies_of
from pathoseg.parallel.activations.pinned_arena import Arena
from pathoseg.parallel.activations.streams import HostStreams, Lane, streams_of

CPU = torch.device("cpu")
Clock = dict[Lane, int]
LABEL = Label(0, 0, "layer")


class RacingStreams:
    """Lanes as vector clocks: two uses of the same bytes, one of them a write, must be ordered.

    Data moves at once, so contents can be compared too. Nothing is ever seen to be passed unless
    the test says so: the worst that a device can do.
    """

    def __init__(self) -> None:
        self.clocks: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, 0) for lane in Lane}
        self.uses: list[tuple[int, int, bool, Lane, int]] = []
        self.seen: list[Clock] = []
        self.copies = 0
        self.races: list[tuple[Lane, Lane]] = []

    def use(self, lane: Lane, tensor: Tensor, writes: bool) -> None:
        """Work of a lane that reads or writes bytes."""
        first = tensor.data_ptr()
        self.use_bytes(lane, first, first + tensor.numel(), writes)

    def use_bytes(self, lane: Lane, first: int, last: int, writes: bool) -> None:
        clock = self.clocks[lane]
        clock[lane] += 1
        for start, stop, wrote, other, at in self.uses:
            overlap = start < last and first < stop
            if overlap and (writes or wrote) and clock[other] < at:
                self.races.append((lane, other))
        self.uses.append((first, last, writes, lane, clock[lane]))

    def copy(self, lane: Lane, into: Tensor, source: Tensor) -> None:
        self.use(lane, source, writes=False)
        self.use(lane, into, writes=True)
        into.copy_(source)
        self.copies += 1

    def mark(self, lane: Lane) -> Clock:
        return dict(self.clocks[lane])

    def wait(self, lane: Lane, mark: Clock) -> None:
        for other, at in mark.items():
            self.clocks[lane][other] = max(self.clocks[lane][other], at)

    def passed(self, mark: Clock) -> bool:
        done = any(all(seen[lane] >= mark[lane] for lane in Lane) for seen in self.seen)
        if done:
            self.wait(Lane.COMPUTE, mark)  # what is over for the process is over for its next work
        return done

    def seconds(self, mark: Clock) -> float:
        return float(mark[Lane.COMPUTE])

    def start_clock(self) -> None:
        pass

    def settle(self) -> None:
        self.seen = [self.mark(lane) for lane in Lane]


class Device:
    """Memory of which a freed part is at once taken for something else, in the compute lane."""

    def __init__(self, streams: RacingStreams) -> None:
        self.streams = streams
        self.held = self.peak = 0

    def watch(self, tensor: Tensor) -> None:
        first, size = tensor.data_ptr(), tensor.numel()
        self.held += size
        self.peak = max(self.peak, self.held)

        def reuse() -> None:
            self.held -= size
            self.streams.use_bytes(Lane.COMPUTE, first, first + size, writes=True)

        weakref.finalize(tensor.untyped_storage(), reuse)

    def make(self, size: int, value: int) -> Tensor:
        tensor = torch.full((size,), value % 251, dtype=torch.uint8)
        self.watch(tensor)
        self.streams.use(Lane.COMPUTE, tensor, writes=True)
        return tensor


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    visits=st.integers(1, 3),
    window=st.integers(0, 100),
    host=st.sampled_from([0, 512, 2_000, 20_000]),
    shares_window=st.booleans(),
    data=st.data(),
)
def test_no_two_lanes_ever_race_and_the_bytes_are_those_that_left(
    sizes: list[int], visits: int, window: int, host: int, shares_window: bool, data: st.DataObject
) -> None:
    streams = RacingStreams()
    device = Device(streams)
    copies = Overlapped(streams, CPU, Arena(host, CPU), window, shares_window)
    empty = torch.empty
    held: deque[list[tuple[int, Any]]] = deque()
    value = 0

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if "device" in kwargs:
            device.watch(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        while visits or held:
            if visits and (not held or data.draw(st.booleans())):
                visits -= 1
                tickets = []
                if held and data.draw(st.booleans()):
                    copies.ask([ticket for _, ticket in held[0][::-1]])
                for size in sizes:
                    value += 1
                    made, lasting = device.make(size, value), data.draw(st.booleans())
                    tickets.append((value, copies.leave(made, LABEL, lasting)))
                    del made
                held.append(tickets)
                if data.draw(st.booleans()):
                    streams.settle()
                copies.let_go()
            else:
                tickets = held.popleft()[::-1]
                if data.draw(st.booleans()):
                    copies.ask([ticket for _, ticket in tickets])
                if data.draw(st.booleans()):
                    tickets = data.draw(st.permutations(tickets))
                for expected, ticket in tickets + [each for each in tickets if each[1].lasting]:
                    if data.draw(st.integers(0, 5)):
                        found = copies.fetch(ticket)
                        streams.use(Lane.COMPUTE, found, writes=False)
                        assert (found == expected % 251).all()
                        del found
                    if ticket.lasting:
                        copies.release(ticket)
                    else:
                        copies.drop(ticket)
                for ticket in [ticket for _, ticket in tickets if ticket.lasting]:
                    copies.drop(ticket)
    assert not streams.races
    assert copies._arena.held == 0  # every byte was given back
    assert copies._ahead_bytes == 0


def test_no_more_than_a_window_waits_to_leave_or_is_back_early() -> None:
    streams = RacingStreams()
    copies = Overlapped(streams, CPU, Arena(10_000, CPU), window=25)
    tickets = [copies.leave(torch.full((10,), at, dtype=torch.uint8), LABEL) for at in range(6)]
    # The compute was told to wait for the four oldest copies, and goes on beside the latest two.
    assert [ticket.source is None for ticket in tickets] == [True] * 4 + [False] * 2
    assert streams.clocks[Lane.COMPUTE][Lane.OUT] == tickets[3].left[Lane.OUT]
    copies.ask(tickets[::-1])
    assert [ticket.device is not None for ticket in tickets] == [False] * 4 + [True] * 2
    copies.fetch(tickets[5])
    assert [ticket.device is not None for ticket in tickets] == [False] * 3 + [True] * 3
    copies.fetch(tickets[0])  # out of turn: it comes at once
    assert tickets[0].device is not None


def test_one_window_serves_directions_that_take_turns() -> None:
    streams = RacingStreams()
    copies = Overlapped(streams, CPU, Arena(10_000, CPU), window=25, shares_window=True)
    tickets = [copies.leave(torch.full((10,), at, dtype=torch.uint8), LABEL) for at in range(6)]
    assert [ticket.source is None for ticket in tickets] == [True] * 4 + [False] * 2
    copies.ask(tickets[::-1])
    # All has left when the first is back; the compute was told to wait for it.
    assert all(ticket.source is None for ticket in tickets)
    assert streams.clocks[Lane.COMPUTE][Lane.OUT] == tickets[5].left[Lane.OUT]
    assert [ticket.device is not None for ticket in tickets] == [False] * 4 + [True] * 2


def test_a_copy_is_not_waited_for_where_the_device_is_done() -> None:
    streams = RacingStreams()
    copies = Overlapped(streams, CPU, Arena(10_000, CPU), window=10)
    first = copies.leave(torch.zeros(10, dtype=torch.uint8), LABEL)
    streams.settle()
    copies.let_go()
    assert first.source is None
    before = streams.copies
    assert copies.fetch(first).numel() == 10
    copies.fetch(first)
    assert streams.copies == before + 1


def test_an_arena_gives_the_same_memory_out_again() -> None:
    arena = Arena(4_096, CPU)
    rooms = [arena.take(1_000)[0] for _ in range(4)]
    assert arena.bytes == 4_096
    assert arena.held == arena.peak == 4_096
    for room in (rooms[1], rooms[3], rooms[2], rooms[0]):
        arena.give_back(room, "mark")
    whole, mark = arena.take(4_000)
    assert mark == "mark"
    assert arena.bytes == 4_096
    assert arena.tensor(whole, 4_000).numel() == 4_000
    arena.take(1)  # there is no room left
    assert arena.bytes == 4_096 + 512


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3_000)), max_size=60))
def test_parts_of_an_arena_never_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(8_192, CPU)
    taken: list[tuple[Any, int]] = []
    for takes, size in steps:
        if takes or not taken:
            room, _ = arena.take(size)
            for other, _ in taken:
                apart = room.start + room.bytes <= other.start
                apart |= other.start + other.bytes <= room.start
                assert apart or room.slab != other.slab
            taken.append((room, size))
        else:
            arena.give_back(taken.pop(size % len(taken))[0], None)
    assert arena.held == sum(room.bytes for room, _ in taken)


def _round_trip(copies: Copies, device: torch.device) -> None:
    sources = [torch.arange(200, device=device).to(torch.uint8) + at for at in range(5)]
    expected = [source.cpu().clone() for source in sources]
    tickets = [copies.leave(source, LABEL) for source in sources]
    del sources
    copies.let_go()
    copies.ask(tickets[::-1])
    for ticket, value in zip(tickets, expected, strict=True):
        assert torch.equal(copies.fetch(ticket).cpu(), value)
        copies.drop(ticket)
    assert copies.peak >= 5 * 200


@pytest.mark.parametrize("mode", [mode for mode in OffloadMode if mode is not OffloadMode.NONE])
def test_every_mode_brings_back_what_left(mode: OffloadMode) -> None:
    copies = copies_of(mode, HostStreams(), CPU, 500, 0)
    assert copies is not None
    copies.copied = []
    _round_trip(copies, CPU)
    assert [each.lane for each in copies.copied].count(Lane.OUT) == 5
    assert all(each.begin <= each.end for each in copies.copied)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", [mode for mode in OffloadMode if mode is not OffloadMode.NONE])
def test_every_mode_brings_back_what_left_a_cuda_device(mode: OffloadMode) -> None:
    device = torch.device("cuda")
    streams = streams_of(device)
    copies = copies_of(mode, streams, device, 500, 100_000)
    assert copies is not None
    copies.copied = []
    streams.start_clock()
    for _ in range(3):
        _round_trip(copies, device)
    streams.settle()
    assert all(streams.seconds(each.begin) <= streams.seconds(each.end) for each in copies.copied)
