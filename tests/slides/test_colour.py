"""Samples to RGB on white, against PIL and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from pathoseg.slides.colour import SampleLayout, on_white

RNG = np.random.default_rng(3)
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK = 0, 1, 2, 3, 5


def _random(channels: int, kind: type = np.uint8) -> np.ndarray[Any, Any]:
    return RNG.integers(0, np.iinfo(kind).max + 1, (13, 17, channels), dtype=kind)


def test_gray_is_the_same_in_all_channels() -> None:
    gray = _random(1)
    rgb = SampleLayout(BLACK_IS_ZERO, 8, 1).to_rgb(gray)
    np.testing.assert_array_equal(rgb, np.repeat(gray, 3, 2))
    inverted = SampleLayout(WHITE_IS_ZERO, 8, 1).to_rgb(gray)
    np.testing.assert_array_equal(inverted, 255 - rgb)


@pytest.mark.parametrize(("bits", "white"), [(1, 1), (2, 3), (4, 15)])
def test_few_bits_span_black_to_white(bits: int, white: int) -> None:
    values = np.array([[[0], [white]]], np.uint8)
    rgb = SampleLayout(BLACK_IS_ZERO, bits, 1).to_rgb(values)
    assert rgb[0, :, 0].tolist() == [0, 255]


def test_sixteen_bit_colours_keep_their_high_byte() -> None:
    pixels = _random(3, np.uint16)
    rgb = SampleLayout(RGB, 16, 3).to_rgb(pixels)
    np.testing.assert_array_equal(rgb, pixels // 256)
    assert rgb.dtype == np.uint8


@pytest.mark.parametrize("shift", [0, 8])
def test_palettes_of_8_and_16_bits(shift: int) -> None:
    colours = RNG.integers(0, 256, (3, 256)).astype(np.uint16)
    colours[0, 0] = 255
    index = _random(1)
    rgb = SampleLayout(PALETTE, 8, 1, palette=colours << shift).to_rgb(index)
    np.testing.assert_array_equal(rgb, colours.T[index[..., 0]])


def test_straight_alpha_is_mixed_with_white() -> None:
    pixels = _random(4)
    expected = pixels[..., :3] * (pixels[..., 3:] / 255) + 255 - pixels[..., 3:]
    rgb = SampleLayout(RGB, 8, 4, extra=(2,)).to_rgb(pixels)
    assert np.abs(rgb - expected).max() <= 0.5001
    assert np.abs(rgb.astype(int) - on_white(Image.fromarray(pixels))).max() <= 1


def test_premultiplied_alpha_is_mixed_with_white() -> None:
    pixels = _random(4)
    pixels[..., :3] = pixels[..., :3] * (pixels[..., 3:] / 255)
    rgb = SampleLayout(RGB, 8, 4, extra=(1,)).to_rgb(pixels)
    np.testing.assert_array_equal(rgb, pixels[..., :3] + (255 - pixels[..., 3:]))


def test_a_fourth_channel_of_no_meaning_is_left_out() -> None:
    pixels = _random(4)
    rgb = SampleLayout(RGB, 8, 4, extra=(0,)).to_rgb(pixels)
    np.testing.assert_array_equal(rgb, pixels[..., :3])


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ((CMYK, 8, 4), "colour space"),
        ((BLACK_IS_ZERO, 8, 3), "channels"),
        ((RGB, 8, 5), "channels"),
        ((BLACK_IS_ZERO, 16, 1), "16-bit"),
        ((RGB, 32, 3), "32-bit"),
        ((PALETTE, 8, 1), "palette"),
    ],
)
def test_what_has_no_clear_colour_is_refused(layout: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SampleLayout(*layout)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_pil_images_without_transparency(mode: str) -> None:
    image = Image.fromarray(_random(3)).convert(mode)
    np.testing.assert_array_equal(on_white(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "PA", "RGBA"])
def test_transparent_pil_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (10, 10, 10, 0))
    image.paste((10, 10, 10, 255), (0, 0, 2, 4))
    rgb = on_white(image.convert(mode))
    assert (rgb[:, :2] == 10).all()
    assert (rgb[:, 2:] == 255).all()
