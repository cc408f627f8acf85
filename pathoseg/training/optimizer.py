"""The optimizer a run asks for, its learning rate at each step, and its state by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pathoseg.config import TrainConfig
from pathoseg.device import fuses_updates


def make_optimizer(
    parameters: Iterable[torch.Tensor], config: TrainConfig
) -> torch.optim.Optimizer:
    """Make AdamW or SGD with the configured rate and weight decay, of fused kernels where there are
    some: a third of the time on a CPU.

    Args:
        parameters: The trained ones; those of one dimension (norms, biases) do not decay.
        config: The options.
    """
    trained = [p for p in parameters if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    plain = [p for p in trained if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = True if trained and fuses_updates(trained[0].device) else None  # None: as torch does
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True, fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    optimizer.register_step_pre_hook(_lay_out)
    return optimizer


def _lay_out(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Bring gradients and state into the memory order of their parameters.

    Fused kernels go through all of them as one line of memory, without asking whether they lie
    alike (torch 2.13 on a CPU): a contiguous gradient of a channels-last weight, or the state of a
    checkpoint of another layout, would be added to other weights.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not _lie_alike(parameter.grad, parameter):
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            state = optimizer.state.get(parameter, {})
            for name, kept in state.items():
                is_of_each = isinstance(kept, torch.Tensor) and kept.shape == parameter.shape
                if is_of_each and not _lie_alike(kept, parameter):
                    state[name] = torch.empty_like(parameter).copy_(kept)


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    ours, theirs = one.stride(), other.stride()
    return ours == theirs or all(
        mine == its for mine, its, size in zip(ours, theirs, other.shape, strict=True) if size > 1
    )


def scale_rates(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    factors: Mapping[str, float],
) -> None:
    """Split the groups of a new optimizer, so that `set_rate` gives parameters rates of their own.

    Args:
        optimizer: Of some or all parameters.
        names: Of these, by parameter.
        factors: By name, the learning rate over that of the others; 1 where a name is missing.
    """
    groups = []
    for group in optimizer.param_groups:
        parts: dict[float, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            parts.setdefault(factors.get(names[parameter], 1.0), []).append(parameter)
        groups += [{**group, "params": part, "factor": factor} for factor, part in parts.items()]
    optimizer.param_groups = groups


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, times the factor of `scale_rates`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Return the rate of step `step` (from 0) of `total`: linear warm-up, then the schedule.

    Cosine falls to 0 as in Loshchilov & Hutter (2017); poly with power 0.9 as in Chen et al. (2017)
    and nnU-Net.
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
