"""Measures what a network gains by what lies 500 µm away, where the class of a gland follows it."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from numpy.typing import NDArray

import pathoseg
from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.reading import read_labels
from pathoseg.geometry import Box, Frame

PAINTER = Path(__file__).resolve().parents[2] / "sample_data" / "distant_cues.py"
CLASSES = ("inflamed", "resting")
MPP = 5.0
RATIO = 4  # of the coarse pixels to the fine ones, as in hooknet
TILE = 64
BATCH = 8

# Each arm: its network, and microns per pixel of its tile.
ARMS: Mapping[str, tuple[str, float]] = {
    "hooknet": ("hooknet", MPP),
    "unet_coarse": ("unet", RATIO * MPP),
    "unet": ("unet", MPP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of slides and runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.0, help="of CPU time, of each training")
    parser.add_argument("--quick", action="store_true", help="20 s of one seed: shows no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, minutes = (1, 1 / 3) if options.quick else (options.seeds, options.minutes)
    slides = options.work / "slides"
    if not (slides / "slides.csv").exists():
        subprocess.run([sys.executable, str(PAINTER), "--out", str(slides)], check=True)
    seconds = cpu_of_a_step(slides, options.work)
    steps = {arm: round(60 * minutes / seconds[arm]) for arm in ARMS}
    figures: dict[str, Any] = {}
    dice: dict[str, list[float]] = {name: [] for arm in ARMS for name in (arm, f"{arm}_any")}
    for seed in range(seeds):
        for arm in ARMS:
            run = options.work / f"{arm}-{steps[arm]}-{seed}"
            if not (run / "model").exists():
                took = train(slides, arm, run, steps[arm], seed)
                (run / "cpu_seconds").write_text(f"{took:.0f}\n")
            figures[f"cpu_seconds_{arm}_{seed}"] = float((run / "cpu_seconds").read_text())
            found = held_out_dice(slides, arm, run)
            for name, value in found.items():
                dice[f"{arm}{name}"].append(value)
    for arm in ARMS:
        figures[f"steps_{arm}"], figures[f"cpu_of_a_step_{arm}"] = steps[arm], seconds[arm]
    figures |= {f"dice_{name}": statistics.median(values) for name, values in dice.items()}
    figures |= {f"dice_{name}_of_seeds": values for name, values in dice.items()}
    for other in ("unet", "unet_coarse"):
        gain = [mine - its for mine, its in zip(dice["hooknet"], dice[other], strict=True)]
        figures[f"gain_over_{other}"] = statistics.median(gain)
    print("| | steps | CPU s | Dice of the two classes: seeds | median | Dice of any gland |")
    print("|---|---|---|---|---|---|")
    for arm in ARMS:
        spent = statistics.median(figures[f"cpu_seconds_{arm}_{seed}"] for seed in range(seeds))
        each = ", ".join(f"{value:.3f}" for value in dice[arm])
        medians = f"{figures[f'dice_{arm}']:.3f} | {figures[f'dice_{arm}_any']:.3f}"
        print(f"| {arm} | {steps[arm]} | {spent:.0f} | {each} | {medians} |")
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


def train(slides: Path, arm: str, run: Path, steps: int, seed: int) -> float:
    """Train an arm for so many steps; return the seconds of CPU time that the process took.

    The last weights are kept, as there is no validation.
    """
    name, mpp = ARMS[arm]
    before = time.process_time()
    pathoseg.train(
        slides,
        out=run,
        overwrite=True,
        options={
            "": {"seed": seed},
            "data": {"classes": list(CLASSES)},
            "tiles": {"mpp": mpp, "tile": TILE, "overlap": TILE // 2},
            "model": {"name": name, "width": 16, "depth": 3},
            "train": {
                "batch": BATCH,
                "lr": 4e-3,
                "epochs": 1,
                "samples_per_epoch": steps * BATCH,
                "readers": 1,
            },
            "parallel": {"device": "cpu"},
        },
    )
    return time.process_time() - before


def cpu_of_a_step(slides: Path, work: Path) -> dict[str, float]:
    """Measure the CPU seconds of a step of each arm; they are kept in the folder.

    It is that by which a training of 40 steps takes longer than one of 4, reading of tiles included
    and the start left out.
    """
    kept = work / "cpu_of_a_step.json"
    if not kept.exists():
        train(slides, "hooknet", work / "probe", 4, 0)  # the first of a process imports much
        seconds = {}
        for arm in ARMS:
            short, long = (train(slides, arm, work / "probe", count, 0) for count in (4, 40))
            seconds[arm] = (long - short) / 36
        kept.write_text(json.dumps(seconds))
    found: dict[str, float] = json.loads(kept.read_text())
    return found


def held_out_dice(slides: Path, arm: str, run: Path) -> dict[str, float]:
    """Compare a run's masks of the test slides with the outlines, at the fine pixel size.

    A pixel of a coarser mask stands for the fine ones that it covers.

    Returns:
        The mean Dice of both classes, over all pixels, and as `_any` that of glands, whatever their
        class.
    """
    with (slides / "slides.csv").open(newline="") as file:
        tested = [slides / row["slide"] for row in csv.DictReader(file) if row["split"] == "test"]
    results = pathoseg.infer(tested, run, out=run / "results", resume=True)
    wide = round(ARMS[arm][1] / MPP)
    both, sums = np.zeros(len(CLASSES) + 1), np.zeros(len(CLASSES) + 1)
    for slide in tested:
        truth = true_classes(slide)
        coarse = np.asarray(tifffile.imread(results / slide.stem / "mask.ome.tiff", level=0))
        mask = coarse.repeat(wide, 0).repeat(wide, 1)[: truth.shape[0], : truth.shape[1]]
        for index, (one, other) in enumerate(planes(truth, mask)):
            both[index] += np.count_nonzero(one & other)
            sums[index] += np.count_nonzero(one) + np.count_nonzero(other)
    dice = 2 * both / sums
    return {"": float(dice[:-1].mean()), "_any": float(dice[-1])}


def planes(
    truth: NDArray[np.uint8], mask: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Yield the pixels of each class in truth and in the mask, last those of any class."""
    for index in range(1, len(CLASSES) + 1):
        yield truth == index, mask == index
    yield truth > 0, mask > 0


def true_classes(slide: Path) -> NDArray[np.uint8]:
    """Return a slide's outlines as class indices, at the fine pixel size."""
    with pathoseg.open_slide(slide) as opened:
        frame = Frame.at(opened.size, opened.mpp, MPP)
        annotation = slide.with_suffix(".geojson")
        labels = read_labels(annotation, opened.size, opened.origin, AnnotationOptions())
    whole = Box(0, 0, frame.size.width, frame.size.height)
    return labels.rasterise(whole, frame, ClassTable(CLASSES, ((200, 0, 0), (0, 150, 0))))


if __name__ == "__main__":
    main()
