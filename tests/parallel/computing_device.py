"""The device of the runtime's tests: the CPU, or the simulated one where that is loaded.

The judge computes on the CPU in either case: the numbers of both are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.simulated_device.device import NAME, is_loaded

DEVICE = torch.device(NAME if is_loaded() else "cpu")


def equal_to_the_bit(models: Iterable[str]) -> list[str]:
    """Return those of the runtime's models whose numbers on `DEVICE` are the CPU's.

    torch puts attention together otherwise on a device of another maker than on a CPU.
    """
    return [name for name in models if DEVICE.type == "cpu" or name not in ("vit", "low-rank")]


def finish() -> None:
    """Wait for all work of `DEVICE`: copies of a runner that is dropped would use freed memory."""
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize(DEVICE)
