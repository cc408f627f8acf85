"""A progress bar with rate and time left on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

console = Console(stderr=True, highlight=False, soft_wrap=True)


class Bar(Protocol):
    """The progress bar that a workflow advances."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None:
        """Show `text` behind the bar, for example the current loss."""
        ...

    def total(self, amount: float) -> None: ...


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


@contextmanager
def progress_bar(title: str, total: float | None, unit: str, done: float = 0) -> Iterator[Bar]:
    """A bar for `total` units of work, `done` of which lie behind.

    Args:
        title: What is being done.
        total: Units of work, or None while unknown.
        unit: The plural name of a unit, for the rate.
        done: Units finished before (a resumed run).
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield _TerminalBar(progress, title, total, done)


def say(text: str) -> None:
    """One line for the user; above the bar where there is one."""
    console.print(text, markup=False)


def say_table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> None:
    """A table for the user; where there is no terminal its lines are as long as they need.

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
    where = console if console.is_terminal else Console(stderr=True, width=_ENDLESS)
    where.print(table, crop=False)
