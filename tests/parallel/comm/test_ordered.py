"""Whatever the order of the calls and the pace of ranks, messages and sums of NCCL end right."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.nccl import OrderedWire
from pathoseg.parallel.comm.process_transport import Request

Route = tuple[int, int, int]  # sender, receiver, tag
Group = tuple[int, ...]


@dataclass(eq=False)
class Delivery:
    """A request that the library of the test has begun."""

    data: Tensor
    over: bool = False

    def done(self) -> bool:
        return self.over


class Library:
    """Moves one message at a time, when told to; never one that is not the first of its route."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sent: dict[Route, deque[Delivery]] = defaultdict(deque)
        self._asked: dict[Route, deque[Delivery]] = defaultdict(deque)

    def begin(self, route: Route, data: Tensor, sends: bool) -> Delivery:
        delivery = Delivery(data)
        (self._sent if sends else self._asked)[route].append(delivery)
        return delivery

    def move(self) -> bool:
        """Deliver one message that is sent and asked for: the first of a route drawn at random.

        Returns:
            True if there was one.

        Raises:
            AssertionError: Its two ends differ in shape.
        """
        ready = [route for route, sent in self._sent.items() if sent and self._asked[route]]
        if not ready:
            return False
        route = self._chance.choice(ready)
        sent, asked = self._sent[route].popleft(), self._asked[route].popleft()
        assert sent.data.shape == asked.data.shape, "the two ends disagree about the order"
        asked.data.copy_(sent.data)
        sent.over = asked.over = True
        return True


class Device:
    """Sums of groups of ranks, each a moment after the last of its ranks has begun it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._begun: dict[Group, dict[int, deque[Delivery]]] = {}

    def begin(self, group: Group, rank: int, data: Tensor) -> Delivery:
        own = self._begun.setdefault(group, {each: deque() for each in group})
        delivery = Delivery(data)
        own[rank].append(delivery)
        return delivery

    def move(self) -> bool:
        """Do one sum that all its ranks have begun; return True if there was one."""
        ready = [group for group, own in self._begun.items() if all(own.values())]
        if not ready:
            return False
        begun = [own.popleft() for own in self._begun[self._chance.choice(ready)].values()]
        total = torch.stack([each.data for each in begun]).sum(0)
        for each in begun:
            each.data.copy_(total)
            each.over = True
        return True


class Tagged:
    """One rank's end of a library that knows tags: implements Wire."""

    reads = frozenset[str]()

    def __init__(self, library: Library, rank: int, ranks: int) -> None:
        self._library, self.rank, self.ranks = library, rank, ranks

    def send(self, data: Tensor, to: int, tag: int) -> Request:
        return self._library.begin((self.rank, to, tag), data, sends=True)

    def receive(self, into: Tensor, source: int, tag: int) -> Request:
        return self._library.begin((source, self.rank, tag), into, sends=False)

    def pause(self, looks: int) -> None:
        raise AssertionError("no rank of this test waits")

    def close(self, well: bool) -> None:
        raise AssertionError("no rank of this test ends")


class Channels:
    """The same without tags, and sums: implements Channels."""

    def __init__(self, wire: Tagged, device: Device) -> None:
        self._wire, self._device = wire, device
        self.pause, self.close = wire.pause, wire.close

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None: ...

    def carries(self, device: torch.device, other: int) -> bool:
        return True

    def sum(self, data: Tensor, ranks: Group) -> Request:
        return self._device.begin(ranks, self._wire.rank, data)

    def send(self, data: Tensor, to: int) -> Request:
        return self._wire.send(data, to, 0)

    def receive(self, into: Tensor, source: int) -> Request:
        return self._wire.receive(into, source, 0)


def wires(ranks: int, seed: int) -> tuple[list[OrderedWire], Library, Library, Device]:
    chance = random.Random(seed)
    words, channels, device = Library(chance), Library(chance), Device(chance)
    joined = [
        OrderedWire(Tagged(words, rank, ranks), Channels(Tagged(channels, rank, ranks), device))
        for rank in range(ranks)
    ]
    return joined, words, channels, device


@dataclass(frozen=True)
class Call:
    """One call of a rank's program: its message or sum, and whether to wait.

    Attributes:
        route: The sender, receiver and tag of a message; the ranks of a sum.
        number: Its number on this route.
        size: Of the tensor.
        waits: Whether the rank waits for it before its next call.
        is_sum: Whether it is a sum.
    """

    route: Route | Group
    number: int
    size: int
    waits: bool
    is_sum: bool = False

    @property
    def ends(self) -> int:
        """Ranks that have to make the call before it can be done."""
        return len(self.route) if self.is_sum else 2


