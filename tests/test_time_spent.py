"""Times of a command: parts add up, in the thread that leads and in those beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg import time_spent
from pathoseg.errors import StoppedError
from pathoseg.time_spent import TimeSpent, time_told

# What is done, for how long before and after the parts within it: a tree.
_Part = tuple[str, float, list[Any]]
_SECONDS = st.floats(0, 10)
_PARTS = st.recursive(
    st.tuples(st.sampled_from("abc"), _SECONDS, st.just([])),
    lambda inner: st.tuples(st.sampled_from("abc"), _SECONDS, st.lists(inner, max_size=3)),
    max_leaves=8,
)


@given(st.lists(_PARTS, max_size=4), _SECONDS)
def test_what_is_timed_within_something_counts_for_itself(
    parts: list[_Part], untimed: float
) -> None:
    now, expected = 0.0, dict.fromkeys("abc", 0.0)

    def do(part: _Part) -> None:
        nonlocal now
        what, seconds, within = part
        with spent.on(what):
            now += seconds
            expected[what] += seconds
            for each in within:
                do(each)

    spent = TimeSpent(lambda: now)
    for part in parts:
        do(part)
    now += untimed
    found = {what: seconds for what, seconds, _ in spent.rows()}
    assert found.pop("all") == pytest.approx(now)
    assert found.pop("the rest") == pytest.approx(untimed, abs=1e-6)
    assert found == pytest.approx({key: expected[key] for key in found}, abs=1e-6)


def test_other_threads_stand_beside_and_waits_end_with_the_items() -> None:
    now = 0.0

    def items() -> Iterator[int]:
        nonlocal now
        for each in range(3):
            now += 2
            yield each

    def aside() -> None:
        nonlocal now
        with spent.on("computing"):
            now += 4

    spent = TimeSpent(lambda: now)
    assert list(spent.waiting(items(), "waiting")) == [0, 1, 2]
    other = threading.Thread(target=aside)
    other.start()
    other.join()
    assert spent.rows() == [
        ("waiting", 6.0, 0.6),
        ("the rest", 4.0, 0.4),
        ("all", 10.0, 1.0),
        ("beside: computing", 4.0, 0.4),
    ]


@pytest.mark.parametrize(("error", "told"), [(None, 1), (StoppedError(2, ""), 1), (OSError(), 0)])
def test_the_table_comes_at_the_end_and_at_a_stop(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, told: int
) -> None:
    tables = list[object]()
    monkeypatch.setattr(time_spent, "answer_table", lambda columns, rows: tables.append(rows))

    def work(verbose: bool) -> None:
        with time_told(verbose) as spent, spent.on("steps"):
            if error is not None:
                raise error

    for verbose in (False, True):
        if error is None:
            work(verbose)
        else:
            with pytest.raises(type(error)):
                work(verbose)
    assert len(tables) == told
