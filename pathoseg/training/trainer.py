"""The training loop: epochs of steps, validation, checkpoints, limits; resumable at any point."""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

from pathoseg.config import TrainConfig
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.progress import Bar, progress_bar, say
from pathoseg.tiles.dataset import Batch, TrainingSet
from pathoseg.training.checkpoint import BEST, LAST, Progress, load_checkpoint, save_checkpoint
from pathoseg.training.clock import StepClock
from pathoseg.training.engine import Engine, Loss
from pathoseg.training.optimizer import learning_rate
from pathoseg.training.run_log import Records
from pathoseg.training.validation import Validation

_DEFAULT_EPOCHS = 50


class Loop:
    """Trains one network, whatever the engine; every rank of it runs the same loop.

    Args:
        run: The run's folder; checkpoints, metrics and the bundle appear there.
        config: The `train` table.
        engine: What does the steps.
        card: What the bundle says beside the weights.
        loss: Per-sample losses.
        training: Seeded batches.
        validation: Held-out tiles.
        started: `time.monotonic()` when this part of the run began.
    """

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        engine: Engine,
        card: Bundle,
        loss: Loss,
        training: TrainingSet,
        validation: Validation,
        started: float,
    ) -> None:
        self._run, self._config, self._engine = run, config, engine
        self._card, self._loss = card, loss
        self._training, self._validation = training, validation
        self._progress = Progress()
        if (run / "checkpoints" / LAST).exists():
            self._progress = load_checkpoint(run / "checkpoints" / LAST, engine)
        self._epoch_steps = training.steps_per_epoch
        self._started, self._spent_before = started, self._progress.seconds
        self._elapsed = self._saved_at = self._spent_before
        self._clock: StepClock | None = None
        if config.time_limit is not None and self._progress.total_steps is None:
            self._clock = StepClock(config.time_limit, self._epoch_steps, validation.batches)
        elif config.time_limit is None:
            self._progress.total_steps = (config.epochs or _DEFAULT_EPOCHS) * self._epoch_steps
        self._validation_seconds = 0.0

    def fit(self, interruption: Interruption) -> Progress:
        """Trains to the end; on a signal saves and raises.

        Raises:
            StoppedError: A signal came; the checkpoint is written.
            PathosegError: The device's memory is too small, or a file cannot be read.
        """
        at = self._progress
        if at.step:
            say(f"Going on at epoch {at.epoch + 1}, step {at.step}.")
        with ExitStack() as open_files, self._bar() as bar:
            records = None
            if self._engine.leads:
                records = Records(self._run, self._validation.columns, at.step)
                open_files.enter_context(closing(records))
            self._agree(interruption)
            self._saved_at = self._elapsed
            while not self._finished():
                self._epoch(records, bar, interruption)
        return at

    def _agree(self, interruption: Interruption) -> None:
        """One clock and one will for all ranks, so that they take the same decisions."""
        own = {"spent": time.monotonic() - self._started, "signal": interruption.number}
        everyone = [json.loads(text) for text in self._engine.gather(json.dumps(own))]
        self._elapsed = self._spent_before + everyone[0]["spent"]
        signals = [rank["signal"] for rank in everyone if rank["signal"] is not None]
        if signals:
            interruption.number = signals[0]

    def _bar(self) -> AbstractContextManager[Bar]:
        at, batch = self._progress, self._training.batch
        total = None if at.total_steps is None else at.total_steps * batch
        return progress_bar("training", total, "tiles", at.step * batch)

    def _epoch(self, records: Records | None, bar: Bar, interruption: Interruption) -> None:
        at, began, first = self._progress, self._elapsed, self._progress.epoch_step
        rows = self._engine.rows
        with closing(self._training.batches(at.epoch, at.epoch_step, rows)) as batches:
            for batch in batches:
                self._step(batch, records, interruption)
                bar.advance(self._training.batch)
                bar.note(f"{self._title(at.epoch + 1)}  loss {at.loss_sum / at.samples:.4f}")
                if self._clock is not None:
                    self._lay_schedule(bar)
                if interruption.number is not None:
                    self._save()
                    interruption.raise_if_asked()
                if self._elapsed - self._saved_at > self._config.checkpoint_minutes * 60:
                    self._save()
                if self._finished():
                    break
        tiles = (at.epoch_step - first) * self._training.batch
        rate = tiles / max(1e-9, self._elapsed - began)
        self._close_epoch(records, rate, interruption)
        interruption.raise_if_asked()

    def _step(self, batch: Batch, records: Records | None, interruption: Interruption) -> None:
        at, began = self._progress, self._elapsed
        total = at.total_steps or _DEFAULT_EPOCHS * self._epoch_steps
        rate = learning_rate(self._config, at.step, total)
        done = self._engine.step(at.step, batch, rate)
        samples = self._training.batch
        at.loss_sum += done.loss_sum
        at.samples += samples
        at.skipped_steps += not done.finite
        at.step += 1
        at.epoch_step += 1
        if records:
            records.step(at.step, done.loss_sum / samples, rate)
        self._agree(interruption)
        if self._clock is not None:
            self._clock.saw(self._elapsed - began)

    def _lay_schedule(self, bar: Bar) -> None:
        """Turns the time limit into steps, once, and records them before anything else."""
        assert self._clock is not None
        if not self._clock.ready:
            return
        at = self._progress
        at.total_steps = self._clock.total_steps(at.step, self._elapsed)
        if self._config.epochs is not None:
            at.total_steps = min(at.total_steps, self._config.epochs * self._epoch_steps)
        self._validation_seconds = self._clock.validation_seconds
        self._clock = None
        bar.total(at.total_steps * self._training.batch)
        self._save()

    def _close_epoch(
        self, records: Records | None, rate: float, interruption: Interruption
    ) -> None:
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
            began = self._elapsed
            verdict = self._validation.run(self._engine, self._loss)
            row.update(verdict.figures)
            if records and verdict.picture is not None:
                records.picture(verdict.picture, at.epoch, at.step)
            self._agree(interruption)
            self._validation_seconds = self._elapsed - began
            # Nothing judges without validation tiles, so the newest weights are the ones to keep.
            if verdict.score > at.best or not (at.best_epoch and self._validation.batches):
                at.best, at.best_epoch = verdict.score, at.epoch
                self._save(BEST, publish=True)
        at.rows.append(row)
        if records:
            records.epoch(at.rows)
        say(f"{self._title(int(row['epoch']))}  {_figures(row)}")
        self._save()

    def _finished(self) -> bool:
        at, config = self._progress, self._config
        if at.total_steps is not None and at.step >= at.total_steps:
            return True
        if config.epochs is not None and at.step >= config.epochs * self._epoch_steps:
            return True
        if config.time_limit is not None:
            left = config.time_limit - self._elapsed
            if at.step and left < self._validation_seconds:
                return True
        return bool(config.patience and at.best_epoch) and (
            at.epoch - at.best_epoch >= config.patience
        )

    def _title(self, epoch: int) -> str:
        total = self._progress.total_steps
        if total is None or self._config.time_limit is not None:  # which may end it earlier
            return f"epoch {epoch}"
        return f"epoch {epoch} of {math.ceil(total / self._epoch_steps)}"

    def _save(self, name: str = LAST, publish: bool = False) -> None:
        self._progress.seconds = self._elapsed
        state = self._engine.state()
        if self._engine.leads:
            save_checkpoint(self._run / "checkpoints" / name, self._progress, state)
            if publish:
                save_bundle(self._run / "model", state["model"], self._card)
        self._saved_at = self._elapsed


def _figures(row: dict[str, float]) -> str:
    parts = [f"train loss {row['train_loss']:.4f}"]
    for name, title in (
        ("val_loss", "val loss"),
        ("val_dice_mean", "val Dice"),
        ("val_accuracy", "val accuracy"),
    ):
        if name in row:
            parts.append(f"{title} {row[name]:.4f}")
    parts.append(f"{row['tiles_per_s']:.2f} tiles/s")
    return "  ".join(parts)
