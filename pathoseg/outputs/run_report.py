"""The page of a training run: what it learnt from, its curves, its mistakes, how it was made."""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from PIL import Image

from pathoseg.annotations.annotation import ClassTable, Colour
from pathoseg.outputs.html_report import (
    Chart,
    Line,
    axis,
    confusion_shares,
    count,
    picture,
    write_page,
)

PAGE = "report.html"
METRICS, VALIDATION = "metrics.csv", "validation.json"
_SIDE = 320  # pixels of a tile that is shown
_VALIDATION_LINE: Colour = (180, 96, 58)
_MEAN_LINE: Colour = (31, 39, 51)


@dataclass(frozen=True)
class Run:
    """What is told of a run beside what its folder holds.

    Attributes:
        folder: Of the run.
        classes: That it learns.
        unit: The unit that validation counts: "pixels" or "tiles".
        state: A sentence: finished, or stopped and how to go on.
        best_epoch: The epoch whose weights are the model's; 0 where there is none yet.
        best_score: Its validation score; None where nothing validates.
        score: What that is, in words.
        epochs: Finished.
        steps: Done.
        skipped_steps: Steps left out because a gradient was not finite.
        seconds: All parts of the run together.
        class_columns: Title of each column, and whether its cells are numbers.
        class_rows: A row for each class.
        slide_columns: Likewise, of the slides.
        slide_rows: A row for each slide.
        warnings: What is likely not meant.
        left_out: Slide to why it is not learnt from.
        options: Name, value and default of the options that are not at their defaults.
        made: Name and value: machine, versions.
        version: Of pathoseg.
    """

    folder: Path
    classes: ClassTable
    unit: str
    state: str
    best_epoch: int
    best_score: float | None
    score: str
    epochs: int
    steps: int
    skipped_steps: int
    seconds: float
    class_columns: Sequence[tuple[str, bool]]
    class_rows: Sequence[Sequence[str]]
    slide_columns: Sequence[tuple[str, bool]]
    slide_rows: Sequence[Sequence[str]]
    warnings: Sequence[str]
    left_out: Mapping[str, str]
    options: Sequence[tuple[str, Any, Any]]
    made: Sequence[tuple[str, str]]
    version: str


def write_run_report(run: Run) -> Path:
    """Write the page of a run into its folder.

    Returns:
        Its path.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    write_page(
        run.folder / PAGE,
        "run.html",
        of=_Page(run),
        run=run,
        quoted_folder=quote(str(run.folder)),
        version=run.version,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    )
    return run.folder / PAGE


class _Page:
    """The content of the page.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        rows = _metrics(run.folder / METRICS)
        self.classes = list(zip(run.classes.names, run.classes.colours, strict=True))
        self.charts = list(_charts(rows, run))
        self.last = rows[-1] if rows else {}
        rates = [row["tiles_per_s"] for row in rows if "tiles_per_s" in row]
        self.rate = rates[-1] if rates else None
        self.options = [
            (name, _told(value), _told(default)) for name, value, default in run.options
        ]
        self.evaluations = sorted(path.name for path in run.folder.glob("evaluation*.html"))
        self.names = ["background", *run.classes.names]
        self.epoch, self.confusion, self.tiles = None, None, list[dict[str, Any]]()
        known = _known(run.folder / VALIDATION, len(self.names))
        if known is None:
            return
        self.epoch = known["epoch"]
        counts = np.array(known["confusion"], np.int64)
        self.confusion = confusion_shares(counts).tolist()
        self.details = [[f"{count(n)} {run.unit}" for n in row] for row in counts.tolist()]
        for name, title in (("best", "Least loss"), ("worst", "Most loss")):
            shown = _shown(run.folder / "predictions" / f"{name}-tile.png")
            if shown is not None and name in known["tiles"]:
                self.tiles.append({"title": title, "panels": shown, **known["tiles"][name]})


def _metrics(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv without what is empty or not finite; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: float(text) for name, text in row.items() if text and math.isfinite(float(text))}
            for row in csv.DictReader(file)
        ]


def _known(path: Path, classes: int) -> dict[str, Any] | None:
    """validation.json; None where no epoch has been validated, or it is of other classes."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if np.shape(known["confusion"]) == (classes, classes):
            return known
    return None


def _charts(rows: Sequence[Mapping[str, float]], run: Run) -> Iterator[Chart]:
    losses = [
        _line(rows, "train_loss", "training", None),
        _line(rows, "val_loss", "validation", _VALIDATION_LINE),
    ]
    yield from _chart("Loss", losses, run, None)
    colours = dict(zip(run.classes.names, run.classes.colours, strict=True))
    mean = [
        _line(rows, "val_dice_mean", "mean", _MEAN_LINE),
        _line(rows, "val_accuracy", "accuracy", _MEAN_LINE),
    ]
    for measure, title in (("dice", "Dice"), ("auc", "Area under the curve")):
        own = [_line(rows, f"val_{measure}_{name}", name, of) for name, of in colours.items()]
        together = mean[:1] if measure == "dice" and len(own) > 1 else []
        yield from _chart(f"{title}, validation", [*own, *together], run, 0.0)
    yield from _chart("Accuracy, validation", mean[1:], run, 0.0)


def _line(
    rows: Sequence[Mapping[str, float]], column: str, name: str, colour: Colour | None
) -> Line:
    points = tuple((row["epoch"], row[column]) for row in rows if column in row)
    return Line(points, name=name, colour=colour)


def _chart(title: str, lines: Sequence[Line], run: Run, low: float | None) -> Iterator[Chart]:
    """A chart of the lines that have a point, the best epoch marked; none where none has."""
    held = [line for line in lines if line.points]
    if not held:
        return
    values = [y for line in held for _, y in line.points]
    up = axis(title, values if low is None else [*values, 1.0], low)
    across = axis("Epoch", [1, *(x for line in held for x, _ in line.points)])
    whole = tuple((at, text) for at, text in across.ticks if float(at).is_integer())
    across = replace(across, ticks=whole)
    best = float(run.best_epoch)
    if across.low <= best <= across.high and best:
        held.append(Line(((best, up.low), (best, up.high)), dashed=True))
    yield Chart(title, across, up, lines=tuple(held))


def _shown(path: Path) -> list[tuple[str, str]] | None:
    """Tile, truth and prediction, side by side in a file; None where it is not there."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            page = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # Pillow's words for a broken file
        return None
    side = page.width // 3
    parts = [page.crop((at * side, 0, (at + 1) * side, page.height)) for at in range(3)]
    for part in parts:
        part.thumbnail((_SIDE, _SIDE))
    uris = [picture(np.asarray(part)) for part in parts]
    return list(zip(("Tile", "Annotation", "Model"), uris, strict=True))


def _told(value: Any) -> str:
    if value is None or value in ((), {}, ""):
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
