"""Plain images: modes, sizes, orientation, resolution, bombs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Mpp, Size
from pathoseg.slides.image_reader import ImageSlide, is_image

SCALE = (50_800, 50_800)  # dpi: 0.5 µm


def _all(slide: ImageSlide) -> Any:
    return slide.read_level(0, Box(0, 0, slide.size.width, slide.size.height))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA"])
def test_png_of_any_mode(tmp_path: Path, picture: Callable[..., Any], mode: str) -> None:
    image = Image.fromarray(picture(90, 70))
    image.putalpha(Image.fromarray(np.tile(np.arange(0, 180, 2, np.uint8), (70, 1))))
    image = image.convert(mode)
    if mode == "PA":
        mode = "P"
        image = image.convert("RGB").quantize(16)
        image.info["transparency"] = 3
    image.save(tmp_path / "a.png", dpi=SCALE)
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(Image.open(tmp_path / "a.png").convert("RGBA"))
    with ImageSlide(tmp_path / "a.png") as slide:
        difference = np.abs(_all(slide).astype(int) - np.asarray(white.convert("RGB")))
    assert difference.max() <= 1


def test_cmyk_jpeg(tmp_path: Path, picture: Callable[..., Any]) -> None:
    pixels = picture(90, 70)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "a.jpg", quality=95, dpi=SCALE)
    with ImageSlide(tmp_path / "a.jpg") as slide:
        assert np.abs(_all(slide).astype(int) - pixels).mean() < 9


def test_orientation_turns_nothing(tmp_path: Path, picture: Callable[..., Any]) -> None:
    image = Image.fromarray(picture(90, 70))
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    image.save(tmp_path / "a.png", exif=exif, dpi=SCALE)
    with ImageSlide(tmp_path / "a.png") as slide:
        assert slide.size == Size(90, 70)
        np.testing.assert_array_equal(_all(slide), np.asarray(image))


@pytest.mark.parametrize("dpi", [None, (72, 72), (300, 300), (1, 1)])
def test_a_density_for_printing_is_no_resolution(
    tmp_path: Path, picture: Callable[..., Any], dpi: tuple[int, int] | None
) -> None:
    how = {} if dpi is None else {"dpi": dpi}
    Image.fromarray(picture(90, 70)).save(tmp_path / "a.png", **how)
    with pytest.raises(PathosegError, match="--assume-mpp"):
        ImageSlide(tmp_path / "a.png")
    with ImageSlide(tmp_path / "a.png", assume_mpp=0.25) as slide:
        assert slide.mpp == Mpp(0.25, 0.25)


def test_gray_of_16_bits_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((9, 9), np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(PathosegError, match="8-bit") as refusal:
        ImageSlide(tmp_path / "a.png")
    assert "a.png" in refusal.value.problem


def _png(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        checked = name + body
        return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">2I5B", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data, 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(20_001, 20_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(_png(*size))
    with pytest.raises(PathosegError, match="400 megapixels") as refusal:
        ImageSlide(path, assume_mpp=0.5)
    assert str(path) in refusal.value.problem


@pytest.mark.slow
def test_an_image_beyond_pils_own_limit_reads_without_a_warning(tmp_path: Path) -> None:
    width, height = 12_000, 8_000  # PIL warns from 89 megapixels on
    path = tmp_path / "large.png"
    path.write_bytes(_png(width, height, (b"\0" + b"\x0f" * (width // 8)) * height))
    with ImageSlide(path, assume_mpp=0.5) as slide:
        pixels = slide.read_level(0, Box(0, 0, width, height))
    assert pixels.shape == (height, width, 3)
    assert (pixels[:, :, 0] == np.tile([0, 0, 0, 0, 255, 255, 255, 255], width // 8)).all()


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp"])
def test_a_damaged_image_is_refused_whole(
    tmp_path: Path, picture: Callable[..., Any], suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(picture(300, 200)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PathosegError) as refusal:
        ImageSlide(path, assume_mpp=0.5)
    assert str(path) in refusal.value.problem


def test_a_picture_too_large_for_the_memory_is_refused_and_not_unread(
    tmp_path: Path, picture: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(_: object) -> None:
        raise MemoryError

    Image.fromarray(picture(40, 30)).save(tmp_path / "a.png")
    slide = ImageSlide(tmp_path / "a.png", assume_mpp=0.5)
    slide.close()  # a read decodes it again
    monkeypatch.setattr(PngImageFile, "load", exhausted)
    with pytest.raises(PathosegError, match=r"a\.png .* does not fit into memory") as refusal:
        _all(slide)
    assert not isinstance(refusal.value, UnreadableError)


def test_kinds_are_told_by_their_first_bytes(tmp_path: Path, picture: Callable[..., Any]) -> None:
    for suffix in ("png", "jpg", "bmp"):
        Image.fromarray(picture(30, 20)).save(tmp_path / f"a.{suffix}")
        assert is_image((tmp_path / f"a.{suffix}").read_bytes()[:16])
    assert not is_image(b"")
    assert not is_image(b"II*\0")


def test_real_images(shared_data: Path) -> None:
    for path in sorted((shared_data / "tnbc" / "images").iterdir()):
        with ImageSlide(path, assume_mpp=0.25) as slide:
            assert slide.size == Size(512, 512)
            assert 50 < _all(slide).mean() < 250
