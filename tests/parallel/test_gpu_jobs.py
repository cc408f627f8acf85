"""The runner of `make gpu`: a cut-off call has done the first jobs, and the next one goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.main import ROOT, Job, Place, jobs, run_all


@pytest.mark.process
def test_a_job_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    made, report = tmp_path / "made", tmp_path / "gpu.json"
    leave = ["-c", f"open({str(made)!r}, 'a').write('x')"]
    wanted = [
        Job("hangs", 0.01, [["-c", "import time; time.sleep(60)"]]),
        Job("fails", 1, [["-c", "print('no such kernel'); raise SystemExit(3)"], leave]),
        Job("passes", 1, [["-c", "pass"], leave]),
    ]
    assert run_all(wanted, tmp_path, report, 60, "a GPU") == ["hangs", "fails"]
    told = json.loads(report.read_text())
    assert told["device"] == "a GPU"
    assert told["hangs"]["state"] == "cut off after 1 s"
    assert told["fails"] | {"seconds": 0} == {
        "ok": False,
        "state": "failed (3)",
        "seconds": 0,
        "said": "no such kernel\n",
    }
    assert told["passes"]["ok"]
    again = run_all(wanted[1:], tmp_path, report, 60, "a GPU")
    assert (again, made.read_text()) == (["fails"], "x")
    assert run_all([Job("late", 1, [leave])], tmp_path, report, 0, "a GPU") == ["late"]
    assert json.loads(report.read_text())["late"]["state"] == "no time left"


def test_the_jobs_name_what_is_there(tmp_path: Path) -> None:
    found = jobs(Place(tmp_path, tmp_path, "gpu-2026-01-01"), "cuda", quick=False)
    for job in found:
        for command in job.commands:
            paths = [each for each in command if "/" in each and not each.startswith(str(tmp_path))]
            assert all((ROOT / each).exists() for each in paths), paths
