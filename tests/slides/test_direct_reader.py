"""The direct reader against OpenSlide, pixel by pixel, and what it leaves to other readers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from openslide import OpenSlide, OpenSlideError
from PIL import Image

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Size
from pathoseg.slides import direct_reader, tile_codec
from pathoseg.slides.direct_reader import DirectSlide
from pathoseg.slides.openslide_reader import OpenSlideSlide
from pathoseg.slides.slide import open_slide
from pathoseg.slides.tile_codec import Compression, TileCodec

Writer = Callable[..., Path]
TILE = 128
SAMPLE_DATA = Path(__file__).resolve().parents[2] / "sample_data"
REAL = [
    "aperio_CMU-1-Small-Region.svs",
    "monusac_A9K0_1.svs",
    "ometiff_HE_example_1380x1484.ome.tif",
    "wsi_gastric-erosion_13196x16866.tif",
]
SAYS = "Aperio Image Library v12\r\n{}x{} (128x128)|AppMag = 20|MPP = 0.5"


@st.composite
def boxes(draw: st.DrawFn, size: Size, most: int = 900) -> Box:
    x, y = draw(st.integers(0, size.width - 1)), draw(st.integers(0, size.height - 1))
    width = draw(st.integers(1, min(most, size.width - x)))
    return Box(x, y, width, draw(st.integers(1, min(most, size.height - y))))


def _opened(path: Path) -> DirectSlide:
    slide = open_slide(path, assume_mpp=0.5)
    assert isinstance(slide, DirectSlide)
    return slide


def _whole_level(peer: OpenSlide, level: int) -> Any:
    """A level read from its corner, where OpenSlide cannot be off by a part of a pixel."""
    return np.asarray(peer.read_region((0, 0), level, peer.level_dimensions[level]))[..., :3]


def _assert_equal_to_openslide(path: Path, examples: int) -> None:
    with _opened(path) as slide, OpenSlide(path) as peer:
        lower = [_whole_level(peer, level) for level in range(1, peer.level_count)]

        @settings(max_examples=examples)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            level = data.draw(st.integers(0, peer.level_count - 1))
            box = data.draw(boxes(slide.levels[level].size))
            if level == 0:
                size = box.width, box.height
                theirs = np.asarray(peer.read_region((box.x, box.y), 0, size))[..., :3]
            else:
                theirs = lower[level - 1][box.y : box.bottom, box.x : box.right]
            np.testing.assert_array_equal(slide.read_level(level, box), theirs)

        check()


@pytest.mark.parametrize("name", REAL)
def test_every_real_slide_equals_openslide_or_its_other_reader(
    shared_data: Path, name: str
) -> None:
    path = shared_data / "slides" / name
    if OpenSlide.detect_format(path) is not None:
        _assert_equal_to_openslide(path, 60)
        return
    with _opened(path) as slide, copy.copy(slide._fallback) as other:

        @given(boxes(slide.size))
        def check(box: Box) -> None:
            np.testing.assert_array_equal(slide.read_level(0, box), other.read_level(0, box))

        check()


@pytest.mark.parametrize("number", range(1, 7))
def test_the_samples_equal_openslide(number: int) -> None:
    _assert_equal_to_openslide(SAMPLE_DATA / f"sample_0{number}.svs", 15)


def test_which_real_slides_are_read_directly(shared_data: Path) -> None:
    for path in sorted((shared_data / "slides").iterdir()):
        try:
            slide = open_slide(path, assume_mpp=0.5)
        except PathosegError:
            continue
        with slide:
            assert isinstance(slide, DirectSlide) == (path.name in REAL)
            if isinstance(slide, DirectSlide):
                slide.read_level(0, Box(slide.size.width // 2, slide.size.height // 2, 500, 500))
                assert "0 tiles left" in repr(slide)


def _aperio(path: Path, tiles: Sequence[bytes], across: int, **how: Any) -> Path:
    """An Aperio slide of encoded tiles, row by row."""
    height, width = TILE * len(tiles) // across, TILE * across
    tifffile.imwrite(
        path,
        iter(tiles),
        shape=(height, width, 3),
        dtype="uint8",
        tile=(TILE, TILE),
        description=SAYS.format(width, height),
        metadata=None,
        **{"photometric": "rgb", **how},
    )
    return path


def _jpegs(pixels: Any, **how: Any) -> list[bytes]:
    height, width = pixels.shape[:2]
    return [
        bytes(imagecodecs.jpeg8_encode(pixels[y : y + TILE, x : x + TILE], 85, **how))
        for y in range(0, height, TILE)
        for x in range(0, width, TILE)
    ]


KINDS: dict[str, dict[str, Any]] = {
    "jpeg 4:2:0": {"compression": "jpeg", "subsampling": (2, 2)},
    "jpeg 4:2:2": {"compression": "jpeg", "subsampling": (2, 1)},
    "jpeg 4:4:4": {"compression": "jpeg", "subsampling": (1, 1)},
    "rgb jpeg": {"compression": "jpeg", "compressionargs": {"outcolorspace": "rgb"}},
    "lzw": {"compression": "lzw"},
    "lzw, differences": {"compression": "lzw", "predictor": "horizontal"},
    "deflate": {"compression": "adobe_deflate"},
    "deflate, differences": {"compression": "adobe_deflate", "predictor": "horizontal"},
    "old deflate": {"compression": "deflate"},
    "plain": {"compression": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aperio", [True, False])
def test_every_kind_of_tile_equals_openslide(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer, kind: str, aperio: bool
) -> None:
    path, levels = tmp_path / "a.tif", pyramid(600, 400, (4,))
    how = {"tile": (TILE, TILE), **KINDS[kind]}
    if aperio:
        write_svs(path, levels, **how)
    else:
        tifffile.imwrite(path, levels[0], photometric="rgb", metadata=None, **how)
    _assert_equal_to_openslide(path, 20)
    with _opened(path) as slide:
        slide.read_level(0, Box(0, 0, 600, 400))
        assert "0 tiles left" in repr(slide)


def test_aperio_jpeg_2000_equals_openslide(tmp_path: Path, picture: Callable[..., Any]) -> None:
    pixels = picture(4 * TILE, 3 * TILE)
    tiles = [
        bytes(imagecodecs.jpeg2k_encode(pixels[y : y + TILE, x : x + TILE], 80, codecformat="J2K"))
        for y in range(0, 3 * TILE, TILE)
        for x in range(0, 4 * TILE, TILE)
    ]
    path = _aperio(tmp_path / "a.svs", tiles, 4, compression=33005)
    _assert_equal_to_openslide(path, 20)
    with _opened(path) as slide:
        read = slide.read_level(0, Box(0, 0, 4 * TILE, 3 * TILE))
        assert "0 tiles left" in repr(slide)
    assert np.abs(read.astype(int) - pixels).mean() < 5


def test_jpeg_tables_are_shared(tmp_path: Path, picture: Callable[..., Any]) -> None:
    pixels = picture(3 * TILE, 2 * TILE)
    streams = _jpegs(pixels)
    first, scan = streams[0], streams[0].index(b"\xff\xc0")
    assert all(stream[:scan] == first[:scan] for stream in streams)
    quantization = first[first.index(b"\xff\xdb") : scan]
    huffman = first[scan + 19 : first.index(b"\xff\xda")]
    tables = b"\xff\xd8" + quantization + huffman + b"\xff\xd9"
    short = [
        b"\xff\xd8" + stream[scan : scan + 19] + stream[stream.index(b"\xff\xda") :]
        for stream in streams
    ]
    path = _aperio(
        tmp_path / "a.svs",
        short,
        3,
        photometric="ycbcr",
        compression=7,
        extratags=[(347, 7, len(tables), tables, True)],
    )
    _assert_equal_to_openslide(path, 20)
    with _opened(path) as slide:
        read = slide.read_level(0, Box(0, 0, 3 * TILE, 2 * TILE))
        assert "0 tiles left" in repr(slide)
    assert np.abs(read.astype(int) - pixels).mean() < 8


@pytest.mark.parametrize("names", [b"\1\2\3", b"RGB", b"\0\1\2"])
@pytest.mark.parametrize("photometric", ["ycbcr", "rgb"])
def test_colours_are_what_the_tiff_says_where_no_stream_does(
    tmp_path: Path, picture: Callable[..., Any], names: bytes, photometric: str
) -> None:
    streams = []
    for stream in _jpegs(picture(3 * TILE, 2 * TILE)):
        bare = bytearray(b"\xff\xd8" + stream[stream.index(b"\xff\xdb") :])
        frame, scan = bare.index(b"\xff\xc0"), bare.index(b"\xff\xda")
        bare[frame + 10 : frame + 19 : 3] = bare[scan + 5 : scan + 11 : 2] = names
        streams.append(bytes(bare))
    path = _aperio(tmp_path / "a.svs", streams, 3, photometric=photometric, compression=7)
    _assert_equal_to_openslide(path, 10)
    with _opened(path) as slide:
        slide.read_level(0, Box(0, 0, 3 * TILE, 2 * TILE))
        assert "0 tiles left" in repr(slide)


def _by_pillow(pixels: Any, **how: Any) -> bytes:
    """A JPEG stream of a kind that imagecodecs does not write."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", **how)
    return file.getvalue()


