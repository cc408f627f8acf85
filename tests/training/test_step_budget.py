"""A time limit becomes a number of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import TrainConfig
from pathoseg.training.checkpoint import Progress
from pathoseg.training.optimizer import learning_rate
from pathoseg.training.trainer import StepBudget, likely_steps, warn_of_rate


@given(
    st.floats(0.01, 10),
    st.integers(1, 200),
    st.floats(0, 100),
    st.floats(100, 100_000),
)
def test_the_steps_and_their_validations_fit_the_limit(
    seconds: float, steps_between: int, validation_batches: float, limit: float
) -> None:
    clock = StepBudget(limit, steps_between, validation_batches)
    spent = 0.0
    while not clock.ready:
        clock.saw(seconds)
        spent += seconds
    done = round(spent / seconds)
    takes = validation_batches * seconds / 3
    assert clock.validation_seconds == pytest.approx(takes)
    total = clock.total_steps(done, spent, takes)
    assert total >= done >= 13
    validations = 1 + (total - done) / steps_between
    need = spent + (total - done) * seconds + validations * takes
    assert total == done or need <= limit
    # And no more is left than the reserve, a step and what it adds of a validation.
    assert need + seconds + takes / steps_between >= spent + 0.9 * (limit - spent) or total == done


def test_the_first_steps_do_not_count() -> None:
    clock = StepBudget(100.0, 10, 0)
    for seconds in [30.0, 9.0, 5.0, *[1.0] * 10]:
        clock.saw(seconds)
    assert clock.ready
    assert clock.step_seconds == 1.0


@pytest.mark.parametrize("epochs", [2, 50, 200])
def test_epochs_that_end_ahead_of_the_time_limit_have_their_rate(epochs: int) -> None:
    """The limit is so long that its clock still measures when they end."""
    config = TrainConfig(epochs=epochs, time_limit=1e6)
    rates = []
    for step in range(10 * epochs):
        total = likely_steps(config, Progress(step=step, seconds=step), 10)
        rates.append(learning_rate(config, step, total))
    by_epochs = TrainConfig(epochs=epochs)
    assert rates == [learning_rate(by_epochs, step, 10 * epochs) for step in range(10 * epochs)]


def test_a_rate_does_not_end_before_the_clock_is_ready() -> None:
    config = TrainConfig(time_limit=1e6)
    rates = [
        learning_rate(config, step, likely_steps(config, Progress(step=step), 10))
        for step in range(0, 100_000, 999)
    ]
    assert min(rates[1:]) > 0.5 * config.lr


def test_a_time_limit_that_held_far_fewer_steps_is_warned_of() -> None:
    config = TrainConfig(time_limit=150.0)
    warning = warn_of_rate(config, Progress(step=264, total_steps=488))
    assert warning is not None
    assert "264 of 488 steps" in warning
    for quiet, at in [
        (config, Progress(step=400, total_steps=488)),
        (config, Progress(step=20)),
        (TrainConfig(epochs=3), Progress(step=20, total_steps=300)),
        (TrainConfig(time_limit=150.0, patience=3), Progress(step=20, total_steps=300)),
    ]:
        assert warn_of_rate(quiet, at) is None


def test_a_prolonged_run_counts_its_epochs_too() -> None:
    config = TrainConfig(epochs=100, time_limit=86_400.0)
    at = Progress(epoch=50, step=500, seconds=1_800.0, prolonged=50)
    assert likely_steps(config, at, 10) == 1_000
