"""Tests `pathoseg calibrate`: the files it writes, and that a signal leaves none."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from pathoseg.cli import app
from pathoseg.errors import PathosegError, StoppedError
from pathoseg.parallel import visit_time
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.cost import timing
from pathoseg.parallel.cost.calibration_layers import Case, draw_cases
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.workflows import calibrate as workflow


def _few_cases() -> list[Case]:
    """Return the smallest layers of a small draw: 51, some of each of the basic families."""
    return [case for case in draw_cases(0.1) if sum(map(prod, case.shapes)) < 2**14]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers of a small draw and one network, on the CPU, once."""
    two_layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
    one = Case(two_layers, ((2, 3, 32, 32),))  # all take 10 s, in `test_profiled.py`
    monkeypatch.setattr(timing, "reference_networks", lambda: [one])
    monkeypatch.setattr(workflow, "draw_cases", lambda scale: _few_cases())
    monkeypatch.setattr(workflow, "pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(workflow, "_QUICK_ROUNDS", 1)
    monkeypatch.setattr(workflow, "keep_freed_memory", lambda: None)  # for all tests that follow


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_a_calibration_writes_a_fit_and_its_timings(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.json"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(out), "--quick"])
    assert result.exit_code == 0, result.output
    hardware = load_hardware(str(out))
    assert hardware.name == "mine"
    assert hardware.threads == torch.get_num_threads()
    assert hardware.memory > 2**20
    assert hardware.fit
    note = cost_model(hardware).note
    assert f"{hardware.threads} of" in note
    assert torch.__version__ in note
    layer = Traced(torch.nn.Conv2d(8, 8, 3), torch.empty(1, 8, 64, 64)).graph.layers[0]
    assert 1e-6 < cost_model(hardware).time(layer).forward < 1
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(_few_cases())
    for row in rows:
        json.loads(row["attributes"])
        for name in ("forward", "backward"):
            low, high = (float(row[f"{name}_{figure}"]) for figure in ("minimum", "maximum"))
            assert 0 <= low <= float(row[f"{name}_median"]) <= high
    assert sorted(file.name for file in out.parent.iterdir()) == ["mine.csv", "mine.json"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    visited: list[None] = []

    def interrupted(
        cases: Sequence[Case], device: torch.device, rounds: int, advance: Callable[[], None]
    ) -> Any:
        os.kill(os.getpid(), number)
        visited.append(None)
        advance()
        pytest.fail("it went on")

    monkeypatch.setattr(workflow, "time_cases", interrupted)
    with pytest.raises(StoppedError, match="Nothing was written") as stop:
        workflow.calibrate(tmp_path / "mine.json", quick=True)
    assert stop.value.exit_code == 128 + number
    assert visited
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["mine.csv", "mine", "folder.json"])
def test_a_name_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "folder.json").mkdir()
    monkeypatch.setattr(workflow, "time_cases", lambda *_: pytest.fail("it went on"))
    with pytest.raises(PathosegError, match=name) as raised:
        workflow.calibrate(tmp_path / name, quick=True)
    assert ".json" in raised.value.hint


RANKS = """
from math import prod
from pathlib import Path
from torch import nn
from pathoseg.parallel import visit_time
from pathoseg.parallel.cost import timing
from pathoseg.parallel.cost.calibration_layers import Case, draw_cases
from pathoseg.workflows import calibrate as workflow

one = Case(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)), ((2, 3, 32, 32),))
timing.reference_networks = lambda: [one]
few = [case for case in draw_cases(0.1) if sum(map(prod, case.shapes)) < 2**14]
workflow.draw_cases = lambda scale: few
workflow._QUICK_ROUNDS = 1
visit_time._STAGES = 16  # 40 take longer to read, and tell the same
workflow.calibrate(Path("linked.json"), quick=True)
"""


@pytest.mark.slow
def test_ranks_measure_their_link_and_visits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("linked.json").write_text("an earlier file")
    Path("ranks.py").write_text(RANKS)
    assert start_local(2, [sys.executable, "ranks.py"]) == 0
    said = "".join(capfd.readouterr())
    assert "The fit is in linked.json, in place of an earlier one" in said
    assert "The link inside a host: " in said
    assert "The link between is not measured" in said
    known, found = load_hardware("cpu"), load_hardware("linked.json")
    assert found.fit
    assert found.fit != known.fit
    assert found.inside != known.inside
    assert found.between == known.between
    assert 0 < found.inside.beta < 1e-6
    assert "A visit of a stage takes " in said
    assert found.inside.alpha < found.visit < 0.1
    assert found.visit != known.visit
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "linked.csv",
        "linked.json",
        "ranks.py",
    ]


def test_a_visit_that_noise_hides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit_time, "_steps", lambda *_: lambda step: 1e-3)
    with pytest.raises(PathosegError, match="took no longer"):
        visit_time.measure_visit(connect("gloo", World()), torch.device("cpu"))
