"""Progress in a log: how often a line comes, and that what it says is right."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pathoseg import progress
from pathoseg.progress import progress_bar

_LINE = re.compile(
    r"reading: ([\d,]+) of ([\d,]+) tiles \((\d+) %\), "
    r"([\d.e+]+) tiles/(s|min), (.+) left  row (\d+)"
)


class _Told(NamedTuple):
    second: float
    line: str


def _log(waits: Sequence[float], total: float | None, done: float = 0) -> list[_Told]:
    """The lines of a job whose units take so many seconds each, and when each line came."""
    now, told = 0.0, list[_Told]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "say", lambda line: told.append(_Told(now, line)))
        with progress_bar("reading", total, "tiles", done, clock=lambda: now) as bar:
            for number, wait in enumerate(waits):
                bar.note(f"row {number}")
                now += wait
                bar.advance()
    return told


def test_brackets_are_part_of_a_title(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "console", console)
    with progress_bar("case[b][/y].svs", 2, "tiles") as bar:
        bar.advance()
        bar.note("of [/z]")
    assert "case[b][/y].svs" in shown.getvalue()
    assert "of [/z]" in shown.getvalue()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=200), st.booleans())
def test_lines_come_each_minute_and_never_two_at_once(waits: list[float], endless: bool) -> None:
    told = _log(waits, None if endless else len(waits))
    moments = [each.second for each in told]
    ends = [0.0, *moments, sum(waits)]
    between = [b - a for a, b in pairwise(ends)]
    assert all(gap >= 10 - 1e-6 for gap in between[:-1])
    assert all(gap < 60 + max(waits) + 1e-6 for gap in between)
    assert len(told) <= sum(waits) / 60 + (0 if endless else 10)


@given(st.integers(2, 300), st.floats(0.2, 50), st.integers(0, 1000))
def test_a_line_says_how_far_how_fast_and_how_long(units: int, each: float, before: int) -> None:
    for second, line in _log([each] * units, before + units, before):
        found = _LINE.fullmatch(line)
        assert found, line
        done, total = (int(found[at].replace(",", "")) for at in (1, 2))
        assert (done - before) * each == pytest.approx(second)
        assert (total, int(found[7])) == (before + units, done - before - 1)
        assert int(found[3]) == 100 * done // total
        per = 1 if found[5] == "s" else 60
        assert float(found[4]) / per == pytest.approx(1 / each, rel=0.01)
        seconds = (total - done) * each
        if (short := re.fullmatch(r"(\d+) s", found[6])) is not None:
            assert float(short[1]) == pytest.approx(seconds, abs=0.51)
        elif (long := re.fullmatch(r"(?:(\d+) h )?(\d+) min", found[6])) is not None:
            assert 60 * int(long[1] or 0) + int(long[2]) == pytest.approx(seconds / 60, abs=0.51)


def test_a_log_reads_like_this() -> None:
    told = _log([25.0] * 13_000, 40_000, done=1_000)
    assert told[0].line == (
        "reading: 1,003 of 40,000 tiles (2 %), 2.4 tiles/min, 11 d 6 h left  row 2"
    )
    assert _log([30.0] * 4, None)[-1].line == "reading: 4 tiles, 2 tiles/min  row 3"
    assert _log([0.03] * 300, 300) == [], "a job of nine seconds says nothing"
    minute = [each.line for each in _log([0.125] * 480, 480)]
    assert len(minute) == 6
    assert minute[-1] == "reading: 480 of 480 tiles (100 %), 8 tiles/s, 0 s left  row 479"


def test_a_total_that_is_known_late_counts_its_steps_from_there() -> None:
    now, told = 0.0, list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "say", told.append)
        with progress_bar("training", None, "tiles", clock=lambda: now) as bar:
            for number in range(20):
                if number == 10:
                    bar.total(100)
                now += 11
                bar.advance()
    assert [line.split(",")[0] for line in told] == [
        "training: 6 tiles",
        "training: 12 of 100 tiles (12 %)",
        "training: 18 of 100 tiles (18 %)",
        "training: 20 of 100 tiles (20 %)",
    ]


def test_on_no_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress_bar("reading", 2, "slides", clock=lambda: now) as bar:
        for _ in range(2):
            now += 30
            bar.advance()
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert "\x1b" not in said
    assert "\r" not in said


def test_a_rank_that_leaves_it_to_another_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress_bar("reading", 9, "slides", clock=lambda: now, is_shown=False) as bar:
        for _ in range(9):
            now += 100
            bar.note("loss")
            bar.advance()
        bar.total(10)
    assert capsys.readouterr().err == ""
