"""Comparing a model with whole annotated slides: figures by hand, splits apart, refusals."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]


def _rows(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(newline="") as file:
        return {(row["slide"], row["split"]): row for row in csv.DictReader(file)}


def test_figures_are_those_of_the_masks_that_infer_writes(
    toy_slides: Path, command: Command
) -> None:
    train = ("train", "--slides", toy_slides, "--config", "tiny.toml", "--epochs", 6)
    code, said = command(*train, "--out", "run")
    assert code == 0, said
    common = ("--config", "tiny.toml")
    assert command("evaluate", "--slides", toy_slides, *common)[0] == 0
    assert command("infer", toy_slides, *common, "--out", "out")[0] == 0
    rows = _rows(Path("run/evaluation.csv"))
    with Path("run/splits.csv").open(newline="") as file:
        splits = {row["slide"]: row["split"] for row in csv.DictReader(file)}
    assert set(rows) == {*splits.items(), *(("all", split) for split in set(splits.values()))}
    together = {split: np.zeros(3) for split in splits.values()}
    for name, split in splits.items():
        found = tifffile.imread(f"out/{Path(name).stem}/mask.ome.tiff") == 1
        truth = np.asarray(Image.open(toy_slides / f"{Path(name).stem}_mask.png")) == 1
        counts = np.array([(found & truth).sum(), found.sum(), truth.sum()])
        together[split] += counts
        row = rows[name, split]
        assert int(row["pixels"]) == truth.size
        _agrees(row, counts)
    for split, counts in together.items():
        _agrees(rows["all", split], counts)


def _agrees(row: dict[str, str], counts: np.ndarray) -> None:
    both, found, truth = counts
    assert float(row["dice_disc"]) == pytest.approx(2 * both / (found + truth))
    assert float(row["iou_disc"]) == pytest.approx(both / (found + truth - both))
    assert row["dice_mean"] == row["dice_disc"]


def test_one_split_alone_and_slides_the_run_never_saw(toy_slides: Path, command: Command) -> None:
    train = ("train", "--slides", toy_slides, "--config", "tiny.toml", "--epochs", 1)
    assert command(*train, "--out", "run")[0] == 0
    evaluate = ("evaluate", "--slides", toy_slides, "--config", "tiny.toml", "--out", "figures")
    assert command(*evaluate, "--split", "val")[0] == 0
    assert {split for _, split in _rows(Path("figures/evaluation-val.csv"))} == {"val"}
    code, said = command(*evaluate, "--split", "test")
    assert code == 2
    assert "of these: train, val; what the model's run never saw is unseen" in said
    for name in ("slide0.png", "slide0_mask.png"):
        (toy_slides / name).rename(toy_slides / name.replace("0", "9"))
    assert command(*evaluate, "--split", "unseen")[0] == 0
    assert set(_rows(Path("figures/evaluation-unseen.csv"))) == {
        ("slide9.png", "unseen"), ("all", "unseen"),
    }  # fmt: skip


def test_slides_are_read_as_the_run_read_them(toy_slides: Path, command: Command) -> None:
    masks = toy_slides.parent / "masks"
    masks.mkdir()
    for mask in toy_slides.glob("*_mask.png"):
        mask.rename(masks / mask.name)
    where = ("--slides", toy_slides, "--annotations", masks)
    train = ("train", *where, "--config", "tiny.toml", "--epochs", 1)
    assert command(*train, "--out", "run")[0] == 0
    # The slides state no mpp: tiny.toml, which is not given again, supplies it.
    code, said = command("evaluate", "--slides", toy_slides)
    assert code == 0, said
    others = toy_slides.rename(toy_slides.parent / "others")
    code, said = command("evaluate", "--slides", others)
    assert code == 2
    assert "annotation" in said
    assert command("evaluate", "--slides", others, "--annotations", masks)[0] == 0
    code, said = command("evaluate", "--slides", others, "--config", "tiny.toml")
    assert code == 2


def test_a_class_the_model_does_not_know_is_refused(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    for mask in toy_slides.glob("*_mask.png"):
        mask.unlink()
    (toy_slides / "slide1.geojson").write_text(
        '{"type":"Feature","properties":{"classification":"nerve"},"geometry":'
        '{"type":"Polygon","coordinates":[[[0,0],[9,0],[9,9],[0,9],[0,0]]]}}'
    )
    model = tiny_bundle()
    arguments = (
        "--slides",
        toy_slides,
        "--model",
        model,
        "--assume-mpp",
        "0.5",
        "--out",
        "figures",
    )
    code, said = command("evaluate", *arguments)
    assert code == 2
    assert "slide1.geojson" in said
    assert '"nerve"' in said
    assert not Path("figures").exists()
