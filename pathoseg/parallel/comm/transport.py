"""The transport protocol between ranks: tagged messages, sums, and a common abort."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A message or sum that a transport has begun."""

    def done(self) -> bool:
        """Return True if the operation is finished; never blocks, but drives progress.

        Raises:
            PathosegError: It can never finish: a rank is gone or has called `abort`.
        """

    def wait(self) -> None:
        """Return once it is finished.

        Raises:
            PathosegError: As `done`.
        """


class Transport(Protocol):
    """Joins the ranks 0 to `ranks` - 1, of which this one is `rank`.

    Messages with the same sender, receiver and tag arrive in the order in which they were sent;
    no other order counts. Tags are whole numbers below 2**20. Messages may be empty, and are of any
    dtype. Sums are of float64, float32, float16, bfloat16, int64, uint8 and bool. Every method may
    raise the PathosegError of a rank that is gone or has called `abort`.

    Attributes:
        rank: This one.
        ranks: The number of ranks.
        reads: Types of accelerators whose memory it sends and receives; tensors of others are
            copied to the host and back.
    """

    rank: int
    ranks: int
    reads: frozenset[str]

    def prepare(self, peers: Collection[int], groups: Collection[tuple[int, ...]]) -> None:
        """Say what this rank will send and sum; all ranks call it, with nothing under way.

        NCCL connects these ranks from device to device. Messages and sums that were not named are
        right all the same, and go through host memory.

        Args:
            peers: The ranks that it exchanges messages with.
            groups: The ascending ranks of each sum in which it takes part.
        """

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start a message to rank `to`.

        Args:
            tensor: Contiguous; it must not change until the message is done.
            to: The receiver.
            tag: The message's number.
        """

    def receive(self, into: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for a message.

        Args:
            into: Contiguous, of the message's shape and dtype.
            source: The sender.
            tag: The message's number.
        """

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start to sum a tensor in place over ascending `ranks`, all of which call this.

        Two ranks that share several sums call them in the same order. The result is equal to the
        bit on all ranks, and the same in every run.
        """

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; all ranks call it."""

    def barrier(self) -> None:
        """Wait until all ranks have called it."""

    def abort(self, reason: str, fits: int | None = None) -> None:
        """Make all that is pending, and all later calls, fail with this reason on every rank.

        The first reason counts; an `abort` after another does nothing.

        Args:
            reason: In words.
            fits: Where an accelerator ran out of memory, the bytes that another plan may fill: then
                the calls of all ranks raise MemoryExhaustedError.
        """

    def close(self) -> None:
        """Leave the other ranks; called once on every rank, last of all."""
