"""find_slides: what in a folder is a slide, and what it is called."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr
from PIL import Image

from pathoseg.errors import PathosegError
from pathoseg.slides.folder import find_slides


def _names(folder: Path) -> list[str]:
    return list(find_slides([folder]))


@pytest.fixture
def image(tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            Image.new("RGB", (4, 4)).save(file, "png")
        return path

    return save


def test_slides_sorted_by_name_without_the_rest(tmp_path: Path, image: Any) -> None:
    for name in ("b.tif", "a.svs", "C.PNG", "noname", ".hidden.svs", "b/d/a.svs", ".trash/d.svs"):
        image(name)
    for name in ("a.xml", "a.geojson", "a.geojson.gz", "slides.csv", "README.md", "Thumbs.db"):
        (tmp_path / name).write_text("BMI,4\n<xml/>")
    assert _names(tmp_path) == ["C.PNG", "a.svs", "b.tif", "b/d/a.svs", "noname"]
    assert find_slides([tmp_path])["C.PNG"] == tmp_path / "C.PNG"


def test_masks_beside_their_slides_are_none(tmp_path: Path, image: Any) -> None:
    for name in ("a.svs", "a_mask.png", "b.tif", "b_mask.TIF", "c_mask.png", "d_mask.jpg"):
        image(name)
    image("Mu\u0308ller.svs")
    for name in ("a_mask.ome.tif", "a.svs_mask.png", "b.tif_classes.tif", "M\xfcller_mask.png"):
        image(name)
    image("d.png")
    image("masks/b_mask.png")
    slides = ["Mu\u0308ller.svs", "a.svs", "b.tif", "c_mask.png", "d.png", "d_mask.jpg"]
    assert _names(tmp_path) == slides


def test_a_damaged_slide_stays_in_the_list(tmp_path: Path) -> None:
    (tmp_path / "empty.svs").touch()
    (tmp_path / "text.ndpi").write_text("no slide")
    assert _names(tmp_path) == ["empty.svs", "text.ndpi"]


def test_a_folder_that_may_not_be_entered_is_passed_over(
    tmp_path: Path, image: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    for name in ("a.png", "private/b.png", "listed/c.png"):
        image(name)
    stat, iterdir = os.stat, Path.iterdir

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if Path(path).parent in (tmp_path / "private", tmp_path / "listed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    def not_listing(path: Path) -> Iterator[Path]:
        if path == tmp_path / "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(Path, "iterdir", not_listing)
    assert _names(tmp_path) == ["a.png"]
    assert "private cannot be listed (Permission denied): it is passed over." in caplog.text


def _dicom(path: Path, series: str, before: bytes = b"") -> None:
    """The part of a DICOM header that names its series, with other elements before that."""
    kind = b"\x08\x00\x16\x00UI\x02\x001\0"
    path.write_bytes(bytes(128) + b"DICM" + kind + before + _series_of(series) + bytes(64))


def _series_of(series: str) -> bytes:
    uid = series.encode() + b"\0" * (len(series) % 2)
    return b"\x20\x00\x0e\x00UI" + len(uid).to_bytes(2, "little") + uid


@pytest.mark.parametrize("is_told", [True, False], ids=["length", "delimiters"])
def test_a_series_that_another_refers_to_is_not_its_own(tmp_path: Path, is_told: bool) -> None:
    content = _series_of("1.2.3")
    if is_told:
        item = b"\xfe\xff\x00\xe0" + len(content).to_bytes(4, "little") + content
        sequence = len(item).to_bytes(4, "little") + item
    else:
        item = b"\xfe\xff\x00\xe0\xff\xff\xff\xff" + content + b"\xfe\xff\x0d\xe0" + bytes(4)
        sequence = b"\xff\xff\xff\xff" + item + b"\xfe\xff\xdd\xe0" + bytes(4)
    referenced = b"\x08\x00\x15\x11SQ\0\0" + sequence
    for name, series in [("a.dcm", "4.5"), ("b.dcm", "4.5"), ("c.dcm", "4.6")]:
        _dicom(tmp_path / name, series, referenced)
    assert _names(tmp_path) == ["a.dcm", "c.dcm"]


def test_a_dicom_series_is_one_slide(tmp_path: Path) -> None:
    for name, series in [("3", "1.2.3"), ("1.dcm", "1.2.3"), ("2.dcm", "1.2.34"), ("4.dcm", "9")]:
        _dicom(tmp_path / name, series)
    _dicom(tmp_path / "5.dcm", "9")
    (tmp_path / "0.dcm").write_bytes(bytes(128) + b"DICM")  # names no series
    assert _names(tmp_path) == ["0.dcm", "1.dcm", "2.dcm", "4.dcm"]


@pytest.mark.parametrize(
    "mask",
    [
        "1.2.840.10008.5.1.4.1.1.66.4",
        "1.2.840.10008.5.1.4.1.1.91.1",
        "1.2.840.10008.5.1.4.1.1.88.33",
        "1.2.840.10008.5.1.4.1.1.104.1",
        "1.2.840.10008.1.3.10",
    ],
    ids=["segmentation", "annotations", "report", "PDF", "directory"],
)
def test_dicom_that_is_no_image_is_no_slide(tmp_path: Path, mask: str) -> None:
    image = "1.2.840.10008.5.1.4.1.1.77.1.6"
    for name, kind in (("a.dcm", image), ("b.dcm", mask), ("c", mask), ("d", image)):
        uid = kind.encode() + b"\0" * (len(kind) % 2)
        meta = b"\x02\0\x02\0UI" + len(uid).to_bytes(2, "little") + uid
        (tmp_path / name).write_bytes(bytes(128) + b"DICM" + meta)
    (tmp_path / "text.dcm").write_text("no slide")
    assert _names(tmp_path) == ["a.dcm", "d", "text.dcm"]


@pytest.mark.parametrize(
    ("marks", "inside"),
    [
        (("config.toml", "splits.csv"), "predictions/epoch-1.png"),
        (("model.json", "weights.safetensors"), "figure.png"),
        (("summary.json", "mask.ome.tiff"), "overlay.png"),
        (("cache.json",), "pixels/c.0.0.0.0"),
        (("zarr.json",), "c.0.0"),
        (("Slidedat.ini",), "Data0000.tif"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_is_made_of_slides_is_passed_over_unless_it_is_given(
    tmp_path: Path, image: Any, marks: tuple[str, ...], inside: str
) -> None:
    image("a.svs")
    for name in (inside, *marks):
        image(f"deep/made/{name}")
    assert _names(tmp_path) == ["a.svs"]
    assert inside in _names(tmp_path / "deep" / "made")
    (tmp_path / "deep/made" / marks[0]).rename(tmp_path / "deep/made/other.txt")
    assert f"deep/made/{inside}" in _names(tmp_path)


def test_the_images_of_a_vms_slide_are_no_slides(tmp_path: Path, image: Any) -> None:
    for name in ("a-0.jpg", "a map.jpg", "b.jpg", "in/a-0.jpg"):
        image(name)
    (tmp_path / "a.vms").write_text("[Virtual]\nImageFile=a-0.jpg\nMapFile = a map.jpg\n")
    assert _names(tmp_path) == ["a.vms", "b.jpg", "in/a-0.jpg"]


def test_several_folders_give_each_slide_one_name(tmp_path: Path, image: Any) -> None:
    for name in ("x/a.png", "x/y/b.png", "z/c.png", "z/y/b.tif", "z/notes/c.png"):
        image(name)
    x, z = tmp_path / "x", tmp_path / "z"
    assert list(find_slides([z, x], [z / "notes", x])) == ["c.png", "y/b.tif", "a.png", "y/b.png"]
    assert list(find_slides([x, x / "y"])) == ["a.png", "y/b.png"], "each file once"
    image("z/a.png")
    with pytest.raises(PathosegError, match=r"x.a\.png and .*z.a\.png are both called a\.png"):
        find_slides([x, z])


def test_links_are_followed_once(tmp_path: Path, image: Any) -> None:
    image("far/b.png")
    folder = tmp_path / "near"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(folder)
    assert _names(folder) == ["link/b.png"]


@pytest.mark.parametrize("make", [lambda folder: None, Path.mkdir, Path.touch])
def test_no_folder_or_no_slides(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "given"
    make(folder)
    with pytest.raises(PathosegError) as refusal:
        find_slides([folder])
    assert str(folder) in refusal.value.problem
    assert refusal.value.hint


def test_real_folder(shared_data: Path, tmp_path: Path) -> None:
    names = _names(shared_data / "slides")
    assert len(names) == 7
    assert "monusac_A9K0_1.xml" not in names
    source = shared_data / "slides" / "dicom_camelyon_1152x700.dcm"
    shutil.copy(source, tmp_path / "a.dcm")
    shutil.copy(source, tmp_path / "b")
    assert _names(tmp_path) == ["a.dcm"]


def test_an_ome_zarr_is_one_slide_in_which_nothing_is_searched(
    tmp_path: Path, image: Any, write_zarr: Any, picture: Any
) -> None:
    image("a.png")
    for name in ("b.ome.zarr", "in/c.zarr"):
        path = write_zarr(tmp_path / name, [picture(64, 64)])
        (path / "preview").mkdir()
        shutil.copy(tmp_path / "a.png", path / "preview")
    (tmp_path / "damaged.ome.zarr").mkdir()
    (tmp_path / "damaged.ome.zarr" / "zarr.json").write_text('{"attri')
    zarr.create_group(tmp_path / "labels.ome.zarr", attributes={"ome": {"labels": ["mask"]}})
    image("labels.ome.zarr/mask.png")
    assert _names(tmp_path) == ["a.png", "b.ome.zarr", "damaged.ome.zarr", "in/c.zarr"]
    with pytest.raises(PathosegError, match="is a slide, not a folder"):
        find_slides([tmp_path / "b.ome.zarr"])
