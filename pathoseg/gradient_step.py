"""Loss, loss scale, clipping and optimizer state: one rule for one device and for many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pathoseg.device import widest
from pathoseg.errors import PathosegError

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Below this loss scale, or after so many steps in a row, training has failed. The scale is
# fairseq's `min_loss_scale`; halved from its start, 2**16, it gets there in so many steps.
_LEAST_SCALE, _MOST_SKIPPED = 1e-4, 30
_HINT = (
    "Lower the learning rate, look for samples on which the loss has no value, or compute in "
    'float32 ([train] amp = "none").'
)


def loss_sum(losses: Any, samples: int) -> Tensor:
    """Return the sum of the losses of a microbatch's samples, in float32 or better.

    Args:
        losses: What the loss function returned, computed inside autocast as the forward was.
        samples: Of the microbatch.

    Raises:
        PathosegError: It is not one number a sample.
    """
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
    if shape != (samples,):
        what = type(losses).__name__ if shape is None else f"tensor of shape {shape}"
        raise PathosegError(
            f"The loss gave a {what} for {samples} samples, not one number a sample.",
            "Let it average over everything but the samples: shape (n,), not a mean over all.",
        )
    exact: Tensor = losses.to(torch.promote_types(losses.dtype, torch.float32))
    return exact.sum()


def gradient_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the L2 norm of each gradient, in float64 (`widest`) and on its device, by one call."""
    return torch._foreach_norm(gradients, 2, widest(gradients[0].device)) if gradients else ()


class StepVerdict(NamedTuple):
    """The loss and gradient norm of a step, ahead of the optimizer; the same on all ranks.

    Attributes:
        loss_sum: Sum of the losses of all samples.
        norm: Global L2 norm of the gradient.
        cause: The reason why the gradient is not finite, as part of a sentence: no parameter is
            updated then. None where it is finite.
    """

    loss_sum: float
    norm: float
    cause: str | None

    @property
    def finite(self) -> bool:
        return self.cause is None


def judge_step(losses: Sequence[float], norms: Mapping[str, float]) -> StepVerdict:
    """Sum losses and norms in float64, one after the other: in whatever process, the same digits.

    Args:
        losses: The loss sum of each microbatch, in their order.
        norms: The norm of each parameter's gradient, in the model's order, each parameter once;
            without those that have no gradient.
    """
    total = squares = 0.0
    causes = []
    for microbatch, loss in enumerate(losses):
        total += loss
        if not math.isfinite(loss):
            causes.append(f"the loss of microbatch {microbatch} is {loss}")
    for name, norm in norms.items():
        squares += norm * norm
        if not math.isfinite(norm):
            causes.append(f"the gradient of {name} is not finite")
    norm = math.sqrt(squares)
    causes.append(f"the norm of the gradient is {norm}")
    return StepVerdict(total, norm, None if math.isfinite(norm) else causes[0])


def clip_gradients(gradients: list[Tensor], norm: float, most: float) -> None:
    """Scale gradients in place so that their global norm is at most `most`, by the factor of
    `torch.nn.utils.clip_grad_norm_` in float64.

    Args:
        gradients: All gradients of this process, or some of them.
        norm: The global norm of the whole model's.
        most: The largest; 0 leaves all as it is.
    """
    factor = most / (norm + 1e-6)
    if gradients and 0 < factor < 1:
        torch._foreach_mul_(gradients, factor)


class LossScale:
    """The rule of `torch.amp.GradScaler`, decided by whether the step of all ranks was finite.

    Its state is that of torch's class, so that checkpoints fit both.

    Args:
        enabled: Whether the loss is scaled at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._skipped = 0
        self._state = {
            "scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }

    @property
    def scale(self) -> float:
        """The factor of every loss ahead of its backward; 1 without scaling."""
        return self._state["scale"] if self.enabled else 1.0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if gradients and self.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, verdict: StepVerdict) -> None:
        """Lower the scale after a step that overflowed, raise it after many that did not; but not
        beyond float32.

        Raises:
            PathosegError: The scale has collapsed, or step after step was not finite.
        """
        state = self._state
        self._skipped = 0 if verdict.finite else self._skipped + 1
        if self.enabled and verdict.finite:
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                grown = state["scale"] * state["growth_factor"]
                state["scale"] = grown if grown <= _FLOAT32_MAX else state["scale"]
                state["_growth_tracker"] = 0
        elif self.enabled:
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
        if self.enabled and state["scale"] < _LEAST_SCALE:
            raise PathosegError(
                f"The loss scale has fallen to {state['scale']:.1g}, as steps overflow in half "
                f"precision whatever it is: {verdict.cause}.",
                _HINT,
            )
        if self._skipped == _MOST_SKIPPED:
            raise PathosegError(
                f"The last {_MOST_SKIPPED} steps changed nothing: {verdict.cause}.", _HINT
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.amp.GradScaler.state_dict` would."""
        return dict(self._state) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of this class or of torch's; a run without scaling has none."""
        if self.enabled and state:
            self._state = {key: state[key] for key in self._state}


def state_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of each parameter by name; empty before the first step."""
    return {names[parameter]: dict(kept) for parameter, kept in optimizer.state.items()}


def load_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], state: Mapping[str, Any]
) -> None:
    """Load copies of the saved states of its parameters into an optimizer.

    Args:
        optimizer: Its parameters need not be all that were saved.
        names: The name of each of its parameters.
        state: As of `state_by_name`; a parameter that had no gradient is missing.

    Raises:
        KeyError, ValueError: It is the state of another kind of optimizer.
    """
    whole = optimizer.state_dict()
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    # Through the optimizer's own door, which brings tensors to the parameters' devices.
    kept = {index: state[name] for index, name in enumerate(own) if name in state}
    whole["state"] = deepcopy(kept)
    optimizer.load_state_dict(whole)
