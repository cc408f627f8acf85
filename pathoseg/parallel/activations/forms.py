"""The six ways in which a stage's tensors may wait in host memory."""

from __future__ import annotations

from enum import StrEnum


class Form(StrEnum):
    """How copies to and from the host are made.

    The first five are those of the offload study; they copy on the stream that computes, when a
    tensor is saved and when it is used. On a CPU all of them copy within host memory.
    """

    NONE = "none"  # everything stays on the device
    NAIVE = "naive"  # pageable memory, the process waits
    PINNED = "pinned"  # freshly pinned memory, the process waits
    NON_BLOCKING = "non-blocking"  # pageable memory, the process goes on
    PINNED_NON_BLOCKING = "pinned-non-blocking"  # freshly pinned memory, the process goes on
    OVERLAPPED = "overlapped"  # streams of their own, pinned memory that is used again, prefetch

    @property
    def pins(self) -> bool:
        """Whether host memory is pinned."""
        return self in (Form.PINNED, Form.PINNED_NON_BLOCKING, Form.OVERLAPPED)
