"""Reduced levels: the means of the stored pixels, in any box, and unread where those are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pathoseg.errors import UnreadableError
from pathoseg.geometry import Box, Frame, Level, Size
from pathoseg.slides.direct_reader import DirectSlide
from pathoseg.slides.levels import averages
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide

TILE, ACROSS, DOWN = 128, 3, 2
WHOLE = Size(ACROSS * TILE, DOWN * TILE)
BRIGHTNESS = np.array([0.299, 0.587, 0.114])


def _soft(size: Size) -> Any:
    """A picture without black or white, where a decoder would cut values off."""
    noise = np.random.default_rng(3).normal(128, 90, (size.height, size.width, 3))
    return np.clip(cv2.GaussianBlur(noise, (0, 0), 1.2), 40, 215).astype(np.uint8)


def _stream(pixels: Any, **how: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", **{"quality": 90, "subsampling": 0, **how})
    return file.getvalue()


def _write(path: Path, size: Size = WHOLE, odd: dict[int, bytes] | None = None, **how: Any) -> Path:
    """A slide of one level; `odd` tells the streams of single tiles."""
    pixels = _soft(WHOLE)
    streams = [
        _stream(pixels[y : y + TILE, x : x + TILE], **how)
        for y in range(0, WHOLE.height, TILE)
        for x in range(0, WHOLE.width, TILE)
    ]
    for index, stream in (odd or {}).items():
        streams[index] = stream
    tifffile.imwrite(
        path,
        iter(streams),
        shape=(size.height, size.width, 3),
        dtype="uint8",
        tile=(TILE, TILE),
        description=f"Aperio Image Library v12\r\n{size.width}x{size.height}|MPP = 0.5",
        metadata=None,
        photometric="ycbcr",
        compression=7,
    )
    return path


def _opened(path: Path) -> DirectSlide:
    slide = open_slide(path)
    assert isinstance(slide, DirectSlide)
    return slide


def _full(level: Level) -> Box:
    return Box(0, 0, level.size.width, level.size.height)


def test_they_lie_between_the_stored_levels_and_behind_the_last(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Callable[..., Path]
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(1030, 515, (4, 16)), compression="jpeg")
    with _opened(path) as slide:
        assert [level.downsample for level in slide.reduced] == [2, 8, 32, 64, 128]
        assert slide.reduced[0].size == Size(515, 257)
        assert [level.downsample for level in slide.levels] == [1, 4, 16]


@pytest.mark.parametrize("compression", ["lzw", "adobe_deflate", None])
def test_other_codecs_have_none(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Callable[..., Path], compression: Any
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(600, 400), compression=compression)
    with _opened(path) as slide:
        assert slide.reduced == ()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_they_are_the_means_of_the_stored_pixels(tmp_path: Path, index: int) -> None:
    with _opened(_write(tmp_path / "a.svs")) as slide:
        stored, shrink = slide.read_level(0, _full(slide.levels[0])).astype(float), 2 << index
        reduced = slide.read_level(1 + index, _full(slide.reduced[index]))
        assert "0 tiles left" in repr(slide)
    height, width = stored.shape[0] // shrink, stored.shape[1] // shrink
    means = stored.reshape(height, shrink, width, shrink, 3).mean((1, 3))
    # Brightness and two colours are rounded on the way to either.
    assert np.abs(reduced - means).max() < 3
    assert abs((reduced - means).mean()) < 0.25


@pytest.mark.parametrize("index", [0, 1, 2])
def test_brightness_is_the_mean_where_colour_has_less_detail(tmp_path: Path, index: int) -> None:
    with _opened(_write(tmp_path / "a.svs", subsampling=2)) as slide:
        stored, shrink = slide.read_level(0, _full(slide.levels[0])) @ BRIGHTNESS, 2 << index
        reduced = slide.read_level(1 + index, _full(slide.reduced[index])) @ BRIGHTNESS
    height, width = stored.shape[0] // shrink, stored.shape[1] // shrink
    means = stored.reshape(height, shrink, width, shrink).mean((1, 3))
    assert np.abs(reduced - means).max() < 3


@pytest.mark.parametrize("size", [WHOLE, Size(321, 203)])
def test_a_box_reads_the_same_alone_and_in_the_whole(tmp_path: Path, size: Size) -> None:
    with _opened(_write(tmp_path / "a.svs", size, subsampling=2)) as slide:
        wholes = [
            slide.read_level(index, _full(level)) for index, level in enumerate(slide.reduced, 1)
        ]

        @given(st.data())
        def check(data: st.DataObject) -> None:
            index = data.draw(st.integers(0, 2))
            level = slide.reduced[index].size
            x = data.draw(st.integers(0, level.width - 1))
            y = data.draw(st.integers(0, level.height - 1))
            width = data.draw(st.integers(1, level.width - x))
            height = data.draw(st.integers(1, level.height - y))
            read = slide.read_level(1 + index, Box(x, y, width, height))
            np.testing.assert_array_equal(read, wholes[index][y : y + height, x : x + width])

        check()
        with copy.copy(slide) as other:
            np.testing.assert_array_equal(other.read_level(1, _full(slide.reduced[0])), wholes[0])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tile_left_to_the_other_reader_is_averaged(tmp_path: Path, index: int) -> None:
    odd = {4: _stream(_soft(WHOLE)[TILE:, TILE : 2 * TILE], restart_marker_blocks=3)}
    shrink, side = 2 << index, TILE >> (index + 1)
    with _opened(_write(tmp_path / "a.svs", odd=odd)) as slide:
        stored = slide.read_level(0, Box(TILE, TILE, TILE, TILE))
        assert "1 tiles left" in repr(slide)
        part = slide.read_level(1 + index, Box(side + 3, side + 5, side // 2, side // 4))
        assert "2 tiles left" in repr(slide)
    expected = averages(stored, shrink, shrink)[5 : 5 + side // 4, 3 : 3 + side // 2]
    np.testing.assert_array_equal(part, expected)


def test_a_stream_of_another_size_is_no_tile(tmp_path: Path) -> None:
    """Decoded to a fourth instead of a half, it would fit."""
    odd = {4: _stream(_soft(Size(2 * TILE, 2 * TILE)))}
    with _opened(_write(tmp_path / "a.svs", odd=odd)) as slide:
        for level, side in enumerate((TILE, TILE // 2)):
            with pytest.raises(UnreadableError, match=r"a\.svs"):
                slide.read_level(level, Box(side, side, side, side))


@pytest.mark.slow
@settings(max_examples=80)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 4096), st.integers(0, 255))
def test_they_are_unread_exactly_where_the_stored_pixels_are(
    tmp_path_factory: pytest.TempPathFactory, place: float, length: int, value: int
) -> None:
    sound = _stream(_soft(WHOLE)[TILE:, TILE : 2 * TILE])
    start = int(place * len(sound))
    damaged = sound[:start] + bytes([value]) * len(sound[start : start + length])
    path = tmp_path_factory.mktemp("damaged") / "a.svs"
    with _opened(_write(path, odd={4: damaged + sound[len(damaged) :]})) as slide:

        def is_read(level: int) -> bool:
            try:
                slide.read_level(level, Box(TILE >> level, TILE >> level, 9, 9))
            except UnreadableError:
                return False
            return True

        assert len({is_read(level) for level in range(4)}) == 1


def test_a_region_between_two_levels_comes_from_them(tmp_path: Path) -> None:
    with _opened(_write(tmp_path / "a.svs")) as slide:
        frame = Frame.at(slide.size, slide.mpp, 2 * slide.mpp.x)
        region = read_region(slide, frame, Box(-3, -2, 60, 50))
        inside = slide.read_level(1, Box(0, 0, 57, 48))
    np.testing.assert_array_equal(region.pixels[2:, 3:], inside)
    assert (region.pixels[:2] == 255).all()
    assert (region.pixels[:, :3] == 255).all()


def test_a_real_slide_differs_little_from_its_means(shared_data: Path) -> None:
    path = shared_data / "slides" / "wsi_gastric-erosion_13196x16866.tif"
    with open_slide(path, assume_mpp=0.5) as slide:
        stored = slide.read_level(0, Box(5000, 8000, 2048, 2048))
        reduced = slide.read_level(len(slide.levels), Box(2500, 4000, 1024, 1024))
    difference = reduced - averages(stored, 2, 2).astype(float)
    assert np.abs(difference).mean() < 1
    assert abs(difference.mean()) < 0.25
