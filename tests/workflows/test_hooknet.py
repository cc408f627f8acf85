"""`hooknet` on the command line: trained, also on ranks, resumed, segmented, judged, planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from pathoseg.config_file import load_config
from pathoseg.device import to_input
from pathoseg.geometry import Box, Frame, ModelInput
from pathoseg.inference.segmenter import Segmenter
from pathoseg.inference.windows import Windows
from pathoseg.models.bundle import load_bundle
from pathoseg.models.hooknet import HookNet
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.grid import TileGrid

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

SMALL = ModelConfig("hooknet", "segment", 3, width=4, depth=2)


def _draw(path: Path, width: int, height: int) -> Path:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(60, 230, (12, 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels = (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.usefixtures("small_windows")
def test_windows_join_to_one_pass_over_the_slide(tmp_path: Path, tiny_bundle: SaveBundle) -> None:
    path = _draw(tmp_path / "slide.png", 233, 190)
    net, card = load_bundle(tiny_bundle(network=SMALL))
    assert card.inputs == (ModelInput("image", 0.5, 64), ModelInput("context", 2.0, 64))
    flags = {"tissue": {"method": "all"}, "infer": {"tile": 96, "batch": 3}}
    segmenter = Segmenter(net, card, load_config(None, flags))
    with open_slide(path, assume_mpp=0.5) as slide, torch.inference_mode():
        plan = segmenter.plan(slide)
        assert isinstance(plan.grid, Windows)
        assert len(plan.grid) >= 20
        found = segmenter.maps(slide)
        whole = Box(0, 0, *(-(-side // 16) * 16 for side in (233, 190)))
        wide = card.context[0].beyond(whole, card.mpp, 64)  # more than is needed
        coarse = Frame.at(slide.size, slide.mpp, 2.0)
        image, context = (
            to_input(read_region(slide, frame, box).pixels[None], card.mean, card.std, _CPU)
            for frame, box in ((plan.frame, whole), (coarse, wide))
        )
        expected = net(image, context).softmax(1)[0, :, :190, :233].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


_CPU = torch.device("cpu")


def test_what_has_no_known_reach_keeps_the_tiles_of_training(
    tmp_path: Path, tiny_bundle: SaveBundle
) -> None:
    network = ModelConfig("hooknet", "segment", 3, width=4, depth=2, norm="group")
    segmenter = Segmenter(*load_bundle(tiny_bundle(network=network)), load_config(None))
    with open_slide(_draw(tmp_path / "slide.png", 90, 50), assume_mpp=0.5) as slide:
        plan = segmenter.plan(slide)
        assert isinstance(plan.grid, TileGrid)
        assert segmenter.maps(slide).shape == (3, 50, 90)


def test_what_cannot_be_read_around_a_tile_is_counted(
    tmp_path: Path, tiny_bundle: SaveBundle, command: Command
) -> None:
    pixels, path = np.asarray(Image.open(_draw(tmp_path / "a.png", 256, 192))), tmp_path / "a.tif"
    scale = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as tiff:
        for level in (pixels, pixels[::4, ::4]):
            how = {"photometric": "rgb", "tile": (64, 64), "compression": "zlib"}
            tiff.write(level, metadata=None, **how, **scale)
    with tifffile.TiffFile(path) as tiff:
        [place, *_], [count, *_] = tiff.pages[1].dataoffsets, tiff.pages[1].databytecounts
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x13" * count)
    infer = ("infer", path, "--model", tiny_bundle(network=SMALL), "--out", tmp_path / "out")
    code, said = command(*infer)
    assert code == 0, said
    summary = json.loads((tmp_path / "out" / "a" / "summary.json").read_text())
    assert summary["tiles"]["unread"] == summary["tiles"]["done"] > 0
    assert summary["unread_pixels"] == 0
    assert "The slide is damaged: " in said
    assert "What is missing lies around what is predicted" in said
    assert "tiles not all could be read" in (tmp_path / "out" / "report.html").read_text()


def test_it_trains_goes_on_segments_and_is_judged(toy_slides: Path, command: Command) -> None:
    text = Path("tiny.toml").read_text().replace("tile = 32", 'tile = 32\ncache = "tiles"')
    text = text.replace("[train]", "[train]\nsamples_per_epoch = 4")
    Path("cached.toml").write_text(text)
    wanted = ("--slides", toy_slides, "--model", "hooknet", "--config", "cached.toml")
    code, said = command("cache", *wanted)
    assert code == 0, said
    assert "With the input `context` of hooknet, at 2 µm per pixel." in said
    shards = sorted(Path("tiles").glob("*/*/pixels/c.*"))
    assert len(shards) == 8, "two resolutions of four slides"
    code, said = command("train", *wanted, "--out", "run", "--epochs", 1)
    assert code == 0, said
    assert sorted(Path("tiles").glob("*/*/pixels/c.*")) == shards, "training reads what is there"
    code, said = command("train", "--resume", "--out", "run", "--epochs", 2)
    assert code == 0, said
    trained, card = load_bundle(Path("run/model"))
    assert isinstance(trained, HookNet)
    assert card.inputs == (ModelInput("image", 0.5, 32), ModelInput("context", 2.0, 32))
    code, said = command("infer", toy_slides, "--model", "run", "--assume-mpp", 0.5, "--out", "out")
    assert code == 0, said
    assert "it is smaller than the 64 µm that the model's input `context` shows" in said
    code, said = command(
        "evaluate", "--slides", toy_slides, "--model", "run", "--config", "tiny.toml"
    )
    assert code == 0, said
    assert "all (val)  Dice: mean" in said


@pytest.mark.process
def test_ranks_train_it_in_stages(toy_slides: Path, command: Command) -> None:
    text = Path("tiny.toml").read_text().replace("[train]", "[train]\nsamples_per_epoch = 4")
    Path("few.toml").write_text(text)
    stages = ("--config", "few.toml", "--ranks", 2, "--order", "gpipe", "--epochs", 1)
    train = ("train", "--slides", toy_slides, "--model", "hooknet", "--out", "run")
    code, said = command(*train, *stages)
    assert code == 0, said
    assert "2 ranks: gpipe, " in said
    assert len(load_bundle(Path("run/model"))[1].inputs) == 2


def test_what_does_not_fit_is_refused_with_the_nearest(toy_slides: Path, command: Command) -> None:
    train = ("train", "--slides", toy_slides, "--model", "hooknet", "--config")
    code, said = command(*train, "tiny.toml", "--tile", 40)
    assert code == 2
    assert "Tiles of 40 px do not fit this model, which needs multiples of 16 px" in said
    assert "Choose 32 or 48 px" in said
    Path("odd.toml").write_text(Path("tiny.toml").read_text().replace("= 32", "= 32\noverlap = 6"))
    code, said = command(*train, "odd.toml")
    assert code == 2
    assert "do not lie on pixels of the input `context`, 4 px wide" in said