@st.composite
def programs(draw: st.DrawFn) -> list[list[Call]]:
    """Draw a program for each of 2 to 4 ranks: its calls, in an order of its own.

    Returns:
        By rank, its calls. With tags and rendezvous, no program would hang.
    """
    ranks = draw(st.integers(2, 4))
    routes = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1), st.integers(0, 2))
    drawn = st.tuples(routes.filter(lambda route: route[0] != route[1]), st.integers(0, 5))
    messages = draw(st.lists(drawn, min_size=1, max_size=16))
    groups = st.sets(st.integers(0, ranks - 1), min_size=2).map(lambda group: tuple(sorted(group)))
    sums = draw(st.lists(groups, max_size=5))
    chance = draw(st.randoms(use_true_random=False))
    calls: list[list[Call]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        mine = [(route, size) for route, size in messages if rank in route[:2]]
        order = [route for route, _ in mine]
        chance.shuffle(order)
        sizes: dict[Route, deque[int]] = defaultdict(deque)
        for route, size in mine:
            sizes[route].append(size)
        counts: dict[Route, int] = defaultdict(int)
        for route in order:
            waits = chance.random() < 0.6
            calls[rank].append(Call(route, counts[route], sizes[route].popleft(), waits))
            counts[route] += 1
        place = 0
        for at, group in enumerate(sums):  # all ranks begin theirs in this order
            if rank in group:
                place = chance.randint(place, len(calls[rank]))
                number = sums[:at].count(group)
                own = Call(group, number, 3, chance.random() < 0.6, is_sum=True)
                calls[rank].insert(place, own)
                place += 1
    return _legal(calls)


def _legal(calls: list[list[Call]]) -> list[list[Call]]:
    """Without the waits at which ranks would be stuck although messages have tags."""
    at = [0] * len(calls)
    begun: dict[tuple[bool, Route | Group, int], int] = defaultdict(int)
    counted = [False] * len(calls)
    while True:
        moved = False
        for rank, own in enumerate(calls):
            if at[rank] == len(own):
                continue
            call = own[at[rank]]
            if not counted[rank]:
                begun[call.is_sum, call.route, call.number] += 1
                counted[rank] = moved = True
            if not call.waits or begun[call.is_sum, call.route, call.number] == call.ends:
                at[rank], counted[rank], moved = at[rank] + 1, False, True
        stuck = [rank for rank, own in enumerate(calls) if at[rank] < len(own)]
        if not stuck:
            return calls
        if not moved:
            rank = stuck[0]
            call = calls[rank][at[rank]]
            calls[rank][at[rank]] = replace(call, waits=False)


def content(call: Call) -> Tensor:
    if call.is_sum:
        return torch.tensor([len(call.route), sum(call.route), call.number])
    source, to, tag = call.route
    return torch.tensor([source, to, tag, call.number, 7][: call.size], dtype=torch.uint8)


def run(wire: OrderedWire, calls: list[Call]) -> Iterator[None]:
    """A rank's program; gives way where a process would wait."""
    received, begun = [], []
    for call in calls:
        into = torch.full((call.size,), 255, dtype=torch.uint8)
        request: Request | None
        if call.is_sum:
            last = wire.rank == call.route[-1]
            into = torch.tensor([1, wire.rank, call.number if last else 0])
            request = wire.sum(into, call.route)
            received.append((call, into))
        elif call.route[0] == wire.rank:
            request = wire.send(content(call), *call.route[1:])
        else:
            request = wire.receive(into, call.route[0], call.route[2])
            received.append((call, into))
        assert request is not None
        begun.append(request)
        while call.waits and not request.done():
            yield
        yield
    while begun := [request for request in begun if not request.done()]:
        yield
    for call, into in received:
        assert torch.equal(into, content(call)), call


@given(programs(), st.integers(0, 2**20))
def test_every_legal_order_of_calls_ends_and_is_right(calls: list[list[Call]], seed: int) -> None:
    joined, *libraries = wires(len(calls), seed)
    chance = random.Random(seed)
    running = [run(wire, own) for wire, own in zip(joined, calls, strict=True)]
    idle = 0
    while running:
        assert idle < 200, "no rank goes on, and no message moves"
        rank = chance.choice(running)
        if next(rank, "ended") == "ended":
            running.remove(rank)
        moved = chance.choice(libraries).move()
        idle = 0 if moved else idle + 1


def test_a_message_of_another_size_is_an_error_where_it_is_received() -> None:
    (first, second), words, channels, _ = wires(2, 0)
    sent = first.send(torch.ones(3, dtype=torch.uint8), 1, 5)
    received = second.receive(torch.ones(4, dtype=torch.uint8), 0, 5)
    for _ in range(4):
        words.move()
        channels.move()
        sent.done()
    with pytest.raises(PathosegError, match="A message of 3 bytes came where 4 were expected"):
        received.done()
    assert sent.done()
