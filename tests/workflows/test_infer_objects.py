"""Objects of a slide are the same however it is cut into windows, rows and processes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pathoseg.geometry import Size
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs import objects
from tests.workflows.test_evaluate_objects import Blobs

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

NAME = "tests.workflows.test_infer_objects:make_blobs"
HEIGHT, WIDTH = 1900, 160  # two bands of windows, two blocks
CONFIG = """
[data]
assume_mpp = 0.5
[tissue]
method = "all"
[infer]
object_um = 12
{more}
"""


class NearBlobs(Blobs):
    """Knows how far it looks, so that windows join to one pass."""

    reach = 4
    multiple = 2


def make_blobs(in_channels: int, classes: int) -> torch.nn.Module:
    """Return the network, which knows all that it will ever know."""
    return NearBlobs()


def _draw(path: Path) -> None:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.full((HEIGHT, WIDTH, 3), (225, 190, 205), np.uint8)
    for _ in range(900):
        radius, (row, column) = rng.uniform(3, 8), rng.uniform((0, 0), (HEIGHT, WIDTH))
        top, left = max(0, int(row) - 9), max(0, int(column) - 9)
        near = np.s_[top : top + 19, left : left + 19]
        inside = (y[near] - row) ** 2 + (x[near] - column) ** 2 < radius**2
        image[near][inside] = (70, 50, 60) if rng.random() < 0.5 else (60, 40, 130)
    Image.fromarray(image).save(path)


def test_windows_rows_and_processes_change_no_object(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of the other processes, which are forked by what is there (`fork_server.py`).
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    _draw(tmp_path / "slide.png")
    model = tiny_bundle(network=ModelConfig(NAME, "objects", 3), tile=64, overlap=32)
    ways = {"whole": ("", ()), "cut": ("tile = 120", ()), "shared": ("", ("--ranks", "2"))}
    for name, (more, flags) in ways.items():
        Path(f"{name}.toml").write_text(CONFIG.format(more=more))
        options = ("--model", model, "--factory", NAME, "--config", f"{name}.toml", *flags)
        with pytest.MonkeyPatch.context() as patch:
            if name == "cut":
                patch.setattr(objects, "_BLOCK", Size(70, 300))
            code, said = command("infer", "slide.png", *options, "--out", name)
        assert code == 0, said
    for file in ("objects.geojson", "objects.csv"):
        whole = Path("whole/slide", file).read_text()
        assert Path("shared/slide", file).read_text() == whole
    # Smaller blocks come in another order.
    for each in (_rows, _outlines):
        assert each("cut/slide") == each("whole/slide")
    classes = [row["class"] for row in _table("whole/slide/objects.csv")]
    for line in _table("whole/summary.csv"):
        assert int(line["objects"]) == classes.count(line["class"]) > 100


def test_that_most_objects_are_left_out_is_said(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _draw(tmp_path / "slide.png")
    model = tiny_bundle(network=ModelConfig(NAME, "objects", 3), tile=64, overlap=32)
    for smallest in (10, 1000):
        Path("large.toml").write_text(CONFIG.format(more=f"min_region_um2 = {smallest}"))
        options = ("--model", model, "--factory", NAME, "--config", "large.toml", "--overwrite")
        code, said = command("infer", "slide.png", *options, "--out", "out")
        assert code == 0, said
        summary = json.loads(Path("out/slide/summary.json").read_text())
        told = (
            f"{summary['objects_left_out']:,} objects are smaller than {smallest:g} µm² ([infer] "
            "min_region_um2) and left out, more than are kept (0)"
        )
        assert (told in summary["warnings"]) == (told in said) == (smallest == 1000)
        assert said.count("more than are kept") == (smallest == 1000)


def test_objects_too_wide_for_the_memory_are_refused_once(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    (tmp_path / "c.toml").write_text("[infer]\nobject_um = 4000\n")
    model = tiny_bundle(network=ModelConfig(NAME, "objects", 3), tile=64, overlap=32)
    options = ("--model", model, "--factory", NAME, "--config", tmp_path / "c.toml")
    code, said = command("infer", tmp_path, *options, "--out", tmp_path / "out")
    told = "object_um = 4000 is 8,000 px at 0.5 µm; at most 800 can be"
    assert (code, told in " ".join(said.split())) == (2, True), said
    assert not (tmp_path / "out").exists()


def _rows(result: str) -> list[str]:
    return sorted(Path(result, "objects.csv").read_text().splitlines())


def _outlines(result: str) -> list[str]:
    features = json.loads(Path(result, "objects.geojson").read_text())["features"]
    return sorted(f"{each['geometry']} {each['properties']}" for each in features)


def _table(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
