"""Runs that go on, beside what has changed since they began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pathoseg.config_file import load_config, write_config
from pathoseg.errors import PathosegError
from pathoseg.inference import leases
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.start_run import run_held
from pathoseg.workflows.train import train

RUN = Path("run")


def test_a_run_is_trained_by_one_process_at_a_time(
    toy_slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT", 0.02)
    flags = {"data": {"slides": str(toy_slides)}}
    asked = TrainingArguments(Path("tiny.toml"), flags, RUN)
    with run_held(RUN):
        write_config(load_config(Path("tiny.toml"), flags), RUN / "config.toml")
        for other in (replace(asked, resume=True), replace(asked, overwrite=True)):
            with pytest.raises(PathosegError, match=r"run is in training already, by process \d"):
                train(other)
        assert (RUN / "config.toml").exists()
    with run_held(RUN):
        pass
