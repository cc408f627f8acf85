"""TIFF of no scanner: pyramids, colours, resolution, missing and spoiled pieces, bombs."""

from __future__ import annotations

import logging
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides import tiff_reader
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.slides.tiff_reader import TiffSlide

Writer = Callable[..., Path]
PLAIN: dict[str, Any] = {"metadata": None}


def _all(slide: TiffSlide, level: int = 0) -> Any:
    size = slide.levels[level].size
    return slide.read_level(level, Box(0, 0, size.width, size.height))


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """write(pixels, **tifffile's): a TIFF of one page, at 0.5 µm unless told otherwise."""

    def imwrite(pixels: Any, **how: Any) -> Path:
        scale = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
        path = tmp_path / "written.tif"
        tifffile.imwrite(path, pixels, **{**PLAIN, **scale, **how})
        return path

    return imwrite


def test_levels_of_unequal_steps_and_without_flags_are_found(
    tmp_path: Path, pyramid: Callable[..., Any], picture: Callable[..., Any]
) -> None:
    levels = pyramid(1600, 1200, (4, 16, 32))
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(picture(333, 217), photometric="rgb", tile=(64, 64), **PLAIN)  # a label
        for pixels in levels:
            tiff.write(pixels, photometric="rgb", tile=(64, 64), **PLAIN)
        tiff.write(levels[1][::2, ::2], photometric="rgb", **PLAIN)  # a thumbnail in strips
        tiff.write(levels[1][..., 0], photometric="minisblack", tile=(64, 64), **PLAIN)
    with TiffSlide(path, assume_mpp=0.5) as slide:
        assert [level.downsample for level in slide.levels] == [1, 4, 16, 32]
        for index, pixels in enumerate(levels):
            np.testing.assert_array_equal(_all(slide, index), pixels)


@pytest.fixture
def write_scenes(tmp_path: Path, picture: Callable[..., Any]) -> Callable[..., Path]:
    """write_scenes((side, µm, factors)…): an OME-TIFF of pictures, each with its reductions."""

    def write(*scenes: tuple[int, float | None, tuple[int, ...]]) -> Path:
        path = tmp_path / "scenes.ome.tif"
        how: dict[str, Any] = {"photometric": "rgb", "tile": (64, 64)}
        with tifffile.TiffWriter(path, ome=True) as tiff:
            for seed, (side, mpp, factors) in enumerate(scenes):
                pixels = picture(side, side, seed)
                stated = {} if mpp is None else {"PhysicalSizeX": mpp, "PhysicalSizeY": mpp}
                metadata = {"axes": "YXS", **stated}
                tiff.write(pixels, subifds=len(factors), metadata=metadata, **how)
                for factor in factors:
                    tiff.write(pixels[::factor, ::factor], subfiletype=1, **how)
        return path

    return write


@pytest.mark.parametrize(
    ("scenes", "downsamples", "counted"),
    [
        ([(512, 0.5, ()), (256, 0.5, (2,))], [1], 2),
        ([(512, 0.5, ()), (384, 0.5, (3,)), (500, 0.5, ())], [1], 3),
        ([(512, 0.5, (2,)), (512, 0.5, (2, 4))], [1, 2], 2),
        ([(512, 0.5, ()), (256, 1.0, ()), (128, 2.002, ())], [1, 2, 4], 1),
        ([(512, 0.5, ()), (256, None, ())], [1, 2], 1),
        ([(256, 0.5, ()), (512, 0.25, ())], [1, 2], 1),
        ([(512, 0.5, ()), (128, 0.5, ()), (500, 40.0, ())], [1], 1),
    ],
    ids=["a half", "a third", "its equal", "levels", "unstated", "smaller first", "label, macro"],
)
def test_another_scene_is_no_level_and_told_of(
    write_scenes: Callable[..., Path], scenes: list[Any], downsamples: list[int], counted: int
) -> None:
    path = write_scenes(*scenes)
    with open_slide(path, assume_mpp=0.5) as slide:
        assert [level.downsample for level in slide.levels] == downsamples
        said = f"it holds {counted} scenes, of which only one of 512 × 512 px is read"
        assert [warning.partition(":")[0] for warning in slide.warnings] == [said][: counted - 1]


