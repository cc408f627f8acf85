"""The optimizer's step of all ranks: the norm of a gradient that lies on several, and clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pathoseg.device import widest
from pathoseg.giving_up import Commit
from pathoseg.gradient_step import (
    LossScale,
    StepVerdict,
    clip_gradients,
    gradient_norms,
    judge_step,
)
from pathoseg.parallel.activations.stage_offload import Park, StageOffload
from pathoseg.parallel.comm.transport import Transport

_ABSENT = -1.0  # no norm is negative


class GradientNorm:
    """Finds, on all ranks together, the losses of a step and the norm of its gradient.

    Each logical parameter counts once, told by one of the ranks that hold it.

    Args:
        parameters: All trained parameters of the model by name, in its order.
        counted: Names of those that this rank tells the others of.
        transport: Joins the ranks.
        device: The gradients' device.
        stage_offload: Has the gradients of this rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Sequence[str],
        transport: Transport,
        device: torch.device,
        stage_offload: StageOffload,
    ) -> None:
        self._names = [*parameters]
        index = {name: number for number, name in enumerate(parameters)}
        self._counted = {id(parameters[name]): index[name] for name in counted}
        self._transport, self._device, self._stage_offload = transport, device, stage_offload
        self._absent = torch.tensor(_ABSENT, dtype=widest(device), device=device)

    def agree(
        self, losses: Mapping[int, Tensor], microbatches: int, scale: LossScale, given_up: bool
    ) -> StepVerdict | None:
        """Unscale the gradients of this rank, and judge the step by those of all ranks.

        All ranks call it, once the sums over copies are done. The host waits for the device once.

        Args:
            losses: The loss of each microbatch whose last stage is on this rank.
            microbatches: Number of microbatches in the whole step.
            scale: The factor by which the losses were multiplied.
            given_up: Whether this rank has given up the step.

        Returns:
            None where a rank has given up.
        """
        size = len(self._names)
        told = torch.zeros(size + microbatches + 1, dtype=widest(self._device), device=self._device)
        told[-1] = given_up
        found = {size + each: loss.to(told) for each, loss in losses.items()}
        changed = () if scale.scale == 1.0 else (Park.GRADIENTS,)
        for parameters in self._stage_offload.in_turn(Park.GRADIENTS, changed=changed):
            scale.unscale([each.grad for each in parameters if each.grad is not None])
            own = {
                self._counted[id(each)]: each.grad
                for each in parameters
                if id(each) in self._counted
            }
            present = {at: gradient for at, gradient in own.items() if gradient is not None}
            found |= dict.fromkeys(own, self._absent)
            found |= zip(present, gradient_norms([*present.values()]), strict=True)
        if found:
            places = torch.tensor([*found], device=self._device)
            told[places] = torch.stack([*found.values()])
        if self._transport.ranks > 1:
            self._transport.sum(told, tuple(range(self._transport.ranks))).wait()
        *values, givers = told.tolist()
        if givers:
            return None
        norms = zip(self._names, values, strict=False)
        return judge_step(values[size:], {name: norm for name, norm in norms if norm != _ABSENT})


class ClippedStep:
    """The optimizer's step of one rank, clipped by the norm of all; made on all ranks, or on none.

    Args:
        norm: Finds losses and norm on all ranks together.
        scale: The losses' scale; read, not updated.
        optimizer: Updates this rank's parameters; None where it has none.
        stage_offload: Brings parameters, gradients and optimizer state of stages that wait.
        clip: Largest global L2 norm of the gradient; 0 leaves it.
    """

    def __init__(
        self,
        norm: GradientNorm,
        scale: LossScale,
        optimizer: torch.optim.Optimizer | None,
        stage_offload: StageOffload,
        clip: float,
    ) -> None:
        self._norm, self._scale, self._clip = norm, scale, clip
        self._optimizer, self._stage_offload = optimizer, stage_offload

    def run(
        self, losses: Mapping[int, Tensor], microbatches: int, given_up: bool, commit: Commit
    ) -> StepVerdict | None:
        """Unscale, clip and apply the gradients, unless one on any rank is not finite.

        All ranks call it, once the sums over copies are done.

        Args:
            losses: The loss sum of each microbatch whose last stage is on this rank.
            microbatches: Number of microbatches in the whole step.
            given_up: Whether this rank has given up the step.
            commit: Called ahead of the update, once no rank has given up.

        Returns:
            The step's loss and norm, the same on all ranks; None where a rank has given up, and no
            parameter is updated.
        """
        verdict = self._norm.agree(losses, microbatches, self._scale, given_up)
        if verdict is None:
            return None
        commit()
        if verdict.finite and self._optimizer is not None:
            for parameters in self._stage_offload.in_turn(*Park, changed=[*Park]):
                gradients = [each.grad for each in parameters if each.grad is not None]
                clip_gradients(gradients, verdict.norm, self._clip)
                with self._stage_offload.alone(parameters) as optimizer:
                    optimizer.step()
                self._stage_offload.forget_gradients(parameters)
        return verdict
