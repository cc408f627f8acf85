"""Figures of regions of interest beside those of the whole slide, as `infer` writes them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import shapely
import tifffile
from PIL import Image

from pathoseg.models.model_options import ModelConfig
from tests.workflows.test_infer_objects import NAME

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

SIDE = 256
CONFIG = '[data]\nassume_mpp = 0.5\n[tissue]\nmethod = "all"\n[infer]\nobject_um = 12\n'
REGIONS = {"core": shapely.box(30, 40, 150, 200), None: shapely.Point(180, 90).buffer(60)}


def _draw(path: Path) -> None:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE]
    image = np.full((SIDE, SIDE, 3), (225, 190, 205), np.uint8)
    for _ in range(150):
        radius, (row, column) = rng.uniform(3, 8), rng.uniform(0, SIDE, 2)
        inside = (y - row) ** 2 + (x - column) ** 2 < radius**2
        image[inside] = (70, 50, 60) if rng.random() < 0.5 else (60, 40, 130)
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(image).save(path)


def _annotate(path: Path) -> None:
    features = [
        {
            "type": "Feature",
            "geometry": shapely.geometry.mapping(area),
            "properties": {"objectType": "annotation", "classification": kind, "name": name},
        }
        for name, area, kind in [
            ("elsewhere", shapely.box(0, 0, 9, 9), "gland"),
            *((name, area, "Region*") for name, area in REGIONS.items()),
        ]
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def _rows(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two slides, one of which has an annotation in another folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        _draw(tmp_path / "slides" / f"{name}.png")
    _annotate(tmp_path / "drawn/a.geojson")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.usefixtures("place")
def test_rows_of_regions_follow_those_of_the_slide(
    command: Command, tiny_bundle: SaveBundle
) -> None:
    model = tiny_bundle(network=ModelConfig(NAME, "objects", 3), tile=64, overlap=32)
    options = ("--model", model, "--factory", NAME, "--config", "config.toml")
    code, said = command("infer", "slides", *options, "--out", "plain")
    assert code == 0, said
    code, said = command("infer", "slides", *options, "--out", "out", "--annotations", "drawn")
    assert code == 0, said
    assert "Without regions of interest in their annotations: b.png." in said
    rows = _rows("out/summary.csv")
    assert list(rows[0])[-1] == "region_of_interest"
    assert [row for row in rows if not row["region_of_interest"]] == _rows("plain/summary.csv")
    of_regions = [row for row in rows if row["region_of_interest"]]
    assert [(row["slide"], row["region_of_interest"], row["class"]) for row in of_regions] == [
        ("a.png", name, kind) for name in ("core", "2") for kind in ("gland", "stroma")
    ]
    mask = tifffile.imread("out/a/mask.ome.tiff")
    x, y = np.meshgrid(np.arange(SIDE) + 0.5, np.arange(SIDE) + 0.5)
    objects = _rows("out/a/objects.csv")
    summary = json.loads(Path("out/a/summary.json").read_text())
    for area, told in zip(REGIONS.values(), summary["regions_of_interest"], strict=True):
        mm2 = area.area * 0.25e-6
        assert told["area_mm2"] == pytest.approx(mm2)
        for index, of in enumerate(told["classes"], start=1):
            pixels = ((mask == index) & shapely.contains_xy(area, x, y)).sum()
            own = [row for row in objects if row["class"] == of["name"]]
            centres = [(float(row["Centroid X px"]), float(row["Centroid Y px"])) for row in own]
            count = shapely.contains_xy(area, np.array(centres)).sum()
            assert of["pixels"] == pixels > 0
            assert of["objects"] == count > 0
            row = of_regions.pop(0)
            assert (row["regions"], row["tissue_mm2"], row["unread_mm2"]) == ("", "", "0")
            assert float(row["area_mm2"]) == pytest.approx(pixels * 0.25e-6)
            assert float(row["share_of_tissue"]) == pytest.approx(pixels * 0.25e-6 / mm2, rel=1e-5)
            assert int(row["objects"]) == count
            assert float(row["objects_per_mm2"]) == pytest.approx(count / mm2, rel=1e-5)


@pytest.mark.usefixtures("place")
def test_kept_results_stay_and_regions_need_no_objects(
    command: Command, tiny_bundle: SaveBundle
) -> None:
    batch = ("infer", "slides", "--model", tiny_bundle(), "--config", "config.toml", "--out", "out")
    assert command(*batch[:1], "slides/a.png", *batch[2:])[0] == 0
    Path("drawn/a.geojson").rename("drawn/b.geojson")
    code, said = command(*batch, "--annotations", "drawn", "--resume")
    assert code == 0, said
    assert "Kept as they were, without regions of interest: a.png." in said
    assert "in their annotations" not in said
    rows = [row for row in _rows("out/summary.csv") if row["region_of_interest"]]
    assert {(row["slide"], row["objects"]) for row in rows} == {("b.png", "")}
    assert len(rows) == 4
    code, said = command(*batch, "--annotations", "drawn")  # made again
    assert code == 0, said
    assert "Without regions of interest in their annotations: a.png." in said


@pytest.mark.usefixtures("place")
def test_regions_off_the_slide_and_too_small_ones_are_told(
    command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"far": shapely.box(5000, 5000, 5100, 5100), "dot": shapely.box(40.6, 40.6, 41.4, 41.4)}
    monkeypatch.setattr(f"{__name__}.REGIONS", REGIONS | odd)
    _annotate(Path("drawn/a.geojson"))
    batch = ("infer", "slides/a.png", "--model", tiny_bundle(), "--config", "config.toml")
    code, said = command(*batch, "--annotations", "drawn")
    assert code == 0, said
    summary = json.loads(Path("results/a/summary.json").read_text())
    assert [each["name"] for each in summary["regions_of_interest"]] == ["core", "2", "dot"]
    for warning in (
        "regions of interest off the slide: 1, without figures",
        "regions of interest that hold no pixel's centre, so that their areas are 0: dot",
    ):
        assert warning in summary["warnings"]
        assert warning in said


@pytest.mark.usefixtures("place")
def test_a_folder_or_an_annotation_that_is_none_is_told(
    command: Command, tiny_bundle: SaveBundle
) -> None:
    batch = ("infer", "slides", "--model", tiny_bundle(), "--config", "config.toml")
    code, said = command(*batch, "--annotations", "absent")
    assert code == 2
    assert "absent is not a folder. Check --annotations." in " ".join(said.split())
    assert not Path("results").exists()
    Path("drawn/b.xml").write_text("<svg/>")
    code, said = command(*batch, "--annotations", "drawn")
    assert code == 1
    assert [row["slide"] for row in _rows("results/failures.csv")] == ["b.png"]
    assert len(_rows("results/summary.csv")) == 2 + 4
