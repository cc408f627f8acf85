"""Malformed files from other projects' corpora: pixels or one clear error, and nothing else."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _outcome(path: Path) -> str:
    """Opens a file and reads from each of its levels."""
    try:
        with open_slide(path, assume_mpp=0.5) as slide:
            for level in slide.levels:
                frame = Frame.at(slide.size, slide.mpp, slide.mpp.mean * level.downsample)
                width, height = min(600, frame.size.width), min(600, frame.size.height)
                for x, y in {(-9, -9), (frame.size.width - width, frame.size.height - height)}:
                    region = read_region(slide, frame, Box(x, y, width, height))
                    assert region.pixels.shape == (height, width, 3)
            return "read"
    except PathosegError as error:
        refusal = error
    assert str(path) in refusal.problem
    assert len(str(refusal)) < 600
    assert "\n" not in str(refusal)
    return "refused"


def test_every_malformed_file_reads_or_is_refused(
    shared_data: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    outcomes = [_outcome(path) for path in _files(shared_data / "robustness")]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - before
    assert len(outcomes) >= 157
    assert outcomes.count("read") >= 20
    assert grown < 1500
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_every_real_slide_reads(shared_data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = {path.name: _outcome(path) for path in _files(shared_data / "slides")}
    refused = sorted(name for name, outcome in outcomes.items() if outcome == "refused")
    assert refused == ["dicom_TCGA-XK-AAJU_3236x2638_no-imagetype.dcm", "monusac_A9K0_1.xml"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("folder", ["annotations", "monuseg-train/masks"])
def test_files_that_are_no_slides(shared_data: Path, folder: str) -> None:
    for path in _files(shared_data / folder)[:12]:
        assert _outcome(path) == ("read" if path.suffix == ".png" else "refused")
