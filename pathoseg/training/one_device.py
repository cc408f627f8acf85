"""The engine of a run without ranks: it trains a network on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pathoseg.config import TrainConfig
from pathoseg.device import Images, Inputs, amp_dtype, answer, memory_told, to_inputs, widest
from pathoseg.giving_up import (
    Commit,
    GivenUpError,
    IsGivenUp,
    asking,
    at_any_time,
    buffers_kept,
    never,
    put_back,
)
from pathoseg.gradient_step import (
    LossScale,
    clip_gradients,
    gradient_norms,
    judge_step,
    load_by_name,
    loss_sum,
    state_by_name,
)
from pathoseg.models.build import lay_out
from pathoseg.models.bundle import Bundle
from pathoseg.tiles.dataset import Batch
from pathoseg.training.encoder_training import rate_factors
from pathoseg.training.engine import Loss, StepResult
from pathoseg.training.optimizer import (
    make_optimizer,
    scale_rates,
    set_rate,
)
from pathoseg.training.tasks import Task

# Number of a microbatch in its step, and its inputs (n, 3, h, w), to what the model makes of them.
Forward = Callable[[int, Inputs], Any]


def train_step(
    model: torch.nn.Module,
    forward: Forward,
    loss: Loss,
    microbatches: Iterable[tuple[Inputs, torch.Tensor]],
    samples: int,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    dtype: torch.dtype | None,
    clip: float,
    commit: Commit = at_any_time,
) -> StepResult:
    """Accumulate the gradient of the mean loss over `samples`, then update the parameters.

    A gradient that is not finite leaves parameters and optimizer as they were, not buffers.

    Args:
        model: Its trained parameters have the gradients.
        forward: Runs the model in training mode.
        loss: Per-sample losses of logits and targets, shape (n,).
        microbatches: Inputs (n, 3, h, w), by name where there are several, and targets; uneven
            sizes allowed.
        samples: Samples of all microbatches together.
        optimizer: Its learning rate is set.
        scale: Disabled unless `dtype` is float16.
        dtype: Autocast precision of forward and loss, or None.
        clip: Largest global L2 norm of the gradient; 0 leaves it.
        commit: Called ahead of the update.

    Raises:
        PathosegError: The loss is not one number a sample, or step after step is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for number, (inputs, targets) in enumerate(microbatches):
        with torch.autocast(targets.device.type, dtype, enabled=dtype is not None):
            each = loss(forward(number, inputs), targets)
        total = loss_sum(each, len(targets))
        (total / samples * scale.scale).backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(total.detach().to(widest(total.device)))
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    scale.unscale([*gradients.values()])
    norms = gradient_norms([*gradients.values()])
    found = torch.stack([*losses, *norms]).tolist()  # here alone the host waits for a GPU
    count = len(losses)
    verdict = judge_step(found[:count], dict(zip(gradients, found[count:], strict=True)))
    commit()
    if verdict.finite:
        clip_gradients([*gradients.values()], verdict.norm, clip)
        optimizer.step()
    scale.update(verdict)
    return StepResult(verdict.loss_sum, verdict.finite)


class OneDevice:
    """The `Engine` of a rank alone.

    Args:
        model: On its device.
        forward: Runs it in training mode on a microbatch: of a step's and its own number, and its
            inputs.
        loss: Per-sample losses.
        task: What a target is.
        card: How pixels become input.
        config: The `train` table.
        is_given_up: Asked between layers and microbatches.
    """

    leads = True
    round = 1
    reads = (0,)

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[[int, int, Inputs], Any],
        loss: Loss,
        task: Task,
        card: Bundle,
        config: TrainConfig,
        is_given_up: IsGivenUp = never,
    ) -> None:
        self._is_given_up = is_given_up
        self._model, self._forward, self._loss = model, forward, loss
        self._task, self._card, self._config = task, card, config
        self.rows: Sequence[int] = range(config.batch)
        self._device = next(model.parameters()).device
        self._layout = lay_out(model, card.model, self._device.type)
        self._dtype = amp_dtype(self._device, config.amp)
        self._optimizer = make_optimizer(model.parameters(), config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        scale_rates(self._optimizer, names, rate_factors(model, config))
        self._scale = LossScale(self._dtype is torch.float16)
        self._keys = tuple(model.state_dict())
        self._before: Mapping[str, torch.Tensor] = {}  # buffers, ahead of the step under way

    def step(
        self, number: int, batch: Batch, rate: float, commit: Commit = at_any_time
    ) -> StepResult:
        set_rate(self._optimizer, rate)
        samples = len(batch.images)
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        self._model.train()
        # Compiled layers do not end one by one.
        between_layers = never if self._config.compile else self._is_given_up
        with (
            memory_told(
                f"A microbatch of {min(samples, self._config.microbatch or samples)} tiles",
                'Name what it may take in the configuration, as [parallel] memory = "16GiB": then '
                "what does not fit is offloaded or recomputed. Or lower [train] microbatch or "
                "--tile, or train on several ranks.",
                self._device,
                can_be_planned=True,
            ),
            buffers_kept(buffers) as self._before,
            asking(self._model, self._device, between_layers),
        ):
            result = train_step(
                self._model,
                partial(self._forward, number),
                self._loss,
                self._microbatches(batch),
                samples,
                self._optimizer,
                self._scale,
                self._dtype,
                self._config.clip,
                commit,
            )
            if not result.finite:  # what its forward has measured is no more finite
                put_back(buffers, self._before)
        self._before = {}
        return result

    def predict(
        self, sizes: Sequence[int], images: Mapping[int, Images]
    ) -> dict[int, torch.Tensor]:
        self._model.eval()
        with (
            torch.inference_mode(),
            asking(self._model, self._device, self._is_given_up),
            memory_told(
                "A validation batch",
                "Lower [train] batch or microbatch, or --tile.",
                self._device,
            ),
            torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None),
        ):
            return {
                batch: answer(self._model, self._input(tiles)) for batch, tiles in images.items()
            }

    def gather(self, text: str) -> list[str]:
        return [text]

    def state(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": state_by_name(self._optimizer, self._names()),
            "scaler": self._scale.state_dict(),
        }

    def begun(self) -> dict[str, Any]:
        now, before = self._model.state_dict(), self._before
        # By the keys of old: a norm that recomputes has lent its buffers.
        model = {key: before[key] if key in before else now[key] for key in self._keys}
        return self.state() | {"model": model}

    def load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        load_by_name(self._optimizer, self._names(), state["optimizer"])
        self._scale.load_state_dict(state["scaler"])

    def _names(self) -> Mapping[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _input(self, images: Images) -> Inputs:
        return to_inputs(images, self._card.mean, self._card.std, self._device, self._layout)

    def _microbatches(self, batch: Batch) -> Iterator[tuple[Inputs, torch.Tensor]]:
        size = self._config.microbatch or len(batch.images)
        targets = self._task.targets(batch.labels(slice(None)))
        for start in range(0, len(batch.images), size):
            if self._is_given_up():
                raise GivenUpError
            part = slice(start, start + size)
            yield (
                self._input(batch.inputs(part)),
                torch.from_numpy(targets[part]).to(self._device),
            )
