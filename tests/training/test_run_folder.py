"""Folders in which a new run may lie, and those in which it may not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pathoseg.errors import PathosegError
from pathoseg.training import run_folder
from pathoseg.training.run_folder import (
    CONFIG,
    clear_run,
    finish_run,
    make_run,
    new_run,
    run_to_resume,
)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["config.toml", "report.html", "metrics.csv", "model"])
def test_files_that_no_run_has_left_are_kept(name: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(PathosegError, match=f"holds no run, and {name}"):
        new_run(tmp_path, overwrite)


@pytest.mark.parametrize("beside", ["splits.csv", "checkpoints"])
def test_a_run_is_replaced_if_that_is_asked_for(beside: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / beside).mkdir()
    (tmp_path / "report.html").touch()
    with pytest.raises(PathosegError, match="already holds a run, unfinished"):
        new_run(tmp_path)
    assert new_run(tmp_path, overwrite=True) == tmp_path


def test_what_other_commands_leave_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("plan.json", "timeline.svg", "check.html", "notes.txt"):
        (tmp_path / name).touch()
    assert new_run(tmp_path) == tmp_path


def test_a_run_that_may_not_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "private"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / CONFIG).touch()
    stat = os.stat

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if Path(path).parent.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert run_to_resume(longer=False) == tmp_path / "runs" / "mine"


def test_a_user_s_own_files_stay_where_a_run_is_replaced(tmp_path: Path) -> None:
    written = ["evaluation.csv", "evaluation-slides-test.csv", "evaluation-unseen.html"]
    written += ["evaluation-val.json", "confusion.csv", "confusion-train.csv"]
    own = ["evaluation-notes.csv", "confusion_second_reader.csv", "evaluation.xlsx"]
    for name in (*written, *own):
        (tmp_path / name).touch()
    clear_run(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own)


def test_runs_that_begin_and_end_together_are_all_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [tmp_path / name for name in ("here", "there")]
    make_pointer, waiting = run_folder.make_pointer, list[Callable[[], object]]()

    def meanwhile(pointer: Path, target: Path) -> None:
        is_latest = pointer.name.startswith(".")
        if waiting and not is_latest:
            waiting.pop()()
        make_pointer(pointer, target)
        if waiting and is_latest:
            waiting.pop()()

    monkeypatch.setattr(run_folder, "make_pointer", meanwhile)
    monkeypatch.setattr(run_folder, "_now", lambda: "now")
    waiting.append(lambda: make_run(runs[1]))
    make_run(runs[0])
    assert {path.resolve() for path in (tmp_path / "runs").iterdir()} == {*runs}
    for run in runs:
        (run / CONFIG).touch()
    waiting.append(lambda: finish_run(runs[1], {}))
    finish_run(runs[0], {})
    assert (tmp_path / "runs" / "latest").resolve() in runs
