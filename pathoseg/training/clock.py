"""How many steps a time limit holds, told once from the first steps and then kept."""

from __future__ import annotations

from dataclasses import dataclass

_WARM_UP = 3
_MEASURED = 10
_MEASURED_SHARE = 0.03  # of the limit: a busy moment of the machine must not decide the run
_SAFETY = 0.97
_FORWARD_SHARE = 1 / 3  # of a training step's time: the backward pass costs twice the forward


@dataclass
class StepClock:
    """Measures the first steps of a run under a time limit.

    Attributes:
        limit: Seconds the whole run may take.
        steps_per_epoch: Steps between two validations.
        validation_batches: Batches a validation reads.
    """

    limit: float
    steps_per_epoch: int
    validation_batches: int
    _steps: int = 0
    _seconds: float = 0.0

    def saw(self, seconds: float) -> None:
        """Notes the duration of a step; the first ones, which warm caches, do not count."""
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
        """A first guess; the loop knows better once it has validated."""
        return self.step_seconds * self.validation_batches * _FORWARD_SHARE

    def total_steps(self, done: int, elapsed: float) -> int:
        """Steps of the whole run that fit.

        Args:
            done: Steps done.
            elapsed: Seconds spent, all parts of the run together.
        """
        per_step = self.step_seconds + self.validation_seconds / self.steps_per_epoch
        left = _SAFETY * (self.limit - elapsed) - self.validation_seconds
        return done + max(0, int(left / per_step))
