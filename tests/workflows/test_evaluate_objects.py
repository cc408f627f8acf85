"""Objects that a model separates are compared with annotated ones as `infer` writes them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from rasterio.features import rasterize
from shapely.geometry import shape

from pathoseg.geometry import Box, ObjectMask
from pathoseg.models.model_options import ModelConfig
from pathoseg.models.object_metrics import ObjectCounts, object_figures

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

NAME = "tests.workflows.test_evaluate_objects:make_blobs"
SIZE = (120, 150)
GLASS, INKS = (225, 190, 205), ((70, 50, 60), (60, 40, 130))
UNKNOWN = 999
CONFIG = """
[data]
assume_mpp = 0.5
[annotations]
mask = "instances"
mask_ignore = [999]
rename = {"class 1" = "gland", "class 2" = "stroma"}
[infer]
simplify = 0
min_region_um2 = 2
object_um = 12
"""


class Blobs(torch.nn.Module):
    """Calls what is dark class 1 or, in violet, 2, and the higher the more is dark around it."""

    def __init__(self) -> None:
        super().__init__()
        self.sure = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        dark = (image.mean(1, keepdim=True) < -0.5).float()
        violet = dark * (image[:, 2:] > image[:, :1] + 0.7)
        height = 12 * torch.nn.functional.avg_pool2d(dark, 9, 1, 4)
        return torch.cat([*(self.sure * each for each in (1 - dark, dark, 2 * violet)), height], 1)


def make_blobs(in_channels: int, classes: int) -> torch.nn.Module:
    """Return the network, which knows all that it will ever know."""
    return Blobs()


def _draw(folder: Path, seed: int) -> None:
    """Write a picture of discs that touch here and there, and a mask of their numbers."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    numbers, classes = np.zeros(SIZE, np.uint16), np.zeros(SIZE, np.uint8)
    image = np.full((*SIZE, 3), GLASS, np.uint8)
    for number in range(1, 80):
        radius, centre = rng.uniform(4, 8), rng.uniform((8, 8), np.array(SIZE) - 8)
        disc = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2
        if numbers[disc].any():
            continue
        numbers[disc], classes[disc] = number, 1 + number % 2
        image[np.roll(disc, rng.integers(0, 3), axis=1)] = INKS[(number + (number % 7 == 0)) % 2]
        if number % 6 == 0:
            image[disc] = GLASS
    numbers[60:95, 70:110] = UNKNOWN
    Image.fromarray(image).save(folder / f"slide{seed}.png")
    Image.fromarray(numbers).save(folder / f"slide{seed}_mask.png")
    Image.fromarray(classes).save(folder / f"slide{seed}_classes.png")


def _counters(folder: Path, seed: int) -> NDArray[np.float64]:
    """Compare the objects that `infer` wrote with the numbers of the mask."""
    whole = Box(0, 0, SIZE[1], SIZE[0])
    numbers = np.asarray(Image.open(folder / f"slide{seed}_mask.png"))
    classes = np.asarray(Image.open(folder / f"slide{seed}_classes.png"))
    counts = ObjectCounts(3, 3.0 / 0.5)
    for number in set(np.unique(numbers).tolist()) - {0, UNKNOWN}:
        pixels = numbers == number
        counts.add_true([ObjectMask(whole, pixels)], [int(classes[pixels][0])])
    features = json.loads(Path(f"out/slide{seed}/objects.geojson").read_text())["features"]
    for feature in features:
        pixels = rasterize([shape(feature["geometry"])], out_shape=SIZE).astype(bool)
        name = feature["properties"]["classification"]["name"]
        index = ("gland", "stroma").index(name) + 1
        counts.add_predicted([ObjectMask(whole, pixels)], [index], [numbers == UNKNOWN])
    return counts.counters()


def test_figures_are_those_of_the_objects_that_infer_writes(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slides = tmp_path / "slides"
    slides.mkdir()
    for seed in range(3):
        _draw(slides, seed)
    Path("objects.toml").write_text(CONFIG)
    model = tiny_bundle(network=ModelConfig(NAME, "objects", 3), tile=64, overlap=32)
    common = ("--model", model, "--factory", NAME, "--config", "objects.toml")
    code, said = command("infer", slides, *common, "--out", "out")
    assert code == 0, said
    code, said = command("evaluate", "--slides", slides, *common, "--out", "whole")
    assert code == 0, said
    monkeypatch.setattr("pathoseg.workflows.evaluate._STRIP_PIXELS", SIZE[1] * 5)
    assert command("evaluate", "--slides", slides, *common, "--out", "strips")[0] == 0
    for name in ("evaluation.csv", "evaluation-slides.csv", "evaluation.json", "evaluation.html"):
        assert (Path("whole") / name).read_bytes() == (Path("strips") / name).read_bytes()

    counters = {f"slide{seed}.png": _counters(slides, seed) for seed in range(3)}
    counters["all"] = np.sum(list(counters.values()), axis=0)
    with Path("whole/evaluation.csv").open(newline="") as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    assert {*rows} == {*counters}
    for slide, expected in counters.items():
        row = rows[slide]
        numbers = [int(row[f"{side}_objects"]) for side in ("annotated", "predicted")]
        assert numbers == expected[0, 4:6].tolist()
        for name, figure in object_figures(expected).items():
            for part, value in zip(("all", "gland", "stroma"), figure, strict=True):
                assert float(row[f"{name}_{part}"]) == pytest.approx(value), (slide, name, part)
    row = rows["all"]
    assert 0.5 < float(row["aji_all"]) < 0.9
    assert 0.4 < float(row["pq_gland"]) < float(row["pq_all"]) < 0.9
    assert float(row["pq_all_low"]) < float(row["pq_all"]) < float(row["pq_all_high"])
    assert f"AJI {float(row['aji_all']):.4f}" in said
    page = Path("whole/evaluation.html").read_text()
    assert f"{float(row['aji_all']):.3f}" in page
