"""Tiled masks read the same in part as whole, whatever their size, codec and tile."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL.TiffImagePlugin import TiffImageFile
from tifffile import TiffWriter, imwrite

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.tiled_mask import TiledMask
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

TABLE = ClassTable(("tumour", "stroma", "necrosis"), ((1, 0, 0), (2, 0, 0), (3, 0, 0)))
CODECS = [None, "zlib", "lzw", "packbits"]
PREDICTED = ["zlib", "lzw"]  # libvips stores differences with these

Mask = NDArray[np.uint8]

masks = arrays(
    np.uint8, st.tuples(st.integers(1, 70), st.integers(1, 70)), elements=st.integers(0, 3)
)


def _tiled(path: Path) -> TiledMask | None:
    with TiffImageFile(path) as image:
        return TiledMask.of(path, image)


def _opened(path: Path) -> TiledMask:
    found = _tiled(path)
    assert found is not None
    return found


def _whole(labels: MaskLabels, slide: Size) -> Mask:
    frame = Frame.at(slide, Mpp(0.25, 0.25), 0.25)
    return labels.rasterise(Box(0, 0, slide.width, slide.height), frame, TABLE)


@given(masks, st.sampled_from(CODECS), st.sampled_from([16, 32]), st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_that_of_the_whole(
    tmp_path: Path, pixels: Mask, codec: str | None, tile: int, data: st.DataObject
) -> None:
    path = tmp_path / "s_mask.tif"
    differs = codec in PREDICTED and data.draw(st.booleans())
    stored = {"tile": (tile, tile), "compression": codec, "predictor": differs}
    imwrite(path, pixels, photometric="minisblack", **stored)
    mask = _opened(path)
    assert mask.differs == differs
    (top, bottom), (left, right) = (
        sorted((data.draw(st.integers(0, side - 1)), data.draw(st.integers(1, side))))
        for side in pixels.shape
    )
    box = Box(left, top, right - left, bottom - top)
    np.testing.assert_array_equal(mask.read(box), pixels[top:bottom, left:right])
    assert mask.values() == set(np.unique(pixels).tolist())


def test_what_fills_up_the_last_tiles_counts_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.tif"
    tile = np.full((16, 16), 9, np.uint8)
    tile[:, :4] = 1
    with TiffWriter(path) as tiff:
        tiff.write(iter([tile]), shape=(16, 4), dtype=np.uint8, tile=(16, 16))
    assert _opened(path).values() == {1}


def test_alike_tiles_are_told_apart_where_the_edge_cuts_one(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.tif"
    tile = np.full((16, 16), 9, np.uint8)
    tile[:, :4] = 1
    with TiffWriter(path) as tiff:  # the one at the edge comes first
        tiff.write(iter([tile, tile]), shape=(20, 4), dtype=np.uint8, tile=(16, 16))
    assert _opened(path).values() == {1}
    with TiffWriter(path) as tiff:
        tiff.write(iter([tile] * 4), shape=(20, 20), dtype=np.uint8, tile=(16, 16))
    assert _opened(path).values() == {1, 9}


def test_a_mask_as_large_as_its_slide_needs_only_the_tiles_in_sight(tmp_path: Path) -> None:
    """A hundred thousand pixels square: 10 gigapixels, of which one tile has anything in it."""
    path, side, tile = tmp_path / "s_mask.tif", 100_000, 2048
    across = -(-side // tile)
    empty, full = (zlib.compress(bytes([value]) * tile**2, 1) for value in (0, 2))
    with TiffWriter(path, bigtiff=True) as tiff:
        tiff.write(
            (full if number == across + 1 else empty for number in range(across**2)),
            shape=(side, side),
            dtype=np.uint8,
            tile=(tile, tile),
            compression="zlib",
        )
    labels = MaskLabels(path, Size(side, side))
    assert list(labels.classes()) == ["class 2"]
    frame = Frame.at(Size(side, side), Mpp(0.25, 0.25), 1.0)
    found = labels.rasterise(Box(500, 500, 100, 100), frame, TABLE)
    assert (found[12:, 12:] == 2).all()
    assert not found[:12].any()
    assert not found[:, :12].any()


def test_a_palette_names_colours(tmp_path: Path) -> None:
    path, colours = tmp_path / "s_mask.tif", np.zeros((3, 256), np.uint16)
    colours[:, 2] = np.array([10, 20, 30]) * 257
    pixels = np.full((20, 20), 2, np.uint8)
    imwrite(path, pixels, tile=(16, 16), photometric="palette", colormap=colours)
    assert _tiled(path) is not None
    labels = MaskLabels(path, Size(20, 20))
    assert labels.classes() == {"class 2": (10, 20, 30)}
    np.testing.assert_array_equal(_whole(labels, Size(20, 20)), pixels)


def test_binary_takes_whatever_is_above_0(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.tif"
    pixels = np.arange(400, dtype=np.uint16).reshape(20, 20).astype(np.uint8)
    imwrite(path, pixels, tile=(16, 16))
    labels = MaskLabels(path, Size(20, 20), AnnotationOptions(mask="binary"))
    assert list(labels.classes()) == ["class 1"]
    np.testing.assert_array_equal(_whole(labels, Size(20, 20)), pixels > 0)


@pytest.mark.parametrize(
    ("pixels", "stored"),
    [
        (np.zeros((20, 20), np.uint8), {}),
        (np.zeros((20, 20), np.uint16), {"tile": (16, 16)}),
        (np.zeros((20, 20), np.uint8), {"tile": (16, 16), "photometric": "miniswhite"}),
    ],
    ids=["strips", "16 bits", "white is 0"],
)
def test_what_is_stored_in_another_way_is_left_to_pillow(
    tmp_path: Path, pixels: NDArray[np.generic], stored: dict[str, object]
) -> None:
    path = tmp_path / "s_mask.tif"
    imwrite(path, pixels, **stored)
    assert _tiled(path) is None


def test_an_odd_palette_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s_mask.tif"
    palette = [(320, "H", 4, (0, 1, 2, 3), True)]
    imwrite(path, np.zeros((32, 32), np.uint8), tile=(16, 16), extratags=palette)
    with pytest.raises(PathosegError, match=r"s_mask\.tif cannot be read as a mask"):
        MaskLabels(path, Size(32, 32))


@pytest.mark.parametrize(
    ("codec", "harm"),
    # Only streams of zlib tell that they are damaged.
    [*((codec, "cut short") for codec in CODECS), ("zlib", "overwritten")],
)
def test_a_damaged_tile_is_refused(tmp_path: Path, codec: str | None, harm: str) -> None:
    path = tmp_path / "s_mask.tif"
    pixels = np.random.default_rng(0).integers(0, 4, (64, 64), dtype=np.uint8)
    imwrite(path, pixels, tile=(16, 16), compression=codec)
    offset, count = _opened(path).places[9].tolist()
    data = path.read_bytes()
    if harm == "cut short":
        path.write_bytes(data[: offset + count // 2])
    else:
        path.write_bytes(data[:offset] + b"\xff" * count + data[offset + count :])
    labels = MaskLabels(path, Size(64, 64))
    with pytest.raises(PathosegError, match=r"s_mask\.tif cannot be read as a mask"):
        _whole(labels, Size(64, 64))
