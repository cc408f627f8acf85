"""Plans of an accelerator: what its step takes is what was planned."""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pathoseg.models.unet import UNet
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.fitting import Fit, best, fit
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from tests.parallel.comm.joined import OnDevice
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

_WIDE = 1024
SIM = torch.device("sim")


def _loss(made: Tensor, targets: Tensor) -> Tensor:
    return (made - targets).square().mean(1)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activations_take_what_was_planned_in_the_precision_of_the_run(
    dtype: torch.dtype | None, norm: Literal["batch", "group"]
) -> None:
    """The simulated device casts by CUDA's lists: group norm in float32, batch norm as it comes."""
    model, shape = UNet(2, width=8, depth=2, norm=norm), (2, 3, 128, 128)
    traced = Traced(model, torch.empty(shape, device="meta"), dtype)
    really, known = 0, {parameter.data_ptr() for parameter in model.to(SIM).parameters()}

    def keep(tensor: Tensor) -> Tensor:
        nonlocal really
        start = tensor.untyped_storage().data_ptr()
        if start not in known:
            known.add(start)
            really += tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("sim", dtype, enabled=dtype is not None):
        made = model(torch.zeros(shape, device=SIM))
    saved = {storage for layer in traced.graph.layers for storage in layer.saved}
    planned = sum(traced.graph.storages[storage].bytes for storage in saved)
    assert str(made.dtype) == f"torch.{traced.graph.layers[-1].outputs[0].dtype}"
    assert planned == pytest.approx(really, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_end_of_a_step_takes_what_was_planned(optimizer: str, ranks: int) -> None:
    """The parameters are large beside the activations: the optimizer's temporaries make the peak,
    or, where there are two ranks and hence a sum, the gradients that are concatenated for it.

    They are those of torch's default on an accelerator (`foreach`); fused kernels have none.
    """
    hardware = replace(load_hardware("v100"), device="sim")
    update: dict[str, Any] = {"adamw": {}, "sgd": {"momentum": 0.9, "nesterov": True}}[optimizer]
    make = partial(
        {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer],
        **{"lr": 1e-3, "weight_decay": 0.1, "foreach": True, **update},
    )
    training = Training(_loss, make, clip=1.0)
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
        made = Fit(plan, runner, ("input",))
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


def test_a_batch_of_host_memory_is_copied_to_the_device() -> None:
    seen: list[torch.device] = []

    def losses(made: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.device)
        return _loss(made, targets)

    model, inputs = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.rand(4, 8)
    training = Training(losses, lambda parameters: torch.optim.SGD(parameters, 1e-3))
    asked = PlanRequest(1, 2**40, 4, "sequential")
    transport = connect("gloo", World())
    run = fit(model, inputs[:1], training, asked, load_hardware("h200"), transport, SIM)
    run.step(0, inputs, torch.zeros(4, 2))
    assert {device.type for device in seen} == {"sim"}
