"""DICOM SEG from end to end: `[outputs] dicom_seg`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import highdicom as hd
import numpy as np
import pytest
import tifffile
from PIL import Image
from pydicom import Dataset

from pathoseg.errors import StoppedError
from pathoseg.inference.segmenter import MaskRow
from pathoseg.inference.slide_job import SavedRows
from pathoseg.slides.folder import find_slides
from tests.dicom_slide import write_dicom_slide

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

MPP = ("--assume-mpp", "0.5")
OPTIONS = """
[outputs]
dicom_seg = true
[tissue]
method = "all"
[infer]
min_region_um2 = 0.0
overlap = 16  # many rows of small tiles
"""


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Noise, in which a network without training sees several classes, as DICOM and as PNG."""
    folder = tmp_path / "slides"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (300, 623, 3), np.uint8)
    write_dicom_slide(folder / "a.dcm", pixels)
    Image.fromarray(pixels).save(folder / "b.png")
    (tmp_path / "c.toml").write_text(OPTIONS)
    return folder


@pytest.fixture
def infer(slides: Path, command: Command, tiny_bundle: SaveBundle, tmp_path: Path) -> Command:
    """Segments slides into a folder, with the option."""
    model = ("--model", tiny_bundle(), "--config", tmp_path / "c.toml")
    return lambda path, out, *more: command("infer", path, *model, "--out", out, *more)


def test_a_mixed_batch(tmp_path: Path, infer: Command, slides: Path) -> None:
    def lacking(dataset: Dataset) -> None:
        del dataset.FrameOfReferenceUID

    pixels = np.zeros((200, 200, 3), np.uint8)
    (slides / "other").mkdir()  # where no other file is of its series
    write_dicom_slide(slides / "other" / "c.dcm", pixels, change=lacking)
    out = tmp_path / "out"
    code, said = infer(slides, out, *MPP)
    assert (code, "3 of 3 slides done" in said) == (0, True), said

    mask = tifffile.imread(out / "a" / "mask.ome.tiff")
    assert len(np.unique(mask)) > 1
    seg = hd.seg.segread(out / "a" / "mask.dcm").get_total_pixel_matrix(combine_segments=True)
    np.testing.assert_array_equal(seg, mask)
    assert json.loads((out / "a" / "summary.json").read_text())["warnings"] == []

    assert not (out / "b" / "mask.dcm").exists()
    np.testing.assert_array_equal(tifffile.imread(out / "b" / "mask.ome.tiff"), mask)
    (warning,) = json.loads((out / "b" / "summary.json").read_text())["warnings"]
    assert warning == "mask.dcm is not written: the slide is no DICOM"
    assert f"Take care: {warning}" in said

    assert not (out / "other" / "c" / "mask.dcm").exists()
    assert (out / "other" / "c" / "mask.ome.tiff").exists()
    (warning,) = json.loads((out / "other" / "c" / "summary.json").read_text())["warnings"]
    assert warning.startswith("mask.dcm is not written: ")
    assert "c.dcm lacks FrameOfReferenceUID" in warning
    assert f"Take care: {warning}" in said

    # Beside the slides it is none of them.
    shutil.copy(out / "a" / "mask.dcm", slides)
    assert list(find_slides([slides])) == ["a.dcm", "b.png", "other/c.dcm"]

    # A result without it is not whole.
    (out / "a" / "mask.dcm").unlink()
    code, said = infer(slides, out, *MPP, "--resume")
    assert "1 of 3 slides done, 2 skipped" in said
    assert (out / "a" / "mask.dcm").exists()


def test_going_on_in_the_middle_of_a_slide_gives_the_same_bytes(
    tmp_path: Path, infer: Command, slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = slides / "a.dcm"
    assert infer(slide, tmp_path / "calm")[0] == 0

    saved, save = list[int](), SavedRows.save

    def stop(rows: SavedRows, row: MaskRow) -> None:
        if len(saved) == 5:
            raise StoppedError(15, "It was stopped.")
        saved.append(row.number)
        save(rows, row)

    with monkeypatch.context() as patch:
        patch.setattr(SavedRows, "save", stop)
        assert infer(slide, tmp_path / "out")[0] == 143
    assert not (tmp_path / "out" / "a").exists()
    assert list((tmp_path / "out" / ".work").rglob("*.row")), "it goes on from these"
    code, said = infer(slide, tmp_path / "out", "--resume")
    assert code == 0, said
    calm, resumed = (tmp_path / each / "a" / "mask.dcm" for each in ("calm", "out"))
    assert resumed.read_bytes() == calm.read_bytes()
    names = {path.name for path in (tmp_path / "out" / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "calm" / "a").iterdir()}


def test_a_single_slide_that_lacks_what_is_needed_has_all_else(
    tmp_path: Path, infer: Command, slides: Path
) -> None:
    def lacking(dataset: Dataset) -> None:
        del dataset.ContainerIdentifier

    pixels = np.zeros((200, 200, 3), np.uint8)
    path = write_dicom_slide(tmp_path / "c.dcm", pixels, change=lacking)
    code, said = infer(path, tmp_path / "out")
    assert code == 0
    assert "lacks ContainerIdentifier" in said
    assert "dicom_seg" in said
    names = {each.name for each in (tmp_path / "out" / "c").iterdir()}
    assert names == {"mask.ome.tiff", "regions.geojson", "overlay.png", "summary.json"}


def test_without_the_library_the_option_is_refused(
    tmp_path: Path, infer: Command, slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highdicom", None)
    code, said = infer(slides, tmp_path / "out")
    assert (code, "pip install highdicom" in said) == (2, True), said
    assert not (tmp_path / "out").exists()
