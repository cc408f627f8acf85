"""What is written in bands opens elsewhere as the same pyramid, from bounded memory."""

from __future__ import annotations

import resource
import tracemalloc
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from openslide import OpenSlide
from PIL import Image

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.reading import read_labels
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.outputs.mask_reader import MaskReader
from pathoseg.outputs.mask_tiff import map_writer, write_mask
from pathoseg.outputs.pyramid import mode_of_four

CLASSES = ClassTable(("Tumör <&>", "stroma"), ((200, 0, 0), (0, 200, 0)))
COLOURS = np.zeros((256, 3), np.uint16)
COLOURS[[1, 2, 255]] = (200, 0, 0), (0, 200, 0), (110, 110, 110)
MPP = Mpp(0.5, 0.25)
OME = "{http://www.openmicroscopy.org/Schemas/OME/2016-06}"


def blobs(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Regions of a few tens of pixels, of every value a mask may have."""
    rng = np.random.default_rng(seed)
    coarse = rng.choice(np.array([0, 0, 1, 2, 255], np.uint8), (height // 20 + 1, width // 20 + 1))
    return np.kron(coarse, np.ones((20, 20), np.uint8))[:height, :width]


def in_bands(mask: NDArray[np.uint8], rows: int) -> Iterator[NDArray[np.uint8]]:
    return (mask[top : top + rows] for top in range(0, len(mask), rows))


def write(path: Path, mask: NDArray[np.uint8], rows: int, mpp: Mpp = MPP) -> None:
    write_mask(path, Size(mask.shape[1], mask.shape[0]), mpp, in_bands(mask, rows), CLASSES)


def half_by_counting(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Half the mask by counting; the first of equals is the one nearest the upper left."""
    even = np.pad(mask, [(0, side % 2) for side in mask.shape], mode="edge")
    four = np.stack([even[y::2, x::2] for y in (0, 1) for x in (0, 1)])
    votes = (four[:, None] == four).sum(axis=0)
    half: NDArray[np.uint8] = np.take_along_axis(four, votes.argmax(axis=0)[None], axis=0)[0]
    return half


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 700), (513, 1), (512, 512), (1025, 300), (2300, 2049)]
)
@pytest.mark.parametrize("rows", [100, 896])
def test_every_level_reads_back(tmp_path: Path, shape: tuple[int, int], rows: int) -> None:
    path = tmp_path / "mask.ome.tiff"
    mask = blobs(*shape)
    write(path, mask, rows)
    with tifffile.TiffFile(path) as file:
        assert file.is_ome
        assert len(file.series) == 1
        levels = file.series[0].levels
        assert [max(level.shape) > 1024 for level in levels] == [True] * (len(levels) - 1) + [False]
        expected = mask
        for number, level in enumerate(levels):
            page = level.keyframe
            assert level.axes == "YX"
            assert (page.tilewidth, page.tilelength) == (512, 512)
            assert page.compression == tifffile.COMPRESSION.ADOBE_DEFLATE
            assert page.predictor == 1
            assert page.photometric == tifffile.PHOTOMETRIC.PALETTE
            np.testing.assert_array_equal(page.colormap, COLOURS.T * 257)
            assert page.subfiletype == (1 if number else 0)
            np.testing.assert_array_equal(level.asarray(), expected)
            expected = half_by_counting(expected)
    assert list(tmp_path.iterdir()) == [path]


