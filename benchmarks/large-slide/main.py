"""Measures what `pathoseg` takes for a slide of 100,000² beside one of 20,000²."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pathoseg.outputs.report import Summary, read_summary
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import find_tissue

ROOT = Path(__file__).resolve().parents[2]
MAKER = ROOT / "sample_data" / "make_samples.py"
TINY = ROOT / "sample_data" / "sample_05.svs"
REGIONS = Path(__file__).with_name("regions.py")


@dataclass(frozen=True)
class Setting:
    """The sizes of one measurement: slides, tiles, training and regions.

    Attributes:
        small: Side of the small slide in pixels.
        large: Side of the large slide in pixels.
        mpp: Resolution of the tiles of both, in µm a pixel.
        tile: Side of a tile in pixels.
        samples: Tiles in the one epoch of training.
        regions: Number of regions in the generated mask whose outlines are written.
    """

    small: int
    large: int
    mpp: float
    tile: int
    samples: int
    regions: int


FULL = Setting(20_000, 100_000, 1.0, 512, 200, 1_000_000)
QUICK = Setting(16_384, 49_152, 4.0, 128, 32, 64_000)


@dataclass(frozen=True)
class Usage:
    """The resources that an ended process has used.

    Attributes:
        wall: Seconds from its start to its end.
        cpu: Seconds of all cores, in user and in kernel mode.
        peak: Largest resident memory in GiB.
    """

    wall: float
    cpu: float
    peak: float


@dataclass(frozen=True)
class Result:
    """A slide that was segmented."""

    usage: Usage
    summary: Summary
    files: dict[str, int]

    @property
    def tiles(self) -> int:
        return self.summary.tiles.done

    @property
    def seconds_a_tile(self) -> float:
        return self.summary.seconds["segment"] / self.tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="slides half as wide, at 4 µm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where slides and model stay for another time")
    options = parser.parse_args()
    setting = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        figures = _measured(setting, options.folder or Path(folder))
    print("| figure | |\n|---|---|")
    for name, value in figures.items():
        print(f"| `{name}` | {value:.4g} |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measured(setting: Setting, work: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    slides, model = work / "slides", work / "run"
    slides.mkdir(parents=True, exist_ok=True)
    small, large = slides / "small.svs", slides / "large.svs"
    for slide, side in ((small, setting.small), (large, setting.large)):
        if not slide.exists():
            made = _run(str(MAKER), "--size", str(side), "--out", str(slide))
            if slide == large:
                figures |= {"make_seconds": made.wall, "make_memory_gib": made.peak}
    figures["slide_gib"] = large.stat().st_size / 2**30
    figures["tissue_seconds"], figures["tissue_share"] = _tissue(large)

    (slides / "slides.csv").write_text(
        f"slide,patient,split\n{large.name},1,train\n{small.name},2,val\n"
    )
    config = work / "config.toml"
    config.write_text(
        f'[tiles]\ncache = "{work / "tiles"}"\n'
        f"[model]\nwidth = 8\n[train]\nsamples_per_epoch = {setting.samples}\n"
    )
    cut = ["--slides", str(slides), "--config", str(config)]
    cut += ["--mpp", str(setting.mpp), "--tile", str(setting.tile)]
    if not model.exists():
        cached = _pathoseg("cache", *cut)
        figures |= {"cache_seconds": cached.wall, "cache_memory_gib": cached.peak}
        trained = _pathoseg("train", *cut, "--epochs", "1", "--out", str(model))
        figures |= {"train_seconds": trained.wall, "train_memory_gib": trained.peak}

    figures |= _outlined(setting.regions, work / "regions")
    tiny = _infer(TINY, model, work / "tiny")
    before = _infer(small, model, work / "small-before")
    whole = _infer(large, model, work / "large")
    after = _infer(small, model, work / "small-after")
    return figures | _compared(tiny, before, whole, after)


def _compared(tiny: Result, before: Result, whole: Result, after: Result) -> dict[str, float]:
    """The large slide beside the small one, which was segmented before it and after."""
    small_seconds = (before.seconds_a_tile + after.seconds_a_tile) / 2
    small_cpu = (before.usage.cpu + after.usage.cpu) / 2
    small_peak = max(before.usage.peak, after.usage.peak)
    # What starts and ends a command counts once, so it is left out.
    of_small = (small_cpu - tiny.usage.cpu) / (before.tiles - tiny.tiles)
    of_large = (whole.usage.cpu - small_cpu) / (whole.tiles - before.tiles)
    return {
        "tiles_small": before.tiles,
        "tiles": whole.tiles,
        "infer_seconds": whole.usage.wall,
        "infer_cpu_seconds": whole.usage.cpu,
        "peak_memory_small_gib": small_peak,
        "peak_memory_gib": whole.usage.peak,
        "peak_memory_ratio": whole.usage.peak / small_peak,
        "seconds_per_tissue_tile": whole.seconds_a_tile,
        "seconds_per_tissue_tile_ratio": whole.seconds_a_tile / small_seconds,
        "cpu_seconds_per_tissue_tile": of_large,
        "cpu_seconds_per_tissue_tile_ratio": of_large / of_small,
        "regions": sum(entry.regions or 0 for entry in whole.summary.classes),
        "regions_geojson_mib": whole.files["regions.geojson"] / 2**20,
        "mask_mib": whole.files["mask.ome.tiff"] / 2**20,
    }


def _outlined(count: int, work: Path) -> dict[str, float]:
    """Many regions beside a quarter as many: both time and memory as they should grow."""
    quarter = _run(str(REGIONS), str(work), str(count // 4))
    whole = _run(str(REGIONS), str(work), str(count))
    return {
        "outlines": count,
        "outlines_cpu_seconds": whole.cpu,
        "outlines_cpu_ratio_to_a_quarter": whole.cpu / quarter.cpu,
        "outlines_memory_gib": whole.peak,
        "outlines_memory_ratio_to_a_quarter": whole.peak / quarter.peak,
    }


def _tissue(slide: Path) -> tuple[float, float]:
    """Seconds to open a slide and find its tissue, and the share of the slide that is tissue."""
    began = time.perf_counter()
    with open_slide(slide, None) as opened:
        tissue = find_tissue(opened, TissueOptions())
    return time.perf_counter() - began, float(tissue.mask.mean())


def _infer(slide: Path, model: Path, out: Path) -> Result:
    usage = _pathoseg("infer", str(slide), "--model", str(model), "--out", str(out))
    folder = out / slide.stem
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return Result(usage, read_summary(folder / "summary.json"), files)


def _pathoseg(*arguments: str) -> Usage:
    return _run("-m", "pathoseg", *arguments)


def _run(*arguments: str) -> Usage:
    """Runs Python as a user would; what it says is shown where it fails."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, *arguments], stdout=said, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(arguments)}:\n{said.read().decode()}")
    return Usage(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


if __name__ == "__main__":
    main()
