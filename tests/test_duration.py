"""Durations: what people write, and what they do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.duration import seconds


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(hours: int, minutes: int, rest: int) -> None:
    expected = 3600 * hours + 60 * minutes + rest
    assert seconds(f"{hours}h{minutes}m{rest}s") == expected
    assert seconds(f" {hours} H {minutes} M {rest} S ") == expected


@pytest.mark.parametrize(("text", "expected"), [("30", 1800), ("1.5h", 5400), ("2d", 172800)])
def test_one_number(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "h", "5 weeks", "-3m", "1:30"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30m or 1h30m"):
        seconds(text)


def test_a_number_is_seconds_already() -> None:
    assert seconds(90.5) == 90.5
