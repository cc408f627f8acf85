"""A time limit becomes a number of steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pathoseg.training.trainer import StepBudget


@given(
    st.floats(0.01, 10),
    st.integers(1, 200),
    st.integers(0, 100),
    st.floats(100, 100_000),
)
def test_the_steps_and_their_validations_fit_the_limit(
    seconds: float, steps_per_epoch: int, validation_batches: int, limit: float
) -> None:
    clock = StepBudget(limit, steps_per_epoch, validation_batches)
    spent = 0.0
    while not clock.ready:
        clock.saw(seconds)
        spent += seconds
    done = round(spent / seconds)
    total = clock.total_steps(done, spent)
    assert total >= done >= 13
    epochs = (total - done) / steps_per_epoch
    need = spent + (total - done) * seconds + epochs * validation_batches * seconds / 3
    assert total == done or need <= limit


def test_the_first_steps_do_not_count() -> None:
    clock = StepBudget(100.0, 10, 0)
    for seconds in [30.0, 9.0, 5.0, *[1.0] * 10]:
        clock.saw(seconds)
    assert clock.ready
    assert clock.step_seconds == 1.0
