"""pathoseg check: it says what train does, goes on after bad slides, and exits accordingly."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

Command = Callable[..., tuple[int, str]]

CHECK = ("check", "--config", "tiny.toml", "--slides", "slides")


def _rows(path: Path = Path("check.csv")) -> dict[str, dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["slide"]: row for row in csv.DictReader(file)}


def _outlines(path: Path, *boxes: tuple[str, int, int, int, int]) -> None:
    """A QuPath file of boxes: class, left, top, right, bottom; it takes the mask's place."""
    path.with_name(f"{path.stem}_mask.png").unlink(missing_ok=True)
    features = [
        {
            "type": "Feature",
            "properties": {"objectType": "annotation", "classification": {"name": name}},
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]],
            },
        }
        for name, x0, y0, x1, y1 in boxes
    ]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    path.with_suffix(".geojson").write_text(text)


def test_it_says_what_train_does(toy_slides: Path, command: Command) -> None:
    inner = toy_slides / "inner"
    inner.mkdir()
    for end in (".png", "_mask.png"):
        (toy_slides / f"slide3{end}").rename(inner / f"slide3{end}")
    code, said = command(*CHECK)
    assert code == 0, said
    assert "Take care" not in said
    assert "Written to check.csv; to look at: check.html" in said
    rows = _rows()
    code, trained = command("train", *CHECK[1:], "--epochs", 1, "--out", "run")
    assert code == 0, trained
    splits = {name: (row["patient"], row["split"]) for name, row in rows.items()}
    recorded = _rows(Path("run/splits.csv"))
    assert splits == {name: (row["patient"], row["split"]) for name, row in recorded.items()}
    assert "inner/slide3.png" in rows
    [line] = [line for line in said.splitlines() if line.startswith("disc: on ")]
    assert line in trained.splitlines()
    tiles = sum(int(row["tiles_disc"]) for row in rows.values() if row["split"] == "train")
    assert f"on 3 of 3 training slides, {tiles} tiles" in line
    for name, row in rows.items():
        mask = np.asarray(Image.open(toy_slides / f"{name.removesuffix('.png')}_mask.png"))
        assert float(row["mm2_disc"]) == pytest.approx((mask == 1).sum() * 0.25e-6)
        blocks = mask.reshape(3, 32, 3, 32).any(axis=(1, 3))
        assert (int(row["tiles"]), int(row["tiles_disc"])) == (9, blocks.sum())
        assert float(row["interest_mm2"]) == pytest.approx(96**2 * 0.25e-6)
    page = Path("check.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)|url\(|<script", page), "one file"
    assert page.count("data:image/png;base64,") == 2 * 4, "a picture and its labels each"


@pytest.mark.usefixtures("toy_slides")
@pytest.mark.parametrize("name", ["Slide", "Tiles"])
def test_a_class_that_is_called_like_a_column_has_its_own(command: Command, name: str) -> None:
    tiny = Path("tiny.toml")
    tiny.write_text(tiny.read_text().replace("disc", name))
    code, said = command(*CHECK)
    assert code == 0, said
    [head] = [line.split() for line in said.splitlines() if line.split()[:2] == ["Slide", "Split"]]
    [row] = [line.split() for line in said.splitlines() if line.split()[:1] == ["slide0.png"]]
    assert head.count(name) == 2
    assert row[0:6:5] == ["slide0.png", "9"], "the column's own"
    assert _rows()["slide0.png"][f"tiles_{name}"] == row[-1]


def test_a_bad_slide_is_told_in_a_line_and_stops_no_other(
    toy_slides: Path, command: Command
) -> None:
    (toy_slides / "slide0.png").write_bytes((toy_slides / "slide0.png").read_bytes()[:300])
    (toy_slides / "slide1_mask.png").unlink()
    code, said = command(*CHECK, "--out", "found")
    assert code == 2
    assert said.count("Training would refuse: slide0.png: ") == 1
    assert "1 slide has no annotation and is left out: slide1.png" in said
    rows = _rows(Path("found/check.csv"))
    states = [rows[f"slide{number}.png"]["training"] for number in range(4)]
    assert states == ["refused", "left out", "used", "used"]
    assert float(rows["slide2.png"]["mm2_disc"]) > 0
    assert command("train", *CHECK[1:], "--out", "run")[0] == 2
    assert command(*CHECK, "--skip-bad-slides")[0] == 1
    for path in toy_slides.glob("slide*.png"):
        path.write_bytes(b"")
    code, said = command(*CHECK)
    assert (code, len(_rows())) == (2, 4)


@pytest.mark.parametrize(("split", "trains"), [("test", True), ("train", False), ("val", False)])
def test_a_slide_that_cannot_be_cut_is_refused_where_training_cuts_it(
    split: str, trains: bool, toy_slides: Path, command: Command
) -> None:
    """Also with --skip-bad-slides, which leaves out what cannot be read."""
    mask = toy_slides / "slide3_mask.png"
    Image.fromarray(np.asarray(Image.open(mask)) + np.uint8(1)).save(mask)  # a class without a name
    rows = "slide0,train\nslide1,train\nslide2,val\n"
    (toy_slides / "slides.csv").write_text(f"slide,split\n{rows}slide3,{split}\n")
    code, said = command(*CHECK, "--skip-bad-slides")
    assert (code == 2) == (not trains), said
    assert "slide3.png: " in said
    train = ("train", *CHECK[1:], "--skip-bad-slides", "--epochs", "1", "--out", "run")
    assert (command(*train)[0] == 2) == (not trains)


