"""Tests hardware files: those that are shipped, round trips, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.features import BASIC
from pathoseg.parallel.cost.hardware import (
    CostFit,
    Hardware,
    Regression,
    known_hardware,
    load_hardware,
    save_hardware,
)
from pathoseg.parallel.schedule.costs import Link

REGRESSION = Regression((1.0,), (1.0,), (2.0,), (0.5, 0.25, 0.125), -1, 1)
NAMES = [f"{family} {part}" for family in BASIC for part in ("forward", "backward")]
FIT = CostFit(dict.fromkeys(NAMES, REGRESSION), 1.5, 0.5)
TOY = Hardware(
    "toy", "cpu", 10, {"float32": 5.0}, 2.0, 4, Link(1, 2), Link(3, 4), Link(5, 6), 0.5, 1, "x", FIT
)


def test_what_is_shipped_loads() -> None:
    assert known_hardware() == [
        *("a10", "a100", "a40", "b200", "cpu", "h100", "h200", "l40s", "rtx-4090"),
        *("rtx-6000-ada", "t4", "v100"),
    ]
    for name in known_hardware():
        assert load_hardware(name).name == name


def test_what_is_shipped_says_whether_it_was_measured() -> None:
    for name in known_hardware():
        hardware = load_hardware(name)
        assert (hardware.fit is not None) == bool(hardware.measured) == (name == "cpu")
    cpu = load_hardware("cpu")
    assert cpu.threads == 1
    assert cpu.measured.startswith("2026-")


def test_the_v100_is_that_of_the_published_runs() -> None:
    v100 = load_hardware("v100")
    assert v100.flops["float32"] == 15.7e12
    assert v100.bandwidth == 900e9
    network = v100.network(8)
    assert network.latency(3, 4) == 1.5e-6
    assert network.transfer(3, 4, 125) == pytest.approx(1e-8)
    assert network.transfer(0, 3, 125) < network.transfer(3, 4, 125)


def test_what_is_saved_loads_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text("something else")
    save_hardware(TOY, path)
    assert load_hardware(str(path)) == TOY
    assert [file.name for file in tmp_path.iterdir()] == ["toy.json"]


def _changed(**changes: Any) -> str:
    return json.dumps({**json.loads(_text()), **changes})


def _text() -> str:
    link = {"alpha": 0.0, "beta": 0.0}
    links = {"inside": link, "between": link, "host": link, "flops": {"float32": 5.0}}
    plain = {"name": "toy", "device": "cpu", "memory": 10, "bandwidth": 2.0}
    return json.dumps({"format": 1, **plain, "per_node": 4, **links})


BROKEN_FIT = {
    "regressions": {
        "relu forward": {
            "rates": [1],
            "low": [1],
            "high": [2],
            "coefficients": [1],
            "least": 0,
            "most": 1,
        }
    }
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no hardware file"),
        ("[]", "format None"),
        (_changed(format=0), "format 0, this pathoseg reads 1"),
        (_changed(memory=0), "memory"),
        (_changed(bandwidth="fast"), "bandwidth"),
        (_changed(flops={"float32": -1}), "flops.float32"),
        (_changed(flops={"bfloat16": 9}), "no rate of float32"),
        (_changed(speed=1), "speed"),
        (_changed(inside={"alpha": -1, "beta": 0}), "not below 0"),
        (_changed(fit=BROKEN_FIT), "as many coefficients"),
        (_changed(fit={"regressions": {}}), "no regression of convolution forward"),
    ],
)
def test_a_broken_file_is_refused_with_the_hint(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "toy.json"
    path.write_text(text)
    with pytest.raises(PathosegError, match=problem) as raised:
        load_hardware(str(path))
    assert str(path) in raised.value.problem
    assert "pathoseg calibrate" in raised.value.hint


def test_the_text_of_these_tests_is_whole(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(_text())
    assert load_hardware(str(tmp_path / "toy.json")).per_node == 4


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PathosegError, match="v10") as raised:
        load_hardware("v10")
    assert "v100" in raised.value.hint
