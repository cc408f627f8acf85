"""The files of an evaluation: tables for programs, and a page to read."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.geometry import Frame, area_text
from pathoseg.outputs.atomic import write_rows, write_text
from pathoseg.outputs.html_report import (
    Axis,
    Bar,
    Chart,
    Line,
    confusion_shares,
    count,
    picture,
    scale_bar,
    write_page,
)
from pathoseg.outputs.overlay import overlay_layer


class Figure(Protocol):
    """A figure and its 95 % interval; nan where there is none."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@dataclass(frozen=True)
class ScoredSlide:
    """The counts and figures of one slide.

    Attributes:
        name: The slide's name.
        patient: The slide's patient.
        split: The slide's split in the model's run, or "unseen".
        mpp: Microns per level-0 pixel.
        pixel_mm2: Area of what was compared at a time: a pixel of the mask, or a tile.
        confusion: Pixels by truth and prediction, see `Confusion`.
        objects: Numbers of annotated and of predicted objects: of all, then of each class but the
            background, shape (classes, 2). None unless objects are separated.
        figures: By name, without intervals.
    """

    name: str
    patient: str
    split: str
    mpp: float
    pixel_mm2: float
    confusion: NDArray[Any]
    objects: NDArray[np.int64] | None
    figures: Mapping[str, float]

    @property
    def pixels(self) -> int:
        return int(self.confusion.sum())

    def areas_mm2(self) -> tuple[list[float], list[float]]:
        """Return the annotated and the predicted areas in mm², by class without the background."""
        return _areas(self.confusion * self.pixel_mm2)


@dataclass(frozen=True)
class SlidePicture:
    """A slide to show.

    Attributes:
        title: Why it is shown; empty for the only one.
        slide: Its figures.
        frame: The frame of the arrays.
        image: Shape (height, width, 3).
        truth: Class indices of shape (height, width), 255 where nothing is compared.
        prediction: Class indices of shape (height, width).
    """

    title: str
    slide: ScoredSlide
    frame: Frame
    image: NDArray[np.uint8]
    truth: NDArray[np.uint8]
    prediction: NDArray[np.uint8]


@dataclass(frozen=True)
class ScoredSplit:
    """The counts and figures of all slides of a split.

    Attributes:
        name: The split.
        slides: Its slides.
        confusion: The sum of theirs.
        calibration: (bins, 3), see `Calibration`.
        figures: By name, with intervals.
        pictures: Slides to show.
    """

    name: str
    slides: tuple[ScoredSlide, ...]
    confusion: NDArray[Any]
    calibration: NDArray[np.float64]
    figures: Mapping[str, Figure]
    pictures: tuple[SlidePicture, ...]

    @property
    def patients(self) -> int:
        return len({slide.patient for slide in self.slides})

    @property
    def objects(self) -> NDArray[np.int64] | None:
        """The numbers of objects of all slides, likewise."""
        numbers = [slide.objects for slide in self.slides if slide.objects is not None]
        return np.sum(numbers, axis=0) if numbers else None

    def areas_mm2(self) -> tuple[list[float], list[float]]:
        """Return the annotated and the predicted areas in mm² of all slides, by class likewise."""
        return _areas(np.sum([slide.confusion * slide.pixel_mm2 for slide in self.slides], axis=0))


@dataclass(frozen=True)
class Evaluation:
    """All that is told of an evaluation.

    Attributes:
        model: The bundle's folder.
        model_id: Its hash.
        classes: The model's classes.
        mpp: Microns per pixel that it sees.
        slides: Folder of the slides.
        unit: The unit that is counted: "pixels" or "tiles".
        boundary_um: Tolerance of the boundary F1; None where there is none.
        centroid_um: Largest distance of paired centroids; None unless objects are separated.
        seed: Seed of the intervals' draws.
        resamples: Number of draws.
        fewest_patients: With fewer patients there are no intervals.
        warnings: Sentences for the reader.
        left_out: Slide to why it is not compared.
        splits: The most telling one first.
        version: The version of pathoseg.
    """

    model: str
    model_id: str
    classes: ClassTable
    mpp: float
    slides: str
    unit: str
    boundary_um: float | None
    centroid_um: float | None
    seed: int
    resamples: int
    fewest_patients: int
    warnings: tuple[str, ...]
    left_out: Mapping[str, str]
    splits: tuple[ScoredSplit, ...]
    version: str


