"""Compares a model's segmentation of whole annotated slides with their annotations."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pathoseg.annotations.annotation import IGNORE
from pathoseg.config import Config, load_config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box
from pathoseg.host_memory import share_one_heap
from pathoseg.inference.segmenter import Segmenter, load_segmenter
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import Bundle
from pathoseg.models.metrics import Confusion
from pathoseg.outputs.atomic import replaced
from pathoseg.progress import say
from pathoseg.slides.slide import open_slide
from pathoseg.training.labelled_slides import LabelledSlide, find_labelled_slides
from pathoseg.training.run_folder import CONFIG, SPLITS, bundle_of

_UNSEEN = "unseen"


def evaluate(
    model: Path | None,
    out: Path | None,
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    split: str | None,
    factory: str | None,
) -> Path:
    """Writes Dice and IoU of every slide, and of all slides of a split taken together.

    A slide's split is what the model's run recorded; one that the run never saw is `unseen`.
    Figures of training slides therefore never mix with others. Without a `config_file`, slides are
    read as the model's run read them.

    Returns:
        The table `slide,split,pixels,dice_mean,iou_mean,dice_<class>…,iou_<class>…`: in a file
        evaluation.csv, or evaluation-<split>.csv for one split.

    Raises:
        PathosegError: The model, a slide or an annotation cannot be used, or no slide is left.
    """
    share_one_heap()
    bundle = bundle_of(model)
    config = _configured(bundle.parent / CONFIG, config_file, flags)
    segmenter = load_segmenter(bundle, config, factory)
    card = segmenter.card
    config = replace(config, tiles=replace(config.tiles, mpp=card.mpp))
    sources = find_labelled_slides(config, segmenter.classes)
    splits = _recorded_splits(bundle.parent / SPLITS)
    chosen = [
        (source, splits.get(source.slide.name, _UNSEEN))
        for source in sources.usable
        if split in (None, splits.get(source.slide.name, _UNSEEN))
    ]
    found = {splits.get(source.slide.name, _UNSEEN) for source in sources.usable}
    if not chosen:
        raise PathosegError(
            f"No annotated slide in {config.data.slides} is of the split {split!r}.",
            f"They are of these: {', '.join(sorted(found))}; what the model's run never saw is "
            f"{_UNSEEN}.",
        )
    rows, pooled = [], dict[str, Confusion]()
    with Interruption("Nothing is written; run the same command again.") as interruption:
        for source, part in chosen:
            confusion = _compare(segmenter, source, config.data.assume_mpp, interruption)
            rows.append(_row(source.slide.name, part, confusion, card))
            pooled.setdefault(part, Confusion(len(confusion.matrix))).merge(confusion)
            say(_line(rows[-1]))
    rows += [_row("all", part, confusion, card) for part, confusion in pooled.items()]
    path = (out or bundle.parent) / (
        "evaluation.csv" if split is None else f"evaluation-{split}.csv"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows[-len(pooled) :]:
        say(_line(row))
    say(f"Written to {path}")
    return path


def _configured(
    recorded: Path, config_file: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> Config:
    if config_file is not None or not recorded.is_file():
        return load_config(config_file, flags)
    config, run = load_config(recorded, flags), load_config(recorded)
    if config.data.slides != run.data.slides:
        # Where the run's annotations lie says nothing of other slides'.
        annotations = flags.get("data", {}).get("annotations")
        config = replace(config, data=replace(config.data, annotations=annotations, table=None))
    return config


def _compare(
    segmenter: Segmenter,
    source: LabelledSlide,
    assume_mpp: float | None,
    interruption: Interruption,
) -> Confusion:
    confusion, top = Confusion(len(segmenter.classes)), 0
    with open_slide(source.slide, assume_mpp) as slide:
        plan = segmenter.plan(slide)
    with closing(segmenter.bands(plan, interruption)) as bands:
        for band in bands:
            box = Box(0, top, band.shape[1], band.shape[0])
            truth = source.labels.rasterise(box, plan.output, segmenter.classes)
            truth[band == IGNORE] = IGNORE
            confusion.update(np.where(band == IGNORE, 0, band), truth)
            top += len(band)
    return confusion


def _recorded_splits(table: Path) -> dict[str, str]:
    if not table.is_file():
        return {}
    with table.open(newline="") as file:
        return {row["slide"]: row["split"] for row in csv.DictReader(file)}


def _row(slide: str, split: str, confusion: Confusion, card: Bundle) -> dict[str, str | float]:
    row: dict[str, str | float] = {
        "slide": slide,
        "split": split,
        "pixels": int(confusion.matrix.sum()),
        "dice_mean": confusion.mean_dice,
        "iou_mean": confusion.mean_iou,
    }
    row |= {f"dice_{n}": float(v) for n, v in zip(card.class_names, confusion.dice, strict=True)}
    row |= {f"iou_{n}": float(v) for n, v in zip(card.class_names, confusion.iou, strict=True)}
    return row


def _line(row: Mapping[str, str | float]) -> str:
    each = "  ".join(
        f"{key.removeprefix('dice_')} {value:.4f}"
        for key, value in row.items()
        if key.startswith("dice_") and isinstance(value, float) and not math.isnan(value)
    )
    return f"{row['slide']} ({row['split']})  Dice: {each}"
