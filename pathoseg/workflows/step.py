"""One training step on one device: microbatches forward and backward, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pathoseg.workflows.config import TrainConfig

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step did: the sum of per-sample losses, and whether its gradient was finite."""

    loss_sum: float
    finite: bool


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on weights only (norms and biases have one dimension)."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=config.lr)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: linear warm-up, then the schedule.

    Cosine falls to 0 as in Loshchilov & Hutter (2017); poly with power 0.9 as in Chen et al.
    (2017) and nnU-Net.
    """
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "poly":
        return config.lr * float((1 - done) ** 0.9)
    return config.lr


def train_step(
    model: torch.nn.Module,
    loss: Loss,
    microbatches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    samples: int,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype | None,
    clip: float,
) -> StepResult:
    """Accumulates the gradient of the mean loss over `samples`, then updates the parameters.

    A gradient that is not finite leaves parameters and optimizer as they were.

    Args:
        model: In training mode.
        loss: Per-sample losses of logits and targets, shape (n,).
        microbatches: Inputs (n, 3, h, w) and targets, uneven sizes allowed.
        samples: Samples of all microbatches together.
        optimizer: Its learning rate is set.
        scaler: Disabled unless `dtype` is float16.
        dtype: Autocast precision, or None.
        clip: Largest global L2 norm of the gradient; 0 leaves it.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), dtype=torch.float64)  # read once: a GPU need not wait in between
    for inputs, targets in microbatches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
            logits = model(inputs)
        losses = loss(logits, targets).sum()
        scaler.scale(losses / samples).backward()  # type: ignore[no-untyped-call]  # torch's
        loss_sum = loss_sum.to(losses.device) + losses.detach()
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
    finite = bool(torch.isfinite(norm))
    if scaler.is_enabled() or finite:
        scaler.step(optimizer)  # a scaler skips what is not finite itself, then lowers its scale
    scaler.update()
    return StepResult(loss_sum.item(), finite)