def best_median_worst(slides: Sequence[ScoredSlide]) -> list[tuple[str, ScoredSlide]]:
    """Choose the slides to show by their mean Dice; those without one are left out.

    Returns:
        Up to three pairs: "Best", "Median" or "Worst" ("" for a single slide), and the slide.
    """
    known = [slide for slide in slides if not math.isnan(slide.figures["dice_mean"])]
    ranked = sorted(known, key=lambda slide: -slide.figures["dice_mean"])
    if len(ranked) < 3:
        return list(zip(("Best", "Worst") if len(ranked) == 2 else ("",), ranked, strict=False))
    return [("Best", ranked[0]), ("Median", ranked[len(ranked) // 2]), ("Worst", ranked[-1])]


def write_evaluation(folder: Path, split: str | None, evaluation: Evaluation) -> tuple[Path, bool]:
    """Write an evaluation's tables, its JSON and its HTML page.

    They are evaluation.csv, evaluation-slides.csv, confusion.csv, evaluation.json and
    evaluation.html.

    Args:
        folder: Made where it is missing.
        split: The single split of the evaluation, with which the names then end; None for several.
        evaluation: The figures.

    Returns:
        The path of evaluation.csv, and whether an earlier one was replaced.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = "" if split is None else f"-{split}"
    table = folder / f"evaluation{end}.csv"
    has_replaced = write_rows(table, _figure_rows(evaluation))
    write_rows(folder / f"evaluation-slides{end}.csv", _slide_rows(evaluation))
    write_rows(folder / f"confusion{end}.csv", _confusion_rows(evaluation))
    text = json.dumps(_without_nan(_document(evaluation)), indent=2, allow_nan=False)
    write_text(folder / f"evaluation{end}.json", text + "\n")
    write_page(
        folder / f"evaluation{end}.html",
        "evaluation.html",
        of=evaluation,
        splits=[_Page(evaluation, split) for split in evaluation.splits],
        version=evaluation.version,
        date=datetime.date.today().isoformat(),
    )
    return table, has_replaced


def _figure_rows(evaluation: Evaluation) -> Iterable[dict[str, object]]:
    slides = [slide for split in evaluation.splits for slide in split.slides]
    for slide in slides:
        yield {
            "slide": slide.name,
            "split": slide.split,
            "pixels": slide.pixels,
            **_all_objects(slide),
            **slide.figures,
            **{f"{name}_{end}": "" for name in slide.figures for end in ("low", "high")},
            **slide.figures,  # a class may be called as an end of another's: gland, gland_low
        }
    for split in evaluation.splits:
        row: dict[str, object] = {
            "slide": "all",
            "split": split.name,
            "pixels": int(split.confusion.sum()),
            **_all_objects(split),
        }
        values = {name: figure.value for name, figure in split.figures.items()}
        ends = dict[str, float]()
        for name, figure in split.figures.items():
            ends |= {f"{name}_low": figure.low, f"{name}_high": figure.high}
        yield {**row, **values, **ends, **values}


def _all_objects(of: ScoredSlide | ScoredSplit) -> dict[str, int]:
    if of.objects is None:
        return {}
    annotated, predicted = of.objects[0].tolist()
    return {"annotated_objects": annotated, "predicted_objects": predicted}


def _slide_rows(evaluation: Evaluation) -> Iterable[dict[str, object]]:
    names = evaluation.classes.names
    for split in evaluation.splits:
        for slide in split.slides:
            annotated, predicted = slide.areas_mm2()
            row: dict[str, object] = {
                "slide": slide.name,
                "patient": slide.patient,
                "split": slide.split,
                "mpp": f"{slide.mpp:.6g}",
                "compared_mm2": f"{slide.pixels * slide.pixel_mm2:.9g}",
                "dice_mean": slide.figures["dice_mean"],
            }
            row |= {f"dice_{name}": slide.figures[f"dice_{name}"] for name in names}
            for what, areas in zip(_SIDES, (annotated, predicted), strict=True):
                row |= {
                    f"{what}_mm2_{n}": f"{area:.9g}" for n, area in zip(names, areas, strict=True)
                }
            if slide.objects is not None:
                for what, numbers in zip(_SIDES, slide.objects[1:].T.tolist(), strict=True):
                    row |= {f"{what}_objects_{n}": k for n, k in zip(names, numbers, strict=True)}
            yield row


def _confusion_rows(evaluation: Evaluation) -> Iterable[dict[str, object]]:
    names = _with_background(evaluation.classes)
    for split in evaluation.splits:
        shares = confusion_shares(split.confusion)
        for row, truth in enumerate(names):
            for column, prediction in enumerate(names):
                yield {
                    "split": split.name,
                    "truth": truth,
                    "prediction": prediction,
                    "pixels": int(split.confusion[row, column]),
                    "share_of_truth": float(shares[row, column]),
                }


def _document(evaluation: Evaluation) -> dict[str, Any]:
    """Every figure in plain values."""
    return {
        "pathoseg_version": evaluation.version,
        "model": {
            "folder": evaluation.model,
            "id": evaluation.model_id,
            "classes": _with_background(evaluation.classes),
            "mpp": evaluation.mpp,
        },
        "slides_folder": evaluation.slides,
        "unit": evaluation.unit,
        "boundary_um": evaluation.boundary_um,
        "centroid_um": evaluation.centroid_um,
        "intervals": {
            "level": 0.95,
            "over": "patients",
            "resamples": evaluation.resamples,
            "seed": evaluation.seed,
            "fewest_patients": evaluation.fewest_patients,
        },
        "warnings": list(evaluation.warnings),
        "left_out": dict(evaluation.left_out),
        "splits": {
            split.name: {
                "slides": len(split.slides),
                "patients": split.patients,
                "figures": {
                    name: {"value": figure.value, "low": figure.low, "high": figure.high}
                    for name, figure in split.figures.items()
                },
                "objects": _numbers(split, evaluation),
                "confusion": split.confusion.tolist(),
                "calibration": [
                    {"pixels": int(pixels), "confidence": sure / pixels, "accuracy": right / pixels}
                    if pixels
                    else {"pixels": 0, "confidence": None, "accuracy": None}
                    for pixels, sure, right in split.calibration.tolist()
                ],
            }
            for split in evaluation.splits
        },
        "slides": [
            {
                "slide": slide.name,
                "patient": slide.patient,
                "split": slide.split,
                "mpp": slide.mpp,
                "pixel_mm2": slide.pixel_mm2,
                "figures": dict(slide.figures),
                "objects": _numbers(slide, evaluation),
                "confusion": slide.confusion.tolist(),
            }
            for split in evaluation.splits
            for slide in split.slides
        ],
    }


def _numbers(of: ScoredSlide | ScoredSplit, evaluation: Evaluation) -> dict[str, Any] | None:
    """Numbers of objects by class."""
    if of.objects is None:
        return None
    names = ("all", *evaluation.classes.names)
    return {
        name: dict(zip(_SIDES, numbers, strict=True))
        for name, numbers in zip(names, of.objects.tolist(), strict=True)
    }


class _Page:
    """The part of the page for one split.

    Args:
        evaluation: The whole.
        split: The part.
    """

    def __init__(self, evaluation: Evaluation, split: ScoredSplit) -> None:
        names = evaluation.classes.names
        annotated, predicted = split.areas_mm2()
        self.of, self.figures, self.patients = split, split.figures, split.patients
        self.has_intervals = split.patients >= evaluation.fewest_patients
        self.compared_mm2 = sum(slide.pixels * slide.pixel_mm2 for slide in split.slides)
        self.classes = [
            {
                "name": name,
                "colour": colour,
                "annotated": annotated[at],
                "predicted": predicted[at],
                **{
                    measure: split.figures[f"{measure}_{name}"]
                    for measure in ("dice", "iou", "precision", "recall", "boundary_f1")
                    if f"{measure}_{name}" in split.figures
                },
            }
            for at, (name, colour) in enumerate(zip(names, evaluation.classes.colours, strict=True))
        ]
        self.objects = None if split.objects is None else _object_rows(split, evaluation.classes)
        self.names = _with_background(evaluation.classes)
        self.shares = confusion_shares(split.confusion).tolist()
        self.details = [
            [f"{count(n)} {evaluation.unit}" for n in row] for row in split.confusion.tolist()
        ]
        self.reliability, self.sureness = _reliability(split.calibration, evaluation)
        self.pictures = [_shown(shown, evaluation.classes) for shown in split.pictures]
        self.has_ignored = any((shown.truth == IGNORE).any() for shown in split.pictures)
        self.slide_columns = [("Slide", False), ("Patient", False), ("Mean Dice", True)]
        self.slide_columns += [(f"Dice {name}", True) for name in names if len(names) > 1]
        if evaluation.boundary_um is not None:
            self.slide_columns.append(("Boundary F1", True))
        if evaluation.centroid_um is not None:
            self.slide_columns += [("AJI", True), ("PQ", True), ("Objects", True)]
        self.slide_columns += [("Annotated mm²", True), ("Predicted mm²", True), ("µm/px", True)]
        ranked = sorted(split.slides, key=lambda slide: _nan_last(slide.figures["dice_mean"]))
        self.slide_rows = [_slide_cells(slide, evaluation) for slide in ranked]


_SIDES = "annotated", "predicted"
_OBJECT_MEASURES = (
    *("aji", "pq", "sq", "rq", "object_precision", "object_recall", "centroid_f1"),
    "object_ratio",
)


def _object_rows(split: ScoredSplit, classes: ClassTable) -> list[dict[str, Any]]:
    """The measures of objects: of all, and of each class where there are several."""
    assert split.objects is not None
    rows = list(zip(("all", *classes.names), (None, *classes.colours), split.objects, strict=True))
    return [
        {
            "name": name,
            "colour": colour,
            "annotated": int(numbers[0]),
            "predicted": int(numbers[1]),
            **{measure: split.figures[f"{measure}_{name}"] for measure in _OBJECT_MEASURES},
        }
        for name, colour, numbers in (rows if len(classes.names) > 1 else rows[:1])
    ]


def _slide_cells(slide: ScoredSlide, evaluation: Evaluation) -> list[str]:
    names, (annotated, predicted) = evaluation.classes.names, slide.areas_mm2()
    figures = ["dice_mean", *(f"dice_{name}" for name in names if len(names) > 1)]
    if evaluation.boundary_um is not None:
        figures.append("boundary_f1_mean")
    if slide.objects is not None:
        figures += ["aji_all", "pq_all"]
    shown = ["–" if math.isnan(slide.figures[f]) else f"{slide.figures[f]:.3f}" for f in figures]
    if slide.objects is not None:
        true, found = slide.objects[0].tolist()
        shown.append(f"{count(found)} / {count(true)}")
    areas = [area_text(sum(annotated)), area_text(sum(predicted)), f"{slide.mpp:.4g}"]
    return [slide.name, slide.patient, *shown, *areas]


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _reliability(bins: NDArray[np.float64], evaluation: Evaluation) -> tuple[Chart, Chart]:
    """Accuracy over confidence, and below it how much there is of each confidence."""
    low = math.floor(10 / len(_with_background(evaluation.classes))) / 10  # none is less sure
    step = 1 if low >= 0.5 else 2
    ticks = tuple((at / 10, f"{at / 10:g}") for at in range(10, round(10 * low) - 1, -step))
    above, below = (
        Axis(label, low, 1.0, ticks) for label in ("", "How sure the model is (confidence)")
    )
    width, total = 1 / len(bins), bins[:, 0].sum()
    right, held = list[Bar](), list[Bar]()
    for at, (pixels, sure, hit) in enumerate(bins.tolist()):
        left, end = max(low, at * width), (at + 1) * width
        if not pixels or end <= low:
            continue
        share = pixels / total
        told = (
            f"{100 * sure / pixels:.1f} % sure, {100 * hit / pixels:.1f} % right; "
            f"{100 * share:.3g} % of the {evaluation.unit}"
        )
        right.append(Bar(left, end, hit / pixels, told))
        held.append(Bar(left, end, share, told))
    fifths = tuple((at / 5, f"{at / 5:g}") for at in range(6))
    diagonal = Line(((low, low), (1.0, 1.0)), dashed=True)
    accuracy = Axis("How often it is right", 0.0, 1.0, fifths)
    halves = ((0.0, "0"), (0.5, "50 %"), (1.0, "100 %"))
    share = Axis("Share", 0.0, 1.0, halves)
    return (
        Chart("Reliability diagram", above, accuracy, tuple(right), (diagonal,), height=220),
        Chart(
            f"Share of the {evaluation.unit} by confidence", below, share, tuple(held), height=64
        ),
    )


def _shown(shown: SlidePicture, classes: ClassTable) -> dict[str, Any]:
    """A picture as the macro `panels` takes it."""
    height, width = shown.truth.shape
    layers = [picture(overlay_layer(mask, classes)) for mask in (shown.truth, shown.prediction)]
    return {
        "title": shown.title,
        "slide": shown.slide,
        "uri": picture(shown.image),
        "width": width,
        "height": height,
        "layers": list(zip(("Slide", "Annotation", "Model"), (None, *layers), strict=True)),
        "bar": scale_bar(width, shown.frame.mpp.x),
    }


def _areas(areas: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    return areas.sum(axis=1)[1:].tolist(), areas.sum(axis=0)[1:].tolist()


def _with_background(classes: ClassTable) -> list[str]:
    return ["background", *classes.names]


def _without_nan(value: Any) -> Any:
    """Plain values with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
