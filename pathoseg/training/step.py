"""One training step on one device: microbatches forward and backward, clip, update."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pathoseg.training.engine import Loss, StepResult


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
