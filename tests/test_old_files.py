"""Test that runs, bundles, results, plans and hardware files of 4b9ee32 are read and continued."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from pathoseg.config_file import UNNUMBERED, load_config
from pathoseg.inference.result_folder import read_state
from pathoseg.inference.segmenter import MaskRow
from pathoseg.inference.slide_job import SavedRows
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.planning.plan import Plan

Command = Callable[..., tuple[int, str]]

OLD = Path(__file__).resolve().parent / "data" / "4b9ee32"
WRITTEN = 1_700_000_000  # as make.py dates the slides
SEGMENT = ("infer", "fresh", "--model", "runs/finished", "--assume-mpp", "0.25")
HINT = "Copy it again from where it came."


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old files, as the working directory."""
    folder = tmp_path / "old"
    shutil.copytree(OLD, folder)
    for slide in (folder / "fresh").iterdir():
        os.utime(slide, (WRITTEN, WRITTEN))
    monkeypatch.chdir(folder)
    return folder


def _mask(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(tifffile.imread(path))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _assert_equal(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> None:
    """Compare the columns of then, but for the speed, in rows of any order.

    README.md says what other processors make of the digits.
    """

    def name(row: dict[str, str]) -> list[str]:
        return [row.get(key, "") for key in ("slide", "split", "epoch")]

    for our, their in zip(sorted(ours, key=name), sorted(theirs, key=name), strict=True):
        for key in their.keys() - {"tiles_per_s"}:
            try:
                expected = float(their[key])
            except ValueError:
                assert our[key] == their[key], key
            else:
                assert float(our[key]) == pytest.approx(expected, rel=1e-4, nan_ok=True), key


def test_a_stopped_batch_goes_on_within_its_slide(
    old: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    whole = SavedRows.save

    def save(self: SavedRows, row: MaskRow) -> None:
        computed.append(row.number)
        whole(self, row)

    monkeypatch.setattr(SavedRows, "save", save)
    code, said = command(*SEGMENT, "--resume")
    assert code == 1, said
    assert "done.png: already done" in said
    assert sorted(computed) == [2, 3], "the other rows are those that were saved"
    for name in ("done", "stopped"):
        mask = _mask(old / "results" / name / "mask.ome.tiff")
        np.testing.assert_array_equal(mask, _mask(old / "expected" / f"{name}.ome.tiff"))
    header, failed, *_ = (old / "results" / "failures.csv").read_text().splitlines()
    assert header == "slide,reason,hint"
    assert failed.startswith("broken.png,")
    assert failed.endswith(HINT)


def test_the_bundle_segments_to_the_pixel(old: Path, command: Command) -> None:
    code, said = command(*SEGMENT, "--out", "again")
    assert code == 1, said
    for name in ("done", "stopped"):
        mask = _mask(old / "again" / name / "mask.ome.tiff")
        np.testing.assert_array_equal(mask, _mask(old / "expected" / f"{name}.ome.tiff"))
    command(*SEGMENT, "--resume")
    for file in ("mask.ome.tiff", "regions.geojson", "overlay.png"):
        one, other = (old / out / "stopped" / file for out in ("results", "again"))
        assert one.read_bytes() == other.read_bytes(), "of saved rows or not, it is the same file"


def test_an_unfinished_run_goes_on_as_it_did(old: Path, command: Command) -> None:
    code, said = command("train", "--resume", "--out", "runs/unfinished")
    assert code == 0, said
    assert "Going on at epoch 13, step 88." in said
    _assert_equal(
        *(_rows(old / "runs" / run / "metrics.csv") for run in ("unfinished", "finished"))
    )


def test_a_finished_run_is_evaluated_as_it_was(old: Path, command: Command) -> None:
    code, said = command("evaluate", "--model", "runs/finished", "--out", "again")
    assert code == 0, said
    ours, theirs = (old / folder / "evaluation.csv" for folder in ("again", "runs/finished"))
    known = _rows(theirs)  # later versions append columns
    _assert_equal([{key: row[key] for key in known[0]} for row in _rows(ours)], known)


def test_the_record_of_a_run_is_of_format_1() -> None:
    path = OLD / "runs" / "unfinished" / "config.toml"
    config, written = load_config(path, unnumbered=UNNUMBERED), tomllib.loads(path.read_text())
    assert config.format == 1
    for section, values in written.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            found = getattr(getattr(config, section), key)
            assert found == (tuple(value) if isinstance(value, list) else value)


def test_failures_are_read_with_what_mends_them() -> None:
    state = read_state(OLD / "results" / "states" / "broken.json")
    assert state is not None
    assert (state.status, state.hint) == ("failed", HINT)


@pytest.mark.parametrize(
    ("name", "order", "groups", "offloads"),
    [
        ("1f1b", "1f1b", 1, False),
        ("gems-mast", "gems-mast", 1, False),
        ("offload", "data-parallel", 2, True),
    ],
)
def test_plans_are_read(name: str, order: str, groups: int, offloads: bool) -> None:
    plan = Plan.from_json((OLD / "plans" / f"{name}.json").read_text())
    assert (plan.ranks, plan.order, plan.groups, plan.batch) == (2, order, groups, 4)
    assert (max(plan.host_memory) > 0) == offloads
    assert plan.schedule.stages == plan.stages


def test_hardware_files_are_read() -> None:
    path = OLD / "hardware.json"
    hardware, written = load_hardware(str(path)), json.loads(path.read_text())
    assert hardware.fit is not None
    assert (hardware.name, hardware.measured) == (written["name"], written["measured"])
