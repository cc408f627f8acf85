"""Brings a tensor to the host while its device goes on computing."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


class Arrival:
    """A tensor on its way to the host.

    Args:
        tensor: On any device. On the CPU its memory is shared, not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._copied.record()

    @property
    def is_here(self) -> bool:
        """Whether `array` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def array(self) -> NDArray[Any]:
        """The tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()
