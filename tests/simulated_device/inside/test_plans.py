"""Plans of an accelerator: what its step takes is what was planned."""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pathoseg.config import TrainConfig
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.fitting import Fit, best
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.training.optimizer import make_optimizer
from tests.parallel.comm.joined import OnDevice
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

_WIDE = 1024


def _loss(made: Tensor, targets: Tensor) -> Tensor:
    return (made - targets).square().mean(1)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_end_of_a_step_takes_what_was_planned(optimizer: str, ranks: int) -> None:
    """The parameters are large beside the activations: the optimizer's temporaries make the peak,
    or, where there are two ranks and hence a sum, the gradients that are concatenated for it."""
    hardware = replace(load_hardware("v100"), device="sim")
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1)  # type: ignore[arg-type]
    training = Training(_loss, lambda own: make_optimizer(own, config), clip=1.0)
    request = PlanRequest(ranks, 2**40, 2 * ranks, "data-parallel" if ranks > 1 else "sequential")

    model = nn.Sequential(*(nn.Linear(_WIDE, _WIDE) for _ in range(3)))
    # Ahead of the threads: tracing patches torch for the whole process.
    traced = [Traced(deepcopy(model), torch.empty(2, _WIDE, device="meta")) for _ in range(ranks)]
    slots = {"adamw": 2, "sgd": 1}[optimizer]
    priced = StageCosts(traced[0].graph, cost_model(hardware), hardware, slots)
    plan = best([priced], request)

    def run(transport: ThreadTransport) -> int:
        device = torch.device("sim", transport.rank)
        torch.accelerator.set_device_index(device)
        through_host = OnDevice(transport, torch.device("cpu"))  # threads add on one device
        own = traced[transport.rank]
        runner = Runner(
            own, plan.partition(own.graph), plan.schedule, through_host, device, training
        )
        made = Fit(plan, runner, "input")
        for step in range(2):
            torch.accelerator.reset_peak_memory_stats(device)
            numbers = torch.zeros(2 * ranks, _WIDE, device=device)
            made.step(step, numbers, numbers)
        return torch.accelerator.max_memory_allocated(device)

    gc.collect()
    before = [torch.accelerator.memory_allocated(rank) for rank in range(ranks)]
    parameters = 3 * (_WIDE * _WIDE + _WIDE) * 4
    [planned] = plan.memory
    # Parameters, gradients, the optimizer's state, and as much as the gradients once more.
    assert planned == pytest.approx(parameters * (3 + slots), rel=0.02)
    for rank, peak in enumerate(run_ranks(ranks, run)):
        assert peak - before[rank] == pytest.approx(planned, rel=0.02)
