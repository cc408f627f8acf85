"""The training loop: epochs of steps, validation, checkpoints, limits; resumable at any point."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pathoseg.config import TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.giving_up import Commit, GivenUpError
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.progress import Bar, progress_bar, say
from pathoseg.tiles.dataset import Batch, TrainingSet
from pathoseg.time_spent import TimeSpent
from pathoseg.training.checkpoint import (
    BEST,
    LAST,
    Progress,
    compare_checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from pathoseg.training.engine import Engine, Loss
from pathoseg.training.optimizer import learning_rate
from pathoseg.training.run_folder import is_finished
from pathoseg.training.run_log import RunLog
from pathoseg.training.validation import Validation

_WARM_UP = 3
_MEASURED = 10
_MEASURED_SHARE = 0.03  # of the limit: a busy moment of the machine must not decide the run
_SAFETY = 0.97
_FORWARD_SHARE = 1 / 3  # of a training step's time: the backward pass costs twice the forward


@dataclass
class StepBudget:
    """Measurement of the first steps of a run under a time limit.

    Attributes:
        limit: Seconds the whole run may take.
        steps_between: Steps from one validation to the next.
        validation_batches: The tiles of a validation, in batches of a step.
    """

    limit: float
    steps_between: int
    validation_batches: float
    _steps: int = 0
    _seconds: float = 0.0

    def saw(self, seconds: float) -> None:
        """Note the seconds that a step took; the first ones, which warm caches, do not count."""
        self._steps += 1
        if self._steps > _WARM_UP:
            self._seconds += seconds

    @property
    def ready(self) -> bool:
        enough = self._seconds >= _MEASURED_SHARE * self.limit
        return enough and self._steps >= _WARM_UP + _MEASURED

    @property
    def step_seconds(self) -> float:
        return self._seconds / max(1, self._steps - _WARM_UP)

    @property
    def validation_seconds(self) -> float:
        """A guess, for a run that has not validated yet."""
        return self.step_seconds * self.validation_batches * _FORWARD_SHARE

    def total_steps(self, done: int, elapsed: float, validation_seconds: float) -> int:
        """Steps of the whole run that fit.

        Args:
            done: Steps done.
            elapsed: Seconds spent, all parts of the run together.
            validation_seconds: Of one validation.
        """
        per_step = self.step_seconds + validation_seconds / self.steps_between
        left = _SAFETY * (self.limit - elapsed) - validation_seconds
        return done + max(0, int(left / per_step))


_DEFAULT_EPOCHS = 50
_UNJUDGED = float("-inf")
# Of a time limit that stays as it was: after so much of it nothing worth a start is left.
_USED_UP = 0.9
_ENOUGH = 0.8  # of the steps that a time limit was to hold: with fewer the rate has not come down


def limits_text(config: TrainConfig) -> str:
    """Return the limits of a run in words: "8 epochs", "20 min" or both."""
    epochs = config.epochs or (_DEFAULT_EPOCHS if config.time_limit is None else None)
    parts = [] if epochs is None else [f"{epochs} epoch{'s' * (epochs != 1)}"]
    if config.time_limit is not None:
        parts.append(_minutes(config.time_limit))
    return " or ".join(parts)


def _minutes(seconds: float) -> str:
    """Format a duration in minutes, in four digits or whole ones."""
    minutes = seconds / 60
    return f"{minutes:,.0f} min" if minutes >= 1000 else f"{minutes:.4g} min"


def check_limits(run: Path, before: TrainConfig, now: TrainConfig) -> None:
    """Refuse other limits that leave a run nothing to do.

    Args:
        run: Its folder.
        before: With the limits the run was begun with.
        now: With those it is to go on with.

    Raises:
        PathosegError: As many epochs or as much time has passed already, or the checkpoint is
            missing or cannot be read.
    """
    checkpoint = run / "checkpoints" / LAST
    if is_finished(run) and not checkpoint.exists():
        raise PathosegError(
            f"{checkpoint} is missing, without which {run} cannot train longer.",
            f"Start a new run from its model, with --from {run}.",
        )
    at = read_progress(checkpoint)
    if now.epochs is not None and now.epochs <= at.epoch:
        raise PathosegError(
            f"{run} has trained {at.epoch} epochs already, and is to train {now.epochs} in all.",
            f"Give it more than {at.epoch} --epochs.",
        )
    share = 1 if now.time_limit != before.time_limit else _USED_UP
    if now.time_limit is not None and at.seconds >= share * now.time_limit:
        raise PathosegError(
            f"The time limit of {run} is {_minutes(now.time_limit)}, and it has trained "
            f"{_minutes(at.seconds)} already.",
            "Give it a longer --time-limit: it counts all parts of the run together.",
        )


def warn_of_rate(config: TrainConfig, at: Progress) -> str | None:
    """Return a warning where the time limit held far fewer steps than its first ones predicted."""
    if config.time_limit is None or config.patience or at.total_steps is None:
        return None
    if at.step >= _ENOUGH * at.total_steps:
        return None
    return (
        f"the time limit came after {at.step} of {at.total_steps} steps, as the machine became "
        "slower: the learning rate has not reached its end. A longer --time-limit and --resume "
        "train on."
    )


def likely_steps(config: TrainConfig, at: Progress, steps_per_epoch: int) -> int:
    """Steps of the whole run while the step budget of a time limit still measures.

    It is ready once a share of the limit has passed, so the run is longer than the steps
    so far over that share; where the epochs end it before, it is as long as they are.
    """
    likely = max(_DEFAULT_EPOCHS * steps_per_epoch, round(at.step / _MEASURED_SHARE))
    if at.prolonged and config.time_limit is not None and at.seconds:
        likely = round(at.step * max(1.0, config.time_limit / at.seconds))
    elif config.epochs is not None:
        likely = config.epochs * steps_per_epoch
    return likely if config.epochs is None else min(likely, config.epochs * steps_per_epoch)


class Trainer:
    """The training of one network, whatever the engine; every rank runs the same loop.

    Args:
        run: The run's folder; checkpoints, metrics and the bundle appear there.
        config: The `train` table.
        engine: What does the steps.
        card: What the bundle says beside the weights.
        loss: Per-sample losses.
        training: Seeded batches.
        validation: Held-out tiles.
        started: `time.monotonic()` when this part of the run began.
        spent: Counts where the time goes.
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
        spent: TimeSpent,
    ) -> None:
        self._spent = spent
        self._run, self._config, self._engine = run, config, engine
        self._card, self._loss = card, loss
        self._training, self._validation = training, validation
        self._progress = Progress()
        if (run / "checkpoints" / LAST).exists():
            self._progress = load_checkpoint(run / "checkpoints" / LAST, engine)
        compare_checkpoints(self._progress, run / "checkpoints" / LAST, engine)
        self._epoch_steps = training.steps_per_epoch
        self._started, self._spent_before = started, self._progress.seconds
        self._elapsed = self._saved_at = self._spent_before
        self._budget: StepBudget | None = None
        self._took = (0.0, 0.0)  # seconds of the last two steps
        self._is_stopping = False  # as all ranks know; a signal may come to one of them at any time
        self._begun = self._progress  # what `leave` saves
        self._tidy: Callable[[], None] = lambda: None
        self._set_total_steps()

    @property
    def progress(self) -> Progress:
        return self._progress

    def leave(self) -> Progress:
        """Save the run as it was ahead of the step or validation under way.

        Called by another thread within a context of `Interruption.abandonable`; every rank's does.
        The process ends then.

        Returns:
            The progress that is saved.

        Raises:
            OSError: The disk is full or cannot be written.
            PathosegError: The rank that leads cannot save, or is lost.
        """
        self._elapsed = self._spent_before + time.monotonic() - self._started
        at = replace(self._begun, seconds=self._elapsed)
        say(f"What follows step {at.step} is given up, and done anew by --resume.")
        state = self._engine.begun()
        if self._engine.leads:
            save_checkpoint(self._run / "checkpoints" / LAST, at, state)
        return at

    def _set_total_steps(self) -> None:
        """Set the number of steps that the learning-rate schedule spans.

        Under a time limit the step budget begins to measure it instead.
        """
        at, config = self._progress, self._config
        if config.time_limit is None:
            at.total_steps = (config.epochs or _DEFAULT_EPOCHS) * self._epoch_steps
        elif at.total_steps is None:
            between = self._epoch_steps * config.validate_every
            batches = self._validation.tiles / config.batch
            self._budget = StepBudget(config.time_limit, between, batches)

    def prolong(self) -> None:
        """Let the learning-rate schedule span other limits than the run was begun with; save that.

        It goes on as in a run that had these limits from its start, so a finished cosine of twice
        the steps falls from about half its peak to zero once more. Patience counts from here.
        """
        self._progress.total_steps, self._progress.prolonged = None, self._progress.epoch
        self._set_total_steps()
        self._save()

    def fit(self, interruption: Interruption) -> Progress:
        """Train until the run's limits, or until a signal comes: then a checkpoint is written.

        A step or validation that is under way then is given up, and done anew by the run that goes
        on, to the same digits.

        Returns:
            The progress at the end.

        Raises:
            StoppedError: A signal came; the checkpoint is written.
            PathosegError: The device's memory is too small, or a file cannot be read.
        """
        at, resumed_at = self._progress, self._progress.step
        if resumed_at:
            say(f"Going on at epoch {at.epoch + 1}, step {at.step}.")
        with ExitStack() as open_files, self._bar() as bar:
            run_log = None
            if self._engine.leads:
                run_log = RunLog(self._run, self._validation.columns, at.step)
                open_files.enter_context(closing(run_log))
            self._tidy = partial(_tidy, bar, run_log)
            self._agree(interruption)
            self._saved_at = self._elapsed
            # An epoch may have all its steps, and not be judged yet.
            while at.epoch_step or not (self._finished() and self._judged):
                self._epoch(run_log, bar, interruption)
        if resumed_at and at.step == resumed_at != at.total_steps:
            say("Nothing was trained: what was left of the limits was too short for a step.")
        elif warning := warn_of_rate(self._config, at):
            say(f"Take care: {warning}")
        return at

    def _agree(self, interruption: Interruption) -> None:
        """Agree on the elapsed time and on a signal, so that all ranks decide alike."""
        own = {"spent": time.monotonic() - self._started, "signal": interruption.number}
        everyone = [json.loads(text) for text in self._engine.gather(json.dumps(own))]
        self._elapsed = self._spent_before + everyone[0]["spent"]
        signals = [rank["signal"] for rank in everyone if rank["signal"] is not None]
        self._is_stopping = bool(signals)
        if signals:
            interruption.number = signals[0]

    @contextmanager
    def _abandonable(self, interruption: Interruption, begun: Progress) -> Iterator[Commit]:
        """Make a context in which `leave` may be called, and saves this progress."""
        self._begun = begun
        with interruption.abandonable(self._tidy) as commit:
            yield commit

    def _bar(self) -> AbstractContextManager[Bar]:
        at, batch = self._progress, self._training.batch
        total = None if at.total_steps is None else at.total_steps * batch
        return progress_bar("training", total, "tiles", at.step * batch)

    def _epoch(self, run_log: RunLog | None, bar: Bar, interruption: Interruption) -> None:
        """Run what is left of an epoch; end as soon as a signal has come."""
        try:
            if self._progress.epoch_step or not self._finished():
                self._steps(run_log, bar, interruption)
                self._close_epoch(run_log, interruption)
            else:
                self._judge_last(run_log, interruption)
        except GivenUpError:
            self._agree(interruption)  # a rank that heard no signal learns of it
            say(f"What follows step {self._progress.step} is given up, and done anew by --resume.")
            self._save()
        if self._is_stopping:
            interruption.raise_if_asked()

    def _steps(self, run_log: RunLog | None, bar: Bar, interruption: Interruption) -> None:
        """Make the steps that are left of an epoch."""
        at, since = self._progress, self._elapsed
        rows = self._engine.rows
        with closing(self._training.batches(at.epoch, at.epoch_step, rows)) as batches:
            following = self._until_finished(batches, interruption)
            for batch in self._spent.waiting(following, "waiting for tiles"):
                with self._spent.on("steps"):
                    self._step(batch, run_log, interruption)
                at.timed_steps += 1
                at.timed_seconds, since = at.timed_seconds + self._elapsed - since, self._elapsed
                bar.note(
                    f"{self._title(at.epoch + 1)}  loss {at.loss_sum / max(1, at.samples):.4f}"
                )
                bar.advance(self._training.batch)
                if self._budget is not None:
                    self._fix_total_steps(bar)
                if self._is_stopping:
                    self._save()
                    interruption.raise_if_asked()
                if self._elapsed - self._saved_at > self._config.checkpoint_minutes * 60:
                    self._save()

    def _until_finished(
        self, batches: Iterator[Batch], interruption: Interruption
    ) -> Iterator[Batch]:
        while not self._finished():
            with self._abandonable(interruption, self._progress):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _step(self, batch: Batch, run_log: RunLog | None, interruption: Interruption) -> None:
        at, began = self._progress, self._elapsed
        likely = at.total_steps or likely_steps(self._config, at, self._epoch_steps)
        rate = learning_rate(self._config, at.step, likely)
        with self._abandonable(interruption, at) as commit:
            done = self._engine.step(at.step, batch, rate, commit)
        samples = self._training.batch
        if math.isfinite(done.loss_sum):  # else the step is skipped, and no epoch's loss is nan
            at.loss_sum += done.loss_sum
            at.samples += samples
        at.skipped_steps += not done.finite
        at.step += 1
        at.epoch_step += 1
        if run_log:
            run_log.step(at.step, done.loss_sum / samples, rate)
        self._agree(interruption)
        self._took = (self._took[1], self._elapsed - began)
        if self._budget is not None:
            self._budget.saw(self._elapsed - began)

    def _fix_total_steps(self, bar: Bar) -> None:
        """Turn the time limit into steps, once, and record them before anything else."""
        assert self._budget is not None
        if not self._budget.ready:
            return
        at = self._progress
        at.validation_seconds = at.validation_seconds or self._budget.validation_seconds
        at.total_steps = self._budget.total_steps(at.step, self._elapsed, at.validation_seconds)
        if self._config.epochs is not None:
            at.total_steps = min(at.total_steps, self._config.epochs * self._epoch_steps)
        self._budget = None
        bar.total(at.total_steps * self._training.batch)
        self._save()

    def _close_epoch(self, run_log: RunLog | None, interruption: Interruption) -> None:
        at = self._progress
        done, whole = at.epoch_step, at.epoch_step == self._epoch_steps
        rate = at.timed_steps * self._training.batch / max(1e-9, at.timed_seconds)
        row = {
            "epoch": float(at.epoch + 1),
            "step": float(at.step),
            "train_loss": at.loss_sum / at.samples if at.samples else math.nan,
            "tiles_per_s": rate,
        }
        before = replace(at)
        at.epoch, at.epoch_step = at.epoch + 1, 0
        at.loss_sum, at.samples = 0.0, 0
        at.timed_steps, at.timed_seconds = 0, 0.0
        if not whole or at.epoch % self._config.validate_every == 0 or self._finished():
            self._judge(row, before, run_log, interruption)
        at.rows.append(row)
        if run_log:
            run_log.epoch(at.rows)
        cut = "" if whole else f", ended after {done} of {self._epoch_steps} steps"
        say(f"{self._title(int(row['epoch']))}{cut}  {_figures(row)}")
        self._save()

    def _judge_last(self, run_log: RunLog | None, interruption: Interruption) -> None:
        """Validate the last epoch if it ended unvalidated.

        `validate_every` left it out, and nobody knew then that time would be up.
        """
        at = self._progress
        [*earlier, row] = at.rows
        row = dict(row)
        self._judge(row, replace(at), run_log, interruption)
        at.rows = [*earlier, row]
        if run_log:
            run_log.epoch(at.rows)
        say(f"{self._title(at.epoch)}  {_figures(row)}")
        self._save()

    def _judge(
        self,
        row: dict[str, float],
        before: Progress,
        run_log: RunLog | None,
        interruption: Interruption,
    ) -> None:
        """Validate the epoch that has ended, and publish the model if it is the best so far.

        Args:
            row: The epoch's figures; those of the validation are added.
            before: The progress to go back to where the validation is given up.
            run_log: As for `_epoch`.
            interruption: Likewise.
        """
        at, began, limit = self._progress, self._elapsed, self._config.time_limit
        if limit is not None and began > limit:
            why = "" if at.best_epoch else ", without which there is no model"
            say(
                f"The time limit of {limit:,.6g} s is over after {began:,.0f} s, {at.step} "
                f"step{'s' * (at.step != 1)}: what is left is one validation{why}."
            )
        try:
            with self._spent.on("validation"), self._abandonable(interruption, before):
                verdict = self._validation.run(self._engine, self._loss)
        except GivenUpError:
            self._progress = before
            raise
        row.update(verdict.figures)
        if run_log and verdict.picture is not None:
            run_log.picture(verdict.picture, at.epoch, at.step)
        self._agree(interruption)
        at.validation_seconds = self._elapsed - began
        if self._validation.tiles and verdict.score == _UNJUDGED and not at.best_epoch:
            say(
                "Take care: the validation tiles give no score, as where none shows a class, "
                "so nothing tells which epoch is best. The newest model is kept."
            )
        # A score that is lost later, as of a network that diverges, replaces none.
        if verdict.score > at.best or at.best == _UNJUDGED or not self._validation.tiles:
            at.best, at.best_epoch = verdict.score, at.epoch
            self._save(BEST, publish=True)
            if run_log and verdict.confusion is not None:
                shown = {
                    name: (tile.slide, tile.loss, tile.picture)
                    for name, tile in verdict.shown.items()
                }
                run_log.validation(at.epoch, verdict.confusion, shown)

    @property
    def _judged(self) -> bool:
        """True if the last epoch that has ended was validated, or there is none."""
        at = self._progress
        return not at.rows or at.best_epoch == at.epoch or "val_loss" in at.rows[-1]

    def _finished(self) -> bool:
        at, config = self._progress, self._config
        if at.total_steps is not None and at.step >= at.total_steps:
            return True
        if config.epochs is not None and at.step >= config.epochs * self._epoch_steps:
            return True
        if config.time_limit is not None:
            # Leave room for one more step: the shorter of the last two, as a run's first is slow.
            left = config.time_limit - self._elapsed - min(self._took)
            if at.step and left < at.validation_seconds:
                return True
        return bool(config.patience and at.best_epoch) and (
            at.epoch - max(at.best_epoch, at.prolonged) >= config.patience
        )

    def _title(self, epoch: int) -> str:
        total = self._progress.total_steps
        if total is None or self._config.time_limit is not None:  # which may end it earlier
            return f"epoch {epoch}"
        return f"epoch {epoch} of {math.ceil(total / self._epoch_steps)}"

    def _save(self, name: str = LAST, publish: bool = False) -> None:
        self._progress.seconds = self._elapsed
        with self._spent.on("writing checkpoints"):
            state = self._engine.state()
            if self._engine.leads:
                save_checkpoint(self._run / "checkpoints" / name, self._progress, state)
                if publish:
                    save_bundle(self._run / "model", state["model"], self._card)
        self._saved_at = self._elapsed


def _tidy(bar: Bar, run_log: RunLog | None) -> None:
    """Leave the terminal and the log as a run does that has ended."""
    bar.end()
    if run_log:
        run_log.flush()


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
