"""The page of a run: the figures of metrics.csv as curves, hostile names, and what is not there."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pathoseg.annotations.annotation import ClassTable
from pathoseg.outputs.run_report import Run, write_run_report
from tests.outputs.test_batch_report import EVIL, parsed

CLASSES = ClassTable((f"gland {EVIL}", "fat"), ((0, 150, 0), (200, 0, 0)))


def _run(folder: Path) -> Run:
    return Run(
        folder=folder,
        classes=CLASSES,
        unit="pixels",
        state="It is finished.",
        best_epoch=2,
        best_score=0.75,
        score="the mean Dice",
        epochs=3,
        steps=30,
        skipped_steps=1,
        seconds=3900.0,
        class_columns=[("Class", False), ("mm²", True)],
        class_rows=[[name, "1"] for name in CLASSES.names],
        slide_columns=[("Slide", False)],
        slide_rows=[[f"{EVIL}.svs"]],
        warnings=[EVIL],
        left_out={EVIL: EVIL},
        options=[("data.slides", (EVIL,), None), ("train.epochs", 3, None)],
        made=[("Machine", EVIL)],
        version="0.1.0",
    )


def _write_metrics(folder: Path, rows: Sequence[dict[str, object]]) -> None:
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)


def test_its_curves_are_those_of_the_table(tmp_path: Path) -> None:
    losses, scores = [1.5, 0.75, 0.5], [0.25, 0.75, 0.5]
    rows: list[dict[str, object]] = [
        {"epoch": at, "train_loss": loss, "val_loss": "", f"val_dice_{CLASSES.names[0]}": score}
        | {"val_dice_fat": "nan", "val_dice_mean": score, "tiles_per_s": 2}
        for at, (loss, score) in enumerate(zip(losses, scores, strict=True), start=1)
    ]
    rows[1]["val_loss"] = 1.25
    _write_metrics(tmp_path, rows)
    counts = [[90, 10, 0], [5, 15, 0], [0, 0, 0]]
    tiles = {name: {"slide": f"{EVIL}.svs", "loss": 0.5} for name in ("best", "worst")}
    known = {"epoch": 2, "confusion": counts, "tiles": tiles}
    (tmp_path / "validation.json").write_text(json.dumps(known))
    (tmp_path / "predictions").mkdir()
    shown = np.zeros((40, 120, 3), np.uint8)
    Image.fromarray(shown).save(tmp_path / "predictions" / "best-tile.png")
    (tmp_path / "predictions" / "worst-tile.png").write_bytes(b"cut")
    write_run_report(_run(tmp_path))
    found = parsed(tmp_path / "report.html")
    assert found.tags["img"] == 3, "the tile, its truth and its prediction"
    page = (tmp_path / "report.html").read_text()
    points = re.findall(r"<title>([\d.]+): ([\d.]+)</title>", page)
    told = [(float(x), float(y)) for x, y in points]
    assert told == [
        *((at, loss) for at, loss in enumerate(losses, start=1)), (2, 1.25),
        *[(at, score) for at, score in enumerate(scores, start=1)] * 2,
    ]  # fmt: skip
    shares = re.findall(r"([\d.–]+(?: %)?)<small>([\d,]+) pixels", page)
    assert [text for text, _ in shares] == [
        *("90.0 %", "10.0 %", "0.0 %", "25.0 %", "75.0 %", "0.0 %", "–", "–", "–")
    ]
    assert "1 h 5 min" in page


def test_before_the_first_epoch_it_says_what_is_known(tmp_path: Path) -> None:
    write_run_report(replace(_run(tmp_path), best_epoch=0, best_score=None, epochs=0))
    assert parsed(tmp_path / "report.html").tags["polyline"] == 0


def test_evaluations_beside_it_are_linked(tmp_path: Path) -> None:
    (tmp_path / "evaluation-test.html").write_text("")
    write_run_report(_run(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert '<a href="evaluation-test.html">' in page


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": 1, "confusion": [[1]], "tiles": {}}'])
def test_a_record_of_something_else_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "validation.json").write_text(text)
    write_run_report(_run(tmp_path))
    assert "What becomes of each class" not in (tmp_path / "report.html").read_text()