@pytest.mark.parametrize(
    "change", ["restarts", "progressive", "size", "gray", "left out", "cut short"]
)
def test_an_unusual_tile_is_left_to_openslide(
    tmp_path: Path, picture: Callable[..., Any], change: str
) -> None:
    pixels = picture(3 * TILE, 2 * TILE)
    streams = _jpegs(pixels)
    streams[4] = {
        "restarts": _by_pillow(pixels[:TILE, :TILE], restart_marker_blocks=3),
        "progressive": _by_pillow(pixels[:TILE, :TILE], progressive=True),
        "size": bytes(imagecodecs.jpeg8_encode(pixels[:64, :64].copy())),
        "gray": bytes(imagecodecs.jpeg8_encode(pixels[:TILE, :TILE, 0].copy())),
        "left out": b"",
        "cut short": streams[4][:-40],
    }[change]
    path = _aperio(tmp_path / "a.svs", streams, 3, photometric="ycbcr", compression=7)
    box = Box(TILE - 5, TILE - 5, TILE + 9, 90)
    with _opened(path) as slide, OpenSlideSlide(path) as other:
        try:
            theirs = other.read_level(0, box)
        except UnreadableError:
            with pytest.raises(UnreadableError, match=r"a\.svs"):
                slide.read_level(0, box)
        else:
            np.testing.assert_array_equal(slide.read_level(0, box), theirs)
        assert "1 tiles left to OpenSlideSlide" in repr(slide)
        around = slide.read_level(0, Box(0, 0, 3 * TILE, TILE))
        np.testing.assert_array_equal(around, other.read_level(0, Box(0, 0, 3 * TILE, TILE)))
        assert "1 tiles left to OpenSlideSlide" in repr(slide)


