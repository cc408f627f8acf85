"""Summaries and tables say what the mask holds, and read back as they were written."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.report import (
    SUMMARY_COLUMNS,
    InterestSummary,
    Summary,
    TileCounts,
    class_summaries,
    count_pixels,
    excess_warning,
    read_summary,
    write_failures,
    write_summary,
    write_summary_table,
)

CLASSES = ClassTable(("gland", 'Tumör, "in situ"'), ((200, 0, 0), (0, 0, 200)))
FRAME = Frame(Size(1000, 1000), 2.0, 2.0, Mpp(0.5, 0.5))
SUMMARY = Summary(
    model="a1b2",
    slide="case 1.svs",
    mpp=FRAME.mpp,
    tissue_mm2=0.2,
    classes=class_summaries(CLASSES, {1: 400_000, 255: 7}, {1: 3}, FRAME, 0.2),
    tiles=TileCounts(done=4, skipped=2, unread=1),
    unread_pixels=7,
    versions={"pathoseg": "0.1.0"},
    seconds={"total": 1.5},
)


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@given(hnp.arrays(np.uint8, (7, 9), elements=st.sampled_from([0, 1, 2, 255])))
def test_areas_match_a_count_of_the_mask(mask: NDArray[np.uint8]) -> None:
    pixels = count_pixels(mask[:3], CLASSES) + count_pixels(mask[3:], CLASSES)
    assert pixels[255] == (mask == 255).sum()
    for index, summary in enumerate(class_summaries(CLASSES, pixels, {}, FRAME, 0.5), start=1):
        assert summary.pixels == (mask == index).sum()
        assert summary.area_mm2 == pytest.approx(summary.pixels * 0.25e-6)
        assert summary.share_of_tissue == pytest.approx(summary.area_mm2 / 0.5)


def test_without_tissue_no_share_is_divided_by_nothing() -> None:
    assert [of.share_of_tissue for of in class_summaries(CLASSES, {}, {}, FRAME, 0.0)] == [0.0, 0.0]


def test_densities_are_of_what_could_be_read() -> None:
    (one, other) = class_summaries(CLASSES, {1: 4}, {}, FRAME, 0.5, {1: 10}, read_mm2=0.2)
    assert (one.objects_per_mm2, other.objects_per_mm2) == (pytest.approx(50), 0)
    assert one.share_of_tissue == pytest.approx(4 * 0.25e-6 / 0.5), "of all of the tissue"
    [one, _] = class_summaries(CLASSES, {}, {}, FRAME, 0.5, {1: 10}, read_mm2=0.0)
    assert one.objects_per_mm2 == 0


def test_more_than_the_tissue_is_warned_of() -> None:
    said = excess_warning(SUMMARY.classes, 0.08)
    assert said is not None
    assert "0.1 mm² are segmented, and 0.08 mm² of tissue were found" in said
    assert excess_warning(SUMMARY.classes, 0.1) is None
    assert excess_warning(SUMMARY.classes, 0.0) is None
    said = excess_warning(SUMMARY.classes, 0.08, 256.0)
    assert said is not None
    assert "areas are of whole tiles of 256 µm, glass in them included" in said


def test_a_summary_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    assert read_summary(path) == SUMMARY
    region = InterestSummary("core", 0.1, SUMMARY.classes, 2)
    with_region = replace(SUMMARY, regions_of_interest=(region,))
    write_summary(tmp_path / "other.json", with_region)
    assert read_summary(tmp_path / "other.json") == with_region
    entries = json.loads(path.read_text())
    assert entries["classes"][0] == {
        "name": "gland",
        "pixels": 400_000,
        "area_mm2": pytest.approx(0.1),
        "share_of_tissue": pytest.approx(0.5),
        "regions": 3,
        "objects": None,
        "objects_per_mm2": None,
    }
    assert entries["tiles"] == {"done": 4, "skipped": 2, "unread": 1}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '"text"', "null", '{"mpp": {"x": 0, "y": 0}}', "[" * 100_000, "\0"]
)
def test_another_file_is_no_summary(tmp_path: Path, text: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(PathosegError, match=r"summary\.json is no summary"):
        read_summary(path)


def test_the_table_has_a_row_for_each_class_of_each_slide(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    pixels, regions, objects = {1: 400_000}, {1: 3}, {1: 50}
    counted = class_summaries(CLASSES, pixels, regions, FRAME, 0.2, objects)
    core = class_summaries(CLASSES, pixels, None, FRAME, 0.25, {1: 5})
    other = replace(
        SUMMARY,
        slide="case,2.svs",
        classes=counted[:1],
        regions_of_interest=(InterestSummary("core", 0.25, core[:1], 2),),
    )
    end = ("0.2", "1.75e-06", "0.5", "a1b2")
    write_summary_table(path, [SUMMARY, other])
    assert rows_of(path) == [
        [*SUMMARY_COLUMNS],
        ["case 1.svs", "gland", "0.1", "0.5", "3", "", "", *end, ""],
        ["case 1.svs", 'Tumör, "in situ"', "0", "0", "0", "", "", *end, ""],
        ["case,2.svs", "gland", "0.1", "0.5", "3", "50", "250", *end, ""],
        ["case,2.svs", "gland", "0.1", "0.4", "", "5", "20", "", "5e-07", "0.5", "a1b2", "core"],
    ]
    write_summary_table(path, [])
    assert len(rows_of(path)) == 1


def test_failures_name_reason_and_hint(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    write_failures(path, {"a.svs": PathosegError("a.svs is cut short.", "Copy it\nagain.")})
    assert rows_of(path) == [
        ["slide", "reason", "hint"],
        ["a.svs", "a.svs is cut short.", "Copy it\nagain."],
    ]


def test_a_file_name_that_is_no_unicode_keeps_its_bytes(tmp_path: Path) -> None:
    name = b"caf\xe9.svs".decode("utf-8", "surrogateescape")
    write_failures(tmp_path / "failures.csv", {name: PathosegError("Bad.", "Mend.")})
    assert b"caf\xe9.svs,Bad.,Mend." in (tmp_path / "failures.csv").read_bytes()
    write_summary(tmp_path / "summary.json", replace(SUMMARY, slide=name))
    assert read_summary(tmp_path / "summary.json").slide == name
