"""Probabilities and uncertainty of slides: what was stitched, whoever computes it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from pathoseg.config_file import load_config
from pathoseg.inference.segmenter import MaskRow, Segmenter
from pathoseg.inference.slide_job import SavedRows
from pathoseg.models.bundle import load_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides import region
from pathoseg.slides.slide import open_slide

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Array = NDArray[np.uint8]

CERTAINTY = {"probability.ome.tiff", "uncertainty.ome.tiff"}
MPP = ("--assume-mpp", "0.5")
ASKED = "[outputs]\nprobability = true\n"
ALL = f'{ASKED}[tissue]\nmethod = "all"\n'


def draw(path: Path, height: int = 300, width: int = 423, seed: int = 0) -> Path:
    """Stained blobs of several sizes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 230, (12, 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels = (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def read(folder: Path) -> tuple[Array, Array, Array]:
    """The mask, the probabilities and the uncertainty of a result."""
    names = ("mask.ome.tiff", "probability.ome.tiff", "uncertainty.ome.tiff")
    mask, probability, uncertainty = (np.asarray(tifffile.imread(folder / name)) for name in names)
    return mask, probability, uncertainty


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    ("options", "network"),
    [
        ("tile = 100", ModelConfig("unet", "segment", 3, width=4, depth=2)),
        ("overlap = 40", ModelConfig("unet", "segment", 3, width=4, depth=2)),
        ("batch = 3", ModelConfig("unet", "segment", 3, width=4, depth=2, norm="group")),
        ("batch = 1", ModelConfig("resnet11_v2", "classify", 3, width=2)),
        ("object_um = 12", ModelConfig("unet", "objects", 3, width=4, depth=2)),
    ],
    ids=["windows", "tiles", "group", "classify", "objects"],
)
def test_level_0_is_what_was_stitched(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, options: str, network: ModelConfig
) -> None:
    height, width = 190, 260
    slide = draw(tmp_path / "slide.png", height, width)
    (tmp_path / "c.toml").write_text(f"{ALL}[infer]\n{options}\n")
    bundle = tiny_bundle(network=network, overlap=0 if network.task == "classify" else 32)
    code, said = command(
        *("infer", slide, "--model", bundle, "--out", tmp_path / "out", *MPP),
        *("--config", tmp_path / "c.toml"),
    )
    assert code == 0, said
    net, card = load_bundle(bundle)
    segmenter = Segmenter(net, card, load_config(tmp_path / "c.toml"))
    with open_slide(slide, assume_mpp=0.5) as opened:
        expected = segmenter.maps(opened)[:3]  # of objects the height is the fourth
    mask, probability, uncertainty = read(tmp_path / "out" / "slide")
    assert probability.shape == (3, *mask.shape)
    np.testing.assert_array_equal(probability, np.round(expected * np.float32(255)))
    if mask.size > 100:
        assert len(np.unique(probability)) > 50, "the net answers alike everywhere"
    entropy = -(expected * np.log(np.maximum(expected, 1e-30))).sum(axis=0) / np.log(3)
    assert np.abs(uncertainty - 255 * entropy).max() <= 0.51
    np.testing.assert_array_equal(mask, expected.argmax(axis=0))
    # The fields of the summary are those of the file.
    fields = summary(tmp_path / "out" / "slide")["least_certain"]
    assert 1 <= len(fields) <= 10
    scale = width / expected.shape[2] if network.task != "classify" else 64
    for field in fields:
        y, x, down, across = (round(field[key] / scale) for key in ("y", "x", "height", "width"))
        here = uncertainty[y : y + max(1, down), x : x + max(1, across)]
        assert field["uncertainty"] == pytest.approx(here.mean() / 255, abs=1e-5)


def test_the_result_is_the_same_in_processes_and_from_saved_rows(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of the other processes, which are forked by what is there (`fork_server.py`).
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    draw(tmp_path / "slide.png", 1700, 300)  # two bands of windows
    Path("c.toml").write_text(ALL)
    call = ("infer", "slide.png", "--model", tiny_bundle(), "--config", "c.toml", *MPP)
    assert command(*call, "--out", "alone")[0] == 0
    code, said = command(*call, "--out", "shared", "--ranks", "2")
    assert code == 0, said

    saved = list[int]()
    whole = SavedRows.save

    def stop_after_one(self: SavedRows, row: MaskRow) -> None:
        whole(self, row)
        saved.append(row.number)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SavedRows, "save", stop_after_one)
    assert command(*call, "--out", "resumed")[0] == 130
    assert not Path("resumed/slide").exists()
    code, said = command(*call, "--out", "resumed", "--resume")
    assert code == 0, said
    assert saved == [0, 1], "the first row is not computed again"
    for other in ("shared", "resumed"):
        for name in ("mask.ome.tiff", *CERTAINTY):
            ours, theirs = (Path(out, "slide", name).read_bytes() for out in ("alone", other))
            assert ours == theirs, (other, name)
        found = [summary(Path(out, "slide"))["least_certain"] for out in ("alone", other)]
        assert found[0] == found[1]
        assert len(found[0]) > 3


def test_glass_is_background_and_what_was_not_read_is_nothing(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "_BLOCK", 64)
    pixels = np.full((1024, 1024, 3), 243, np.uint8)
    drawn = np.asarray(Image.open(draw(tmp_path / "x.png", 600, 400)))
    pixels[:600, :400] = drawn
    slide = tmp_path / "torn.tif"
    tifffile.imwrite(
        slide, pixels, tile=(64, 64), compression="zlib", photometric="rgb",
        resolution=(20000, 20000), resolutionunit="CENTIMETER",
    )  # fmt: skip
    with tifffile.TiffFile(slide) as tiff:
        offset, length = (
            values[17] for values in (tiff.pages[0].dataoffsets, tiff.pages[0].databytecounts)
        )
    with slide.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * length)
    (tmp_path / "c.toml").write_text(ASKED)
    code, said = command(
        *("infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out"),
        *("--config", tmp_path / "c.toml"),
    )
    assert code == 0, said
    mask, probability, uncertainty = read(tmp_path / "out" / "torn")
    torn = np.zeros(mask.shape, bool)
    torn[64:128, 64:128] = True
    assert np.array_equal(mask == 255, torn)
    assert not probability[:, torn].any()
    assert not uncertainty[torn].any()
    glass = np.s_[800:, 600:]
    assert (probability[(slice(None), *glass)] == np.array([255, 0, 0])[:, None, None]).all()
    assert not uncertainty[glass].any()
    sums = probability.sum(axis=0, dtype=int)
    assert np.abs(sums[~torn] - 255).max() <= 2, "rounding of three classes"
    fields = summary(tmp_path / "out" / "torn")["least_certain"]
    assert {(field["x"], field["y"]) for field in fields} <= {
        (x, y) for x in (0, 256) for y in (0, 256, 512)
    }
    assert len(fields) >= 2
    [first] = [field for field in fields if (field["x"], field["y"]) == (0, 0)]
    known = uncertainty[:256, :256][~torn[:256, :256]]
    assert first["uncertainty"] == pytest.approx(known.mean() / 255, abs=0.01)  # edges of tissue


def test_a_result_is_made_again_where_certainty_is_asked_for(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide, out = draw(tmp_path / "s.png", 96, 96), tmp_path / "out"
    (tmp_path / "c.toml").write_text(ALL)
    call = ("infer", slide, "--model", tiny_bundle(), "--out", out, *MPP)
    asked = ("--config", tmp_path / "c.toml", "--resume", "--overwrite")
    assert command(*call)[0] == 0
    assert not {path.name for path in (out / "s").iterdir()} & CERTAINTY
    assert summary(out / "s")["least_certain"] is None
    assert "already done" not in command(*call, *asked)[1]
    assert {path.name for path in (out / "s").iterdir()} >= CERTAINTY
    assert "already done" in command(*call, *asked)[1]
    (out / "s" / "uncertainty.ome.tiff").write_bytes(b"cut short")
    assert "already done" not in command(*call, *asked)[1]
    assert read(out / "s")[2].shape == (96, 96)
    assert (
        command(*call, "--overwrite")[0] == 0
    )  # without: the new result takes the place of the whole folder
    assert not {path.name for path in (out / "s").iterdir()} & CERTAINTY