@pytest.mark.parametrize(
    "how",
    [
        {"tile": (TILE, TILE), "planarconfig": "separate"},
        {"tile": (TILE, TILE), "extrasamples": ["unassalpha"]},
        {"tile": (TILE, TILE), "compression": "zstd"},
        {"rowsperstrip": 16},
    ],
)
def test_an_unusual_file_is_left_to_its_other_reader(
    tmp_path: Path, picture: Callable[..., Any], how: dict[str, Any]
) -> None:
    pixels = picture(300, 200)
    if "extrasamples" in how:
        pixels = np.concatenate([pixels, np.full((200, 300, 1), 255, np.uint8)], 2)
    if "planarconfig" in how:
        pixels = np.moveaxis(pixels, -1, 0)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", metadata=None, **how)
    with open_slide(tmp_path / "a.tif", assume_mpp=0.5) as slide:
        assert not isinstance(slide, DirectSlide)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jpeg 4:2:0", "rgb jpeg", "lzw", "deflate"])
def test_no_lost_piece_goes_unnoticed(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer, kind: str
) -> None:
    """Whatever of a tile a disk or a transfer turned to zeros, it shows what OpenSlide shows."""
    path = write_svs(tmp_path / "a.svs", pyramid(768, 512)[:1], **KINDS[kind])
    sound = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[4], tiff.pages[0].databytecounts[4]
    tile = Box(256, 256, 256, 256)

    @settings(max_examples=50)
    @given(st.integers(-511, count - 1), st.sampled_from([512, 4096, 10**6]))
    def check(start: int, length: int) -> None:
        damaged = bytearray(sound)
        first, end = offset + max(start, 0), offset + min(start + length, count)
        damaged[first:end] = bytes(end - first)
        path.write_bytes(damaged)
        theirs: Any = None
        try:
            with OpenSlide(path) as peer:
                theirs = np.asarray(peer.read_region((tile.x, tile.y), 0, (256, 256)))[..., :3]
        except OpenSlideError:
            pass
        with _opened(path) as slide:
            if theirs is None:
                with pytest.raises(UnreadableError, match=r"a\.svs"):
                    slide.read_level(0, tile)
            else:
                np.testing.assert_array_equal(slide.read_level(0, tile), theirs)

    check()


