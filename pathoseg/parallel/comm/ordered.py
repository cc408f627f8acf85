"""Tagged messages over channels that know no tags, only the order of the calls on both ends."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import torch
from torch import Tensor

from pathoseg.parallel.comm.process_transport import TAGS, Request, Wire, wrong_size

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
        """Whether this tensor goes by a channel."""

    def send(self, data: Tensor, to: int) -> Request:
        """Begins to send the bytes of a flat uint8 tensor, at least one; never blocks."""

    def receive(self, into: Tensor, source: int) -> Request:
        """Begins to receive as many bytes; never blocks."""

    def pause(self, turns: int) -> None:
        """Lets others run until a request may be done; called `turns` times without success."""

    def close(self, well: bool) -> None:
        """Ends their use; not `well` where messages may be under way that never arrive."""


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

    reads_cuda = True

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
        """Begins what both ends have agreed on."""
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
        size: How many the sender has, once the two ends have agreed.
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