def test_what_is_wrong_with_many_slides_is_said_once(toy_slides: Path, command: Command) -> None:
    for number in range(4):
        _outlines(toy_slides / f"slide{number}.png", ("disc", 5, 5, 60, 60), ("ring", 70, 5, 90, 9))
    rows = "slide0,train\nslide1,train\nslide2,val\nslide3,test\n"
    (toy_slides / "slides.csv").write_text(f"slide,split\n{rows}")
    code, said = command(*CHECK)
    assert code == 2
    assert said.count('has regions of class "ring"') == 2
    names = ", ".join(f"slide{number}.png" for number in range(3))
    assert f"Training would refuse: 3 slides ({names}): slides/slide0.geojson has" in said
    assert "Take care: slide3.png: slides/slide3.geojson has" in said  # of the test split
    assert {row["training"] for row in _rows().values()} == {"refused", "left out"}
    config = Path("tiny.toml").read_text().replace("assume_mpp = 0.5\n", "")
    Path("tiny.toml").write_text(config)
    code, said = command(*CHECK)
    assert (code, said.count("--assume-mpp")) == (2, 1)
    _outlines(toy_slides / "slide0.png", ("disc", 5, 5, 60, 60), ("dot", 70, 5, 90, 9))
    code, said = command(*CHECK, "--assume-mpp", 0.5)
    assert "Written to check.csv, in place of an earlier one; to look at: check.html" in said
    assert said.count("Training would refuse: slide0.png: ") == 1, "another class"
    assert said.count("Training would refuse: 2 slides (slide1.png, slide2.png): ") == 1


def test_every_odd_mask_and_every_option_is_told(toy_slides: Path, command: Command) -> None:
    Image.fromarray(np.full((96, 96), 255, np.uint8)).save(toy_slides / "slide0_mask.png")
    odd = np.full((96, 96), 300, np.uint16)
    Image.fromarray(odd).save(toy_slides / "slide1_mask.png")
    network = 'name = "unet_resnet18"\nencoder_weights = "gone.pth"'
    text = Path("tiny.toml").read_text().replace("width = 4\ndepth = 2", network)
    Path("tiny.toml").write_text(text + "[loss]\nclass_weights = [1, 2, 3, 4, 5]\n")
    code, said = command(*CHECK)
    said = " ".join(said.split())
    assert code == 2, said
    for told in (
        "Training would refuse: slide0.png: slides/slide0_mask.png holds no class",
        "Training would refuse: slide1.png: slides/slide1_mask.png holds the values 300 to 300",
        "gone.pth",
    ):
        assert told in said
    assert said.count("Training would refuse") == 4
    refused = [row["training"] for row in _rows().values()]
    assert refused == ["refused", "refused", "used", "used"]


def test_a_renamed_class_that_is_nowhere_is_said_once(toy_slides: Path, command: Command) -> None:
    rename = '[annotations.rename]\nDisk = "disc"\n"Disc 2" = "disc"\n'
    Path("tiny.toml").write_text(Path("tiny.toml").read_text() + rename)
    for number, name in enumerate(("Disc 2", "disc", "disc", "disc")):
        _outlines(toy_slides / f"slide{number}.png", (name, 5, 5, 60, 60))
    code, said = command(*CHECK)
    line = (
        "Take care: [annotations] rename: no annotation that can be read has a class "
        '"Disk"; there are "disc", "Disc 2".\n'
    )
    assert (code, said.count(line), said.count("[annotations] rename")) == (1, 1, 1)
    code, said = command("train", *CHECK[1:], "--epochs", 1, "--out", "run")
    assert (code, said.count(line), said.count("[annotations] rename")) == (0, 1, 1)
    assert "Disk" in Path("run/report.html").read_text()
    code, said = command("evaluate", "--model", "run", "--slides", "slides")
    assert (code, "Disk" in said) == (0, False), "one of the run's classes need not be there"


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        ("slide0,val\n", (), "has no row for slide1.png"),
        ("slide0,val\nslide1,val\nslide2,test\nslide3,val\n", (), "None of the 4 slides is left"),
        ("slide0,val\nslide1,\nslide2,\nslide3,\n", ("--tile", "31"), "31"),
        ("slide0,val\nslide1,\nslide2,\nslide3,\n", (), "class_weights"),
    ],
)
def test_what_training_refuses_of_all_slides_together(
    rows: str, options: tuple[str, ...], why: str, toy_slides: Path, command: Command
) -> None:
    (toy_slides / "slides.csv").write_text(f"slide,split\n{rows}")
    if why == "class_weights":
        with Path("tiny.toml").open("a") as config:
            config.write("\n[loss]\nclass_weights = [1.0, 1.0, 1.0]\n")
    code, said = command(*CHECK, *options)
    assert (code, why in said.partition("Training would refuse")[2]) == (2, True), said
    code, said = command("train", *CHECK[1:], *options, "--out", "run")
    assert (code, why in said) == (2, True), said
    assert not Path("run").exists()


