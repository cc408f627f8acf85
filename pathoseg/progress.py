"""A progress bar with rate and time left on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

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
from rich.text import Text

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
