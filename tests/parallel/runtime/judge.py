"""The serial judge: one process, a plain loop over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.randomness import seed_of
from tests.parallel.networks.runtime_models import RuntimeModel, per_sample_loss, samples

LEARNING_RATE = 0.01
STEPS = 3


@dataclass
class Verdict:
    """What three steps must lead to.

    Attributes:
        losses: Sum of the losses of each step's samples.
        gradients: Of the first step, by parameter, clipped.
        state: Parameters and buffers after it.
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
    dtype = next(model.parameters()).dtype
    steps = optimizer([*model.parameters()])
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for step in range(STEPS):
        steps.zero_grad()
        total = 0.0
        measured: list[list[list[tuple[Tensor, Tensor]]]] = []
        for microbatch, size in enumerate(sizes):
            if not size:
                continue
            images, targets = samples(step, microbatch, size, dtype)
            with _Measuring(norms) as found:
                returned = _forward(traced, {kind.input: images}, step, microbatch)
            measured.append(found.measured)
            loss = per_sample_loss(returned, targets).sum()
            (loss / sum(sizes)).backward()
            total += loss.item()
        for index, norm in enumerate(norms):
            for of_microbatch in measured:
                for mean, variance in of_microbatch[index]:
                    _move(norm, mean, variance)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step == 0:
            verdict.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        steps.step()
        verdict.losses.append(total)
    verdict.state = deepcopy(model.state_dict())
    model.load_state_dict(before)
    model.zero_grad()
    return verdict


def _forward(traced: Traced, inputs: dict[str, Tensor], step: int, microbatch: int) -> object:
    """All layers in turn, each with random numbers of its own."""
    whole = traced.segment(range(len(traced.graph.layers)))
    values = whole(
        inputs, lambda position: torch.manual_seed(seed_of(0, step, microbatch, position))
    )
    return traced.assemble(values)


class _Measuring:
    """Keeps norms from moving their statistics; notes what each call measured instead.

    Attributes:
        measured: By norm, (mean, variance) of each of its calls.
    """

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        self._norms = norms
        self.measured: list[list[tuple[Tensor, Tensor]]] = [[] for _ in norms]

    def __enter__(self) -> _Measuring:
        self._hooks = []
        self._was = [(n.momentum, n.running_mean, n.running_var) for n in self._norms]
        for norm, found in zip(self._norms, self.measured, strict=True):
            norm.momentum = 1.0
            self._hooks += [norm.register_forward_pre_hook(_blank)]
            self._hooks += [norm.register_forward_hook(_noting(found))]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for norm, was, found in zip(self._norms, self._was, self.measured, strict=True):
            norm.momentum, norm.running_mean, norm.running_var = was
            norm.num_batches_tracked -= len(found)


def _blank(norm: nn.Module, inputs: object) -> None:
    norm.running_mean = torch.zeros_like(norm.running_mean)
    norm.running_var = torch.zeros_like(norm.running_var)


def _noting(found: list[tuple[Tensor, Tensor]]):
    def note(norm: nn.Module, inputs: object, output: object) -> None:
        found.append((norm.running_mean, norm.running_var))

    return note


def _move(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    norm.num_batches_tracked += 1
    share = norm.momentum
    if share is None:
        share = 1 / norm.num_batches_tracked.item()
    norm.running_mean.copy_((1 - share) * norm.running_mean + share * mean)
    norm.running_var.copy_((1 - share) * norm.running_var + share * variance)