def test_slides_that_wait_for_the_classes_are_not_left_out(
    toy_slides: Path, command: Command
) -> None:
    """Compare terminal and check.csv where unknown classes keep all slides from being cut."""
    text = Path("tiny.toml").read_text()
    Path("tiny.toml").write_text(text.replace('["disc"]', '["background"]'))
    code, said = command(*CHECK)
    assert (code, "background is index 0" in said) == (2, True), said
    assert "left out" not in said
    assert {row["training"] for row in _rows().values()} == {"used"}


@pytest.mark.parametrize("page", [0, 1])
def test_a_damaged_slide_is_told_of_and_counted_by_cache(
    page: int, toy_slides: Path, command: Command
) -> None:
    pixels, path = np.asarray(Image.open(toy_slides / "slide0.png")), toy_slides / "slide0.tif"
    pixels = pixels.repeat(16, 0).repeat(16, 1)  # its thumbnail is of the coarse level
    scale = {"resolution": (320_000, 320_000), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as tiff:
        for level in (pixels, pixels[::2, ::2]):
            how = {"photometric": "rgb", "tile": (384, 384), "compression": "zlib"}
            tiff.write(level, metadata=None, **how, **scale)
    with tifffile.TiffFile(path) as tiff:
        place, count = tiff.pages[page].dataoffsets[0], tiff.pages[page].databytecounts[0]
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x13" * count)
    (toy_slides / "slide0.png").unlink()
    code, said = command(*CHECK)
    assert code == 1, said
    lost = ("1 of 16 places of it", "part of a coarse level")[page]
    assert said.count(f"Take care: slide0.tif is damaged: {lost} cannot be read") == 1, said
    code, said = command("cache", *CHECK[1:])
    assert code == 0, said
    told = re.findall(r"Take care: (.*) is damaged: (\d+) of its tiles", said)
    assert [name for name, _ in told] == ["slide0.tif"][:page], "the coarse level is learnt from"


def test_scenes_that_are_not_read_are_told_of(toy_slides: Path, command: Command) -> None:
    pixels = np.asarray(Image.open(toy_slides / "slide0.png"))
    metadata = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    with tifffile.TiffWriter(toy_slides / "slide0.ome.tif", ome=True) as tiff:
        for scene in (pixels, pixels[::-1]):
            tiff.write(scene, photometric="rgb", metadata=metadata)
    (toy_slides / "slide0.png").unlink()
    code, said = command(*CHECK)
    assert code == 1, said
    told = "Take care: slide0.ome.tif: it holds 2 scenes, of which only one of 96 × 96 px is read"
    assert said.count(told) == 1, said


def test_what_is_likely_not_meant_is_said(toy_slides: Path, command: Command) -> None:
    config = Path("tiny.toml").read_text().replace('classes = ["disc"]\n', "")
    Path("tiny.toml").write_text(config.replace("tile = 32", "tile = 320"))
    glass = np.full((960, 960, 3), 244, np.uint8)  # large enough for tissue to be looked for
    rng = np.random.default_rng(0)
    glass[:300, :300] = np.clip(rng.normal((180, 90, 150), 20, (300, 300, 3)), 0, 255)
    Image.fromarray(glass).save(toy_slides / "slide0.png")
    _outlines(
        toy_slides / "slide0.png",
        ("Region*", 0, 0, 900, 900),
        ("disc", 500, 500, 900, 900),
        ("Disc", 20, 20, 40, 40),
        ("disc", 2000, 2000, 2100, 2100),
    )
    _outlines(toy_slides / "slide1.png", ("rare", 5, 5, 60, 60))
    for number in (2, 3):
        _outlines(toy_slides / f"slide{number}.png", ("disc", 5, 5, 60, 60))
    table = "slide,split\nslide0,train\nslide1,val\nslide2,train\nslide3,train\n"
    (toy_slides / "slides.csv").write_text(table)
    code, said = command(*CHECK)
    assert code == 1, said
    for expected in (
        "rare is only on slides that are held out (slide1.png)",
        "disc is on no validation slide",
        "Disc is in 1 training tile, fewer than 10",
        '"Disc" and "disc" are different classes',
        "Outlines off the slide: 1 not used, in 1 file (slide0.geojson)",
        "1 of 4 slides have regions of interest",
        "Labels lie mostly on glass: slide0.png (disc, 100%).",
        "Tiles of 320 px are 91% padding on 3 of 4 slides",
    ):
        assert expected in said, expected
    row = _rows()["slide0.png"]
    assert float(row["interest_mm2"]) == pytest.approx(900**2 * 0.25e-6)
    assert row["regions_disc"] == "1"
