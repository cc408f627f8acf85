"""Trains two steps by a plan on ranks that each have so much memory and no more."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from cases import networks

from pathoseg.device import memory_of, pick_device
from pathoseg.errors import PathosegError
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig
from pathoseg.parallel.comm.launcher import World, connect, find_world
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.fitting import Fit, split
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.runtime.stage import Training
from tests.parallel.networks.stages import allocated

DEVICE = pick_device()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--memory", type=int, required=True, help="bytes of a rank")
    parser.add_argument("--out", type=Path, required=True, help="where the seconds a tile go")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = Plan.from_json(options.plan.read_text())
    if chosen.ranks > 1 and not options.rank:
        sys.exit(start_local(chosen.ranks, [sys.executable, *sys.argv, "--rank"], "auto"))
    try:
        _train(options, chosen)
    except PathosegError as error:
        sys.exit(f"{error}")


def _train(options: argparse.Namespace, chosen: Plan) -> None:
    transport = connect("auto", find_world() if options.rank else World())
    torch.manual_seed(0)
    loss = build_loss(LossConfig())
    training = Training(loss, lambda parameters: torch.optim.AdamW(parameters, 1e-4))
    if DEVICE.type == "cpu":
        # Beyond it torch says that there is no more; the kernel would kill, and not this alone.
        left = psutil.virtual_memory().available // chosen.ranks
        if left < options.memory:
            sys.exit(f"This host has {left} bytes for each rank; {options.memory} were asked for.")
        resource.setrlimit(resource.RLIMIT_DATA, (left, left))
    else:
        free = memory_of(DEVICE)
        assert free is not None
        cap = getattr(torch.get_device_module(DEVICE), "set_per_process_memory_fraction", None)
        if cap is None:
            sys.exit(f"A process of {DEVICE} cannot be capped.")
        cap(options.memory / free[1])
    model = networks(options.quick)[options.network]()
    side = options.side
    images = torch.rand(chosen.batch, 3, side, side)
    targets = torch.randint(2, (chosen.batch, side, side))
    example = torch.empty(1, 3, side, side, device="meta")
    fitted = split(Traced(model, example), chosen, training, transport, DEVICE)
    # Twice: from the second step on buffers are posted ahead.
    steps = [partial(fitted.step, number, images, targets) for number in range(3)]
    if DEVICE.type == "cpu":
        _count(fitted, lambda: [steps.pop(0)(), steps.pop(0)()], transport, options.memory)
    while len(steps) > 1:
        steps.pop(0)()
    begin = time.perf_counter()
    steps.pop()()
    if transport.rank == 0:
        options.out.write_text(str((time.perf_counter() - begin) / chosen.batch))
    transport.close()


def _count(fitted: Fit, step: Callable[[], object], transport: Transport, memory: int) -> None:
    """Refuses what a step on CPUs, which cap nothing, holds above the cap."""
    held = allocated(step) + sum(each.nbytes for each in fitted.runner.own.values())
    most = max(map(int, transport.gather(str(held))))
    if most > memory:
        sys.exit(f"The largest rank holds {most} bytes, and may hold {memory}.")


if __name__ == "__main__":
    main()
