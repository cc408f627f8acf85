"""read_region against brute force: the slide on a white plane, weighed pixel by pixel."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pathoseg.geometry import Box, Frame, Mpp
from pathoseg.slides import region
from pathoseg.slides.levels import averages
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide

RNG = np.random.default_rng(7)
NOISE = RNG.integers(0, 256, (157, 203, 3), dtype=np.uint8)
HALF = RNG.integers(0, 256, (78, 101, 3), dtype=np.uint8)  # of NOISE, other pixels
FIFTH = RNG.integers(0, 256, (31, 40, 3), dtype=np.uint8)
LEVELS = [NOISE, HALF, FIFTH]

# The mean of a cell and each of two passes round, so a result is off by up to 1.5.
ROUNDING = 1.51


def _weights(start: int, length: int, step: float) -> tuple[int, NDArray[Any]]:
    """First pixel of a level that matters, and what each one weighs in each result.

    The two pixels that a position lies between, each a mean with its neighbours.
    """
    centres = np.round(((start + np.arange(length) + 0.5) * step - 0.5) * 32) / 32
    first = math.floor(centres[0]) - 1
    pixels = np.arange(first, math.ceil(centres[-1]) + 2)
    distance = np.abs(pixels - centres[:, None])
    between = np.maximum(0, 1 - distance)
    side = max(0, step**2 - 2) / 24
    around = np.pad(between, ((0, 0), (1, 1)))
    return first, (1 - 2 * side) * between + side * (around[:, 2:] + around[:, :-2])


def _brute_force(
    levels: list[NDArray[Any]], frame: Frame, box: Box, ground: float = 255.0
) -> NDArray[Any]:
    """The region by its definition. `levels` may hold any number of channels."""
    finest = min(frame.scale_x, frame.scale_y)
    downsamples = [1, 2, 5][: len(levels)]
    index = max(i for i, factor in enumerate(downsamples) if factor <= max(1, finest * 1.02))
    steps = [scale / downsamples[index] for scale in (frame.scale_x, frame.scale_y)]
    cells = [max(1, int(step * 1.02)) for step in steps]
    rests = [step / cell for step, cell in zip(steps, cells, strict=True)]
    left, across = _weights(box.x, box.width, rests[0])
    top, down = _weights(box.y, box.height, rests[1])
    shown = Box(
        left * cells[0], top * cells[1], across.shape[1] * cells[0], down.shape[1] * cells[1]
    )
    pixels = levels[index]
    plane = np.full((shown.height, shown.width, pixels.shape[2]), ground)
    part = shown.intersection(Box(0, 0, pixels.shape[1], pixels.shape[0]))
    if part is not None:
        rows = slice(part.y - shown.y, part.bottom - shown.y)
        columns = slice(part.x - shown.x, part.right - shown.x)
        plane[rows, columns] = pixels[part.y : part.bottom, part.x : part.right]
    means = plane.reshape(down.shape[1], cells[1], across.shape[1], cells[0], -1).mean((1, 3))
    return np.einsum("iy,yxc,jx->ijc", down, means, across, optimize=True)


def _frame(slide: Any, scale_x: float, scale_y: float) -> Frame:
    """A frame of any two scales: that of a slide with anisotropic pixels."""
    return Frame.at(slide.size, Mpp(1 / scale_x, 1 / scale_y), 1.0)


scales = st.floats(0.3, 12) | st.sampled_from([0.5, 1.0, 2.0, 2.5, 4.0, 5.0, 10.0])
corners = st.integers(-40, 230)
sides = st.integers(1, 50)
boxes = st.builds(Box, corners, corners, sides, sides)


@settings(max_examples=200)
@given(scales, scales, boxes)
def test_any_box_at_any_scale(memory_slide: Any, scale_x: float, scale_y: float, box: Box) -> None:
    slide = memory_slide(LEVELS)
    frame = _frame(slide, scale_x, scale_y)
    result = read_region(slide, frame, box)
    assert result.unread is None
    assert result.pixels.shape == (box.height, box.width, 3)
    assert result.pixels.flags.writeable
    assert np.abs(result.pixels - _brute_force(LEVELS, frame, box)).max() <= ROUNDING


@given(st.sampled_from([1.0, 2.0, 5.0]), boxes)
def test_a_stored_level_is_read_as_it_is(memory_slide: Any, scale: float, box: Box) -> None:
    slide = memory_slide(LEVELS)
    frame = _frame(slide, scale, scale)
    expected = _brute_force(LEVELS, frame, box)
    np.testing.assert_array_equal(read_region(slide, frame, box).pixels, np.floor(expected + 0.5))


@settings(max_examples=60)
@given(st.sampled_from([0.7, 1.37, 2.6, 4.0, 9.1]), st.integers(0, 30), st.integers(0, 30))
def test_a_box_reads_the_same_alone_and_in_a_larger_one(
    memory_slide: Any, scale: float, x: int, y: int
) -> None:
    slide = memory_slide(LEVELS)
    frame = _frame(slide, scale, scale)
    whole = read_region(slide, frame, Box(-10, -10, 80, 80)).pixels
    part = read_region(slide, frame, Box(x, y, 20, 30)).pixels
    np.testing.assert_array_equal(whole[y + 10 : y + 40, x + 10 : x + 30], part)


@settings(max_examples=60)
@given(scales, boxes)
def test_reading_in_parts_changes_nothing(memory_slide: Any, scale: float, box: Box) -> None:
    bad = {0: Box(60, 60, 9, 5), 1: Box(30, 30, 9, 3), 2: Box(10, 10, 9, 1)}
    frame = _frame(memory_slide(LEVELS), scale, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "_BLOCK", 1)
        whole = read_region(memory_slide(LEVELS, bad=bad), frame, box)
        patch.setattr(region, "_MOST_SOURCE_PIXELS", 500)
        slide = memory_slide(LEVELS, bad=bad)
        parts = read_region(slide, frame, box)
    np.testing.assert_array_equal(parts.pixels, whole.pixels)
    assert (parts.unread is None) == (whole.unread is None)
    if whole.unread is not None:
        np.testing.assert_array_equal(parts.unread, whole.unread)


def test_memory_is_bounded_where_no_level_is_coarse_enough(
    memory_slide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "_MOST_SOURCE_PIXELS", 2_000)
    slide = memory_slide([NOISE])
    read_region(slide, _frame(slide, 10, 10), Box(0, 0, 21, 16))
    assert max(box.size.pixels for _, box in slide.reads) <= 2_000


def test_a_box_longer_than_opencvs_positions(memory_slide: Any) -> None:
    row = RNG.integers(0, 256, (4, 70_000, 3), dtype=np.uint8)
    slide = memory_slide([row])
    frame = _frame(slide, 1.3, 1.3)
    pixels = read_region(slide, frame, Box(0, 0, 53_000, 3)).pixels
    end = read_region(slide, frame, Box(52_000, 0, 1_000, 3)).pixels
    np.testing.assert_array_equal(pixels[:, 52_000:], end)
    assert np.abs(end - _brute_force([row], frame, Box(52_000, 0, 1_000, 3))).max() <= ROUNDING


@pytest.mark.parametrize(
    ("scale", "level"),
    [(0.5, 0), (1.9, 0), (1.97, 1), (2, 1), (4.8, 1), (4.91, 2), (5, 2), (50, 2)],
)
def test_the_level_is_picked_by_its_downsample(memory_slide: Any, scale: float, level: int) -> None:
    slide = memory_slide(LEVELS)
    read_region(slide, _frame(slide, scale, scale), Box(0, 0, 4, 4))
    assert {index for index, _ in slide.reads} == {level}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_means_of_four_are_pillows(width: int, height: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (2 * height, 2 * width, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).reduce(2))
    np.testing.assert_array_equal(averages(pixels, 2, 2), expected)


def test_a_level_of_4_00011_serves_as_4(memory_slide: Any) -> None:
    slide = memory_slide([NOISE, FIFTH], downsamples=[1.0, 4.00011])
    box = Box(3, 4, 20, 20)
    pixels = read_region(slide, _frame(slide, 4, 4), box).pixels
    np.testing.assert_array_equal(pixels, FIFTH[4:24, 3:23])


def test_outside_is_white_and_not_read(memory_slide: Any) -> None:
    slide = memory_slide(LEVELS)
    result = read_region(slide, _frame(slide, 1, 1), Box(-50, 300, 20, 20))
    assert (result.pixels == 255).all()
    assert result.unread is None
    assert slide.reads == []


@settings(max_examples=100)
@given(st.sampled_from([0.6, 1.0, 1.5, 2.0, 3.3, 8.0]), boxes)
def test_what_comes_from_unreadable_pixels_is_unread(
    memory_slide: Any, scale: float, box: Box
) -> None:
    bad = {0: Box(70, 90, 30, 11), 1: Box(35, 45, 15, 5), 2: Box(14, 18, 6, 2)}
    slide = memory_slide(LEVELS, bad=bad)
    frame = _frame(slide, scale, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "_BLOCK", 1)
        result = read_region(slide, frame, box)
    flags = []
    for index, pixels in enumerate(LEVELS):
        flag, place = np.zeros((*pixels.shape[:2], 1)), bad[index]
        flag[place.y : place.bottom, place.x : place.right] = 1
        flags.append(flag)
    share = _brute_force(flags, frame, box, ground=0.0)[..., 0]
    unread = np.zeros(share.shape, bool) if result.unread is None else result.unread
    assert unread[share > 0.03].all()
    assert not unread[share == 0].any() or scale == 1.0
    clean = read_region(memory_slide(LEVELS), frame, box).pixels
    assert np.abs(clean.astype(int) - result.pixels)[~unread].max(initial=0) <= 1


@pytest.fixture(params=["svs", "ome.tif", "strips.tif"])
def spoiled(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    pyramid: Callable[..., Any],
    write_svs: Callable[..., Path],
    write_ome: Callable[..., Path],
    spoil: Callable[..., None],
) -> tuple[Path, Any, Box]:
    """A file with one spoiled tile or strip of level 0, its pixels, and what is lost."""
    levels = pyramid(1024, 768, (4,))
    path = tmp_path / f"a.{request.param}"
    if request.param == "svs":
        write_svs(path, levels, compression="jpeg", compressionargs={"level": 100})
    elif request.param == "ome.tif":
        write_ome(path, levels, tile=(256, 256))
    else:
        write_ome(path, levels[:1], tile=None, rowsperstrip=256)
    spoil(path, 1 if "strips" in request.param else 5)  # the second of row 1 of tiles
    lost = Box(0, 256, 1024, 256) if "strips" in request.param else Box(256, 256, 256, 256)
    return path, levels[0], lost


def test_only_a_spoiled_tile_is_unread(spoiled: tuple[Path, Any, Box]) -> None:
    path, pixels, lost = spoiled
    expected = np.zeros((768, 1024), bool)
    expected[lost.y : lost.bottom, lost.x : lost.right] = True
    with open_slide(path) as slide:
        frame = Frame.at(slide.size, slide.mpp, 0.5)
        for _ in range(2):  # errors do not stick
            result = read_region(slide, frame, Box(0, 0, 1024, 768))
            assert result.unread is not None
            np.testing.assert_array_equal(result.unread, expected)
            assert (result.pixels[expected] == 255).all()
            difference = np.abs(result.pixels.astype(int) - pixels)[~expected]
            assert difference.mean() < 6  # JPEG's
        beside = read_region(slide, frame, Box(600, 520, 200, 200))
        assert beside.unread is None
        within = read_region(slide, frame, Box(300, 300, 50, 50))
        assert within.unread is not None
        assert within.unread.all()


@pytest.mark.parametrize("mpp", [1.0, 2.0, 4.0])
def test_only_a_spoiled_tile_is_unread_where_its_level_is_read_smaller(
    tmp_path: Path,
    pyramid: Callable[..., Any],
    write_svs: Callable[..., Path],
    spoil: Callable[..., None],
    mpp: float,
) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(1280, 1024, ()), compression="jpeg")
    spoil(path, 6)  # the second of row 1 of tiles
    with open_slide(path) as slide:
        frame = Frame.at(slide.size, slide.mpp, mpp)
        result = read_region(slide, frame, Box(0, 0, frame.size.width, frame.size.height))
    expected = np.zeros((frame.size.height, frame.size.width), bool)
    side = round(128 / mpp)
    expected[side : 2 * side, side : 2 * side] = True
    np.testing.assert_array_equal(result.unread, expected)
