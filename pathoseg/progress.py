"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_ENDLESS = 10_000  # characters
# When a log gets a line: the work advances, and either so long has passed since the last line, or
# another such share of the work is done and the last line is not too fresh. So an hour prints 60 to
# 70 lines, a minute at most 6, and ten seconds none.
_AT_LEAST_EVERY = 60.0  # seconds
_AT_MOST_EVERY = 10.0
_SHARE = 10  # percent

# Of the work, errors too; what a command was asked for goes to standard output, to be piped.
console = Console(stderr=True, highlight=False, soft_wrap=True)
_answers = Console(highlight=False, soft_wrap=True)


class Bar(Protocol):
    """The progress bar that a workflow advances."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None:
        """Show `text` behind the bar, for example the current loss."""
        ...

    def total(self, amount: float) -> None: ...
    def end(self) -> None:
        """Clear the terminal of it, ahead of the end of the process."""
        ...


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.2f} {self._unit}/s" if speed else f"– {self._unit}/s")


class _TerminalBar:
    def __init__(self, progress: Progress, title: str, total: float | None, done: float) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, completed=int(done), note="")

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)

    def total(self, amount: float) -> None:
        self._progress.update(self._task, total=amount)

    def end(self) -> None:
        self._progress.stop()


class _NoBar:
    """Shows nothing."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None: ...
    def total(self, amount: float) -> None: ...
    def end(self) -> None: ...


class _LogBar:
    """Lines of a log: title, units done, rate since the start, time left, note.

    A line is due when work advances; work that stands still prints none.
    """

    def __init__(
        self, title: str, total: float | None, unit: str, done: float, clock: Callable[[], float]
    ) -> None:
        self._title, self._total, self._unit, self._clock = title, total, unit, clock
        self._before, self._done, self._note = done, done, ""
        self._started = self._told = clock()
        self._told_share = self._share

    def advance(self, amount: float = 1) -> None:
        # The note of this advance follows it, and belongs to the next line.
        self._done += amount
        since = self._clock() - self._told
        is_step = self._share > self._told_share and since >= _AT_MOST_EVERY
        if is_step or since >= _AT_LEAST_EVERY:
            self._told += since
            self._told_share = self._share
            say(self._line(self._told - self._started))

    def note(self, text: str) -> None:
        self._note = text

    def total(self, amount: float) -> None:
        self._total = amount
        self._told_share = self._share

    def end(self) -> None: ...

    @property
    def _share(self) -> int:
        """Whole steps of `_SHARE` percent that are done."""
        return int(100 * self._done / self._total) // _SHARE if self._total else 0

    def _line(self, seconds: float) -> str:
        done, rate = f"{self._done:,.0f}", (self._done - self._before) / max(1e-9, seconds)
        parts = [f"{done} {self._unit}"]
        if self._total:
            share = int(100 * self._done / self._total)
            parts = [f"{done} of {self._total:,.0f} {self._unit} ({share} %)"]
        each, per = (rate, "s") if rate >= 0.1 else (60 * rate, "min")
        speed = f"{each:,.0f}" if each >= 100 else f"{each:.3g}"
        parts.append(f"{speed} {self._unit}/{per}")
        if self._total:
            parts.append(f"{_span(max(0.0, self._total - self._done) / rate)} left")
        return f"{self._title}: {', '.join(parts)}{self._note and f'  {self._note}'}"


def _span(seconds: float) -> str:
    """Return a span of time in its two largest units: "42 s", "7 min", "3 h 5 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


@contextmanager
def progress_bar(
    title: str,
    total: float | None,
    unit: str,
    done: float = 0,
    clock: Callable[[], float] = time.monotonic,
    is_shown: bool = True,
) -> Iterator[Bar]:
    """Make a context that shows `total` units of work, `done` of which lie behind.

    On a terminal it is a bar that goes with the context. Elsewhere, as in the log of a batch job,
    it is a line at every tenth of the work, but not two within ten seconds, and at least one a
    minute as long as the work advances.

    Args:
        title: What is being done.
        total: Units of work, or None while unknown.
        unit: The plural name of a unit, for the rate.
        done: Units finished before (a resumed run).
        clock: Seconds since any moment, for the lines of a log.
        is_shown: False on the ranks that leave it to another.
    """
    if not is_shown:
        yield _NoBar()
        return
    if not console.is_terminal:
        yield _LogBar(title, total, unit, done, clock)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),  # names of slides may hold brackets
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
    ) as progress:
        yield _TerminalBar(progress, title, total, done)


def say(text: str) -> None:
    """Print a line about the work on standard error, above the bar where there is one."""
    console.print(text, markup=False)


def answer(text: str) -> None:
    """Print a line of what the command was asked for on standard output."""
    _answers.print(text, markup=False)


def answer_table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> None:
    """Print a table likewise; where there is no terminal its lines are as long as they need.

    Args:
        columns: Title, and whether the cells are numbers.
        rows: Texts of the cells.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, (title, numeric) in enumerate(columns):
        folds = at == 0  # names; figures that were broken would mislead
        table.add_column(
            Text(title),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=not folds,
            min_width=12 if folds else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    where = _answers if _answers.is_terminal else Console(width=_ENDLESS)
    where.print(table, crop=False)
