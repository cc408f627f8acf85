"""The serial judge: one process, a plain loop over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathoseg.device import CPU, seed_random
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.rng import seed_of
from tests.parallel.computing_device import DEVICE, HAS_OWN_KERNELS
from tests.parallel.networks.runtime_models import RuntimeModel, per_sample_loss, samples

LEARNING_RATE = 0.01
STEPS = 3
# A GPU draws other random numbers than a CPU, so there it is judged by itself.
_ON = DEVICE if HAS_OWN_KERNELS else CPU


@dataclass
class Verdict:
    """The outcome of three steps of training, by the judge or on a rank.

    Attributes:
        losses: Sum of the losses of each step's samples.
        gradients: Of the first step, by parameter, clipped.
        state: Parameters and buffers after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9)


def judge(kind: RuntimeModel, traced: Traced, sizes: Sequence[int], clip: float) -> Verdict:
    """Trains the traced model; it is left as it was."""
    model, verdict = traced.model, Verdict()
    before = deepcopy(model.state_dict())
    model.to(_ON)
    dtype = next(model.parameters()).dtype
    steps = optimizer([*model.parameters()])
    for step in range(STEPS):
        steps.zero_grad()
        total = 0.0
        for microbatch, size in enumerate(sizes):
            if not size:
                continue
            images, targets = samples(step, microbatch, size, dtype)
            returned = _forward(traced, kind.inputs(images.to(_ON)), step, microbatch)
            loss = per_sample_loss(returned, targets.to(_ON)).sum()
            (loss / sum(sizes)).backward()
            total += loss.item()
        if clip:
            _clip([p.grad for p in model.parameters()], clip)
        if step == 0:
            verdict.gradients = {
                name: p.grad.to(CPU, copy=True)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        steps.step()
        verdict.losses.append(total)
    verdict.state = {name: each.to(CPU, copy=True) for name, each in model.state_dict().items()}
    model.to(CPU)
    model.load_state_dict(before)
    model.zero_grad()
    return verdict


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """By the norm of all gradients end to end, in double precision."""
    norm = torch.cat([each.double().flatten() for each in gradients]).norm().item()
    for each in gradients:
        each.mul_(min(1.0, most / (norm + 1e-6)))


def _forward(traced: Traced, inputs: dict[str, Tensor], step: int, microbatch: int) -> object:
    """All layers in turn, each with random numbers of its own."""
    whole = traced.segment(range(len(traced.graph.layers)))

    def seed(position: int) -> None:
        # torch.manual_seed would format the stack three times, for devices that are not there:
        # 1.5 ms a layer.
        seed_random(_ON, seed_of(0, step, microbatch, position))

    return traced.assemble(whole(inputs, seed))
