"""Test the files of an evaluation where figures are missing, and the choice of slides shown."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import ClassTable
from pathoseg.models.tally import Figure, Tally, pooled_figures
from pathoseg.outputs.evaluation_report import (
    Evaluation,
    ScoredSlide,
    ScoredSplit,
    best_median_worst,
    write_evaluation,
)

CLASSES = ClassTable(("gland", "never seen"), ((0, 150, 0), (200, 0, 0)))
OBJECTS = np.array([[3.0, 4, 1, 0.75, 2, 1, 1, 1]] * 2 + [[0.0] * 8])
TALLY = Tally(
    np.diag([5, 3, 0]), np.zeros((15, 3)), np.array([[4, 4, 2, 2], [0, 0, 0, 0]]), OBJECTS
)


def _slide(name: str, dice: float = 1.0) -> ScoredSlide:
    figures = {key: float(value) for key, value in TALLY.figures(CLASSES.names).items()}
    figures["dice_mean"] = dice
    numbers = TALLY.object_numbers
    return ScoredSlide(name, "P", "test", 0.5, 0.25e-6, TALLY.confusion, numbers, figures)


def _evaluation(classes: ClassTable, *splits: ScoredSplit) -> Evaluation:
    return Evaluation(
        model="run/model",
        model_id="0",
        classes=classes,
        mpp=0.5,
        slides="slides",
        unit="pixels",
        boundary_um=2.0,
        centroid_um=3.0,
        seed=0,
        resamples=2000,
        fewest_patients=3,
        warnings=(),
        left_out={},
        splits=splits,
        version="1",
    )


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=9))
def test_the_slides_shown_are_the_best_the_median_and_the_worst(dice: list[float]) -> None:
    known = sorted(value for value in dice if not math.isnan(value))
    shown = best_median_worst([_slide(str(at), value) for at, value in enumerate(dice)])
    scores = {title: slide.figures["dice_mean"] for title, slide in shown}
    assert len({slide.name for _, slide in shown}) == len(shown) == min(3, len(known))
    if len(known) > 1:
        assert (scores["Best"], scores["Worst"]) == (known[-1], known[0])
    if len(known) > 2:
        assert scores["Median"] in (known[(len(known) - 1) // 2], known[len(known) // 2])


def test_what_does_not_exist_is_left_open_everywhere(tmp_path: Path) -> None:
    slides = tuple(_slide(f"{number}.svs", math.nan) for number in range(41))
    figures: dict[str, Figure] = pooled_figures([TALLY] * 41, ["P"] * 41, CLASSES.names, 0)
    split = ScoredSplit("test", slides, 41 * TALLY.confusion, np.zeros((15, 3)), figures, ())
    evaluation = _evaluation(CLASSES, split, replace(split, name="val"))
    table, has_replaced = write_evaluation(tmp_path, None, evaluation)
    assert not has_replaced
    assert {path.name for path in tmp_path.iterdir()} == {
        "evaluation.csv", "evaluation-slides.csv", "evaluation.json", "evaluation.html",
        "confusion.csv",
    }  # fmt: skip
    with table.open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    assert (row["slide"], row["split"], row["dice_never seen"]) == ("all", "val", "nan")
    assert (row["annotated_objects"], row["predicted_objects"]) == (str(2 * 41), str(41))
    assert (row["pq_gland"], row["aji_all"], row["rq_never seen"]) == ("0.5", "0.75", "nan")
    with (tmp_path / "evaluation-slides.csv").open(newline="") as file:
        of_slide = next(csv.DictReader(file))
    assert (of_slide["annotated_objects_gland"], of_slide["predicted_objects_never seen"]) == (
        "2", "0",
    )  # fmt: skip
    told = json.loads((tmp_path / "evaluation.json").read_text())["splits"]["test"]
    assert told["objects"]["gland"] == {"annotated": 82, "predicted": 41}
    assert told["figures"]["dice_gland"] == {"value": 1.0, "low": None, "high": None}
    assert told["figures"]["ece"]["value"] is None
    page = (tmp_path / "evaluation.html").read_text()
    assert not re.search(r"\bnan\b", page)
    large = tuple(replace(slide, pixel_mm2=2500.0) for slide in slides)
    split = replace(split, name="val", slides=large)
    write_evaluation(tmp_path, "val", replace(evaluation, splits=(split,)))
    page = (tmp_path / "evaluation-val.html").read_text()
    assert "20,000.0" in page  # mm² of 8 pixels
    assert not re.search(r"\de[+-]\d", page)
    assert len(list(tmp_path.glob("*-val.*"))) == 5


def test_a_class_named_as_an_end_of_anothers_interval_keeps_its_figures(tmp_path: Path) -> None:
    classes = ClassTable(("grade", "grade_low"), CLASSES.colours)
    figures = pooled_figures([TALLY] * 9, [*"ABCDEFGHI"], classes.names, 0)
    slide = _slide("a.svs")
    own = {key: float(value) for key, value in TALLY.figures(classes.names).items()}
    own["dice_grade_low"] = 0.25
    split = ScoredSplit(
        "test", (replace(slide, figures=own),), TALLY.confusion, np.zeros((15, 3)),
        figures | {"dice_grade_low": Figure(0.25, 0.125, 0.5)}, (),
    )  # fmt: skip
    table, _ = write_evaluation(tmp_path, None, _evaluation(classes, split))
    with table.open(newline="") as file:
        of_slide, of_all = csv.DictReader(file)
    assert (of_slide["dice_grade_low"], of_slide["dice_grade_high"]) == ("0.25", "")
    assert (of_all["dice_grade_low"], of_all["dice_grade_low_high"]) == ("0.25", "0.5")
