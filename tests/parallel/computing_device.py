"""The device of the runtime's tests: the CPU, or the simulated one where that is loaded.

The judge computes on the CPU in either case: the numbers of both are equal to the bit.
"""

from __future__ import annotations

import torch

from tests.simulated_device.device import NAME, is_loaded

DEVICE = torch.device(NAME if is_loaded() else "cpu")


def finish() -> None:
    """Wait for all work of `DEVICE`: copies of a runner that is dropped would use freed memory."""
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize(DEVICE)
