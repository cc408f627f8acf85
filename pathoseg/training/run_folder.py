"""The folders of runs: making, finishing and finding them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.outputs.atomic import write_text
from pathoseg.platform_support import follow_pointer, is_file, make_pointer, relative_path
from pathoseg.progress import say

RUNS = Path("runs")
CONFIG = "config.toml"
SPLITS = "splits.csv"
METRICS, VALIDATION = "metrics.csv", "validation.json"
PLAN, TRACE, TIMELINE = "plan.json", "trace.json", "timeline.svg"
LIMITS = ("epochs", "time_limit")  # keys of the `train` table that a run may be given anew
START = "start"  # the bundle of the weights that a run from an earlier model begins with
_FINISHED = "summary.json"
_CHECKPOINTS = "checkpoints"
# What training writes and a user, or another program, may have called so, too.
_REPLACED = (CONFIG, SPLITS, METRICS, VALIDATION, "report.html", "model", "predictions")
_EVALUATION = (
    *(("evaluation", ".csv"), ("evaluation-slides", ".csv"), ("confusion", ".csv")),
    *(("evaluation", ".json"), ("evaluation", ".html")),
)
# What else commands write into a run's folder, by name: a user may keep evaluation-notes.csv there.
_WRITTEN = (
    *(PLAN, METRICS, VALIDATION, "report.html", TRACE, TIMELINE),
    *(
        f"{stem}{split}{suffix}"
        for stem, suffix in _EVALUATION
        for split in ("", "-test", "-unseen", "-val", "-train")
    ),
    *("checkpoints", "model", "predictions", "tensorboard"),
)


def new_run(out: Path | None, overwrite: bool = False) -> Path:
    """Choose the folder of a new run; `make_run` makes it.

    Args:
        out: The folder that the user names, or None for `runs/<date>-<time>`.
        overwrite: Whether it may hold a run, for `clear_run` to remove.

    Raises:
        PathosegError: It already holds a run, or files that a run would replace; or its disk
            cannot be written.
    """
    run = out or _free(RUNS / _now())
    is_run = (run / CONFIG).exists() and ((run / SPLITS).exists() or (run / _CHECKPOINTS).exists())
    if not is_run and (others := [name for name in _REPLACED if (run / name).exists()]):
        raise PathosegError(
            f"{run} holds no run, and {', '.join(others)}, where a run would write.",
            "Give --out another folder, or move what is there away.",
        )
    if is_run and not overwrite:
        raise PathosegError(
            f"{run} already holds a run, {'finished' if is_finished(run) else 'unfinished'}, by "
            f"{run / CONFIG}.",
            "Continue it with --resume, choose another --out, or replace it with --overwrite.",
        )
    refuse_unwritable(run, "run's folder")
    return run


def refuse_unwritable(folder: Path, what: str) -> None:
    """Refuse a folder that cannot be made or written, ahead of hours of work.

    Args:
        folder: Which need not exist.
        what: Its name in the message.

    Raises:
        PathosegError: It cannot.
    """
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise PathosegError(
            f"The {what} {folder} cannot be written: {place} is no folder that can be written.",
            "Give --out a folder on a disk that can be written.",
        )


def refuse_overwriting(out: Path | None, resume: bool, overwrite: bool) -> None:
    """Refuse --overwrite where it says nothing, or the opposite of --resume.

    Raises:
        PathosegError: It does.
    """
    if overwrite and (resume or out is None):
        raise PathosegError(
            "--overwrite begins a run anew, and --resume goes on with it."
            if resume
            else "--overwrite replaces the run in --out, which is not given.",
            "Leave out one of them." if resume else "Add --out RUN, or leave out --overwrite.",
        )


def make_run(run: Path) -> None:
    """Make a run's folder and register it in `runs/` (as a pointer if it lies elsewhere).

    Raises:
        OSError: The disk is full or cannot be written.
    """
    run.mkdir(parents=True, exist_ok=True)
    if run.resolve().parent == RUNS.resolve():
        return
    RUNS.mkdir(exist_ok=True)
    is_registered = False
    while not is_registered:
        with suppress(FileExistsError):  # another run has just taken the name
            make_pointer(_free(RUNS / _now()), _from_runs(run))
            is_registered = True


def named_run(out: Path) -> Path:
    """Return the run behind a link such as `runs/latest`, which may name another one soon."""
    if out.is_symlink():
        out = Path(os.path.normpath(out.parent / out.readlink()))
    return follow_pointer(out)


def clear_run(run: Path, overwrite: bool) -> None:
    """Remove a run from its folder; killed at any moment, what is left is a run or none.

    Args:
        run: The folder.
        overwrite: Whether that was asked for: else another command has begun the run just now.

    Raises:
        PathosegError: It was not.
        OSError: The disk cannot be written.
    """
    if not overwrite:
        raise PathosegError(
            f"Another command has begun a run in {run} meanwhile.",
            "Start this one again; give each of several that start together an --out of its own.",
        )
    reopen_run(run)
    for path in (run / name for name in (*_WRITTEN, START, SPLITS, CONFIG)):
        if path.is_dir() and not path.is_symlink():  # a link may lead to a larger disk
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finish_run(run: Path, summary: Mapping[str, Any]) -> None:
    """Mark a run as finished, with its summary as JSON, and point `runs/latest` at it."""
    write_text(run / _FINISHED, json.dumps(summary, indent=2) + "\n")
    _point_latest(run)


def _point_latest(run: Path) -> None:
    RUNS.mkdir(exist_ok=True)
    fresh = RUNS / f".latest-{uuid4().hex[:8]}"  # processes of two hosts may have one number
    make_pointer(fresh, _from_runs(run))
    fresh.replace(RUNS / "latest")


def is_finished(run: Path) -> bool:
    return (run / _FINISHED).exists()


def reopen_run(run: Path) -> None:
    """Mark a finished run as unfinished; `runs/latest` falls back to the newest of the others."""
    (run / _FINISHED).unlink(missing_ok=True)
    if _latest() == run.resolve():
        (RUNS / "latest").unlink(missing_ok=True)
        if other := _last_finished():
            _point_latest(other)


def moved_options(recorded: Config, asked: Config) -> Config:
    """Return `recorded` with what no batch depends on as `asked`: folders, cache and readers.

    Raises:
        PathosegError: A folder of slides is not there.
    """
    for folder in asked.data.slide_folders:
        if not folder.exists():
            raise PathosegError(
                f"The run's slides were in {folder}, which is not there.",
                "Name the folder that they are in now with --slides DIR.",
            )
    data = replace(recorded.data, slides=asked.data.slides, annotations=asked.data.annotations)
    tiles = replace(recorded.tiles, cache=asked.tiles.cache)
    train = replace(recorded.train, readers=asked.train.readers)
    return replace(recorded, data=data, tiles=tiles, train=train)


def with_limits(recorded: Config, asked: Config) -> Config:
    """Return `recorded` with the limits of `asked`."""
    limits = {limit: getattr(asked.train, limit) for limit in LIMITS}
    return replace(recorded, train=replace(recorded.train, **limits))


def refuse_changes(run: Path, recorded: Config, asked: Config) -> None:
    """Refuse other options for a run that goes on, but for its ranks and its microbatches.

    Raises:
        PathosegError: It names the options that differ.
    """
    train = replace(asked.train, microbatch=recorded.train.microbatch)
    before, now = asdict(recorded), asdict(replace(asked, parallel=recorded.parallel, train=train))
    for section, values in now.items():
        if values != before[section]:
            changed = (
                [f"{section}.{key}" for key in values if values[key] != before[section][key]]
                if isinstance(values, dict)
                else [section]
            )
            raise PathosegError(
                f"{run} was begun with other values of {', '.join(changed)}.",
                "Leave these options out to go on, or start a new run without --resume.",
            )


def run_to_resume(longer: bool) -> Path:
    """Find the run that `--resume` alone continues: the newest unfinished one.

    Args:
        longer: The newest finished one will do where there is no other: it is to train longer.

    Raises:
        PathosegError: There is none.
    """
    unfinished = [run for run in _known() if not is_finished(run)]
    if longer and not unfinished and (_newest() / CONFIG).is_file():
        return _newest()
    if not unfinished:
        raise PathosegError(
            f"There is no unfinished run in {RUNS.resolve()}.",
            "Name one by --out RUN: --resume goes on with it, or begins it with --slides DIR.",
        )
    return max(unfinished, key=lambda run: (run / CONFIG).stat().st_mtime)


def bundle_of(model: Path | None, option: str = "--model") -> Path:
    """Find the bundle behind `--model`: a run's, the bundle itself, or (None) the newest run's.

    Args:
        model: What was given.
        option: By which option, for messages.

    Raises:
        PathosegError: There is none.
    """
    # The run behind the link says more, and stays the same when another run is finished.
    given = relative_path(_newest(), Path()) if model is None else follow_pointer(model)
    for folder in (given / "model", given):
        if (folder / "model.json").is_file():
            run = folder.parent
            if (run / CONFIG).is_file() and not is_finished(run):
                say(f"{run} is not finished: this is its best model so far.")
            return folder
    if model is None:
        raise PathosegError(
            f"There is no finished run in {RUNS.resolve()}.",
            "Train one with `pathoseg train --slides DIR`, or name a run with --model RUN.",
        )
    if not model.exists():
        raise PathosegError(f"{model} does not exist.", f"Check the path behind {option}.")
    raise PathosegError(
        f"{model} holds no model (no model.json in it or in its model/ folder).",
        f"Give {option} the folder of a run or of a bundle.",
    )


def _latest() -> Path:
    """The run that `runs/latest` points at, by a link or by a file."""
    return follow_pointer(Path(os.path.realpath(RUNS / "latest")))


def _newest() -> Path:
    """Return the newest finished run: that of `runs/latest`, else the one that ended last."""
    latest = _latest()
    return latest if latest.is_dir() else _last_finished() or latest


def _last_finished() -> Path | None:
    """Return the finished run whose summary was written last; None where there is none."""
    found = [run for run in _known() if is_finished(run)]
    return max(found, key=lambda run: (run / _FINISHED).stat().st_mtime, default=None)


def _from_runs(run: Path) -> Path:
    """The way from `runs/` to a run: relative, so that both may move together."""
    return relative_path(run.resolve(), RUNS.resolve())


def _known() -> Iterator[Path]:
    if not RUNS.is_dir():
        return
    for entry in RUNS.iterdir():
        run = follow_pointer(entry)
        if entry.name != "latest" and is_file(run / CONFIG):
            yield run.resolve()


def _now() -> str:
    return time.strftime("%Y-%m-%d-%H%M%S")


def _free(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists() or candidate.is_symlink():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
