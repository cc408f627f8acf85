"""Trains on a large tile of a real slide: on two ranks that share it, where one has no room."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from shapely import box, to_geojson, transform, union_all

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pathoseg.slides.slide import open_slide
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import find_tissue

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PATHOSEG_DATA", HERE.parents[2] / "shared" / "data"))
SLIDE = "wsi_gastric-erosion_13196x16866.tif"
MPP = 0.5  # the file does not say; its cells look like it
CONFIG = """
[data]
assume_mpp = {mpp}
classes = ["tissue"]
val_share = 0.0
[tiles]
mpp = {mpp}
tile = {tile}
[model]
width = {width}
[train]
batch = 1
epochs = 1
samples_per_epoch = {steps}
readers = 1
[parallel]
device = "cpu"
hardware = "cpu"
ranks = {ranks}
shards = {ranks}
memory = "{memory}"
offload = "none"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tile", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", default="7GiB", help="of a rank")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    slide = DATA / "slides" / SLIDE
    if not slide.exists():
        parser.exit(0, f"skipped: no {slide} (set PATHOSEG_DATA)\n")
    figures: dict[str, object] = {
        name: getattr(options, name) for name in ("tile", "width", "steps", "memory")
    }
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        slides = work / "slides"
        slides.mkdir()
        (slides / "gastric.tif").symlink_to(slide)
        outline_tissue(slide, slides / "gastric.geojson")
        for way, ranks in (("alone", 1), ("strips", 2)):
            config = work / f"{way}.toml"
            config.write_text(CONFIG.format(mpp=MPP, ranks=ranks, **vars(options)))
            for figure, value in train(slides, config, work / way).items():
                figures[f"{figure}_{way}"] = value
            print(json.dumps(figures, indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def outline_tissue(slide: Path, geojson: Path) -> None:
    """Write the slide's tissue, in squares of its thumbnail, as an annotation."""
    with open_slide(slide, assume_mpp=MPP) as opened:
        tissue = find_tissue(opened, TissueOptions())
        pixel = opened.size.width / tissue.mask.shape[1]
    squares = [
        box(column, row, column + 1, row + 1) for row, column in np.argwhere(tissue.mask).tolist()
    ]
    area = transform(union_all(squares), lambda corners: corners * pixel)
    feature = {
        "type": "Feature",
        "geometry": json.loads(to_geojson(area)),
        "properties": {"objectType": "annotation", "classification": {"name": "tissue"}},
    }
    geojson.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))


def train(slides: Path, config: Path, run: Path) -> dict[str, object]:
    """Train from the command line.

    Returns:
        Exit code, seconds, the most GiB that one of its processes had resident, and the last lines
        that it printed.
    """
    command = [sys.executable, "-m", "pathoseg", "train", "--slides", str(slides)]
    command += ["--config", str(config), "--out", str(run)]
    began, peak = time.perf_counter(), 0
    with (run.with_suffix(".txt")).open("w+") as said:
        process = psutil.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, *resident(process))
            time.sleep(0.2)
        said.seek(0)
        lines = said.read().splitlines()
    return {
        "code": process.returncode,
        "seconds": time.perf_counter() - began,
        "peak_gib": peak / 2**30,
        "said": lines[-12:],
    }


def resident(process: psutil.Process) -> Iterator[int]:
    """Yield the bytes that a process and each of its descendants have resident."""
    yield 0
    with suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                yield one.memory_info().rss


if __name__ == "__main__":
    main()
