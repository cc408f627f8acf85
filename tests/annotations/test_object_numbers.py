"""Masks of object numbers: classes from a second mask, and what is refused, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.object_numbers import ObjectNumbers
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

TABLE = ClassTable(("class 1", "class 2"), ((1, 0, 0), (2, 0, 0)))
SLIDE = Size(240, 160)  # the masks have half its pixels
FILE = Path("s_mask.png")


def _discs(step: int = 20, first: int = 1, value: int | None = None) -> NDArray[np.int64]:
    """Discs 10 px wide on a grid, numbered from `first` or all of one value: shape (80, 120)."""
    y, x = np.mgrid[:80, :120]
    inside = (y % step - 8) ** 2 + (x % step - 8) ** 2 <= 25
    number = first + (y // step) * (120 // step) + x // step
    return np.where(inside, number if value is None else value, 0)


def _labels(
    folder: Path, pixels: NDArray[Any], name: str = "s_mask.png", **options: Any
) -> MaskLabels:
    Image.fromarray(pixels).save(folder / name)
    return MaskLabels(folder / name, SLIDE, AnnotationOptions(**{"mask": "instances", **options}))


@pytest.mark.parametrize(
    ("name", "dtype", "factor"),
    [
        ("s_mask.png", np.uint8, 1),
        ("s_mask.png", np.uint16, 2700),
        ("s_mask.tif", np.uint16, 2700),
        ("s_mask.tif", np.int32, 80_000_000),
        ("s_mask.TIFF", np.uint32, 80_000_000),
    ],
)
def test_8_and_16_and_32_bits(tmp_path: Path, name: str, dtype: Any, factor: int) -> None:
    labels = _labels(tmp_path, (_discs() * factor).astype(dtype), name)
    assert labels.object_counts(ClassTable(("nucleus",), ((1, 0, 0),))) == {"nucleus": 24}
    assert dict(labels.classes()) == {"class 1": None}


def test_an_object_has_the_class_that_covers_most_of_it(tmp_path: Path) -> None:
    """A mask of classes of another size, with a palette; what it leaves out is ignored."""
    classes = np.zeros((160, 240), np.uint8)
    classes[:, :84], classes[:, 84:160] = 1, 2  # the border lies in discs, past their middle
    classes[:40, 160:200] = IGNORE
    image = Image.fromarray(classes)
    image.putpalette([0, 0, 0, 10, 20, 30, 40, 50, 60] + [7] * 3 * 253)
    image.save(tmp_path / "s_classes.png")
    labels = _labels(tmp_path, _discs().astype(np.uint16))
    assert labels.classes() == {"class 1": (10, 20, 30), "class 2": (40, 50, 60)}
    assert labels.object_counts(TABLE) == {"class 1": 8, "class 2": 8}
    assert [path.name for path in labels.files] == ["s_mask.png", "s_classes.png"]
    frame = Frame.at(SLIDE, Mpp(0.25, 0.25), 0.5)
    mask = labels.rasterise(Box(0, 0, 120, 80), frame, TABLE)
    expected = np.select([_discs() == 0, np.arange(120) < 60, np.arange(120) < 80], [0, 1, 2], 255)
    expected[:, 40:60][_discs()[:, 40:60] > 0] = 2
    np.testing.assert_array_equal(mask, expected)


def test_ignored_values_are_no_objects(tmp_path: Path) -> None:
    pixels = _discs()
    pixels[:, 100:] = 65535
    labels = _labels(tmp_path, pixels.astype(np.uint16), mask_ignore=(65535, 3))
    assert labels.object_counts(TABLE) == {"class 1": 19}
    frame = Frame.at(SLIDE, Mpp(0.25, 0.25), 0.5)
    mask = labels.rasterise(Box(0, 0, 120, 80), frame, TABLE)
    assert (mask[:, 100:] == IGNORE).all()
    np.testing.assert_array_equal(mask == IGNORE, (pixels == 65535) | (pixels == 3))
    with pytest.raises(PathosegError, match=r"mask_ignore = \[255\]"):
        AnnotationOptions(mask="indices", mask_ignore=(255,))


@pytest.mark.parametrize(
    ("pixels", "problem", "hint"),
    [
        (_discs(value=1), "the one value 1 in 24 separate areas", 'mask = "binary"'),
        (_discs(value=255), "the one value 255 in 24 separate areas", 'mask = "binary"'),
        (
            np.concatenate([_discs()[:, :60]] * 2, axis=1),
            r"object number \d+ in two places far apart, at \(\d+, \d+\) and \(\d+, \d+\) px",
            "a number of its own",
        ),
        (  # values that are classes
            np.where(_discs() % 2, _discs() > 0, 2 * (_discs() > 0)),
            r"object number [12] in two places far apart",
            'mask = "indices"',
        ),
        (_discs() - 1, "holds the value -1", "from 1"),
    ],
)
def test_what_does_not_number_objects_is_refused(
    tmp_path: Path, pixels: NDArray[Any], problem: str, hint: str
) -> None:
    labels = _labels(tmp_path, pixels.astype(np.int32), "s_mask.tif")
    with pytest.raises(PathosegError, match=rf"s_mask\.tif.*{problem}") as refused:
        labels.refuse_without_objects()
    assert hint in refused.value.hint


def test_the_two_places_of_a_number_are_named(tmp_path: Path) -> None:
    """In pixels of the slide; those of the largest area, and of the one furthest from it."""
    pixels = _discs()
    pixels[70:76, 100:106] = 1
    with pytest.raises(PathosegError, match=r"number 1 .* at \(17, 17\) and \(206, 146\) px"):
        _labels(tmp_path, pixels.astype(np.uint16)).classes()


def test_an_object_in_pieces_that_are_near_is_one(tmp_path: Path) -> None:
    pixels = _discs()
    pixels[(pixels > 0) & (np.arange(120) % 20 == 8)] = 0  # a line through each
    pixels[30:50, 44] = 12  # a thin one, that fills little of its box
    pixels[30, 44:80] = 12
    labels = _labels(tmp_path, pixels.astype(np.uint16))
    labels.refuse_without_objects()


@pytest.mark.parametrize("values", ["indices", "binary"])
def test_masks_of_classes_have_no_objects(tmp_path: Path, values: str) -> None:
    labels = _labels(tmp_path, (_discs() > 0).astype(np.uint8), mask=values)
    box, frame = Box(0, 0, 120, 80), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.5)
    mask = labels.rasterise(box, frame, TABLE)
    for ask in (
        labels.refuse_without_objects,
        lambda: labels.object_counts(TABLE),
        lambda: labels.objects(box, frame, TABLE, mask),
    ):
        with pytest.raises(PathosegError, match=rf's_mask\.png is read as .*"{values}"') as refused:
            ask()
        assert 'mask = "instances"' in refused.value.hint


def test_65535_objects_are_the_most() -> None:
    most = np.arange(65_536).reshape(256, 256)
    found, numbers = ObjectNumbers.of(FILE, most, (), None, SLIDE)
    np.testing.assert_array_equal(numbers, most)
    np.testing.assert_array_equal(found.values, np.arange(65_536))
    with pytest.raises(PathosegError, match=r"s_mask\.png numbers 65,792 objects"):
        ObjectNumbers.of(FILE, np.arange(256 * 257).reshape(257, 256) + 1, (), None, SLIDE)


def test_masks_of_classes_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    pixels = _discs().astype(np.uint16)
    Image.fromarray(np.zeros((80, 80), np.uint8)).save(tmp_path / "s_classes.png")
    with pytest.raises(PathosegError, match=r"s_classes\.png has 80 × 80 px, another shape"):
        _labels(tmp_path, pixels)
    Image.fromarray((_discs() * 100).astype(np.uint16)).save(tmp_path / "s_classes.png")
    with pytest.raises(PathosegError, match=r"s_classes\.png holds the values 0 to 2400"):
        _labels(tmp_path, pixels).classes()
    Image.fromarray(np.zeros((80, 120), np.uint8)).save(tmp_path / "s_classes.tif")
    with pytest.raises(PathosegError, match=r"several masks of classes"):
        _labels(tmp_path, pixels)
