"""The overlay shows the mask where it lies on the slide, in the classes' colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pathoseg.annotations.annotation import ClassTable
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.overlay import (
    MaskThumbnail,
    overlay_layer,
    thumbnail_frame,
    write_overlay,
)

RED, BLUE = (220, 30, 30), (30, 60, 220)
CLASSES = ClassTable(("nuclei", "Tumör"), (RED, BLUE))
NATIVE = Mpp(0.25, 0.25)


@given(
    st.integers(1, 300), st.integers(1, 300), st.floats(0.25, 40), st.floats(0.25, 40), st.data()
)
def test_each_pixel_has_the_class_under_its_centre(
    width: int, height: int, mask_mpp: float, thumbnail_mpp: float, data: st.DataObject
) -> None:
    mask = Frame.at(Size(width, height), NATIVE, mask_mpp)
    frame = Frame.at(Size(width, height), NATIVE, thumbnail_mpp)
    pixels = np.random.default_rng(0).integers(
        0, 256, (mask.size.height, mask.size.width), np.uint8
    )
    thumbnail = MaskThumbnail(mask, frame)
    cuts = data.draw(st.lists(st.integers(0, mask.size.height), max_size=4))
    for band in np.split(pixels, sorted(cuts)):
        thumbnail.add(band)
    for y in range(frame.size.height):
        row = min(int((y + 0.5) * frame.scale_y / mask.scale_y), mask.size.height - 1)
        for x in {0, frame.size.width // 2, frame.size.width - 1}:
            column = min(int((x + 0.5) * frame.scale_x / mask.scale_x), mask.size.width - 1)
            near = pixels[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
            exact = abs((y + 0.5) * frame.scale_y / mask.scale_y % 1 - 0.5) < 0.499
            exact &= abs((x + 0.5) * frame.scale_x / mask.scale_x % 1 - 0.5) < 0.499
            assert thumbnail.pixels[y, x] in ([pixels[row, column]] if exact else near)


@pytest.mark.parametrize(
    ("slide", "native", "size"),
    [
        (Size(100_000, 50_000), Mpp(0.25, 0.25), Size(2000, 1000)),
        (Size(1000, 400), Mpp(0.25, 0.25), Size(1000, 400)),
        (Size(4000, 4000), Mpp(0.5, 0.25), Size(2000, 1000)),
        (Size(1, 1), Mpp(0.25, 0.25), Size(1, 1)),
    ],
)
def test_a_thumbnail_is_as_large_as_a_screen_shows(slide: Size, native: Mpp, size: Size) -> None:
    assert thumbnail_frame(slide, native).size == size


def drawn(
    folder: Path, mask: NDArray[np.uint8], classes: ClassTable = CLASSES
) -> NDArray[np.uint8]:
    path = folder / "overlay.png"
    write_overlay(path, np.full((*mask.shape, 3), 200, np.uint8), mask, classes)
    assert list(folder.iterdir()) == [path]
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture)


def test_regions_are_tinted_and_outlined_and_the_rest_is_the_slide(tmp_path: Path) -> None:
    mask = np.zeros((100, 120), np.uint8)
    mask[20:50, 30:70] = 1
    mask[50:80, 30:70] = 2
    picture = drawn(tmp_path, mask)
    assert picture[10, 10].tolist() == [200, 200, 200]
    for edge, colour in [((20, 40), RED), ((49, 40), RED), ((50, 40), BLUE), ((60, 69), BLUE)]:
        assert tuple(picture[edge]) == colour
    for inside, colour in [((30, 40), RED), ((60, 40), BLUE)]:
        expected = 0.65 * 200 + 0.35 * np.array(colour)
        np.testing.assert_allclose(picture[inside], expected, atol=0.5)


def test_unread_parts_are_hatched(tmp_path: Path) -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:32] = 255
    picture = drawn(tmp_path, mask)
    slide = (picture[:64, :64] == 200).all(axis=2)
    assert slide[32:].all()
    assert slide[:32].mean() == pytest.approx(5 / 8, abs=0.02)


def colours_below(picture: NDArray[np.uint8], top: int) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in picture[top:].reshape(-1, 3).tolist()}


@pytest.mark.parametrize("width", [1, 60, 1500])
def test_the_legend_has_every_class_at_any_width(tmp_path: Path, width: int) -> None:
    mask = np.zeros((40, width), np.uint8)
    assert {RED, BLUE, (0, 0, 0), (255, 255, 255)} <= colours_below(drawn(tmp_path, mask), 40)


def test_the_legend_tells_of_unread_parts_only_where_some_are(tmp_path: Path) -> None:
    mask = np.zeros((40, 400), np.uint8)
    grey = (110, 110, 110)
    squares = (drawn(tmp_path, mask)[40:] == grey).all(axis=2).sum()
    mask[0, 0] = 255
    assert (drawn(tmp_path, mask)[40:] == grey).all(axis=2).sum() >= squares + 100


def test_a_letter_with_an_accent_is_drawn_without_it(tmp_path: Path) -> None:
    mask = np.zeros((40, 400), np.uint8)
    plain = ClassTable(("nuclei", "Tumor"), CLASSES.colours)
    np.testing.assert_array_equal(drawn(tmp_path, mask), drawn(tmp_path, mask, plain))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("Opuchoľ ß", "Opuchol ss"), ("Опухоль", "class 2"), ("Tumor – 2", "Tumor ? 2")],
)
def test_a_name_whose_letters_cannot_be_drawn_is_its_number(
    tmp_path: Path, name: str, shown: str
) -> None:
    mask = np.zeros((40, 400), np.uint8)
    named, plain = (ClassTable(("nuclei", of), CLASSES.colours) for of in (name, shown))
    np.testing.assert_array_equal(drawn(tmp_path, mask, named), drawn(tmp_path, mask, plain))


def test_a_layer_over_a_picture_is_the_overlay(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 60, 3), np.uint8)
    mask = np.kron(rng.choice([0, 1, 2, 255], (4, 6)), np.ones((10, 10))).astype(np.uint8)
    write_overlay(tmp_path / "overlay.png", image, mask, CLASSES)
    layer = Image.fromarray(overlay_layer(mask, CLASSES))
    page = Image.alpha_composite(Image.fromarray(image).convert("RGBA"), layer).convert("RGB")
    drawn = np.asarray(Image.open(tmp_path / "overlay.png"))[:40, :60]
    np.testing.assert_allclose(np.asarray(page).astype(int), drawn.astype(int), atol=2)
