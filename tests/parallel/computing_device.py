"""The device of the runtime's tests: the CPU, the simulated one where that is loaded, or a GPU.

The judge computes on the CPU, and the numbers of the simulated device are equal to its numbers to
the bit. A GPU, which PATHOSEG_TEST_DEVICE names (`make gpu`), has kernels and random numbers of its
own: there the judge computes on it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from tests.simulated_device.device import NAME, is_loaded

DEVICE = torch.device(NAME if is_loaded() else os.environ.get("PATHOSEG_TEST_DEVICE", "cpu"))
HAS_OWN_KERNELS = DEVICE.type not in ("cpu", NAME)
if HAS_OWN_KERNELS:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def equal_to_the_bit(models: Iterable[str]) -> list[str]:
    """Return those of the runtime's models whose numbers on `DEVICE` are the CPU's.

    torch puts attention together otherwise on a device of another maker than on a CPU.
    """
    return [name for name in models if DEVICE.type == "cpu" or name not in ("vit", "low-rank")]


def finish() -> None:
    """Wait for all work of `DEVICE`: copies of a runner that is dropped would use freed memory."""
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize(DEVICE)
