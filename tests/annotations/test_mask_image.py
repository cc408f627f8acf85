"""Index masks: formats, sizes, names, instances, and what is refused."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import astuple
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter, imwrite

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

NATIVE = Mpp(0.25, 0.25)
TABLE = ClassTable(("tumour", "stroma", "necrosis"), ((1, 0, 0), (2, 0, 0), (3, 0, 0)))
PATTERN = np.array([[0, 1, 1, 2], [3, 255, 0, 0], [0, 0, 0, 1]], dtype=np.uint8)


def _saved(tmp_path: Path, pixels: NDArray[np.generic], name: str = "s_mask.png") -> Path:
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    return path


def _whole(labels: MaskLabels, slide: Size, classes: ClassTable = TABLE) -> NDArray[np.uint8]:
    frame = Frame.at(slide, NATIVE, 0.25)
    return labels.rasterise(Box(0, 0, slide.width, slide.height), frame, classes)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("s_mask.png", np.uint8),
        ("s_mask.png", np.uint16),
        ("s_mask.tif", np.uint8),
        ("s_mask.tif", np.uint16),
        ("s_mask.TIFF", np.int32),
    ],
)
def test_8_and_16_and_32_bits(tmp_path: Path, name: str, dtype: type[np.generic]) -> None:
    labels = MaskLabels(_saved(tmp_path, PATTERN.astype(dtype), name), Size(4, 3))
    np.testing.assert_array_equal(_whole(labels, Size(4, 3)), PATTERN)
    assert dict(labels.classes()) == {"class 1": None, "class 2": None, "class 3": None}


def test_palette_images_are_indices_with_colours(tmp_path: Path) -> None:
    image = Image.fromarray(PATTERN)
    image.putpalette([0, 0, 0, 10, 20, 30, 40, 50, 60] + [7] * 3 * 253)
    path = tmp_path / "s_mask.png"
    image.save(path)
    labels = MaskLabels(path, Size(4, 3))
    np.testing.assert_array_equal(_whole(labels, Size(4, 3)), PATTERN)
    assert labels.classes()["class 2"] == (40, 50, 60)


@pytest.mark.parametrize("name", ["s_mask.png", "s_mask.tif"])
@pytest.mark.parametrize("mask", ["indices", "binary", "instances"])
def test_bilevel_images_have_class_1(
    tmp_path: Path, name: str, mask: Literal["indices", "binary", "instances"]
) -> None:
    """A mask of one bit a pixel, and its class by name."""
    path = _saved(tmp_path, PATTERN == 1, name)
    labels = MaskLabels(path, Size(4, 3), AnnotationOptions(mask=mask))
    assert [*labels.classes()] == [*labels.file_classes()] == ["class 1"]
    np.testing.assert_array_equal(_whole(labels, Size(4, 3)), PATTERN == 1)


MASKS = arrays(
    np.uint8,
    st.tuples(st.integers(2, 30), st.integers(2, 30)),
    elements=st.sampled_from([0, 1, 2, 3, IGNORE]),
).filter(lambda mask: IGNORE not in mask or set(np.unique(mask)) & {1, 2, 3})


@given(mask=MASKS, scale=st.integers(1, 9), mpp=st.floats(0.1, 3), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pixel_has_the_class_that_covers_most_of_it(
    tmp_path: Path, mask: NDArray[np.uint8], scale: int, mpp: float, data: st.DataObject
) -> None:
    """Against areas in fractions: exact, but for where edges are rounded to 1/256 pixel."""
    height, width = mask.shape
    slide = Size(width * scale, height * scale)
    labels = MaskLabels(_saved(tmp_path, mask), slide)
    frame = Frame.at(slide, NATIVE, mpp)
    x, y = (data.draw(st.integers(-20, side)) for side in (frame.size.width, frame.size.height))
    found = labels.rasterise(Box(x, y, 15, 11), frame, TABLE)

    def shares(first: int, count: int, cells: int) -> NDArray[np.float64]:
        """Return the share of each pixel's side that each mask cell covers: (pixels, cells)."""
        pixel = np.arange(first, first + count)[:, None] * frame.scale_x
        cell = np.arange(cells) * scale
        common = np.minimum(pixel + frame.scale_x, cell + scale) - np.maximum(pixel, cell)
        return common.clip(0) / frame.scale_x

    down, across = shares(y, 11, height), shares(x, 15, width)
    areas = {value: down @ (mask == value) @ across.T for value in (0, 1, 2, 3, IGNORE)}
    most = np.max(list(areas.values()), axis=0)
    for row, column in np.ndindex(found.shape):
        level0 = (np.array([x + column, y + row]) + 0.5) * frame.scale_x
        if not ((level0 >= 0) & (level0 < (slide.width, slide.height))).all():
            assert found[row, column] == IGNORE
        else:
            assert areas[found[row, column]][row, column] >= most[row, column] - 0.02


