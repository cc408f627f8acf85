"""One rank of `pathoseg train`, as mpirun or torchrun starts it: rank 0 loses memory in step 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pathoseg.cli import main
from pathoseg.parallel.comm.launcher import find_world
from pathoseg.training.pipeline_engine import PipelineEngine
from tests.simulated_device import device

_SHARE = 0.8  # of what the first step took


def lose_memory() -> None:
    step, before, steps = PipelineEngine.step, torch.accelerator.memory_allocated(0), 0

    def limited(engine: PipelineEngine, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            needed = torch.accelerator.max_memory_allocated(0) - before
            device.set_memory_limit(before + int(needed * _SHARE), 0)
        return step(engine, *arguments)

    PipelineEngine.step = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv.pop(1) == "tight" and find_world().rank == 0:
        lose_memory()
    try:
        main()
    finally:
        assert device.counts().kernels > 500
        assert device.problems() == []
