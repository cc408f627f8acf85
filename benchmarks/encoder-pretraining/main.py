"""Measures what an encoder pretrained on nuclei is worth to a task with few annotations."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathoseg

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PATHOSEG_DATA", HERE.parents[2] / "shared" / "data"))
SPLIT = HERE / "split.csv"
MPP = 0.25  # of all images; of DSB it is assumed
BATCH = 4
PASSES = 10  # epochs that a run's steps are divided into
NUCLEI: dict[str, dict[str, Any]] = {
    "data": {"assume_mpp": MPP, "classes": ["nucleus"], "val_share": 0.0},
    "annotations": {"mask": "binary"},
    "tiles": {"mpp": 0.5, "tile": 96, "overlap": 48},
}


@dataclass(frozen=True)
class Arm:
    """One way to begin: `[train] encoder`, and its learning rate over that of the decoder."""

    pretrained: bool
    encoder: str = "tuned"
    encoder_lr: float = 1.0


ARMS = {
    "random": Arm(pretrained=False),
    "tuned": Arm(pretrained=True, encoder_lr=0.1),
    "frozen": Arm(pretrained=True, encoder="frozen"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", default=tuple(ARMS), help="left out: all three")
    parser.add_argument("--work", type=Path, required=True, help="folder of images and runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretrain-minutes", type=float, default=10, help="of one core")
    parser.add_argument("--minutes", type=float, default=1, help="of a run, of one core")
    parser.add_argument("--steps-per-minute", type=float, default=200, help="of one core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if not (DATA / "monuseg-train").exists():
        parser.exit(0, f"skipped: no monuseg-train in {DATA} (set PATHOSEG_DATA)\n")
    work, rate = options.work, options.steps_per_minute
    link_images(work)
    pretrained = work / "pretrained"
    figures: dict[str, Any] = {}
    arms = {name: ARMS[name] for name in options.arms}
    if any(arm.pretrained for arm in arms.values()):
        train(work / "pretrain", NUCLEI, pretrained, 0, round(options.pretrain_minutes * rate))
        figures |= {f"pretrain_{key}": value for key, value in spent(pretrained).items()}
        # What the model of the pretraining finds by itself, without a step of the new task.
        figures["dice_pretrained"] = round(dice(work, pretrained), 4)
    dices: dict[str, list[float]] = {name: [] for name in arms}
    seconds: dict[str, list[int]] = {name: [] for name in arms}
    for seed in range(options.seeds):
        for name, arm in arms.items():
            run = work / f"nuclei-{name}-{seed}"
            table = NUCLEI | {
                "model": {"encoder_weights": str(pretrained)} if arm.pretrained else {},
                "train": {"encoder": arm.encoder, "encoder_lr": arm.encoder_lr},
            }
            train(work / "nuclei", table, run, seed, round(options.minutes * rate))
            figures["steps"] = spent(run)["steps"]
            dices[name].append(dice(work, run))
            seconds[name].append(spent(run)["seconds"])
    print("| run | " + " | ".join(f"seed {n}" for n in range(options.seeds)) + " | median |")
    print("|---" * (options.seeds + 2) + "|")
    for name, values in dices.items():
        figures[f"dice_{name}"] = round(statistics.median(values), 4)
        figures[f"seconds_{name}"] = statistics.median(seconds[name])
        cells = [*values, statistics.median(values)]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in cells) + " |")
    figures["seeds"] = dices
    print(json.dumps(figures), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


def link_images(work: Path) -> None:
    """Link each image and its annotation of `split.csv` into folders of what they are for."""
    with SPLIT.open(newline="") as file:
        for row in csv.DictReader(file):
            for part, folder in (("image", row["use"]), ("annotation", f"{row['use']}-labels")):
                path = DATA / row[part]
                # Images of two collections may have the same name.
                target = work / folder / f"{row['collection']}_{path.name}"
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    target.symlink_to(path)


def train(
    images: Path, task: Mapping[str, dict[str, Any]], run: Path, seed: int, steps: int
) -> None:
    """Train for a number of steps; a finished run stays, one that was cut off is begun anew."""
    if spent_file(run).exists():
        return
    samples = round(steps * BATCH / PASSES)
    length = {"batch": BATCH, "epochs": PASSES, "samples_per_epoch": samples}
    table = {
        **task,
        "": {"seed": seed},
        "model": {"name": "unet_resnet18", **task.get("model", {})},
        "train": {"lr": 2e-3, "readers": 1, **length, **task.get("train", {})},
    }
    labels = images.with_name(f"{images.name}-labels")
    began = time.process_time()
    pathoseg.train(images, labels, out=run, options=table, overwrite=run.exists())
    seconds = round(time.process_time() - began)
    with (run / "metrics.csv").open(newline="") as file:
        steps = int(list(csv.DictReader(file))[-1]["step"])
    spent_file(run).write_text(json.dumps({"steps": steps, "seconds": seconds}) + "\n")


def spent_file(run: Path) -> Path:
    """The file of a finished run's steps and seconds of processor time."""
    return run.with_name(f"{run.name}.json")


def spent(run: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(spent_file(run).read_text())
    return found


def dice(work: Path, run: Path) -> float:
    """Dice of a run's nuclei over all pixels of the held-out images."""
    figures = run / "held-out" / "evaluation.csv"
    if not figures.exists():
        table = {"annotations": NUCLEI["annotations"], "data": {"assume_mpp": MPP}}
        images, labels = work / "nuclei-test", work / "nuclei-test-labels"
        pathoseg.evaluate(images, labels, model=run, out=figures.parent, options=table)
    with figures.open(newline="") as file:
        [row] = [row for row in csv.DictReader(file) if row["slide"] == "all"]
    return float(row["dice_nucleus"])


if __name__ == "__main__":
    main()