@given(mask=MASKS, scale=st.integers(1, 9), mpp=st.floats(0.1, 3), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_by_centres_a_pixel_is_that_under_its_centre(
    tmp_path: Path, mask: NDArray[np.uint8], scale: int, mpp: float, data: st.DataObject
) -> None:
    height, width = mask.shape
    slide = Size(width * scale, height * scale)
    frame = Frame.at(slide, NATIVE, mpp)
    labels = MaskLabels(_saved(tmp_path, mask), slide, AnnotationOptions(labels="centre"))
    x, y = (data.draw(st.integers(-20, side)) for side in (frame.size.width, frame.size.height))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathoseg.annotations.mask_image._MOST_READ", 50)  # some rows at a time
        found = labels.rasterise(Box(x, y, 15, 11), frame, TABLE)
    expected = np.full((11, 15), IGNORE)
    for row, column in np.ndindex(11, 15):
        level0_x = (x + column + 0.5) * frame.scale_x
        level0_y = (y + row + 0.5) * frame.scale_y
        if 0 <= level0_x < slide.width and 0 <= level0_y < slide.height:
            expected[row, column] = mask[int(level0_y / scale), int(level0_x / scale)]
    np.testing.assert_array_equal(found, expected)


@given(mask=MASKS, scale=st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_of_equal_areas_the_higher_index_has_the_pixel(
    tmp_path: Path, mask: NDArray[np.uint8], scale: int
) -> None:
    """At twice the mask's pixels, where areas are halves and quarters; 255 is the highest."""
    height, width = mask.shape
    slide = Size(width * scale, height * scale)
    labels = MaskLabels(_saved(tmp_path, mask), slide)
    frame = Frame(Size(-(-width // 2), -(-height // 2)), 2.0 * scale, 2.0 * scale, NATIVE)
    found = labels.rasterise(Box(0, 0, width // 2, height // 2), frame, TABLE)
    blocks = mask[: height // 2 * 2, : width // 2 * 2].reshape(height // 2, 2, width // 2, 2)
    counts = np.stack([(blocks == value).sum(axis=(1, 3)) for value in range(256)])
    expected = 255 - counts[::-1].argmax(axis=0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rule", ["majority", "centre"])
@given(mask=MASKS, mpp=st.floats(0.1, 1.5), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_box_is_a_piece_of_the_whole(
    tmp_path: Path,
    rule: Literal["majority", "centre"],
    mask: NDArray[np.uint8],
    mpp: float,
    data: st.DataObject,
) -> None:
    slide = Size(mask.shape[1] * 3, mask.shape[0] * 3)
    labels = MaskLabels(_saved(tmp_path, mask), slide, AnnotationOptions(labels=rule))
    frame = Frame.at(slide, NATIVE, mpp)
    box = Box(*(data.draw(st.integers(*limits)) for limits in [(-9, 40)] * 2 + [(1, 40)] * 2))
    whole = labels.rasterise(Box(-9, -9, 100, 100), frame, TABLE)
    with pytest.MonkeyPatch.context() as patch:  # what is read and labelled at a time
        patch.setattr("pathoseg.annotations.mask_image._MOST_READ", data.draw(st.integers(1, 900)))
        patch.setattr("pathoseg.annotations.coverage._MOST_SUMS", 500)
        found = labels.rasterise(box, frame, TABLE)
    np.testing.assert_array_equal(found, whole[box.y + 9 :, box.x + 9 :][: box.height, : box.width])


def test_a_box_much_coarser_than_its_mask_takes_little_memory(tmp_path: Path) -> None:
    """Noise, where each of a mask's pixels ends a stretch of equal ones; 190 MiB all at once."""
    slide = Size(1400, 1400)
    noise = np.random.default_rng(0).integers(0, 4, (1400, 1400), dtype=np.uint8)
    labels, frame = MaskLabels(_saved(tmp_path, noise), slide), Frame.at(slide, NATIVE, 4)
    labels.classes()
    tracemalloc.start()
    try:
        labels.rasterise(Box(0, 0, *astuple(frame.size)), frame, TABLE)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_more_rows_than_a_band(tmp_path: Path) -> None:
    mask = np.arange(1000, dtype=np.uint16)[:, None].repeat(3, axis=1) // 100
    labels = MaskLabels(_saved(tmp_path, mask), Size(3, 1000))
    table = ClassTable(tuple("abcdefghi"), ((0, 0, 0),) * 9)
    frame = Frame.at(Size(3, 1000), NATIVE, 0.25)
    found = labels.rasterise(Box(0, 300, 3, 600), frame, table)
    np.testing.assert_array_equal(found, mask[300:900])


@pytest.mark.parametrize("size", [Size(13196, 16866), Size(13200, 16880), Size(13199, 16881)])
def test_a_thumbnail_of_rounded_size_fits_its_slide(tmp_path: Path, size: Size) -> None:
    mask = np.zeros((16866 // 16, 13196 // 16), dtype=np.uint8)
    MaskLabels(_saved(tmp_path, mask), size)


@pytest.mark.parametrize("size", [Size(3, 4), Size(400, 200), Size(4000, 4000)])
def test_another_shape_is_refused(tmp_path: Path, size: Size) -> None:
    mask = np.zeros((300, 400), dtype=np.uint8)
    with pytest.raises(PathosegError, match=r"s_mask\.png has 400 × 300 px, another shape"):
        MaskLabels(_saved(tmp_path, mask), size)


def test_names_of_the_run_go_by_number(tmp_path: Path) -> None:
    labels = MaskLabels(_saved(tmp_path, PATTERN), Size(4, 3))
    numbered = ClassTable(("a class", "class 3", "class 2", "class 1"), ((0, 0, 0),) * 4)
    found = _whole(labels, Size(4, 3), numbered)
    assert found[0].tolist() == [0, 4, 4, 3]
    assert found[1, 0] == 2


@pytest.mark.parametrize(
    "names", [("tumour",), ("tumour", "stroma"), ("class 1", "class 2")], ids=["1", "2", "numbered"]
)
def test_values_beyond_the_classes_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    labels = MaskLabels(_saved(tmp_path, PATTERN), Size(4, 3))
    with pytest.raises(PathosegError, match=r"s_mask\.png.*3") as refused:
        _whole(labels, Size(4, 3), ClassTable(names, ((0, 0, 0),) * len(names)))
    assert "`[data] classes`" in refused.value.hint


@pytest.mark.parametrize("values", ["indices", "binary"])
def test_a_mask_without_foreground_is_background(
    tmp_path: Path, values: Literal["indices", "binary"]
) -> None:
    labels = MaskLabels(_saved(tmp_path, PATTERN * 0), Size(4, 3), AnnotationOptions(mask=values))
    assert not _whole(labels, Size(4, 3)).any()
    assert dict(labels.classes()) == {}


def test_binary_takes_instances_and_255_as_class_1(tmp_path: Path) -> None:
    instances = PATTERN.astype(np.uint16) * 255
    for pixels in (PATTERN, instances):
        labels = MaskLabels(_saved(tmp_path, pixels), Size(4, 3), AnnotationOptions(mask="binary"))
        np.testing.assert_array_equal(_whole(labels, Size(4, 3)), PATTERN > 0)


@pytest.mark.parametrize(
    "pixels",
    [
        np.array([[0, 255]], dtype=np.uint8),
        np.array([[255, 255]], dtype=np.uint8),
        np.array([[0, 700]], dtype=np.uint16),
        np.array([[0, 65535]], dtype=np.uint16),
    ],
)
def test_what_is_no_index_is_refused_with_the_option_for_it(
    tmp_path: Path, pixels: NDArray[np.generic]
) -> None:
    labels = MaskLabels(_saved(tmp_path, pixels), Size(2, 1))
    with pytest.raises(PathosegError, match=r"s_mask\.png") as refused:
        labels.classes()
    assert '[annotations] mask = "binary"' in refused.value.hint


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_colours_are_no_indices(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "s_mask.png"
    Image.new(mode, (4, 3)).save(path)
    with pytest.raises(PathosegError, match=rf"s_mask\.png holds {mode} pixels") as refused:
        MaskLabels(path, Size(4, 3))
    assert "palette" in refused.value.hint


@pytest.mark.parametrize("tile", [None, (16, 16)])
@pytest.mark.parametrize("mask", ["indices", "binary", "instances"])
def test_a_plane_for_each_class_is_refused(
    tmp_path: Path, tile: tuple[int, int] | None, mask: Literal["indices", "binary", "instances"]
) -> None:
    """A TIFF whose second page is as large as the first, in strips or tiles."""
    path, planes = tmp_path / "s_mask.tif", np.zeros((3, 32, 48), np.uint8)
    imwrite(path, planes, tile=tile, photometric="minisblack")
    with pytest.raises(PathosegError, match=r"s_mask\.tif has several pages of 48 × 32") as refused:
        MaskLabels(path, Size(48, 32), AnnotationOptions(mask=mask))
    assert "one page of class indices" in refused.value.hint


def test_classes_of_objects_in_planes_are_refused(tmp_path: Path) -> None:
    """The mask of classes beside one of object numbers."""
    path = _saved(tmp_path, PATTERN)
    imwrite(tmp_path / "s_classes.tif", np.zeros((2, 3, 4), np.uint8), photometric="minisblack")
    with pytest.raises(PathosegError, match=r"s_classes\.tif has several pages"):
        MaskLabels(path, Size(4, 3), AnnotationOptions(mask="instances"))


@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_smaller_pages_and_those_of_transparency_are_passed_over(
    tmp_path: Path, tile: tuple[int, int] | None
) -> None:
    """A pyramid of pages one after the other, and GDAL's page of where there is data."""
    path, pixels = tmp_path / "s_mask.tif", np.tile(PATTERN, (8, 8))
    with TiffWriter(path) as tiff:
        tiff.write(pixels, tile=tile)
        tiff.write(pixels[::2, ::2], tile=tile, subfiletype=1)
        tiff.write(np.zeros((8, 6, 3), np.uint8), photometric="rgb")
        tiff.write(pixels > 0, subfiletype=4, photometric=4)
    labels = MaskLabels(path, Size(32, 24))
    np.testing.assert_array_equal(_whole(labels, Size(32, 24)), pixels)


def test_real_numbers_are_no_indices(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match="holds F pixels"):
        MaskLabels(_saved(tmp_path, PATTERN.astype(np.float32), "s_mask.tif"), Size(4, 3))


def _png(width: int, height: int, body: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        whole = kind + content
        return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(body)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def test_an_image_bomb_is_refused_undecoded(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.png"
    path.write_bytes(_png(1_000_000, 1_000_000, b"\0"))
    with pytest.raises(PathosegError, match="1000000 × 1000000 px; a mask may have"):
        MaskLabels(path, Size(10, 10))


def test_the_bound_is_ours_and_not_pillows(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.png"
    path.write_bytes(_png(19_000, 19_000, b"\0"))  # 361 megapixels; the pixels are not asked for
    MaskLabels(path, Size(19_000, 19_000))


def test_a_truncated_mask_is_refused_when_it_is_decoded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = _saved(tmp_path, rng.integers(0, 4, (64, 64), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-300])
    labels = MaskLabels(path, Size(64, 64))
    with pytest.raises(PathosegError, match=r"s_mask\.png cannot be read as a mask"):
        labels.classes()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"II*\0", b"\xff\xd8\xff\xe0 JPEG"])
@pytest.mark.parametrize("name", ["s_mask.png", "s_mask.tif"])
def test_what_is_no_image_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PathosegError, match=r"s_mask\.\w+ cannot be read as a mask"):
        MaskLabels(path, Size(4, 3))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match="No such file"):
        MaskLabels(tmp_path / "none_mask.png", Size(4, 3))


@pytest.mark.parametrize(
    ("folder", "size", "values", "files"),
    [
        ("tnbc/masks", Size(512, 512), "binary", 37),
        ("monuseg-train/masks", Size(1000, 1000), "indices", 30),
        ("dsb2018-stained/labels", Size(320, 256), "binary", 81),
    ],
)
def test_real_masks_have_one_class(
    shared_data: Path, folder: str, size: Size, values: Literal["indices", "binary"], files: int
) -> None:
    paths = sorted((shared_data / folder).glob("*.png"))
    assert len(paths) == files
    for path in paths[:10]:
        labels = MaskLabels(path, size, AnnotationOptions(mask=values))
        assert list(labels.classes()) == ["class 1"]
        with Image.open(path) as image:
            np.testing.assert_array_equal(_whole(labels, size), np.asarray(image) > 0)
