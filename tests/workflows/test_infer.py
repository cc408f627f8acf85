"""Segmenting slides: whole results, outputs that agree, batches, interruption, going on."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import shapely
import tifffile
import torch
from PIL import Image
from shapely.geometry import shape

import pathoseg
from pathoseg.annotations.annotation import ClassTable
from pathoseg.config_file import load_config
from pathoseg.device import to_input
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Size
from pathoseg.inference import leases, slide_job
from pathoseg.inference.leases import Leases
from pathoseg.inference.result_folder import STATES, State, state_file, write_state
from pathoseg.inference.segmenter import Segmenter
from pathoseg.inference.slide_job import SlideJob, WorkerContext
from pathoseg.inference.windows import Windows
from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import load_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs.batch_report import BatchResults
from pathoseg.slides import region
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.training.run_folder import bundle_of
from pathoseg.workflows import infer as workflow
from tests.forked import Forked

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Start = Callable[..., Forked]

FILES = {"mask.ome.tiff", "regions.geojson", "overlay.png", "summary.json"}
MPP = ("--assume-mpp", "0.5")


def _draw(path: Path, seed: int = 0, width: int = 211, height: int = 150) -> Path:
    """Stained blobs of several sizes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 230, (12, 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels = (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def _mask(folder: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(tifffile.imread(folder / "mask.ome.tiff"))


def _summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_outlines_that_are_all_left_out_are_said(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = _draw(tmp_path / "a.png", width=96, height=96)
    (tmp_path / "large.toml").write_text("[infer]\nmin_region_um2 = 1e6\n")
    code, said = command(
        "infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out",
        "--config", tmp_path / "large.toml", "--assume-mpp", "0.5",
    )  # fmt: skip
    assert code == 0, said
    assert _mask(tmp_path / "out/a").any()
    assert not json.loads((tmp_path / "out/a/regions.geojson").read_text())["features"]
    assert "Take care: no region reaches 1e+06 µm²" in said


def test_all_outputs_of_a_slide_agree(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = _draw(tmp_path / "case 1.b.png", width=423, height=301)
    (tmp_path / "exact.toml").write_text("[infer]\nsimplify = 0.0\nmin_region_um2 = 0.0\n")
    code, said = command(
        "infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out",
        "--config", tmp_path / "exact.toml", "--assume-mpp", "0.25",
    )  # fmt: skip
    assert code == 0, said
    folder = tmp_path / "out" / "case 1.b"
    assert {path.name for path in folder.iterdir()} == FILES
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        folder.name, "summary.csv", "failures.csv", "report.html", "states",
    }  # fmt: skip

    mask = _mask(folder)
    assert mask.shape == (151, 212)
    with tifffile.TiffFile(folder / "mask.ome.tiff") as tiff:
        pixels = tifffile.xml2dict(tiff.ome_metadata)["OME"]["Image"]["Pixels"]
    assert (pixels["PhysicalSizeX"], pixels["PhysicalSizeY"]) == (0.5, 0.5)

    areas, regions = Counter[str](), Counter[str]()
    extent = shapely.box(0, 0, 424, 302)
    for feature in json.loads((folder / "regions.geojson").read_text())["features"]:
        name, outline = feature["properties"]["classification"]["name"], shape(feature["geometry"])
        assert outline.is_valid
        assert extent.covers(outline)
        areas[name] += outline.area
        regions[name] += 1
    rows = _table(tmp_path / "out" / "summary.csv")
    summary = _summary(folder)
    for index, (row, entry) in enumerate(zip(rows, summary["classes"], strict=True), start=1):
        count = int((mask == index).sum())
        assert count > 50, "the net answers one class alone, so this test shows little"
        assert entry["pixels"] == count
        assert areas[entry["name"]] == 4 * count, "level-0 pixels, at twice the mask's resolution"
        assert (row["slide"], row["class"]) == (slide.name, entry["name"])
        assert float(row["area_mm2"]) == pytest.approx(count * 0.25e-6, rel=1e-6)
        assert int(row["regions"]) == regions[entry["name"]]
        share = count * 0.25e-6 / summary["tissue_mm2"]
        assert float(row["share_of_tissue"]) == pytest.approx(share, rel=1e-4)
    assert summary["unread_pixels"] == 0
    assert _table(tmp_path / "out" / "failures.csv") == []


def test_a_slide_s_own_warnings_are_those_of_its_result(
    tmp_path: Path, tiny_bundle: SaveBundle
) -> None:
    path = tmp_path / "slide.ome.tif"
    stated = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    with tifffile.TiffWriter(path, ome=True) as tiff:
        for _ in range(2):
            tiff.write(np.zeros((64, 64, 3), np.uint8), photometric="rgb", metadata=stated)
    segmenter = Segmenter(*load_bundle(tiny_bundle()), load_config(None))
    with open_slide(path) as slide:
        [warning] = segmenter.plan(slide).warnings
    assert warning.startswith("it holds 2 scenes, of which only one of 64 × 64 px is read")


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("overlap", [None, 48])
def test_predicting_in_tiles_equals_predicting_whole(
    tmp_path: Path, tiny_bundle: SaveBundle, overlap: int | None
) -> None:
    path = _draw(tmp_path / "slide.png", width=233, height=190)
    net, card = load_bundle(tiny_bundle())
    flags = {"tissue": {"method": "all"}, "infer": {"tile": 80 if overlap is None else None}}
    flags["infer"] |= {"overlap": overlap, "batch": 3}
    segmenter = Segmenter(net, card, load_config(None, flags))
    reach = edge_reach(net)
    assert reach is not None
    assert 2 * reach <= card.overlap == 48, "no seam shows where the overlap holds the reach"
    with open_slide(path, assume_mpp=0.5) as slide, torch.inference_mode():
        plan = segmenter.plan(slide)
        assert isinstance(plan.grid, Windows if overlap is None else TileGrid)
        assert len(plan.indices) == len(plan.grid) >= 30
        found = segmenter.maps(slide)
        # Windows end where the slide does, tiles beyond.
        last = plan.grid.box(len(plan.grid) - 1)
        covered = read_region(slide, plan.frame, Box(0, 0, last.right, last.bottom)).pixels
        logits = net(to_input(covered[None], card.mean, card.std, torch.device("cpu")))
    whole = logits.softmax(1)[0, :, :190, :233].numpy()
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "network",
    [
        {"norm": "batch"},
        {"norm": "group"},
        {"norm": "instance"},
        {"name": "resnet11_v2", "depth": None, "task": "classify"},
        {"name": "own_network:make", "width": None, "depth": None},
    ],
    ids=lambda network: " ".join(str(value) for value in network.values() if value),
)
def test_what_no_known_reach_bounds_keeps_the_tiles_of_training(
    tmp_path: Path,
    tiny_bundle: SaveBundle,
    monkeypatch: pytest.MonkeyPatch,
    network: dict[str, Any],
) -> None:
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n\n"
        "def make(in_channels, classes):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, classes, 1), nn.BatchNorm2d(classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"name": "unet", "task": "segment", "classes": 3, "width": 4, "depth": 2, **network}
    bundle = tiny_bundle(network=ModelConfig(**options))
    net, card = load_bundle(bundle, network["name"] if ":" in network.get("name", "") else None)
    segmenter = Segmenter(net, card, load_config(None))
    with open_slide(_draw(tmp_path / "slide.png"), assume_mpp=0.5) as slide:
        grid = segmenter.plan(slide).grid
    if network == {"norm": "batch"}:
        assert isinstance(grid, Windows)
        assert segmenter.tiling is not None
    else:
        assert isinstance(grid, TileGrid)
        assert segmenter.tiling is None, "so that its results are found under their earlier key"
        assert grid.tile == Size(64, 64)
        assert grid.overlap == (0 if card.model.task == "classify" else 48)


def test_a_bundle_of_an_earlier_version_answers_as_it_did(
    tmp_path: Path, tiny_bundle: SaveBundle
) -> None:
    bundle = tiny_bundle()
    card = json.loads((bundle / "model.json").read_text())
    assert card.pop("tiling") == "windows"
    (bundle / "model.json").write_text(json.dumps(card))
    path = _draw(tmp_path / "slide.png")
    for tile, kind in ((None, TileGrid), (1024, Windows)):
        segmenter = Segmenter(*load_bundle(bundle), load_config(None, {"infer": {"tile": tile}}))
        with open_slide(path, assume_mpp=0.5) as slide:
            assert isinstance(segmenter.plan(slide).grid, kind)
    net, earlier = load_bundle(bundle)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = net(images)
        Segmenter(net, earlier, load_config(None))
        assert torch.equal(net(images), before), "to the bit: no norm is folded"


def test_a_model_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match="nowhere does not exist"):
        bundle_of(tmp_path / "nowhere")


def test_the_model_of_an_unfinished_run_is_said_to_be_so(
    tmp_path: Path, tiny_bundle: SaveBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tiny_bundle()
    (tmp_path / "run").mkdir()
    bundle.rename(tmp_path / "run" / "model")
    (tmp_path / "run" / "config.toml").touch()
    assert bundle_of(tmp_path / "run") == tmp_path / "run" / "model"
    assert "run is not finished" in capsys.readouterr().err
    (tmp_path / "run" / "summary.json").touch()
    assert bundle_of(tmp_path / "run") == tmp_path / "run" / "model"
    assert "not finished" not in capsys.readouterr().err


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("options", ["tile = 100", "overlap = 48"])
def test_unread_parts_are_255_and_counted(
    tmp_path: Path,
    command: Command,
    tiny_bundle: SaveBundle,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    monkeypatch.setattr(region, "_BLOCK", 64)
    rng = np.random.default_rng(0)
    pixels = rng.integers(60, 220, (192, 256, 3), np.uint8)
    slide = tmp_path / "torn.tif"
    tifffile.imwrite(
        slide, pixels, tile=(64, 64), compression="zlib", photometric="rgb",
        resolution=(20000, 20000), resolutionunit="CENTIMETER",
    )  # fmt: skip
    with tifffile.TiffFile(slide) as tiff:
        offset, length = (
            values[6] for values in (tiff.pages[0].dataoffsets, tiff.pages[0].databytecounts)
        )
    with slide.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * length)
    (tmp_path / "tiles.toml").write_text(f"[infer]\n{options}\n")
    code, said = command(
        "infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out",
        "--config", tmp_path / "tiles.toml",
    )  # fmt: skip
    assert code == 0, said
    mask, summary = _mask(tmp_path / "out" / "torn"), _summary(tmp_path / "out" / "torn")
    torn = np.zeros(mask.shape, bool)
    torn[64:128, 128:192] = True
    assert np.array_equal(mask == 255, torn)
    assert summary["unread_pixels"] == torn.sum()
    assert summary["read_mm2"] == pytest.approx(summary["tissue_mm2"] - 0.001024), "all is tissue"
    assert 0 < summary["tiles"]["unread"] < summary["tiles"]["done"]
    tiles = summary["tiles"]
    assert f"{tiles['unread']} of {tiles['done']} tiles could not be read" in said
    damage = (
        f"the slide is damaged: {tiles['unread']} of {tiles['done']} tiles could not be read "
        "whole, 0.001024 mm² (8.33 % of the mask) not at all"
    )
    assert summary["warnings"][-1] == damage
    assert said.count("8.33 % of the mask") == 1
    assert "T" + damage[1:] in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("8.33 % of the mask") == 1


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("options", ["tile = 100", "overlap = 48"])
def test_a_slide_of_which_nothing_can_be_read_fails(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, options: str
) -> None:
    pixels = np.random.default_rng(0).integers(60, 220, (384, 448, 3), np.uint8)
    slide = tmp_path / "torn.tif"
    with tifffile.TiffWriter(slide) as tiff:
        for level, scale in ((pixels, 40_000), (pixels[::2, ::2], 20_000)):
            tiff.write(
                level, tile=(64, 64), compression="zlib", photometric="rgb", metadata=None,
                resolution=(scale, scale), resolutionunit="CENTIMETER",
            )  # fmt: skip
    with tifffile.TiffFile(slide) as tiff:
        places = list(zip(tiff.pages[1].dataoffsets, tiff.pages[1].databytecounts, strict=True))
    sound = slide.read_bytes()
    with slide.open("r+b") as file:
        for offset, length in places:
            file.seek(offset)
            file.write(b"\xff" * length)
    (tmp_path / "tiles.toml").write_text(f"[infer]\n{options}\n")
    infer = (
        "infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out",
        "--config", tmp_path / "tiles.toml",
    )  # fmt: skip
    code, said = command(*infer)
    assert code == 2, said
    assert "torn.tif cannot be segmented: nothing of the 0.01075 mm² that are not glass" in said
    assert not (tmp_path / "out" / "torn").exists()
    # with the same time and size, as a disk that was away and is back
    then = slide.stat()
    slide.write_bytes(sound)
    os.utime(slide, ns=(then.st_atime_ns, then.st_mtime_ns))
    code, said = command(*infer, "--resume")
    assert code == 0, said
    assert not (_mask(tmp_path / "out" / "torn") == 255).any()


def test_a_batch_goes_on_after_a_bad_slide(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    folder = tmp_path / "slides"
    for name in ("a.png", "a.bmp", "c.png"):
        _draw(folder / name)
    (folder / "b.svs").write_bytes(b"II*\0 and nothing else")
    out = tmp_path / "out"
    code, said = command("infer", folder, "--model", tiny_bundle(), "--out", out, *MPP)
    assert code == 1
    assert {path.name for path in out.iterdir()} == {
        "a.png", "a.bmp", "c", "summary.csv", "failures.csv", "report.html", "states",
    }  # fmt: skip
    [failure] = _table(out / "failures.csv")
    assert failure["slide"] == "b.svs"
    assert str(folder / "b.svs") in failure["reason"]
    assert failure["reason"] in said
    assert {row["slide"] for row in _table(out / "summary.csv")} == {"a.png", "a.bmp", "c.png"}

    _draw(folder / "b.png", seed=4)
    (folder / "b.png").rename(folder / "b.svs")  # mended; readers go by content
    before = (out / "c" / "summary.json").stat().st_mtime_ns
    code, said = command(
        "infer", folder, "--model", tmp_path / "model", "--out", out, *MPP, "--resume"
    )
    assert code == 0
    assert said.count("already done") == 3
    assert (out / "c" / "summary.json").stat().st_mtime_ns == before
    assert _table(out / "failures.csv") == []
    assert len(_table(out / "summary.csv")) == 2 * 4


def test_a_call_under_a_launcher_takes_nothing_of_the_call_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: SaveBundle
) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "1")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slides, bundle = [_draw(tmp_path / "a.png"), tmp_path / "b.png"], tiny_bundle()
    slides[1].write_bytes(b"\x89PNG and nothing else")
    done = tmp_path / "out" / "states" / "a.json"
    times = []
    for failed in (["b.png"], []):
        out = pathoseg.infer(
            slides, bundle, out=tmp_path / "out", options={"data": {"assume_mpp": 0.5}}
        )
        assert [row["slide"] for row in _table(out / "failures.csv")] == failed
        times.append(done.stat().st_mtime_ns)
        _draw(slides[1])  # mended
    assert times[1] > times[0], "without resume, all is made again"
    for thread in threading.enumerate():
        if thread.name == "launcher":
            thread.join(10)
            assert not thread.is_alive(), "it would keep the model in memory"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_program_learns_on_every_rank_that_the_only_slide_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: SaveBundle, rank: str
) -> None:
    for name, value in (("RANK", rank), ("SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slide = _draw(tmp_path / "a.png")
    bundle, options = tiny_bundle(), {"data": {"assume_mpp": 0.5}}

    def failing(*_: object) -> None:
        raise PathosegError("a.png is broken.", "This is a test.")

    monkeypatch.setattr(Segmenter, "plan", failing)
    with pytest.raises(PathosegError, match="is broken"):
        pathoseg.infer(slide, bundle, out=tmp_path / "out", options=options)


def test_a_slide_that_is_named_twice_is_segmented_once(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slide = _draw(tmp_path / "slides" / "s.png")
    common = ("--model", tiny_bundle(), "--out", "out", *MPP)
    code, said = command("infer", "slides", tmp_path / "slides", "slides/s.png", slide, *common)
    assert code == 0, said
    assert len([*Path("out").glob("*/summary.json")]) == 1


def test_python_starts_no_ranks(tmp_path: Path, tiny_bundle: SaveBundle) -> None:
    options = {"data": {"assume_mpp": 0.5}, "parallel": {"ranks": 2}}
    with pytest.raises(PathosegError, match=r"\[parallel\] ranks = 2 asks for ranks"):
        pathoseg.infer(
            _draw(tmp_path / "a.png"), tiny_bundle(), out=tmp_path / "out", options=options
        )
    assert not (tmp_path / "out").exists()


def test_what_a_dead_process_elsewhere_had_begun_is_waited_for_and_told(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()

    def say(line: str) -> None:
        told.append(line)
        if line.startswith("Waiting for "):
            monkeypatch.setattr(leases, "LEASE", 0.0)  # it is over

    monkeypatch.setattr(workflow, "say", say)
    monkeypatch.setattr(workflow, "_PATIENCE", 0.1)
    claim = tmp_path / "out" / ".work" / "s" / "claim"
    claim.parent.mkdir(parents=True)
    claim.write_text('{"host": "node9", "boot": "b", "pids": "p", "pid": 7, "born": 0.0}')
    slide = _draw(tmp_path / "s.png")
    code, said = command(
        *("infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out", "--resume", *MPP)
    )
    assert code == 0, said
    [waited] = [line for line in told if line.startswith("Waiting for ")]
    assert waited.startswith("Waiting for s.png, which other processes have begun.")


def test_two_slides_of_one_name_are_refused(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    one, other = _draw(tmp_path / "x" / "s.png"), _draw(tmp_path / "y" / "s.png")
    code, said = command(
        "infer", one, other, one, "--model", tiny_bundle(), "--out", tmp_path / "o"
    )
    assert code == 2
    assert str(one) in said
    assert str(other) in said
    assert not (tmp_path / "o").exists()


def test_results_lie_in_folders_like_those_of_the_slides(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    folder, out = tmp_path / "slides", tmp_path / "out"
    names = ["s.png", "x/s.png", "x/y/s.png", "x/y.png"]
    for seed, name in enumerate(names):
        _draw(folder / name, seed)
    (folder / "x" / "bad.png").write_bytes(b"\x89PNG")
    arguments = ("infer", folder, "--model", tiny_bundle(overlap=0), "--out", out, *MPP)
    code, said = command(*arguments)
    assert code == 1, said
    for name in ("s", "x/s", "x/y/s", "x/y.png"):
        assert {path.name for path in (out / name).iterdir()} >= FILES
    assert {path.name for path in out.iterdir()} == {
        *("s", "x", "states", "summary.csv", "failures.csv", "report.html")
    }
    assert {row["slide"] for row in _table(out / "summary.csv")} == set(names)
    assert [row["slide"] for row in _table(out / "failures.csv")] == ["x/bad.png"]
    assert "x/y/s.png: done" in said
    code, said = command(*arguments, "--resume")
    assert said.count("already done") == 4
    (folder / "states").mkdir()
    (folder / "s.png").rename(folder / "states" / "s.png")
    assert command(*arguments)[0] == 2, "results would lie among the states of the batch"


def test_no_result_takes_the_place_of_another_ones(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """Results of an earlier call count: a slide and a folder of slides may be called alike."""
    folder, out = tmp_path / "slides", tmp_path / "out"
    inside, alike = _draw(folder / "x" / "a.png", 1), _draw(tmp_path / "x.png", 2)
    infer = ("infer", "--model", tiny_bundle(), *MPP, "--out")
    assert command(*infer, out, folder)[0] == 0
    assert command(*infer, out, alike)[0] == 0
    assert {*out.iterdir()} >= {out / "x", out / "x.png"}
    assert {path.name for path in (out / "x/a").iterdir()} >= FILES
    assert {row["slide"] for row in _table(out / "summary.csv")} == {"x/a.png", "x.png"}

    again = tmp_path / "again"
    assert command(*infer, again, alike)[0] == 0
    code, said = command(*infer, again, folder)
    assert (code, f"{inside} would lie in {again / 'x'}" in said) == (2, True), said
    alike.rename(folder / "x.png")
    code, said = command(*infer, again, folder)
    assert (code, f"would lie in {again / 'x'}" in said) == (2, True), said
    assert {path.name for path in (again / "x").iterdir()} >= FILES


def test_a_slide_of_the_same_name_does_not_replace_the_result_of_another(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segment two patients' `HE.png` into one output folder, in a call for each."""
    one, other = _draw(tmp_path / "a" / "HE.png", 1), _draw(tmp_path / "b" / "HE.png", 2)
    infer = ("infer", "--model", tiny_bundle(), *MPP, "--out", tmp_path / "out")
    monkeypatch.chdir(one.parent)
    assert command(*infer, "HE.png")[0] == 0
    mask = tmp_path / "out" / "HE" / "mask.ome.tiff"
    before = mask.read_bytes()
    monkeypatch.chdir(other.parent)
    code, said = command(*infer, "HE.png", "--resume")
    assert (code, mask.read_bytes() == before) == (2, True), said
    assert f"is the result of another HE.png, {one}" in " ".join(said.split())
    copied = tmp_path / "c" / "HE.png"
    copied.parent.mkdir()
    copied.write_bytes(one.read_bytes())
    assert command(*infer, copied)[0] == 0, "the same slide in another place"
    assert command(*infer, "HE.png", "--overwrite")[0] == 0
    assert mask.read_bytes() != before
    other.rename(tmp_path / "HE.png")
    assert command(*infer, tmp_path / "HE.png")[0] == 0, "it was moved"


@pytest.mark.parametrize("taken", ["a/notes.txt", "a", "summary.csv", "report.html"])
def test_no_result_replaces_what_is_the_users(
    taken: str, tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """A result that would lie where the slides do, with a folder, slide or table of its name."""
    slide = _draw(tmp_path / "a.png", width=96, height=96)
    own = tmp_path / taken
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    infer = ("infer", slide, "--model", tiny_bundle(), *MPP, "--out", tmp_path)
    for more in ((), ("--overwrite",), ("--resume",)):
        code, said = command(*infer, *more)
        assert (code, "would replace it" in " ".join(said.split())) == (2, True), said
        assert own.read_text() == "mine"
    assert not (tmp_path / "states").exists()
    own.unlink()  # an empty folder of a result's name is in nobody's way
    assert command(*infer)[0] == 0
    assert slide.exists()


def test_slides_of_one_stem_are_not_replaced_by_their_results(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """Their results would have their whole names, beside them."""
    slides = [_draw(tmp_path / f"a.{kind}", 0, 96, 96) for kind in ("png", "bmp")]
    before = [slide.read_bytes() for slide in slides]
    code, said = command("infer", tmp_path, "--model", tiny_bundle(), *MPP, "--out", tmp_path)
    assert (code, "is no result" in " ".join(said.split())) == (2, True), said
    assert [slide.read_bytes() for slide in slides] == before


def test_files_beside_a_result_outlive_the_next_one(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide, out = _draw(tmp_path / "a.png", width=96, height=96), tmp_path / "out"
    infer = ("infer", slide, "--model", tiny_bundle(), *MPP, "--out", out)
    (tmp_path / "more.toml").write_text("[outputs]\nprobability = true\n")
    assert command(*infer, "--config", tmp_path / "more.toml")[0] == 0
    (out / "a" / "corrected.geojson").write_text("mine")
    (out / "a" / "figures").mkdir()
    (out / "a" / "figures" / "1.png").write_text("mine, too")
    code, said = command(*infer, "--overwrite")
    assert code == 0, said
    assert {path.name for path in (out / "a").iterdir()} == {
        *FILES,
        "corrected.geojson",
        "figures",
    }
    assert (out / "a" / "corrected.geojson").read_text() == "mine"
    assert (out / "a" / "figures" / "1.png").read_text() == "mine, too"


@pytest.mark.skipif(sys.platform != "linux", reason="file names are UTF-8 there")
def test_a_name_that_is_no_utf_8(tmp_path: Path, command: Command, tiny_bundle: SaveBundle) -> None:
    slide = tmp_path / os.fsdecode(b"Pr\xe4parat.png")
    _draw(tmp_path / "s.png").rename(slide)
    code, said = command("infer", slide, "--model", tiny_bundle(), *MPP, "--out", tmp_path / "out")
    assert code == 0, said
    assert {path.name for path in (tmp_path / "out" / slide.stem).iterdir()} >= FILES


@pytest.mark.parametrize("kind", [ValueError, MemoryError])
def test_an_unforeseen_failure_ends_its_slide_alone(
    tmp_path: Path,
    command: Command,
    tiny_bundle: SaveBundle,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    for seed, name in enumerate("abc"):
        _draw(tmp_path / "slides" / f"{name}.png", seed)

    def stumble(name: str, *arguments: Any) -> None:
        if name == "b.png":
            raise kind("no such luck")
        publish(name, *arguments)

    publish = slide_job.publish
    monkeypatch.setattr(slide_job, "publish", stumble)
    out = tmp_path / "out"
    infer = ("infer", tmp_path / "slides", "--model", tiny_bundle(), *MPP, "--out", out)
    code, said = command(*infer)
    assert (code, "2 of 3 slides done" in said, "Traceback" in said) == (1, True, False), said
    [failure] = _table(out / "failures.csv")
    assert failure["slide"] == "b.png"
    assert f"({kind.__name__}: no such luck, in slide_job.py:" in " ".join(failure.values())
    monkeypatch.undo()
    assert command(*infer, "--resume")[0] == 0


def test_a_failure_keeps_the_earlier_result(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = _draw(tmp_path / "s.png")
    arguments = ("infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out", *MPP)
    assert command(*arguments)[0] == 0
    folder = tmp_path / "out" / "s"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    slide.write_bytes(slide.read_bytes()[:5000])
    code, said = command(*arguments)
    assert code == 2
    assert str(slide) in said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failed_slide_that_keeps_its_result_is_counted_once(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    bad, good, out = _draw(tmp_path / "s.png"), _draw(tmp_path / "t.png"), tmp_path / "out"
    infer = ("infer", bad, good, "--model", tiny_bundle(), "--out", out, *MPP)
    assert command(*infer)[0] == 0
    before = _table(out / "summary.csv")
    bad.write_bytes(bad.read_bytes()[:5000])
    assert command(*infer)[0] == 1
    assert _table(out / "summary.csv") == before
    [failure] = _table(out / "failures.csv")
    told = ". The result of an earlier call is kept in s, its rows in summary.csv."
    assert failure["reason"].endswith(told)
    page = (out / "report.html").read_text()
    counts = re.findall(r'(Done|Failed)</div>\s*<div class="value">([^<]*)<', page)
    assert counts == [("Done", "1"), ("Failed", "1")]
    assert page.count(told) == page.count("of an earlier call</a>") == 1


def test_a_kill_while_a_result_is_replaced_loses_nothing(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take the place between two renames: the former result is moved away, no new one is there."""

    def stumble(*_: Any) -> None:
        raise ValueError("no such luck")

    slide, out = _draw(tmp_path / "s.png", width=96, height=96), tmp_path / "out"
    infer = ("infer", slide, "--model", tiny_bundle(), "--out", out, *MPP)
    assert command(*infer)[0] == 0
    own, away = out / "s" / "corrected.geojson", out / ".work" / "s" / "old-12345678"
    own.write_text("mine")
    for expected in (0, 2):
        away.parent.mkdir(parents=True, exist_ok=True)
        (out / "s").rename(away)
        code, said = command(*infer)
        assert (code, own.exists() and own.read_text()) == (expected, "mine"), said
        assert {path.name for path in (out / "s").iterdir()} == FILES | {own.name}
        assert not away.exists()
        monkeypatch.setattr(slide_job, "publish", stumble)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("overlap = 18", "Tiles of 64 px with 18 px overlap do not fit"),
        ("tile = 32", "Tiles of 32 px with 48 px overlap do not fit"),
        ("margin = 30", "between two margins of 30 px"),
    ],
)
def test_options_that_fit_no_slide_are_refused_once(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, options: str, told: str
) -> None:
    for name in "ab":
        _draw(tmp_path / "slides" / f"{name}.png", width=96, height=96)
    own = "overlap = 48\n" if "tile" in options else ""
    (tmp_path / "c.toml").write_text(f"[infer]\n{own}{options}\n")
    infer = ("infer", tmp_path / "slides", "--model", tiny_bundle(), "--out", tmp_path / "out")
    code, said = command(*infer, *MPP, "--config", tmp_path / "c.toml")
    assert (code, told in " ".join(said.split())) == (2, True), said
    assert not (tmp_path / "out").exists()


def test_a_stain_is_fitted_on_the_models_own_tiles(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = _draw(tmp_path / "a.png", width=96, height=96)
    (tmp_path / "c.toml").write_text("[infer]\ntile = 128\noverlap = 64\n")
    model = tiny_bundle(stain="reinhard")
    infer = ("infer", slide, "--model", model, "--out", tmp_path / "out", *MPP)
    code, said = command(*infer, "--config", tmp_path / "c.toml")
    assert code == 0, said


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_a_slide_of_little_stain_keeps_its_colours(
    tmp_path: Path, tiny_bundle: SaveBundle, method: str
) -> None:
    Image.new("RGB", (64, 64), (250, 250, 250)).save(tmp_path / "glass.png")
    flags = {"tissue": {"method": "all"}}
    segmenter = Segmenter(*load_bundle(tiny_bundle(stain=method)), load_config(None, flags))
    with open_slide(tmp_path / "glass.png", assume_mpp=0.5) as slide:
        plan = segmenter.plan(slide)
    assert plan.indices
    assert plan.stain is None
    assert "too little stained tissue for the model's stain normalisation" in plan.warnings[0]


@pytest.mark.parametrize(
    ("error", "is_told"), [(MemoryError(), False), (ValueError(), False), (RuntimeError(), True)]
)
def test_a_helper_leaves_a_slide_that_it_cannot_read_to_the_leader(
    tmp_path: Path, error: Exception, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(slide: Slide) -> None:
        raise error

    config = load_config(None, {"data": {"assume_mpp": 0.5}})
    model = SimpleNamespace(plan=fail, tiling=None, model_id="1")
    given = {"out": tmp_path, "segmenter": model, "config": config, "since": 0.0}
    context = cast(WorkerContext, SimpleNamespace(**given))
    slide = _draw(tmp_path / "a.png", width=8, height=8)
    job = SlideJob("a.png", slide, tmp_path / "a", context)
    job._rows.mkdir(parents=True)
    (tmp_path / STATES).mkdir()
    write_state(state_file(tmp_path, job.folder), State(str(slide), "begun", job._key, 1, "host"))
    with pytest.raises(RuntimeError) if is_told else nullcontext():
        assert not job.help()
    assert job._left == (not is_told)
    said = f"a.png is left to the process that leads it ({type(error).__name__}: )."
    assert (said in capsys.readouterr().err) == (not is_told)


def test_tables_are_written_by_the_last_one_that_finds_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the file system counts, not that of the process."""
    pages = list[BatchResults]()
    monkeypatch.setattr(workflow, "write_batch_report", lambda _, page: pages.append(page))
    monkeypatch.setattr(workflow, "_STOPPED_WAIT", 0.0)

    def end(*, is_stopped: bool = False, since: float = 0.0) -> int:
        given = {"out": tmp_path, "leases": leases, "since": since, "segmenter": model}
        context = cast(WorkerContext, SimpleNamespace(**given))
        workflow._write_tables(context, [], Path("model"), is_stopped=is_stopped)
        return len(pages)

    model = SimpleNamespace(classes=ClassTable(("gland",), ((1, 2, 3),)))
    (tmp_path / "summary.json").write_text("{}")
    with Leases(tmp_path / STATES) as leases, Leases(tmp_path / STATES) as others:
        state = state_file(tmp_path, tmp_path / "a")
        write_state(state, State("a.svs", "done", "", 1, ""))
        os.utime(state, (1e9, 1e9))
        assert end() == 1
        assert end() == 1, "nothing is new"
        assert end(since=time.time() + 60) == 2, "a batch that begins later writes its own"
        assert end(is_stopped=True) == 3
        assert pages[-1].is_stopped
        assert end() == 4, "they tell of a stop"
        os.utime(state, (4e9, 4e9))
        assert end() == 5
        assert others.take(tmp_path / STATES / ".tables")
        assert end(is_stopped=True) == 5, "another process writes them"


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_whole_and_resume_completes_it(
    tmp_path: Path, start: Start, command: Command, tiny_bundle: SaveBundle
) -> None:
    for number in range(5):
        _draw(tmp_path / "slides" / f"{number}.png", number, 900, 700)
    arguments = [
        "infer",
        "slides",
        "--model",
        str(tiny_bundle()),
        "--assume-mpp",
        "0.5",
        "--resume",
    ]
    process = start(*arguments, "--out", "out")
    while not list((tmp_path / "out").glob("*/summary.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "--resume" in said
    assert "Traceback" not in said
    out = tmp_path / "out"
    whole = [path.parent for path in out.glob("*/summary.json")]
    assert 1 <= len(whole) < 5
    assert all({path.name for path in folder.iterdir()} == FILES for folder in whole)

    arguments[1] = str(tmp_path / "slides")
    assert command(*arguments, "--out", out)[0] == 0
    assert command(*arguments, "--out", tmp_path / "calm")[0] == 0
    for number in range(5):
        for name in ("regions.geojson", "overlay.png"):
            one, other = (run / str(number) / name for run in (out, tmp_path / "calm"))
            assert one.read_bytes() == other.read_bytes()
        assert np.array_equal(_mask(out / str(number)), _mask(tmp_path / "calm" / str(number)))
    assert (out / "summary.csv").read_text() == (tmp_path / "calm" / "summary.csv").read_text()


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_stain_normalisation_makes_slides_of_two_scanners_alike(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, method: str
) -> None:
    """The same tissue, once darker and redder: the normaliser must undo much of it."""
    (tmp_path / "slides").mkdir()
    amounts = np.random.default_rng(0).uniform(0.1, 1.2, (12, 16, 2)).astype(np.float32)
    amounts = cv2.resize(amounts, (400, 300), interpolation=cv2.INTER_CUBIC)
    pixels = 255 * np.exp(-amounts @ [[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]])
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "slides" / "plain.png")
    other = 255 * (pixels / 255) ** (1.0, 1.4, 1.2)
    Image.fromarray(other.astype(np.uint8)).save(tmp_path / "slides" / "other.png")
    differing = {}
    for name, stain in (("raw", None), ("normalised", method)):
        model, out = tiny_bundle(name, stain=stain), tmp_path / f"out-{name}"
        code, said = command("infer", tmp_path / "slides", "--model", model, "--out", out, *MPP)
        assert code == 0, said
        differing[name] = (_mask(out / "plain") != _mask(out / "other")).mean()
    assert differing["normalised"] < differing["raw"]


def test_classifying_writes_a_coarse_map_through_the_same_outputs(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = _draw(tmp_path / "s.png", width=200, height=130)
    network = ModelConfig("resnet11_v2", "classify", 3, width=2)
    model = tiny_bundle(network=network, tile=32, overlap=0)
    code, said = command("infer", slide, "--model", model, "--out", tmp_path / "out", *MPP)
    assert code == 0, said
    mask, summary = _mask(tmp_path / "out" / "s"), _summary(tmp_path / "out" / "s")
    assert mask.shape == (5, 7)
    assert summary["mpp"] == {"x": 16.0, "y": 16.0}
    for index, entry in enumerate(summary["classes"], start=1):
        assert entry["area_mm2"] == pytest.approx((mask == index).sum() * 16**2 * 1e-6)
    features = json.loads((tmp_path / "out" / "s" / "regions.geojson").read_text())["features"]
    assert sum(len(feature["geometry"]["coordinates"]) for feature in features) > 0
    corners = shapely.get_coordinates([shape(feature["geometry"]) for feature in features])
    assert (corners % 32 == 0).all(), "a tile is 32 level-0 pixels wide"


def test_a_network_of_ones_own_runs_only_when_it_is_named(
    toy_slides: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ownnet.py").write_text(
        "from torch import nn\n\n"
        "def make(in_channels, classes, kernel=1):\n"
        "    return nn.Conv2d(in_channels, classes, kernel, padding=kernel // 2)\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    text = Path("tiny.toml").read_text().replace("width = 4\ndepth = 2", "options = {kernel = 3}")
    Path("own.toml").write_text(text)
    code, said = command(
        "train", "--slides", toy_slides, "--config", "own.toml", "--model", "ownnet:make",
        "--epochs", 1, "--out", "run",
    )  # fmt: skip
    assert code == 0, said
    arguments = ("infer", toy_slides / "slide0.png", *MPP, "--out", "out")
    code, said = command(*arguments)
    assert code == 2
    assert "ownnet:make" in said
    assert not Path("out").exists()
    code, said = command(*arguments, "--factory", "ownnet:make")
    assert code == 0, said
    assert set(np.unique(_mask(Path("out/slide0")))) <= {0, 1}
