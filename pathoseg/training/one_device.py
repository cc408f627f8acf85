"""Trains a network on one device: the engine of a run without ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.config import TrainConfig
from pathoseg.device import amp_dtype, memory_told, to_input
from pathoseg.models.bundle import Bundle
from pathoseg.tiles.dataset import Batch
from pathoseg.training.engine import Loss, StepResult
from pathoseg.training.optimizer import load_by_name, make_optimizer, state_by_name
from pathoseg.training.tasks import Task


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


class OneDevice:
    """The `Engine` of a rank alone.

    Args:
        model: On its device.
        loss: Per-sample losses.
        task: What a target is.
        card: How pixels become input.
        config: The `train` table.
        seed: Seed of the run.
    """

    leads = True
    round = 1
    reads = (0,)

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        task: Task,
        card: Bundle,
        config: TrainConfig,
        seed: int,
    ) -> None:
        self._model, self._loss, self._task, self._card = model, loss, task, card
        self._config, self._seed = config, seed
        self.rows: Sequence[int] = range(config.batch)
        self._device = next(model.parameters()).device
        self._dtype = amp_dtype(self._device, config.amp)
        self._optimizer = make_optimizer(model.parameters(), config)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._dtype is torch.float16)

    def step(self, number: int, batch: Batch, rate: float) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # Dropout draws from (seed, step) alone, so a resumed run draws the same.
        torch.manual_seed((self._seed << 32) + number)
        samples = len(batch.images)
        self._model.train()
        with memory_told(
            f"A microbatch of {min(samples, self._config.microbatch or samples)} tiles",
            'Name what it may take in the configuration, as [parallel] memory = "16GiB": then '
            "what does not fit is offloaded or recomputed. Or lower [train] microbatch or --tile, "
            "or train on several ranks.",
        ):
            return train_step(
                self._model,
                self._loss,
                self._microbatches(batch),
                samples,
                self._optimizer,
                self._scaler,
                self._dtype,
                self._config.clip,
            )

    def predict(
        self, sizes: Sequence[int], images: Mapping[int, NDArray[np.uint8]]
    ) -> dict[int, torch.Tensor]:
        self._model.eval()
        with (
            torch.inference_mode(),
            memory_told("A validation batch", "Lower [train] batch or microbatch, or --tile."),
            torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None),
        ):
            return {batch: self._model(self._input(tiles)) for batch, tiles in images.items()}

    def gather(self, text: str) -> list[str]:
        return [text]

    def state(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": state_by_name(self._optimizer, self._names()),
            "scaler": self._scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        load_by_name(self._optimizer, self._names(), state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def _names(self) -> Mapping[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _input(self, images: NDArray[np.uint8]) -> torch.Tensor:
        return to_input(images, self._card.mean, self._card.std, self._device)

    def _microbatches(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self._config.microbatch or len(batch.images)
        targets = self._task.targets(batch.masks)
        for start in range(0, len(batch.images), size):
            part = slice(start, start + size)
            yield (
                self._input(batch.images[part]),
                torch.from_numpy(targets[part]).to(self._device),
            )