def mean_of_four(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    even = np.pad(values, [(0, 0), *((0, side % 2) for side in values.shape[1:])], mode="edge")
    four = np.stack([even[:, y::2, x::2] for y in (0, 1) for x in (0, 1)])
    half: NDArray[np.uint8] = np.floor(four.mean(axis=0) + 0.5).astype(np.uint8)
    return half


CHANNELS = [("background", (255, 255, 255)), ("Tumör <&>", (200, 0, 0)), ("x", (0, 9, 254))]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 700, 1), (2, 513, 1030), (3, 2300, 2049)])
@pytest.mark.parametrize("rows", [100, 896])
def test_a_map_reads_back_at_every_level(
    tmp_path: Path, shape: tuple[int, int, int], rows: int
) -> None:
    path, channels = tmp_path / "map.ome.tiff", CHANNELS[: shape[0]]
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    values[:, : shape[1] // 2] = 7
    with map_writer(path, Size(shape[2], shape[1]), MPP, channels) as add:
        for top in range(0, shape[1], rows):
            add(values[:, top : top + rows])
    assert list(tmp_path.iterdir()) == [path]
    with tifffile.TiffFile(path) as file, closing(MaskReader(path)) as reader:
        assert len(file.series) == 1
        assert reader.channels == tuple(name for name, _ in channels)
        assert reader.mpp == MPP
        assert reader.colours == {}
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        assert [pixels[f"Size{axis}"] for axis in "CYX"] == [*shape]
        told = pixels["Channel"] if shape[0] > 1 else [pixels["Channel"]]
        expected = values
        colours = [int.from_bytes(bytes((*each, 255)), "big") for _, each in channels]
        assert [one["Color"] % 2**32 for one in told] == colours
        for number, level in enumerate(file.series[0].levels):
            np.testing.assert_array_equal(level.asarray().reshape(expected.shape), expected)
            whole = Box(0, 0, expected.shape[2], expected.shape[1])
            for channel, one in enumerate(expected):
                np.testing.assert_array_equal(reader.read(number, whole, channel), one)
            assert level.keyframe.photometric == tifffile.PHOTOMETRIC.MINISBLACK
            expected = mean_of_four(expected)


def test_an_error_while_a_map_is_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "map.ome.tiff"
    path.write_bytes(b"as it was")

    def write_map(rows: int, error: Exception | None = None) -> None:
        with map_writer(path, Size(64, 1024), MPP, CHANNELS[:2]) as add:
            add(np.zeros((2, rows, 64), np.uint8))
            if error is not None:
                raise error

    for rows in (1023, 1025):
        with pytest.raises(ValueError, match="1024"):
            write_map(rows)
    with pytest.raises(KeyError):
        write_map(1024, KeyError())
    assert path.read_bytes() == b"as it was"
    assert list(tmp_path.iterdir()) == [path]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_half_a_mask_is_the_mode_of_four(height: int, width: int, seed: int) -> None:
    mask = np.random.default_rng(seed).integers(0, 4, (height, width), np.uint8)
    np.testing.assert_array_equal(mode_of_four(mask), half_by_counting(mask))


def test_the_size_of_a_pixel_and_the_classes_are_told(tmp_path: Path) -> None:
    """A class name may have a character for which XML has no form."""
    path = tmp_path / "mask.ome.tiff"
    classes = ClassTable(("Tumör <&>", "stroma\x07"), CLASSES.colours)
    write_mask(path, Size(3000, 1500), MPP, in_bands(blobs(1500, 3000), 512), classes)
    with tifffile.TiffFile(path) as file:
        root = ElementTree.fromstring(file.ome_metadata or "")
        assert [page.get_resolution("MICROMETER") for page in file.series[0].levels[1].pages] == [
            pytest.approx((1.0, 2.0), rel=1e-5)
        ]
    (image,) = root.findall(f"{OME}Image")
    (pixels,) = image.findall(f"{OME}Pixels")
    assert image.get("Name") == "mask.ome.tiff"
    said = {key: pixels.get(key) for key in ("SizeX", "SizeY", "Type", "PhysicalSizeX")}
    assert said == {"SizeX": "3000", "SizeY": "1500", "Type": "uint8", "PhysicalSizeX": "0.5"}
    assert pixels.get("PhysicalSizeY") == "0.25"
    assert pixels.get("PhysicalSizeXUnit") == pixels.get("PhysicalSizeYUnit") == "µm"
    assert {entry.get("K"): entry.text for entry in root.iter(f"{OME}M")} == {
        "0": "background",
        "1": "Tumör <&>",
        "2": "stroma\ufffd",
        "255": "unread",
    }


def test_openslide_shows_the_colours_of_the_full_resolution(tmp_path: Path) -> None:
    path = tmp_path / "mask.ome.tiff"
    mask = blobs(1500, 2100)
    write(path, mask, 300)
    with OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert slide.level_dimensions == ((2100, 1500),)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.25)
        read = np.asarray(slide.read_region((0, 0), 0, (2100, 1500)))
    np.testing.assert_array_equal(read[:, :, :3], COLOURS[mask])


