"""Copies of a stage's storages to host memory and back, in each of the study's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pathoseg.parallel.activations.forms import Form
from pathoseg.parallel.activations.overlapped import Overlapped
from pathoseg.parallel.activations.pinned_arena import Arena
from pathoseg.parallel.activations.streams import Lane, Streams
from pathoseg.parallel.activations.tickets import Copied, Label


class Copies(Protocol):
    """The copies of one rank. A ticket stands for bytes that were given to `leave`.

    Attributes:
        copied: Gains every copy, where it is a list.
        peak: Most bytes that were in host memory at once.
    """

    copied: list[Copied] | None

    @property
    def peak(self) -> int: ...

    def leave(self, source: Tensor, label: Label, lasting: bool = False) -> Any:
        """Takes over bytes of the device (uint8, one dimension), which nothing else may need.

        Args:
            source: The bytes.
            label: Whose they are.
            lasting: Whether they stay on the host when they have come back, until `drop`.
        """

    def let_go(self) -> None:
        """Frees what has left the device by now."""

    def ask(self, tickets: Sequence[Any]) -> None:
        """The backward is near: its tickets in the order in which it needs them."""

    def fetch(self, ticket: Any) -> Tensor:
        """The bytes, on the device; until `drop` they may be fetched again."""

    def release(self, ticket: Any) -> None:
        """Lasting bytes leave the device as they came; they may be asked for and fetched again."""

    def drop(self, ticket: Any) -> None:
        """They are needed no more."""


class _Away(NamedTuple):
    host: Tensor
    label: Label


class Direct:
    """Copies on the stream that computes, when a tensor is saved and when it is used.

    Args:
        streams: The lanes of the device.
        device: Where tensors come back to.
        form: Which of the four.
    """

    def __init__(self, streams: Streams, device: torch.device, form: Form) -> None:
        self.copied: list[Copied] | None = None
        self.peak = 0
        self._held = 0
        self._streams, self._device = streams, device
        self._pins = form.pins and device.type == "cuda"
        self._goes_on = form in (Form.NON_BLOCKING, Form.PINNED_NON_BLOCKING)

    def leave(self, source: Tensor, label: Label, lasting: bool = False) -> _Away:
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self._pins)
        self._copy(Lane.OUT, host, source, label)
        self._held += host.numel()
        self.peak = max(self.peak, self._held)
        return _Away(host, label)

    def let_go(self) -> None:
        """Nothing is ever on its way."""

    def ask(self, tickets: Sequence[_Away]) -> None:
        """Nothing comes back ahead of its use."""

    def fetch(self, ticket: _Away) -> Tensor:
        device = torch.empty(ticket.host.numel(), dtype=torch.uint8, device=self._device)
        self._copy(Lane.BACK, device, ticket.host, ticket.label)
        return device

    def release(self, ticket: _Away) -> None:
        """Bytes that came back are held by who fetched them alone."""

    def drop(self, ticket: _Away) -> None:
        self._held -= ticket.host.numel()

    def _copy(self, lane: Lane, into: Tensor, source: Tensor, label: Label) -> None:
        begin = self._streams.mark(Lane.COMPUTE)
        into.copy_(source, non_blocking=self._goes_on)
        if self.copied is not None:
            end = self._streams.mark(Lane.COMPUTE)
            self.copied.append(Copied(lane, label, into.numel(), begin, end))


def copies_of(
    form: Form,
    streams: Streams,
    device: torch.device,
    window: int,
    host_bytes: int,
    turns: bool = False,
) -> Copies | None:
    """The copies of one rank in a form; None where everything stays on the device.

    Args:
        form: The form.
        streams: The lanes of the device.
        device: Where the rank computes.
        window: Bytes on the device that may wait to leave, and as many that may be back early.
        host_bytes: Bytes of host memory that are taken at once.
        turns: Whether nothing leaves while anything is back early.
    """
    if form is Form.NONE:
        return None
    if form is Form.OVERLAPPED:
        arena = Arena(host_bytes, pinned=device.type == "cuda")
        return Overlapped(streams, device, arena, window, turns)
    return Direct(streams, device, form)
