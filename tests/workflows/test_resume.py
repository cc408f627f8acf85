"""Runs that go on, beside what has changed since they began."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pathoseg.config_file import load_config, write_config
from pathoseg.errors import PathosegError
from pathoseg.inference import leases
from pathoseg.training.run_folder import finish_run
from pathoseg.workflows import start_run
from pathoseg.workflows import train as workflow
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.start_run import begin_run, run_held
from pathoseg.workflows.train import train

RUN = Path("run")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that the start of a run says."""
    lines = list[str]()
    monkeypatch.setattr(start_run, "say", lines.append)
    return lines


def test_a_run_is_trained_by_one_process_at_a_time(
    toy_slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT", 0.02)
    monkeypatch.setattr(workflow, "_read_input", lambda _: pytest.fail("input is read first"))
    flags = {"data": {"slides": str(toy_slides)}}
    asked = TrainingArguments(Path("tiny.toml"), flags, RUN)
    with run_held(RUN):
        write_config(load_config(Path("tiny.toml"), flags), RUN / "config.toml")
        (RUN / "splits.csv").write_text("slide,patient,split\n")
        for other in (replace(asked, resume=True), replace(asked, overwrite=True)):
            with pytest.raises(PathosegError, match=r"run is in training already, by process \d"):
                train(other)
        assert (RUN / "config.toml").exists()
    with run_held(RUN):
        pass


def test_the_lease_of_a_dead_process_elsewhere_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        monkeypatch.setattr(leases, "LEASE", 0.0)  # it is over

    monkeypatch.setattr(start_run, "say", say)
    monkeypatch.setattr(start_run, "BEAT", 0.1)
    owner = {"host": "node9", "boot": "b", "pids": "p", "pid": 7, "born": 0.0}
    (tmp_path / ".lease").write_text(json.dumps(owner))
    with run_held(tmp_path):
        [line] = said
        assert f"{tmp_path} was in training by process 7 of node9" in line


def test_limits_are_recorded_once_the_checkpoint_has_them(
    toy_slides: Path, said: list[str]
) -> None:
    """A command that is killed before leaves the run as finished as it was."""
    RUN.mkdir()
    before = load_config(Path("tiny.toml"), {"data": {"slides": str(toy_slides)}})
    write_config(before, RUN / "config.toml")
    finish_run(RUN, {})
    train = replace(before.train, epochs=9, microbatch=1)
    unused: Any = None
    begin_run(RUN, replace(before, train=train), {}, {}, None, unused, unused)
    recorded = load_config(RUN / "config.toml").train
    assert (recorded.microbatch, recorded.epochs) == (1, before.train.epochs)
    assert "Microbatches of 1, not 2" in said[0]


def test_annotations_that_have_changed_are_named(tmp_path: Path, said: list[str]) -> None:
    config = load_config(None)
    write_config(config, tmp_path / "config.toml")
    table = tmp_path / "splits.csv"
    table.write_text("slide,patient,split\na.svs,a,train\n")  # an older version's
    unused: Any = None
    begin_run(tmp_path, config, {}, {"a.svs": "1"}, None, unused, unused)
    assert not any("Take care" in line for line in said)
    table.write_text("slide,patient,split,annotation\na.svs,a,train,2\n")
    begin_run(tmp_path, config, {}, {"a.svs": "1"}, None, unused, unused)
    [warning] = [line for line in said if "Take care" in line]
    assert "changed since the run began" in warning
    assert "those of a.svs." in warning
