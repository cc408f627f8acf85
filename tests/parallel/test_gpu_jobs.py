"""The runner of `make gpu`: a cut-off call has done the first jobs, and the next one goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest
import typer

from benchmarks.gpu.main import ROOT, Job, Place, jobs, run_all
from benchmarks.offload import main as offload
from pathoseg.cli import app


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


@pytest.mark.process
def test_a_hardware_file_is_given_to_a_job_once_it_is_there(tmp_path: Path) -> None:
    """`calibrate`, a job before, may have failed."""
    hardware, given = tmp_path / "hardware.json", tmp_path / "given"
    note = f"import sys; open({str(given)!r}, 'a').write(' '.join(sys.argv[1:]) + ';')"
    plans = Job("plans", 1, [["-c", note, "--quick"]], hardware=hardware)
    calibrates = Job("calibrates", 1, [["-c", f"open({str(hardware)!r}, 'w')"]])
    assert run_all([plans], tmp_path, tmp_path / "before.json", 60, "a GPU") == []
    assert run_all([calibrates, plans], tmp_path, tmp_path / "after.json", 60, "a GPU") == []
    assert given.read_text() == f"--quick;--quick --hardware {hardware};"


@pytest.mark.parametrize("quick", [False, True])
def test_the_jobs_name_what_is_there(quick: bool, tmp_path: Path) -> None:
    """Files, and options of benchmarks and of the command line."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group
    for job in jobs(Place(tmp_path, tmp_path, "gpu-2026-01-01"), "cuda", quick):
        for command in job.commands:
            paths = [each for each in command if "/" in each and not each.startswith(str(tmp_path))]
            assert all((ROOT / each).exists() for each in paths), paths
            options = {each for each in command if each.startswith("--")}
            options |= {"--hardware"} if job.hardware else set()
            if command[0].startswith("benchmarks/"):
                known = (ROOT / command[0]).read_text()
                assert all(
                    f'add_argument("{each}"' in known.replace("\n        ", "") for each in options
                )
            elif command[1] == "pathoseg":
                known = {name for each in commands[command[2]].params for name in each.opts}
                assert options <= known


def _cut_off(*_: object) -> Iterator[tuple[str, float]]:
    yield "first", 1.5
    raise KeyboardInterrupt


def test_offload_that_is_cut_off_leaves_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "study", _cut_off)
    figures = tmp_path / "offload.json"
    monkeypatch.setattr(sys, "argv", ["offload", "--part", "study", "--json", str(figures)])
    with pytest.raises(KeyboardInterrupt):
        offload.main()
    assert json.loads(figures.read_text())["first"] == 1.5


def test_the_memory_wall_that_is_cut_off_leaves_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ROOT / "benchmarks" / "memory-wall"
    monkeypatch.syspath_prepend(str(place))  # where its `cases` are
    spec = util.spec_from_file_location("memory_wall", place / "main.py")
    assert spec is not None
    assert spec.loader is not None
    wall = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_wall", wall)
    spec.loader.exec_module(wall)
    del sys.modules["cases"]
    rows = iter([wall.Wall()])  # that of the second way is cut off
    monkeypatch.setattr(wall, "_predict", lambda *_: next(rows))
    figures = tmp_path / "wall.json"
    monkeypatch.setattr(sys, "argv", ["memory-wall", "--quick", "--json", str(figures)])
    with pytest.raises(StopIteration):
        wall.main()
    assert json.loads(figures.read_text())["predicted_tile_sequential_unet64"] == 0