def test_neighbouring_boxes_share_the_tiles_between_them(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    decode = TileCodec.decode

    def counted(codec: TileCodec, data: bytes, pixels: Any) -> bool:
        decoded.append(len(data))
        return decode(codec, data, pixels)

    levels = pyramid(2048, 1024)
    path = write_svs(tmp_path / "a.svs", levels)
    with _opened(path) as slide:
        slide.close()
        monkeypatch.setattr(TileCodec, "decode", counted)
        for x in range(0, 2048, 128):  # half a tile
            read = slide.read_level(0, Box(x, 100, 128, 512))
            np.testing.assert_array_equal(read, levels[0][100:612, x : x + 128])
        assert len(decoded) == 8 * 3
        monkeypatch.setattr(direct_reader, "_KEPT_BYTES", 5 * 256 * 256 * 3)
        for x in range(0, 1900, 140):
            np.testing.assert_array_equal(
                slide.read_level(0, Box(x, 50, 140, 900)), levels[0][50:950, x : x + 140]
            )
        assert slide._opened()._kept_bytes <= 5 * 256 * 256 * 3


def test_a_slide_that_vanishes_or_shrinks(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(1024, 512))
    with _opened(path) as slide:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(PathosegError, match=r"a\.svs"):
            slide.read_level(0, Box(500, 200, 500, 300))
        path.unlink()
        with copy.copy(slide) as other, pytest.raises(PathosegError, match="cannot be opened"):
            other.read_level(0, Box(0, 0, 9, 9))


def test_a_codec_takes_nothing_for_sure_that_is_no_tile() -> None:
    room = np.empty((TILE, TILE, 3), np.uint8)
    for compression in Compression:
        codec = TileCodec(compression, Size(TILE, TILE))
        for data in (b"", b"\xff\xd8", bytes(100), b"\x13\x37" * 999, b"\xff\x4f\xff\x51"):
            assert not codec.decode(data, room)


def test_a_known_header_is_judged_anew_for_another_tile(picture: Callable[..., Any]) -> None:
    [stream] = _jpegs(picture(TILE, TILE))
    for ycbcr, side in ((True, TILE), (True, TILE // 2), (False, TILE), (True, TILE)):
        codec = TileCodec(Compression.JPEG, Size(side, side), ycbcr=ycbcr)
        room = np.empty(codec.shape, np.uint8)
        assert codec.decode(stream, room) is (ycbcr and side == TILE)


def test_a_header_of_any_length_is_read_and_only_a_usual_one_is_kept(
    picture: Callable[..., Any],
) -> None:
    [stream] = _jpegs(picture(TILE, TILE))
    comment = b"\xff\xfe" + (20_000).to_bytes(2, "big") + bytes(19_998)
    codec = TileCodec(Compression.JPEG, Size(TILE, TILE), ycbcr=True)
    plain, long = (np.empty(codec.shape, np.uint8) for _ in range(2))
    assert codec.decode(stream, plain)
    kept = tile_codec._to_be_told.cache_info().currsize
    assert codec.decode(stream[:2] + comment + stream[2:], long)
    np.testing.assert_array_equal(plain, long)
    assert tile_codec._to_be_told.cache_info().currsize == kept
