"""Scanners' formats: resolution, bounds, transparency, odd downsamples, errors that latch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides.openslide_reader import OpenSlideSlide, scanner_format
from pathoseg.slides.region import read_region

Writer = Callable[..., Path]


@pytest.fixture(scope="module")
def leica(
    tmp_path_factory: pytest.TempPathFactory, write_scn: Writer, picture: Callable[..., Any]
) -> tuple[Path, Any, Any]:
    """A Leica slide with two scanned areas, and the pixels of both."""
    first, second = picture(512, 256, 1), picture(256, 256, 2)
    path = tmp_path_factory.mktemp("leica") / "two.scn"
    write_scn(path, Size(2048, 1536), [(300, 200, first), (1000, 500, second)])
    return path, first, second


def test_bounds_are_the_slide(leica: tuple[Path, Any, Any]) -> None:
    path, first, second = leica
    with OpenSlideSlide(path) as slide:
        assert slide.vendor == "leica"
        assert slide.origin == (300, 200)
        assert slide.size == Size(956, 556)
        np.testing.assert_array_equal(slide.read_level(0, Box(0, 0, 512, 256)), first)
        np.testing.assert_array_equal(slide.read_level(0, Box(700, 300, 256, 256)), second)


def test_what_was_not_scanned_is_white(leica: tuple[Path, Any, Any]) -> None:
    path, first, _ = leica
    with OpenSlideSlide(path) as slide:
        assert (slide.read_level(0, Box(520, 0, 100, 250)) == 255).all()
        half = slide.read_level(0, Box(500, 100, 24, 50))
    np.testing.assert_array_equal(half[:, :12], first[100:150, 500:])
    assert (half[:, 12:] == 255).all()


def test_odd_downsamples_are_read_to_half_a_level_0_pixel(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    levels = pyramid(1999, 1501, (2, 4, 16))
    smooth = [np.zeros_like(pixels) for pixels in levels]
    for factor, pixels in zip((1, 2, 4, 16), smooth, strict=True):  # a ramp over level 0
        across = (np.arange(pixels.shape[1]) + 0.5) * factor
        pixels[..., 0] = across / 1999 * 255
        pixels[..., 1] = ((np.arange(pixels.shape[0]) + 0.5) * factor / 1501 * 255)[:, None]
    with OpenSlideSlide(write_svs(tmp_path / "odd.svs", smooth)) as slide:
        assert [level.downsample for level in slide.levels] == [1, 2, 4, 16]
        for index, pixels in enumerate(smooth):
            height, width = pixels.shape[:2]
            read = slide.read_level(index, Box(0, 0, width, height)).astype(int)
            assert np.abs(read - pixels).max() <= 1
            inner = slide.read_level(index, Box(width - 19, height - 19, 9, 9)).astype(int)
            assert np.abs(inner - pixels[-19:-10, -19:-10]).max() <= 1


@pytest.mark.parametrize(
    ("says", "tags", "mpp"),
    [
        ("AppMag = 40|MPP = 0.2498", {}, Mpp(0.2498, 0.2498)),
        ("MPP = 0.4", {"resolution": (10_000, 10_000), "resolutionunit": "CENTIMETER"}, None),
        ("AppMag = 40", {"resolution": (40_000, 20_000), "resolutionunit": "CENTIMETER"}, None),
    ],
)
def test_the_resolution_comes_from_the_scanner_then_from_the_tags(
    tmp_path: Path,
    pyramid: Callable[..., Any],
    write_svs: Writer,
    says: str,
    tags: dict[str, Any],
    mpp: Mpp | None,
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(300, 300), says, **tags)
    expected = mpp or (Mpp(0.4, 0.4) if "MPP" in says else Mpp(0.25, 0.5))
    with OpenSlideSlide(path) as slide:
        assert slide.mpp == expected


def test_a_magnification_and_a_print_density_are_no_resolution(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    tags = {"resolution": (72, 72), "resolutionunit": "INCH"}
    path = write_svs(tmp_path / "a.svs", pyramid(300, 300), "AppMag = 40", **tags)
    with pytest.raises(PathosegError, match=r"--assume-mpp 0\.25") as refusal:
        OpenSlideSlide(path)
    assert str(path) in refusal.value.problem
    with OpenSlideSlide(path, assume_mpp=0.3) as slide:
        assert slide.mpp == Mpp(0.3, 0.3)


def test_a_spoiled_tile_fails_alone(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer, spoil: Callable[..., None]
) -> None:
    levels = pyramid(1024, 768)
    path = write_svs(tmp_path / "a.svs", levels, compression="jpeg")
    spoil(path, 5)  # column 1, row 1 of 4 × 3 tiles
    with OpenSlideSlide(path) as slide:
        before = slide.read_level(0, Box(0, 0, 256, 256))
        for box in (Box(300, 300, 9, 9), Box(0, 0, 1024, 768)):
            with pytest.raises(UnreadableError, match=r"a\.svs"):
                slide.read_level(0, box)
        np.testing.assert_array_equal(slide.read_level(0, Box(0, 0, 256, 256)), before)
        assert slide.read_level(1, Box(0, 0, 256, 192)).shape == (192, 256, 3)


def test_a_tile_too_large_for_memory_is_refused(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(300, 300))
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[1].tags["TileLength"].overwrite(2**30, dtype="I")
    with pytest.raises(PathosegError, match="256 × 1073741824 px") as refusal:
        OpenSlideSlide(path)
    assert str(path) in refusal.value.problem


def test_plain_tiff_is_no_scanner_format(
    tmp_path: Path, pyramid: Callable[..., Any], write_ome: Writer, write_svs: Writer
) -> None:
    assert scanner_format(write_ome(tmp_path / "a.ome.tif", pyramid(300, 300))) is None
    assert scanner_format(write_svs(tmp_path / "b.tif", pyramid(300, 300))) == "aperio"
    (tmp_path / "text").write_text("no slide")
    assert scanner_format(tmp_path / "text") is None


@pytest.mark.parametrize(
    ("name", "vendor", "size", "levels", "mpp"),
    [
        ("aperio_CMU-1-Small-Region.svs", "aperio", Size(2220, 2967), 1, 0.499),
        ("monusac_A9K0_1.svs", "aperio", Size(1307, 1153), 1, 0.19448),
        ("hamamatsu_test3-TRITC.ndpi", "hamamatsu", Size(3968, 4864), 7, 0.228175),
        ("dicom_camelyon_1152x700.dcm", "dicom", Size(1152, 700), 1, 28.969),
    ],
)
def test_real_slides(
    shared_data: Path, name: str, vendor: str, size: Size, levels: int, mpp: float
) -> None:
    with OpenSlideSlide(shared_data / "slides" / name) as slide:
        assert (slide.vendor, slide.size, len(slide.levels)) == (vendor, size, levels)
        assert slide.mpp.x == pytest.approx(mpp, rel=1e-4)
        frame = Frame.at(slide.size, slide.mpp, slide.mpp.x * 2.5)
        region = read_region(slide, frame, Box(-5, -5, 300, 300))
        assert region.unread is None
        assert region.pixels.std() > 5


def test_a_dicom_without_image_type_is_refused_politely(shared_data: Path) -> None:
    path = next((shared_data / "slides").glob("*no-imagetype.dcm"))
    with pytest.raises(PathosegError, match="dicom") as refusal:
        OpenSlideSlide(path)
    assert refusal.value.problem.count(str(path)) == 1
    assert refusal.value.hint
