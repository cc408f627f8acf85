"""The second attempt of ranks: which files lead to it, and what it is started with."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pathoseg.errors import MemoryExhaustedError
from pathoseg.workflows import second_attempt
from pathoseg.workflows.second_attempt import SecondAttempt, leave_word, start_ranks_twice

_GIVEN = ["train", "--slides", "out", "--out", "run", "--overwrite", "--memory=16GiB", "--trace"]


def _exhausted(fits: int, run: str | None) -> MemoryExhaustedError:
    error = MemoryExhaustedError("No memory is left.", "Take less.", fits)
    error.run = None if run is None else Path(run)
    return error


@pytest.mark.parametrize(
    ("errors", "codes", "started"),
    [
        ({}, [0], 1),
        ({}, [2], 1),
        ({1: _exhausted(900 * 2**20, "run"), 2: _exhausted(700 * 2**20 + 5, "run")}, [2, 0], 2),
        ({0: _exhausted(900 * 2**20, "run")}, [2, 2], 2),
        ({0: _exhausted(2**20 - 1, "run"), 1: _exhausted(2**30, None)}, [2], 1),
    ],
)
def test_ranks_are_started_again_once_with_what_fits_the_least(
    errors: dict[int, MemoryExhaustedError],
    codes: list[int],
    started: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []

    def start_ranks(
        ranks: int,
        arguments: Sequence[str],
        choice: str,
        variables: Mapping[str, str] | None = None,
    ) -> int:
        calls.append([*arguments])
        with monkeypatch.context() as patch:
            for name, value in (variables or {}).items():
                patch.setenv(name, value)
            for rank, error in errors.items():  # a second attempt's are nobody's to read
                leave_word(error, rank)
        return codes[len(calls) - 1]

    monkeypatch.setattr(second_attempt, "start_ranks", start_ranks)
    assert start_ranks_twice(3, _GIVEN, "gloo") == codes[-1]
    assert len(calls) == started
    assert calls[0] == _GIVEN
    if started == 2:
        least = min(error.fits for error in errors.values()) // 2**20
        kept = ["train", "--slides", "out", "--trace"]
        assert calls[1] == [*kept, "--resume", "--out", "run", "--memory", f"{least}MiB"]


def test_ranks_that_nobody_starts_again_leave_no_word(tmp_path: Path) -> None:
    assert second_attempt._FOLDER not in os.environ
    leave_word(_exhausted(2**30, str(tmp_path)), 0)
    assert not [*tmp_path.iterdir()]


def test_the_memory_goes_on_beside_other_options() -> None:
    attempt = SecondAttempt(Path("run"), 700)
    given = {"train": {"epochs": 2}, "parallel": {"ranks": 1, "memory": "16GiB"}}
    parallel = {"ranks": 1, "memory": "700MiB"}
    assert attempt.flags(given) == {"train": {"epochs": 2}, "parallel": parallel}
    assert attempt.flags({}) == {"parallel": {"memory": "700MiB"}}


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(_exhausted(5, "run")))
    assert (type(error), error.problem, error.fits) == (
        MemoryExhaustedError,
        "No memory is left.",
        5,
    )
