"""Measures what a box of annotations, and an earlier model, are worth on real nuclei."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image
from shapely import Polygon, box
from shapely.geometry import mapping

import pathoseg
from pathoseg.outputs.polygons import RegionTracer

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PATHOSEG_DATA", HERE.parents[2] / "shared" / "data"))
MPP = 0.25
SIDE = 1000  # of a MoNuSeg image in pixels
TRAINED, HELD_OUT = 24, 6
TNBC_TRAINED, TNBC_TESTED = ("01", "02"), ("07", "08")

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Arm:
    """One way to train, of which every seed is a run.

    Attributes:
        slides: Folder of images, with annotations beside them or in `annotations`.
        annotations: Folder of annotations, or None.
        tested: Folders of held-out images and masks.
        steps: Number of steps of a run.
        start_from: Run whose weights training starts from, or None.
    """

    slides: Path
    annotations: Path | None
    tested: tuple[Path, Path]
    steps: int
    start_from: Path | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("regions", "transfer"))
    parser.add_argument("--work", type=Path, required=True, help="folder of images and runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="of a run; left out: 10, transfer 3")
    parser.add_argument("--steps-per-minute", type=float, default=96, help="of this machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if not (DATA / "monuseg-train").exists():
        parser.exit(0, f"skipped: no monuseg-train in {DATA} (set PATHOSEG_DATA)\n")
    options.work.mkdir(parents=True, exist_ok=True)
    minutes = options.minutes or {"regions": 10.0, "transfer": 3.0}[options.case]
    steps = round(minutes * options.steps_per_minute)
    if options.case == "regions":
        arms = regions(options.work, steps)
    else:
        arms = transfer(options.work, steps, round(10 * options.steps_per_minute))
    dice: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(options.seeds):
        for name, arm in arms.items():
            dice[name].append(held_out_dice(arm, options.work / f"{name}-{seed}", seed))
    print("| training | " + " | ".join(f"seed {n}" for n in range(options.seeds)) + " | median |")
    print("|---" * (options.seeds + 2) + "|")
    for name, values in dice.items():
        cells = [*values, statistics.median(values)]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in cells) + " |")
    medians = {f"dice_{name}": statistics.median(values) for name, values in dice.items()}
    if options.json:
        options.json.write_text(json.dumps({**medians, "seeds": dice, "steps": steps}) + "\n")


def regions(work: Path, steps: int) -> dict[str, Arm]:
    """Mosaics of four images of which one is annotated in a box, and these images alone."""
    images = sorted((DATA / "monuseg-train" / "images").glob("*.tif"))
    order = np.random.default_rng(0).permutation(len(images))
    trained = [images[n] for n in order[:TRAINED]]
    tested = link_held_out(work, [images[n] for n in order[TRAINED:][:HELD_OUT]])
    boxed, alone = work / "boxed-slides", work / "alone-slides"
    for folder in (boxed, alone):
        folder.mkdir(exist_ok=True)
    for number in range(TRAINED // 4):
        four = trained[4 * number : 4 * number + 4]
        pixels = [tifffile.imread(path) for path in four]
        mosaic = np.vstack([np.hstack(pixels[:2]), np.hstack(pixels[2:])])
        quadrant = number % 4
        corner = (quadrant % 2 * SIDE, quadrant // 2 * SIDE)
        outlines = list(nuclei(mask_of(four[quadrant])))
        write(boxed / f"mosaic_{number}", mosaic, outlines, corner, boxed=True)
        write(alone / f"quadrant_{number}", pixels[quadrant], outlines, (0, 0), boxed=False)
    return {
        "boxed": Arm(boxed, None, tested, steps),
        "alone": Arm(alone, None, tested, steps),
    }


def transfer(work: Path, steps: int, first_steps: int) -> dict[str, Arm]:
    """TNBC's first patients from nothing, and from a model of MoNuSeg's images."""
    folder = DATA / "monuseg-train"
    first = work / "monuseg"
    if not (first / "model").exists():
        run(Arm(folder / "images", folder / "masks", (first, first), first_steps), first, 0)
    trained, tested = work / "tnbc-trained", work / "tnbc-tested"
    for path in sorted((DATA / "tnbc" / "images").glob("*.png")):
        for target, patients in ((trained, TNBC_TRAINED), (tested, TNBC_TESTED)):
            if path.name.startswith(patients):
                link(path, target)
    masks = DATA / "tnbc" / "masks"
    return {
        "nothing": Arm(trained, masks, (tested, masks), steps),
        "from-monuseg": Arm(trained, masks, (tested, masks), steps, first),
    }


def link_held_out(work: Path, images: list[Path]) -> tuple[Path, Path]:
    for path in images:
        link(path, work / "held-out")
    return work / "held-out", DATA / "monuseg-train" / "masks"


def link(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    if not target.exists():
        target.symlink_to(path)


def mask_of(image: Path) -> Pixels:
    path = DATA / "monuseg-train" / "masks" / f"{image.stem}.png"
    return np.asarray(Image.open(path), np.uint8)


def nuclei(mask: Pixels) -> Iterator[Polygon]:
    """Outlines of the regions of a binary mask along pixel edges."""
    tracer = RegionTracer()
    yield from (region.geometry for region in tracer.add(mask))
    yield from (region.geometry for region in tracer.close())


def write(
    stem: Path, pixels: Pixels, outlines: list[Polygon], corner: tuple[int, int], boxed: bool
) -> None:
    """An image as TIFF and its outlines, moved to `corner`, as QuPath exports them."""
    if stem.with_suffix(".geojson").exists():
        return
    tifffile.imwrite(stem.with_suffix(".tif"), pixels, photometric="rgb", tile=(256, 256))
    x, y = corner
    parts = [("nucleus", outline) for outline in outlines]
    if boxed:
        parts.append(("Region*", box(0, 0, SIDE, SIDE)))
    features = []
    for name, geometry in parts:
        moved = Polygon(
            [(a + x, b + y) for a, b in geometry.exterior.coords],
            [[(a + x, b + y) for a, b in ring.coords] for ring in geometry.interiors],
        )
        properties = {"objectType": "annotation", "classification": {"name": name}}
        features.append({"type": "Feature", "geometry": mapping(moved), "properties": properties})
    text = json.dumps({"type": "FeatureCollection", "features": features})
    stem.with_suffix(".geojson").write_text(text)


def run(arm: Arm, folder: Path, seed: int) -> None:
    """Train for the arm's number of steps, in whole epochs; the newest weights are kept."""
    table: dict[str, dict[str, Any]] = {
        "": {"seed": seed},
        "data": {"assume_mpp": MPP, "classes": ["nucleus"], "val_share": 0.0},
        "tiles": {"mpp": 0.5, "tile": 256, "overlap": 128},
        "model": {"width": 16},
        "train": {"batch": 4, "lr": 2e-3, "epochs": 1, "validate_every": 1},
    }
    if arm.annotations is not None and "tnbc" in arm.annotations.parts:
        table["annotations"] = {"mask": "binary"}

    def trained(out: Path, resume: bool = False) -> int:
        pathoseg.train(
            arm.slides,
            arm.annotations,
            start_from=None if resume else arm.start_from,
            out=out,
            options=table,
            resume=resume,
        )
        with (out / "metrics.csv").open(newline="") as file:
            return int(list(csv.DictReader(file))[-1]["step"])

    probe = folder.with_name(f"{folder.name}-one-epoch")
    epoch = trained(probe)
    table["train"]["epochs"] = max(1, round(arm.steps / epoch))
    trained(folder)


def held_out_dice(arm: Arm, folder: Path, seed: int) -> float:
    """Dice of a run's nuclei over all pixels of the held-out images; trains where none lies."""
    if not (folder / "model").exists():
        run(arm, folder, seed)
    images, masks = arm.tested
    table: dict[str, dict[str, Any]] = {"data": {"assume_mpp": MPP}}
    if "tnbc" in masks.parts:
        table["annotations"] = {"mask": "binary"}
    path = pathoseg.evaluate(images, masks, model=folder, out=folder / "held-out", options=table)
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["slide"] == "all"]
    (row,) = rows
    return float(row["dice_nucleus"])


if __name__ == "__main__":
    main()
