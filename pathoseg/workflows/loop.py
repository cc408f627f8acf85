"""The training loop: epochs of steps, validation, checkpoints, limits; resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch

from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.tiles.dataset import Batch, TrainingSet
from pathoseg.workflows.checkpoint import BEST, LAST, Progress, load_checkpoint, save_checkpoint
from pathoseg.workflows.clock import StepClock
from pathoseg.workflows.config import TrainConfig
from pathoseg.workflows.device import amp_dtype, memory_told, to_input
from pathoseg.workflows.interruption import Interruption
from pathoseg.workflows.progress import Bar, progress_bar, say
from pathoseg.workflows.records import Records
from pathoseg.workflows.step import Loss, learning_rate, make_optimizer, train_step
from pathoseg.workflows.tasks import Task
from pathoseg.workflows.validation import Validation

_DEFAULT_EPOCHS = 50


class Loop:
    """Trains one model on one device.

    Args:
        run: The run's folder; checkpoints, metrics and the bundle appear there.
        config: The `train` table.
        seed: Seed of the run.
        model: On its device.
        card: What the bundle says beside the weights.
        loss: Per-sample losses.
        task: What a target is.
        training: Seeded batches.
        validation: Held-out tiles.
        started: `time.monotonic()` when this part of the run began.
    """

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        seed: int,
        model: torch.nn.Module,
        card: Bundle,
        loss: Loss,
        task: Task,
        training: TrainingSet,
        validation: Validation,
        started: float,
    ) -> None:
        self._run, self._config, self._seed = run, config, seed
        self._model, self._card, self._loss, self._task = model, card, loss, task
        self._training, self._validation = training, validation
        self._device = next(model.parameters()).device
        self._dtype = amp_dtype(self._device, config.amp)
        self._optimizer = make_optimizer(model, config)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._dtype is torch.float16)
        self._progress = Progress()
        if (run / "checkpoints" / LAST).exists():
            self._progress = load_checkpoint(
                run / "checkpoints" / LAST, model, self._optimizer, self._scaler
            )
        self._epoch_steps = training.steps_per_epoch
        self._started, self._spent_before = started, self._progress.seconds
        self._clock: StepClock | None = None
        if config.time_limit is not None and self._progress.total_steps is None:
            self._clock = StepClock(config.time_limit, self._epoch_steps, validation.batches)
        elif config.time_limit is None:
            self._progress.total_steps = (config.epochs or _DEFAULT_EPOCHS) * self._epoch_steps
        self._validation_seconds = 0.0
        self._saved_at = time.monotonic()

    def fit(self, interruption: Interruption) -> Progress:
        """Trains to the end; on a signal saves and raises.

        Raises:
            StoppedError: A signal came; the checkpoint is written.
            PathosegError: The device's memory is too small, or a file cannot be read.
        """
        at = self._progress
        records = Records(self._run, self._validation.columns, at.step)
        if at.step:
            say(f"Going on at epoch {at.epoch + 1}, step {at.step}.")
        with (
            closing(records),
            self._bar() as bar,
        ):
            while not self._finished():
                self._epoch(records, bar, interruption)
        return at

    def _bar(self) -> AbstractContextManager[Bar]:
        at, batch = self._progress, self._training.batch
        total = None if at.total_steps is None else at.total_steps * batch
        return progress_bar("training", total, "tiles", at.step * batch)

    def _epoch(self, records: Records, bar: Bar, interruption: Interruption) -> None:
        at, began, first = self._progress, time.monotonic(), self._progress.epoch_step
        self._model.train()
        with closing(self._training.batches(at.epoch, at.epoch_step)) as batches:
            for batch in batches:
                self._step(batch, records)
                bar.advance(len(batch.images))
                bar.note(f"epoch {at.epoch + 1}  loss {at.loss_sum / at.samples:.4f}")
                if self._clock is not None:
                    self._lay_schedule(bar)
                if interruption.number is not None:
                    self._save()
                    interruption.raise_if_asked()
                if time.monotonic() - self._saved_at > self._config.checkpoint_minutes * 60:
                    self._save()
                if self._finished():
                    break
        tiles = (at.epoch_step - first) * self._training.batch
        self._close_epoch(records, tiles / max(1e-9, time.monotonic() - began))
        interruption.raise_if_asked()

    def _step(self, batch: Batch, records: Records) -> None:
        at, config = self._progress, self._config
        began = time.monotonic()
        total = at.total_steps or _DEFAULT_EPOCHS * self._epoch_steps
        rate = learning_rate(config, at.step, total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # Dropout draws from (seed, step) alone, so a resumed run draws the same.
        torch.manual_seed((self._seed << 32) + at.step)
        samples = len(batch.images)
        with memory_told(
            f"A microbatch of {min(samples, config.microbatch or samples)} tiles",
            "Lower [train] microbatch, --tile, or the model's width.",
        ):
            done = train_step(
                self._model,
                self._loss,
                self._microbatches(batch),
                samples,
                self._optimizer,
                self._scaler,
                self._dtype,
                config.clip,
            )
        at.loss_sum += done.loss_sum
        at.samples += samples
        at.skipped_steps += not done.finite
        at.step += 1
        at.epoch_step += 1
        records.step(at.step, done.loss_sum / samples, rate)
        if self._clock is not None:
            self._clock.saw(time.monotonic() - began)

    def _microbatches(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self._config.microbatch or len(batch.images)
        targets = self._task.targets(batch.masks)
        for start in range(0, len(batch.images), size):
            part = slice(start, start + size)
            yield (
                to_input(batch.images[part], self._card.mean, self._card.std, self._device),
                torch.from_numpy(targets[part]).to(self._device),
            )

    def _lay_schedule(self, bar: Bar) -> None:
        """Turns the time limit into steps, once, and records them before anything else."""
        assert self._clock is not None
        if not self._clock.ready:
            return
        at = self._progress
        at.total_steps = self._clock.total_steps(at.step, self._elapsed())
        if self._config.epochs is not None:
            at.total_steps = min(at.total_steps, self._config.epochs * self._epoch_steps)
        self._validation_seconds = self._clock.validation_seconds
        self._clock = None
        bar.total(at.total_steps * self._training.batch)
        self._save()

    def _close_epoch(self, records: Records, rate: float) -> None:
        at = self._progress
        whole = at.epoch_step == self._epoch_steps
        row = {
            "epoch": float(at.epoch + 1),
            "step": float(at.step),
            "train_loss": at.loss_sum / max(1, at.samples),
            "tiles_per_s": rate,
        }
        at.epoch, at.epoch_step = at.epoch + 1, 0
        at.loss_sum, at.samples = 0.0, 0
        if not whole or at.epoch % self._config.validate_every == 0 or self._finished():
            began = time.monotonic()
            verdict = self._validation.run(self._model, self._loss, self._dtype)
            row.update(verdict.figures)
            if verdict.picture is not None:
                records.picture(verdict.picture, at.epoch, at.step)
            self._validation_seconds = time.monotonic() - began
            # Nothing judges without validation tiles, so the newest weights are the ones to keep.
            if verdict.score > at.best or not (at.best_epoch and self._validation.batches):
                at.best, at.best_epoch = verdict.score, at.epoch
                self._save(BEST)
                save_bundle(self._run / "model", self._model, self._card)
        at.rows.append(row)
        records.epoch(at.rows)
        say(_line(row))
        self._save()

    def _finished(self) -> bool:
        at, config = self._progress, self._config
        if at.total_steps is not None and at.step >= at.total_steps:
            return True
        if config.epochs is not None and at.step >= config.epochs * self._epoch_steps:
            return True
        if config.time_limit is not None:
            left = config.time_limit - self._elapsed()
            if at.step and left < self._validation_seconds:
                return True
        return bool(config.patience and at.best_epoch) and (
            at.epoch - at.best_epoch >= config.patience
        )

    def _elapsed(self) -> float:
        return self._spent_before + time.monotonic() - self._started

    def _save(self, name: str = LAST) -> None:
        self._progress.seconds = self._elapsed()
        save_checkpoint(
            self._run / "checkpoints" / name,
            self._progress,
            self._model,
            self._optimizer,
            self._scaler,
        )
        self._saved_at = time.monotonic()


def _line(row: dict[str, float]) -> str:
    parts = [f"epoch {row['epoch']:.0f}", f"train loss {row['train_loss']:.4f}"]
    for name, title in (
        ("val_loss", "val loss"),
        ("val_dice_mean", "val Dice"),
        ("val_accuracy", "val accuracy"),
    ):
        if name in row:
            parts.append(f"{title} {row[name]:.4f}")
    parts.append(f"{row['tiles_per_s']:.2f} tiles/s")
    return "  ".join(parts)