@pytest.mark.slow
def test_a_large_level_is_never_held_whole(tmp_path: Path, pyramid: Callable[..., Any]) -> None:
    path = tmp_path / "large.tif"
    tile = np.full((256, 256, 3), 77, np.uint8)
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:  # 10,240² pixels: 0.3 GB
        tiff.write(
            (tile for _ in range(40 * 40)),
            shape=(10_240, 10_240, 3),
            dtype="uint8",
            photometric="rgb",
            tile=(256, 256),
            compression="zlib",
            **PLAIN,
        )
    tracemalloc.start()
    with TiffSlide(path, assume_mpp=0.5) as slide:
        for corner in range(0, 9_700, 500):
            assert (slide.read_level(0, Box(corner, corner, 480, 480)) == 77).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80_000_000


def test_kinds_of_pixels(write: Writer, picture: Callable[..., Any]) -> None:
    rgb = picture(150, 70)
    gray = rgb[..., :1]
    alpha = np.zeros((70, 150, 1), np.uint8)
    alpha[:, :50] = 255
    clear = np.where(alpha == 255, rgb, 255)
    inverted = {"photometric": "miniswhite"}
    bits = rgb[..., 0] > 127
    twelve = [(281, "H", 3, (4095,) * 3, True)]  # MaxSampleValue
    ome = {"ome": True, "metadata": {"axes": "YXS", "SignificantBits": 12}}
    for pixels, how, expected in [
        (gray[..., 0], {}, np.repeat(gray, 3, 2)),
        (gray[..., 0], inverted, 255 - np.repeat(gray, 3, 2)),
        (rgb.astype(np.uint16) * 257, {"photometric": "rgb"}, rgb),
        (rgb.astype(np.uint16) * 16 + 15, {"photometric": "rgb", "extratags": twelve}, rgb),
        (rgb.astype(np.uint16) * 16 + 15, {"photometric": "rgb", **ome}, rgb),
        (np.concatenate([rgb, alpha], 2), {"extrasamples": ["unassalpha"]}, clear),
        (np.concatenate([rgb * (alpha // 255), alpha], 2), {"extrasamples": ["assocalpha"]}, clear),
        (bits, {"photometric": "minisblack"}, np.where(bits[..., None], 255, 0).repeat(3, 2)),
        (bits, inverted, np.where(bits[..., None], 0, 255).repeat(3, 2)),
    ]:
        with TiffSlide(write(pixels, **how)) as slide:
            np.testing.assert_array_equal(_all(slide), expected)
    colours = np.random.default_rng(0).integers(0, 65_536, (3, 256), dtype=np.uint16)
    with TiffSlide(write(gray[..., 0], photometric="palette", colormap=colours)) as slide:
        np.testing.assert_array_equal(_all(slide), (colours >> 8).T[gray[..., 0]])


@pytest.mark.parametrize(
    ("pixels", "how", "said"),
    [
        (np.zeros((60, 60), np.float32), {}, "float32"),
        (np.zeros((60, 60), np.uint16), {}, "16-bit"),
        (np.zeros((60, 60), np.int8), {}, "int8"),
        (np.zeros((60, 60, 5), np.uint8), {"planarconfig": "contig"}, "channels"),
        (np.zeros((60, 60, 4), np.uint8), {"photometric": "separated"}, "colour space"),
        (np.zeros((5, 60, 60), np.uint8), {"photometric": "minisblack"}, "5 planes"),
        (np.zeros((64, 64), np.uint8), {"compression": "lerc"}, "compression"),
    ],
)
def test_what_is_no_rgb_image_is_refused(
    write: Writer, pixels: Any, how: dict[str, Any], said: str
) -> None:
    path = write(pixels, **how)
    with pytest.raises(PathosegError, match=said) as refusal:
        TiffSlide(path)
    assert str(path) in refusal.value.problem
    assert "8-bit RGB" in refusal.value.hint


@pytest.mark.parametrize(
    ("how", "mpp"),
    [
        ({"resolution": (40_000, 20_000), "resolutionunit": "CENTIMETER"}, Mpp(0.25, 0.5)),
        ({"resolution": (50_800, 50_800), "resolutionunit": "INCH"}, Mpp(0.5, 0.5)),
        ({"resolution": (4, 4), "resolutionunit": "MICROMETER"}, Mpp(0.25, 0.25)),
        ({"resolution": (1, 1), "resolutionunit": "INCH"}, None),
        ({"resolution": (300, 300), "resolutionunit": "INCH"}, None),
        ({"resolution": (20_000, 20_000), "resolutionunit": "NONE"}, None),
        ({"imagej": True, "resolution": (2, 2), "metadata": {"unit": "micron"}}, Mpp(0.5, 0.5)),
        ({"imagej": True, "resolution": (2, 2), "metadata": {"unit": "\\u00B5m"}}, Mpp(0.5, 0.5)),
        ({"imagej": True, "resolution": (2_000, 2_000), "metadata": {"unit": "mm"}}, Mpp(0.5, 0.5)),
        ({"imagej": True, "resolution": (2, 2), "metadata": {"unit": "pixel"}}, None),
        ({"ome": True, "metadata": {"axes": "YXS", "PhysicalSizeX": 3}}, Mpp(0.5, 0.5)),  # tags
    ],
)
def test_resolution(
    write: Writer, picture: Callable[..., Any], how: dict[str, Any], mpp: Mpp | None
) -> None:
    path = write(picture(90, 60), photometric="rgb", **how)
    if mpp is None:
        with pytest.raises(PathosegError, match="does not state") as refusal:
            TiffSlide(path)
        assert "--assume-mpp" in refusal.value.hint
    else:
        with TiffSlide(path) as slide:
            assert slide.mpp == mpp


def test_ome_units(tmp_path: Path, pyramid: Callable[..., Any], write_ome: Writer) -> None:
    stated = {"PhysicalSizeX": 250, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.5}
    with TiffSlide(write_ome(tmp_path / "a.ome.tif", pyramid(256, 256), stated)) as slide:
        assert slide.mpp == Mpp(0.25, 0.5)


def test_tiles_left_out_are_white(write: Writer, picture: Callable[..., Any]) -> None:
    pixels = picture(512, 256)
    path = write(pixels, photometric="rgb", tile=(256, 256))
    with tifffile.TiffFile(path, mode="r+") as tiff:
        for name in ("TileOffsets", "TileByteCounts"):
            tag = tiff.pages[0].tags[name]
            tag.overwrite((tag.value[0], 0))
    with TiffSlide(path) as slide:
        read = _all(slide)
    np.testing.assert_array_equal(read[:, :256], pixels[:, :256])
    assert (read[:, 256:] == 255).all()


def test_a_plane_left_out_is_unread(write: Writer, picture: Callable[..., Any]) -> None:
    planes = np.moveaxis(picture(64, 64), -1, 0)
    path = write(planes, photometric="rgb", planarconfig="separate")
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tag = tiff.pages[0].tags["StripByteCounts"]
        tag.overwrite((*tag.value[:2], 0))
    with TiffSlide(path) as slide, pytest.raises(UnreadableError, match="left out"):
        _all(slide)


def test_spoiled_strips_fail_alone(
    write: Writer, picture: Callable[..., Any], spoil: Callable[..., None]
) -> None:
    pixels = picture(300, 200)
    path = write(pixels, photometric="rgb", rowsperstrip=50, compression="zlib")
    spoil(path, 1)
    with TiffSlide(path) as slide:
        with pytest.raises(UnreadableError, match=r"written\.tif"):
            slide.read_level(0, Box(0, 99, 1, 2))
        np.testing.assert_array_equal(slide.read_level(0, Box(0, 0, 300, 50)), pixels[:50])
        np.testing.assert_array_equal(slide.read_level(0, Box(0, 100, 300, 100)), pixels[100:])


def test_memory_that_runs_out_is_no_damage(
    write: Writer, picture: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    path = write(picture(64, 64), photometric="rgb", rowsperstrip=16)
    with TiffSlide(path) as slide:
        frame = Frame.at(slide.size, slide.mpp, 0.5)
        monkeypatch.setattr(tiff_reader.TiffPage, "decode", property(exhausted))
        with pytest.raises(MemoryError):
            read_region(slide, frame, Box(0, 0, 64, 64))
    monkeypatch.setattr(tiff_reader, "TiffFile", exhausted)
    with pytest.raises(PathosegError, match=r"written\.tif cannot be read"):
        TiffSlide(path)


def _jpeg_bomb() -> bytes:
    stream = bytearray(imagecodecs.jpeg8_encode(np.zeros((256, 256, 3), np.uint8)))
    struct.pack_into(">2H", stream, stream.index(b"\xff\xc0") + 5, 65_000, 65_000)
    return bytes(stream)


def _jpeg_2000_bomb() -> bytes:
    stream = bytearray(imagecodecs.jpeg2k_encode(np.zeros((256, 256, 3), np.uint8)))
    start = stream.index(b"\xff\x4f\xff\x51")
    for field in (8, 24):  # the image's size, the tiles' size
        struct.pack_into(">2I", stream, start + field, 60_000, 60_000)
    return bytes(stream)


@pytest.mark.parametrize(
    ("compression", "bomb"), [("jpeg", _jpeg_bomb()), ("jpeg2000", _jpeg_2000_bomb())]
)
def test_a_bomb_in_a_tile_is_not_decoded(
    write: Writer,
    picture: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
    bomb: bytes,
) -> None:
    path = write(
        iter([bomb, bomb]),
        shape=(256, 512, 3),
        dtype="uint8",
        photometric="rgb",
        tile=(256, 256),
        compression=compression,
    )
    decoded = []
    for codec in ("jpeg_decode", "jpeg2k_decode"):
        monkeypatch.setattr(imagecodecs, codec, lambda *a, **k: decoded.append(1))
    with pytest.raises(UnreadableError, match="claim to lie in 256 × 256 px"):
        open_slide(path)
    assert not decoded


@pytest.mark.parametrize(
    ("tag", "value"),
    [("ImageWidth", 2**31 - 1), ("ImageLength", 2**31 - 1), ("RowsPerStrip", 0)],
)
def test_a_header_that_promises_more_than_the_file_is_refused(
    write: Writer, picture: Callable[..., Any], tag: str, value: int
) -> None:
    path = write(picture(300, 200), photometric="rgb", rowsperstrip=50)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags[tag].overwrite(value, dtype="I")
    with pytest.raises(PathosegError, match=r"written\.tif"):
        open_slide(path)


def test_what_tifffile_logs_is_heard_elsewhere_only(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tifffile")
    files = sorted((shared_data / "robustness" / "gofuzz-tiff").iterdir())[:40]
    for path in files:
        with pytest.raises(PathosegError):
            TiffSlide(path)  # nobody says a resolution
    assert not caplog.records
    logging.getLogger("tifffile").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def test_real_ome_tiff(shared_data: Path) -> None:
    path = next((shared_data / "slides").glob("ometiff*"))
    with TiffSlide(path) as slide:
        assert slide.vendor == "ome"
        assert slide.size == Size(1380, 1484)
        assert slide.mpp.x == pytest.approx(0.5000799214486333, rel=1e-12)
        assert 100 < _all(slide).mean() < 255


def test_real_pyramid_equals_openslide_on_level_0(shared_data: Path) -> None:
    from openslide import OpenSlide

    path = next((shared_data / "slides").glob("wsi_*"))
    with TiffSlide(path, assume_mpp=0.5) as slide, OpenSlide(path) as peer:
        assert [level.downsample for level in slide.levels] == [1, 4, 16, 64]
        theirs = np.asarray(peer.read_region((6000, 7000), 0, (700, 600)).convert("RGB"))
        np.testing.assert_array_equal(slide.read_level(0, Box(6000, 7000, 700, 600)), theirs)


def test_real_strips_state_no_resolution(shared_data: Path) -> None:
    path = next((shared_data / "monuseg-train" / "images").glob("*.tif"))
    with pytest.raises(PathosegError, match="does not state"):
        TiffSlide(path)
    with TiffSlide(path, assume_mpp=0.25) as slide:
        assert slide.size == Size(1000, 1000)
        assert 50 < _all(slide).mean() < 255
