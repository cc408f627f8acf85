"""Measures how well touching nuclei are told apart: task `objects` beside connected components."""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

import pathoseg
from pathoseg.config import Config
from pathoseg.geometry import Box, ObjectMask, Size
from pathoseg.inference.segmenter import Segmenter, load_segmenter
from pathoseg.interruption import Interruption
from pathoseg.models.object_metrics import ObjectCounts, object_figures
from pathoseg.outputs.objects import ObjectFinder, ObjectOptions
from pathoseg.outputs.stitch import HEIGHT_LEVELS
from pathoseg.slides.slide import open_slide

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PATHOSEG_DATA", HERE.parents[2] / "shared" / "data"))
MPP = 0.25
RADIUS_UM = 6.0  # of paired centroids
OBJECT_UM = 40.0
DEPTHS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # pixels
SMALLEST = (1.25, 2.5, 5.0, 10.0)  # µm², below which what is found is left out
ARMS = ("objects", "components")
CROWDED, SHOWN = 30, 256  # objects of an image that is drawn; pixels of it

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.int32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", default=ARMS, help="objects, components; left out: both")
    parser.add_argument("--data", choices=("monuseg", "dsb"), default="monuseg")
    parser.add_argument("--work", type=Path, required=True, help="folder of images and runs")
    parser.add_argument("--minutes", type=float, default=30, help="of a training on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw objects found in images of DSB"
    )
    options = parser.parse_args()
    if not DATA.exists():
        parser.exit(0, f"skipped: no {DATA} (set PATHOSEG_DATA)\n")
    trained, held_out = split(options.data)
    figures: dict[str, Any] = {}
    for arm in options.arms:
        folder = options.work / f"{options.data}-{arm}"
        if not (folder / "summary.json").exists():  # written last
            train(arm, trained, folder, 2 * 60 * options.minutes)
        figures |= scored(arm, folder, trained, held_out, options.picture)
        print(json.dumps(figures, indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


def split(data: str) -> tuple[list[tuple[Path, Path]], list[tuple[Path, Path]]]:
    """Pairs of image and instance mask: to train on, and held out; by a fixed seed.

    Of MoNuSeg each image is a patient. Of DSB's stained images patients are not known.
    """
    if data == "monuseg":
        masks = sorted((DATA / "monuseg-train" / "instances").glob("*.png"))
        images = DATA / "monuseg-train" / "images"
        pairs = [(images / f"{mask.stem}.tif", mask) for mask in masks]
    else:
        masks = sorted((DATA / "dsb2018-stained" / "labels").iterdir())
        images = DATA / "dsb2018-stained" / "images"
        pairs = [(next(images.glob(f"{mask.stem}.*")), mask) for mask in masks]
    order = np.random.default_rng(0).permutation(len(pairs))
    held = max(3, len(pairs) // 5)
    return [pairs[n] for n in order[held:]], [pairs[n] for n in order[:held]]


def train(arm: str, pairs: Sequence[tuple[Path, Path]], folder: Path, seconds: float) -> None:
    """Train for as many whole epochs as take `seconds` of processor time, one measured ahead."""
    slides, masks = (
        folder.with_name(f"{folder.name}-slides"),
        folder.with_name(f"{folder.name}-masks"),
    )
    for image, mask in pairs:
        link(image, slides / image.name)
        target = masks / f"{image.stem}.png"
        if arm == "objects":
            link(mask, target)
        elif not target.exists():
            target.parent.mkdir(exist_ok=True)
            Image.fromarray((255 * (labels_of(mask) > 0)).astype(np.uint8)).save(target)
    table: dict[str, dict[str, Any]] = {
        "": {"seed": 0},
        "data": {"assume_mpp": MPP, "classes": ["nucleus"], "val_share": 0.0},
        "annotations": {"mask": "instances" if arm == "objects" else "binary"},
        "tiles": {"mpp": MPP, "tile": 256, "overlap": 128},
        "model": {"width": 16, "task": "objects" if arm == "objects" else "segment"},
        # Twice the default: the stains of ten images are not those of the next ones.
        "augment": {"stain": 0.2, "colour": 0.2},
        "train": {"batch": 4, "lr": 2e-3, "epochs": 1, "validate_every": 1},
    }
    probe = folder.with_name(f"{folder.name}-one-epoch")
    began = time.process_time()
    pathoseg.train(slides, masks, out=probe, options=table)
    epoch = time.process_time() - began
    table["train"]["epochs"] = max(1, round(seconds / epoch))
    print(
        f"{arm}: {table['train']['epochs']} epochs of {epoch:.1f} s of processor time", flush=True
    )
    pathoseg.train(slides, masks, out=folder, options=table)


def link(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.symlink_to(path)


def labels_of(mask: Path) -> Numbers:
    return np.asarray(Image.open(mask)).astype(np.int32)


def scored(
    arm: str,
    folder: Path,
    trained: Sequence[tuple[Path, Path]],
    held_out: Sequence[tuple[Path, Path]],
    picture: Path | None,
) -> dict[str, float]:
    """Figures of held-out images, and of all of DSB where it was not trained on.

    The depth of objects, and the area below which what is found is left out, are those of best PQ
    on the trained images.
    """
    config = Config()
    config = replace(config, data=replace(config.data, assume_mpp=MPP))
    segmenter = load_segmenter(folder / "model", config, None)
    with (folder / "metrics.csv").open(newline="") as file:
        steps = float(list(csv.DictReader(file))[-1]["step"])
    figures = {f"{arm}_steps": steps}
    planes = list(predicted(segmenter, trained))
    truth = [labels_of(mask) for _, mask in trained]
    tuned = []
    for depth in DEPTHS if arm == "objects" else DEPTHS[:1]:
        for smallest in SMALLEST:
            found = [FINDERS[arm](each, depth, smallest) for each in planes]
            known = counted(truth, found)
            tuned.append((known["pq"], depth, smallest))
            name = f"{arm}_trained_{{}}_at_{depth:g}px_{smallest:g}um2"
            figures |= {name.format(each): round(known[each], 4) for each in ("pq", "object_ratio")}
    _, depth, smallest = max(tuned)
    figures |= {f"{arm}_depth": depth, f"{arm}_smallest_um2": smallest}
    places = {arm: held_out}
    if "monuseg" in folder.name:
        places[f"{arm}_dsb"] = [pair for part in split("dsb") for pair in part]
    for name, pairs in places.items():
        found = [FINDERS[arm](each, depth, smallest) for each in predicted(segmenter, pairs)]
        figures |= named(name, counted([labels_of(mask) for _, mask in pairs], found))
    if picture is not None and arm == "objects":
        draw(pairs, found, picture)  # the last ones, which are of DSB
    return figures


def draw(
    pairs: Sequence[tuple[Path, Path]], found: Sequence[Numbers], picture: Path, count: int = 4
) -> None:
    """Draw outlines of the first images with many nuclei: found above, annotated below."""
    crowded = [at for at, each in enumerate(found) if each.max() >= CROWDED][:count]
    columns = []
    for at in crowded:
        image = np.asarray(Image.open(pairs[at][0]).convert("RGB"))[:SHOWN, :SHOWN]
        rows = [outlined(image, each) for each in (found[at], labels_of(pairs[at][1]))]
        columns.append(np.concatenate([rows[0], np.full_like(image[:4], 255), rows[1]]))
    Image.fromarray(np.concatenate(columns, axis=1)).quantize(128).save(picture, optimize=True)


def outlined(image: Pixels, labels: Numbers) -> Pixels:
    own = labels[: len(image), : image.shape[1]]
    inner = ndimage.minimum_filter(own, 3) == ndimage.maximum_filter(own, 3)
    shown = image.copy()
    shown[(own > 0) & ~inner] = (20, 240, 60)
    return shown


def named(arm: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{arm}_{name}": round(value, 4) for name, value in figures.items()}


def predicted(segmenter: Segmenter, pairs: Sequence[tuple[Path, Path]]) -> Iterator[Pixels]:
    """The planes of each image, see `MaskRow`."""
    for image, _ in pairs:
        with open_slide(image, MPP) as slide:
            plan = segmenter.plan(slide)
        with closing(segmenter.rows(plan, Interruption(""))) as rows:
            yield np.concatenate([row.planes for row in rows], axis=1)


def separated(planes: Pixels, depth: float, smallest: float) -> Numbers:
    """Numbers of the objects of an image, as `infer` finds them."""
    height, width = planes.shape[1:]
    options = ObjectOptions(
        round(depth * HEIGHT_LEVELS), round(OBJECT_UM / MPP), round(smallest / MPP**2)
    )
    labels, count = np.zeros((height, width), np.int32), 0
    for found in ObjectFinder(Size(width, height), options).add(planes):
        rows, columns = found.box.within(Box(0, 0, width, height))
        own = found.labels > 0
        labels[rows, columns][own] = found.labels[own] + count
        count += len(found)
    return labels


def components(planes: Pixels, _: float, smallest: float) -> Numbers:
    """Connected areas (of eight neighbours) of the nuclei, none smaller than objects may be."""
    labels, _ = ndimage.label(planes[0] == 1, np.ones((3, 3)))
    sizes = np.bincount(labels.reshape(-1))
    small = sizes < round(smallest / MPP**2)
    small[0] = False
    kept: Numbers = np.where(small, 0, np.cumsum(~small) - 1).astype(np.int32)
    numbers: Numbers = kept[labels]
    return numbers


FINDERS = {"objects": separated, "components": components}


def counted(truth: Sequence[Numbers], found: Sequence[Numbers]) -> dict[str, float]:
    """Figures of all images together, and means over images of AJI and PQ, as published."""
    of_images = []
    for true, one in zip(truth, found, strict=True):
        counts = ObjectCounts(2, RADIUS_UM / MPP)
        expected, predictions = list(masks(true)), list(masks(one))
        counts.add_true(expected, [1] * len(expected))
        counts.add_predicted(predictions, [1] * len(predictions))
        of_images.append(counts.counters())
    counters = np.stack(of_images)
    together = object_figures(counters.sum(axis=0))
    figures = {name: float(values[0]) for name, values in together.items()}
    each = object_figures(counters)
    for name in ("aji", "pq"):
        figures[f"mean_{name}"] = float(each[name][:, 0].mean())
    return figures


def masks(labels: Numbers) -> Iterator[ObjectMask]:
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        if place is not None:
            rows, columns = place
            pixels = labels[place] == number
            yield ObjectMask(
                Box(columns.start, rows.start, pixels.shape[1], pixels.shape[0]), pixels
            )


if __name__ == "__main__":
    main()
