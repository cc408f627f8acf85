"""Gradient clipping and loss scaling that all ranks agree on ahead of the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pathoseg.parallel.activations.stage_offload import Park, StageOffload
from pathoseg.parallel.comm.transport import Transport


class LossScale:
    """What `torch.amp.GradScaler` does, decided by whether the step of all ranks was finite.

    Its state is that of torch's class, so that checkpoints fit both.

    Args:
        enabled: Whether the loss is scaled at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._state = {
            "scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }

    @property
    def scale(self) -> float:
        return self._state["scale"] if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """After a step: lower after one that overflowed, higher after many that did not."""
        state = self._state
        state["_growth_tracker"] = state["_growth_tracker"] + 1 if finite else 0
        if not finite:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            KeyError: The state is that of a run without scaling, or the other way round.
        """
        if self.enabled:
            self._state = {key: state[key] for key in self._state}


_ABSENT = -1.0  # no norm is negative


class Agreed(NamedTuple):
    """The same on all ranks.

    Attributes:
        norm: Global L2 norm of the gradient, a scalar tensor.
        finite: Whether it is finite.
        loss_sum: Sum of the losses of all samples.
    """

    norm: Tensor
    finite: bool
    loss_sum: float


class Clipping:
    """The norm of the gradient of a model whose parameters lie on several ranks.

    Each logical parameter counts once, and norms are joined in the model's order, as
    `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: All trained parameters of the model by name, in its order.
        counted: Names of those that this rank tells the others of.
        transport: Joins the ranks.
        device: Where the gradients are.
        parking: Has the gradients of this rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Sequence[str],
        transport: Transport,
        device: torch.device,
        parking: StageOffload,
    ) -> None:
        index = {name: number for number, name in enumerate(parameters)}
        self._size = len(index)
        self._dtype = next((each.dtype for each in parameters.values()), torch.float32)
        self._counted = {id(parameters[name]): index[name] for name in counted}
        self._transport, self._device, self._parking = transport, device, parking

    def agree(self, losses: Mapping[int, Tensor], microbatches: int, scale: float) -> Agreed:
        """Divides the gradients by `scale` and finds their norm.

        All ranks call it, once the sums over copies are done.

        Args:
            losses: The loss of each microbatch whose last stage is on this rank.
            microbatches: Of the whole step.
            scale: What the losses were multiplied by.
        """
        size = self._size
        told = torch.zeros(size + microbatches, dtype=torch.float64, device=self._device)
        found = {size + each: loss.to(told) for each, loss in losses.items()}
        changed = () if scale == 1.0 else (Park.GRADIENTS,)
        for parameters in self._parking.in_turn(Park.GRADIENTS, changed=changed):
            for parameter in parameters:
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(1.0 / scale)
                if id(parameter) in self._counted:
                    found[self._counted[id(parameter)]] = _norm(parameter.grad, told)
        if found:
            places = torch.tensor([*found], device=self._device)
            told[places] = torch.stack([*found.values()])
        if self._transport.ranks > 1:
            self._transport.sum(told, tuple(range(self._transport.ranks))).wait()
        told = told.cpu()
        norms_of_all, losses_of_all = told[:size], told[size:].tolist()
        present = norms_of_all[norms_of_all != _ABSENT].to(self._dtype)
        norm = torch.linalg.vector_norm(present)
        loss_sum = 0.0
        for loss in losses_of_all:
            loss_sum += loss
        return Agreed(norm, math.isfinite(norm.item()), loss_sum)


def _norm(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.full_like(like[0], _ABSENT)
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return norm.to(like)
