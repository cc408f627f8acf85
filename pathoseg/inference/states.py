"""What is known of each slide of a batch: one small file per slide, replaced whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pathoseg.outputs.atomic import write_text

STATES = "states"


@dataclass(frozen=True)
class State:
    """Where a slide stands.

    Attributes:
        slide: Its path as it was given.
        status: "begun" by a process that works on it, or that was stopped or killed.
        key: What its result depends on: the file, the model, the options.
        attempts: How often it was begun.
        host: Where the last attempt runs or ran.
        seconds: Of each attempt that came to an end, the last one last.
        outputs: Files of the whole result to their bytes.
        problem: Why it failed.
        mend: What can be done about it.
        written: When, in seconds of the file system's clock; 0 before it is read back.
    """

    slide: str
    status: Literal["begun", "done", "failed"]
    key: str
    attempts: int
    host: str
    seconds: tuple[float, ...] = ()
    outputs: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    mend: str = ""
    written: float = 0.0

    def is_whole(self, folder: Path) -> bool:
        """Whether the outputs lie in `folder`, none of them cut short."""
        try:
            return self.status == "done" and all(
                (folder / name).stat().st_size == size for name, size in self.outputs.items()
            )
        except OSError:
            return False


def state_file(out: Path, folder: Path) -> Path:
    """Where the state of the slide lies whose result goes into `folder`."""
    return out / STATES / f"{folder.name}.json"


def read_state(path: Path) -> State | None:
    """The state, None where there is none that can be read."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = json.load(file)
        entries["seconds"] = tuple(entries["seconds"])
        return State(**entries, written=path.stat().st_mtime)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_state(path: Path, state: State) -> None:
    """Replaces the file.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    entries = asdict(state)
    del entries["written"]  # the file's own time
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(entries, indent=2) + "\n")