def test_pillow_reads_indices_and_colours(tmp_path: Path) -> None:
    mask = blobs(600, 700)
    write(tmp_path / "mask.ome.tiff", mask, 300)
    with Image.open(tmp_path / "mask.ome.tiff") as image:
        assert image.mode == "P"
        np.testing.assert_array_equal(np.asarray(image), mask)
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), COLOURS[mask])


def test_a_mask_is_an_annotation_with_its_classes_and_colours(tmp_path: Path) -> None:
    """A result that a lab corrects and puts beside its slide, large or small."""
    mask = blobs(1100, 1200)
    write(tmp_path / "slide_mask.tif", mask, 300)
    labels = read_labels(tmp_path / "slide_mask.tif", Size(1200, 1100), (0, 0), AnnotationOptions())
    assert labels.classes() == {"class 1": (200, 0, 0), "class 2": (0, 200, 0)}
    frame = Frame(Size(1200, 1100), 1.0, 1.0, MPP)
    table = ClassTable(("class 1", "class 2"), CLASSES.colours)
    np.testing.assert_array_equal(labels.rasterise(Box(0, 0, 1200, 1100), frame, table), mask)


@pytest.mark.parametrize("rows", [1023, 1025, 1024 + 512])
def test_bands_of_another_height_are_an_error(tmp_path: Path, rows: int) -> None:
    bands = in_bands(np.zeros((rows, 64), np.uint8), 100)
    with pytest.raises(ValueError, match="1024"):
        write_mask(tmp_path / "mask.ome.tiff", Size(64, 1024), Mpp(1, 1), bands, CLASSES)
    assert list(tmp_path.iterdir()) == []


def test_the_bands_run_to_their_very_end(tmp_path: Path) -> None:
    ended = []

    def bands() -> Iterator[NDArray[np.uint8]]:
        yield np.zeros((512, 64), np.uint8)
        ended.append(True)

    write_mask(tmp_path / "mask.ome.tiff", Size(64, 512), Mpp(1, 1), bands(), CLASSES)
    assert ended


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (4096, 2048), np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "mask.ome.tiff", noise, 512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_height(tmp_path: Path) -> None:
    path = tmp_path / "mask.ome.tiff"
    band = blobs(500, 3000)
    bands = (np.roll(band, number * 7, axis=1) for number in range(40))
    tracemalloc.start()
    try:
        write_mask(path, Size(3000, 20_000), Mpp(0.5, 0.5), bands, CLASSES)
        strip = 512 * 3000
        assert tracemalloc.get_traced_memory()[1] < 5 * strip  # the mask has 40
    finally:
        tracemalloc.stop()
    with tifffile.TiffFile(path) as file:
        lowest = file.series[0].levels[-1].asarray()
        assert lowest.shape == (625, 94)
        assert np.isin(lowest, [0, 1, 2, 255]).all()


def test_memory_of_a_map_does_not_grow_with_its_height(tmp_path: Path) -> None:
    band, peaks = np.tile(np.arange(2000, dtype=np.uint8), (3, 300, 1)), []
    for bands in (24, 48):  # a level more
        tracemalloc.start()
        try:
            with map_writer(
                tmp_path / "map.ome.tiff", Size(2000, 300 * bands), MPP, CHANNELS
            ) as add:
                for _ in range(bands):
                    add(band)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1.5 * 3 * 512 * 512, "the strip of that level alone"
    assert peaks[1] < 4 * 3 * 512 * 2000, "and few of the map's 28 strips"


def test_what_may_pass_four_gigabytes_is_bigtiff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mask.ome.tiff"
    write(path, blobs(600, 600), 300)
    with tifffile.TiffFile(path) as file:
        assert not file.is_bigtiff
    monkeypatch.setattr("pathoseg.outputs.mask_tiff._CLASSIC_TIFF", 1_000_000)
    write(path, blobs(600, 600), 300)
    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff
