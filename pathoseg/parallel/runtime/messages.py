"""A rank's messages of one pass: sent without waiting, received into buffers posted ahead."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Pending, Transport
from pathoseg.parallel.graph.layer_graph import MOST_DIMENSIONS, SENT_DTYPES
from pathoseg.parallel.runtime.step_trace import StepTrace
from pathoseg.parallel.schedule.action import COMPUTE, Action, Edge, Kind
from pathoseg.parallel.schedule.schedule import Schedule

_DTYPES = tuple(getattr(torch, name) for name in SENT_DTYPES)


class Layout(NamedTuple):
    """The dtype, shape and memory order of a tensor in a message.

    Attributes:
        dtype: One of `_DTYPES`.
        sizes: Its shape.
        order: Its dimensions from the largest stride to the smallest.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
        return cls(tensor.dtype, tuple(tensor.shape), tuple(order))

    def packed(self, tensor: Tensor) -> Tensor:
        """Return the values as a contiguous tensor in memory order; no copy without gaps.

        A view of another sign, such as a conjugate, is a copy too: its bytes are not its values.
        """
        return tensor.resolve_conj().resolve_neg().permute(self.order).contiguous()

    def buffer(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Allocate room for a tensor of this layout.

        Returns:
            The contiguous memory to receive into, and a view of it with this layout's shape.
        """
        sizes = [self.sizes[dimension] for dimension in self.order]
        memory = torch.empty(sizes, dtype=self.dtype, device=device)
        return memory, self.unpacked(memory)

    def unpacked(self, memory: Tensor) -> Tensor:
        """Return a view of contiguous memory, of any shape, with this layout's shape."""
        sizes = [self.sizes[dimension] for dimension in self.order]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return memory.view(sizes).permute(back)

    def fits(self, tensor: Tensor) -> bool:
        return (self.dtype, self.sizes) == (tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True)
class MessageRoute:
    """The messages that two ranks exchange in a step, each way, in sending order.

    Attributes:
        receives: By rank that sends to this one, its SENDs.
        tags: The number of each SEND among those of its sender to its receiver.
        receivers: The receiving rank of each SEND of this rank.
        sends: The SEND that each of this rank's RECVs waits for.
    """

    receives: dict[int, list[Action]]
    tags: dict[Action, int]
    receivers: dict[Action, int]
    sends: dict[Action, Action]

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> MessageRoute:
        """Return the messages that a rank sends and receives by a lowered schedule."""
        receives: dict[int, list[Action]] = defaultdict(list)
        tags: dict[Action, int] = {}
        receivers: dict[Action, int] = {}
        sends: dict[Action, Action] = {}
        for sender, actions in enumerate(schedule.lists):
            counts: dict[int, int] = defaultdict(int)
            for action in actions:
                if action.kind is not Kind.SEND:
                    continue
                assert action.edge is not None
                other = action.edge.target if _is_forward(action) else action.edge.source
                receiver = schedule.placement.homes[action.replica][other]
                if rank in (sender, receiver):
                    tags[action] = counts[receiver]
                if sender == rank:
                    receivers[action] = receiver
                if receiver == rank:
                    receives[sender].append(action)
                    sends[action._replace(kind=Kind.RECV, stage=other)] = action
                counts[receiver] += 1
        return cls(receives, tags, receivers, sends)


@dataclass
class _Sending:
    pending: Pending
    action: Action | None  # None of a header
    start: float


class MessageChannel:
    """The messages of one rank, pass after pass: where they go, and the layouts known so far.

    A receiver learns the layout of an edge's tensors, for a number of samples, from a header
    ahead of the first of them; from then on their buffers are posted before they are needed.
    Where there is no tensor yet (a value that a microbatch does not use has no gradient, some do
    not exist in `eval` mode) a header alone says so, each time.

    Args:
        transport: Carries them.
        device: The device of sent and received tensors.
        route: The messages of this rank.
        without_gradient: Edges on which nothing comes back, which both their ranks know.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        route: MessageRoute,
        without_gradient: Collection[Edge],
    ) -> None:
        self.transport, self.device, self.route = transport, device, route
        self.layouts: dict[tuple[object, ...], Layout] = {}
        self._without_gradient = without_gradient

    def has_tensor(self, send: Action) -> bool:
        """Return False for a SEND that never carries a tensor: a gradient where there is none."""
        return _is_forward(send) or send.edge not in self._without_gradient


class Messages:
    """The sends and receives of one pass, of which none has been sent or posted at first.

    `post`, `send` and `receive` are called as the actions run, in their order; `finish` at the end.
    A pass that is given up runs to its end all the same, so that no rank waits for a message that
    never comes: what is not computed is sent as zeros, or announced as given up where the receiver
    knows no layout yet.

    Args:
        channel: The rank's.
        actions: The rank's list of actions; empty microbatches left out.
        sizes: Samples of each microbatch.
        training: Whether the model is in training mode.
        trace: Records each SEND, from its start until it has left.

    Attributes:
        given_up: True once this rank, or the sender of a message that came, has given up.
    """

    def __init__(
        self,
        channel: MessageChannel,
        actions: Sequence[Action],
        sizes: Sequence[int],
        training: bool,
        trace: StepTrace | None,
    ) -> None:
        self._channel, self._layouts = channel, channel.layouts
        self._transport, self._device, self._route = (
            channel.transport,
            channel.device,
            channel.route,
        )
        self._sizes, self._training, self._trace = sizes, training, trace
        self._sending: deque[_Sending] = deque()
        self._receives = [self._route.sends[each] for each in actions if each.kind is Kind.RECV]
        wanted = set(self._receives)
        self._queues = {
            rank: deque(each for each in sent if each in wanted)
            for rank, sent in self._route.receives.items()
        }
        self._source = {each: rank for rank, sent in self._queues.items() for each in sent}
        self._until = _horizons(actions)
        self._posted: dict[Action, tuple[Pending, Tensor] | None] = {}
        self._next = 0
        self.given_up = False

    def post(self, position: int) -> None:
        """Post the receives that are due until the visit after the action at `position`.

        No more than these, as the memory of their buffers counts (`simulate`), and no less, so that
        they arrive while this visit computes.
        """
        self._reap()
        while self._next < self._until[position]:
            send = self._receives[self._next]
            self._advance(send, wait=False)
            if send not in self._posted:
                return
            self._next += 1

    def send(self, action: Action, tensor: Tensor | None) -> None:
        """Start the message of a SEND; never waits for the receiver.

        Args:
            action: The SEND.
            tensor: On the device, of any strides; None where the edge has no tensor this time:
                zeros are sent if it had one before.

        Raises:
            PathosegError: The tensor has another dtype or shape than those before it.
        """
        if not self._channel.has_tensor(action):
            return
        to, tag, key = self._route.receivers[action], self._route.tags[action], self._key(action)
        layout = self._layouts.get(key)
        if layout is None:
            layout = None if tensor is None else Layout.of(tensor)
            header = _header(layout, self.given_up)
            self._start(None, header.to(self._device), to, tag)
            if layout is None:
                return
            self._layouts[key] = layout
        if tensor is None:
            tensor = torch.zeros(layout.sizes, dtype=layout.dtype, device=self._device)
        if not layout.fits(tensor):
            raise PathosegError(
                f"The tensor of edge {action.edge} is {tensor.dtype} {tuple(tensor.shape)} and was "
                f"{layout.dtype} {layout.sizes} for as many samples.",
                "Give the model inputs of one size, or train it on one rank.",
            )
        self._start(action, layout.packed(tensor), to, tag)

    def receive(self, action: Action) -> Tensor | None:
        """Wait for the message of a RECV.

        Returns:
            Its tensor, on the device; None where the edge has none.

        Raises:
            PathosegError: A rank is lost.
        """
        send = self._route.sends[action]
        if not self._channel.has_tensor(send):
            return None
        while send not in self._posted:
            self._advance(send, wait=True)
        found, self._posted[send] = self._posted[send], None
        if found is None:
            return None
        pending, tensor = found
        pending.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for each in self._sending:
            each.pending.wait()
        self._reap()

    def _advance(self, send: Action, wait: bool) -> None:
        """Post the messages of a rank up to `send`, in the order in which they are sent; one
        whose layout is unknown only if it may wait for its header."""
        if not self._channel.has_tensor(send):
            self._posted[send] = None
        if send in self._posted:
            return
        source = self._source[send]
        queue = self._queues[source]
        while send not in self._posted:
            first = queue[0]
            if self._channel.has_tensor(first):
                key, tag = self._key(first), self._route.tags[first]
                layout = self._layouts.get(key)
                if layout is None:
                    if not wait:
                        return
                    header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
                    self._transport.receive(header, source, tag).wait()
                    known = header.tolist()
                    layout = _layout(known)
                    if layout is not None:
                        self._layouts[key] = layout
                    self.given_up |= known[0] == _GIVEN_UP
                self._posted[first] = None
                if layout is not None:
                    memory, tensor = layout.buffer(self._device)
                    self._posted[first] = self._transport.receive(memory, source, tag), tensor
            queue.popleft()

    def _start(self, action: Action | None, tensor: Tensor, to: int, tag: int) -> None:
        start = time.perf_counter()
        self._sending.append(_Sending(self._transport.send(tensor, to, tag), action, start))

    def _reap(self) -> None:
        """Let go of what has left."""
        for _ in range(len(self._sending)):
            each = self._sending.popleft()
            if not each.pending.done():
                self._sending.append(each)
            elif self._trace is not None and each.action is not None:
                self._trace.waited(each.action, each.start)

    def _key(self, send: Action) -> tuple[object, ...]:
        assert send.microbatch is not None
        samples = self._sizes[send.microbatch]
        return send.replica, send.edge, _is_forward(send), samples, self._training


def _is_forward(send: Action) -> bool:
    assert send.edge is not None
    return send.stage == send.edge.source


def _horizons(actions: Sequence[Action]) -> list[int]:
    """By position: how many of the RECVs, from the first, come ahead of the visit after it."""
    received = sum(action.kind is Kind.RECV for action in actions)
    horizons, ahead = [], received
    for action in reversed(actions):
        horizons.append(ahead)
        if action.kind is Kind.RECV:
            received -= 1
        elif action.kind in COMPUTE:
            ahead = received
    return horizons[::-1]


_HEADER = 2 + 2 * MOST_DIMENSIONS
_NONE, _GIVEN_UP = -1, -2


def _header(layout: Layout | None, given_up: bool = False) -> Tensor:
    """A layout as a message: the number of the dtype or why there is none, dimensions, sizes,
    order."""
    header = torch.full((_HEADER,), _GIVEN_UP if given_up else _NONE, dtype=torch.int64)
    if layout is not None:
        dimensions = len(layout.sizes)
        if layout.dtype not in _DTYPES or dimensions > MOST_DIMENSIONS:
            raise PathosegError(
                f"A {layout.dtype} tensor of {dimensions} dimensions cannot be sent.",
                "Cut the model elsewhere.",
            )
        numbers = [_DTYPES.index(layout.dtype), dimensions, *layout.sizes, *layout.order]
        header[: len(numbers)] = torch.tensor(numbers)
    return header


def _layout(header: list[int]) -> Layout | None:
    """The inverse of `_header`."""
    dtype, dimensions, *numbers = header
    if dtype < 0:
        return None
    sizes, order = numbers[:dimensions], numbers[dimensions : 2 * dimensions]
    return Layout(_DTYPES[dtype], tuple(sizes), tuple(order))
