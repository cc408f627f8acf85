"""mask.ome.zarr holds the levels of mask.ome.tiff, valid for others, from bounded memory."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import yaozarrs
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ome_zarr_models import open_ome_zarr

from pathoseg.annotations.annotation import ClassTable
from pathoseg.geometry import Mpp, Size
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.mask_zarr import zarr_mask_writer

CLASSES = ClassTable(("Tumör <&>", "stroma"), ((200, 0, 0), (0, 200, 0)))
MPP = Mpp(0.5, 0.25)


def blobs(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Regions of a few tens of pixels, of every value a mask may have."""
    rng = np.random.default_rng(seed)
    coarse = rng.choice(np.array([0, 0, 1, 2, 255], np.uint8), (height // 20 + 1, width // 20 + 1))
    return np.kron(coarse, np.ones((20, 20), np.uint8))[:height, :width]


def in_bands(mask: NDArray[np.uint8], rows: int) -> Iterator[NDArray[np.uint8]]:
    return (mask[top : top + rows] for top in range(0, len(mask), rows))


def write(path: Path, mask: NDArray[np.uint8], rows: int) -> None:
    with zarr_mask_writer(path, Size(mask.shape[1], mask.shape[0]), MPP, CLASSES) as add:
        for band in in_bands(mask, rows):
            add(band)


def levels_of(path: Path) -> list[zarr.Array]:
    label = zarr.open_group(path / "mask", mode="r")
    (multiscale,) = label.attrs["ome"]["multiscales"]
    return [label[dataset["path"]] for dataset in multiscale["datasets"]]


def assert_as_tiff(folder: Path, mask: NDArray[np.uint8], rows: int) -> None:
    zarr_path, tiff_path = folder / "mask.ome.zarr", folder / "mask.ome.tiff"
    write(zarr_path, mask, rows)
    write_mask(tiff_path, Size(mask.shape[1], mask.shape[0]), MPP, in_bands(mask, 512), CLASSES)
    assert {path.name for path in folder.iterdir()} == {"mask.ome.zarr", "mask.ome.tiff"}
    with tifffile.TiffFile(tiff_path) as file:
        levels = levels_of(zarr_path)
        assert len(levels) == len(file.series[0].levels)
        for mine, other in zip(levels, file.series[0].levels, strict=True):
            assert mine.dtype == np.uint8
            np.testing.assert_array_equal(mine[:], other.asarray())
    np.testing.assert_array_equal(levels[0][:], mask)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 700), (513, 1), (512, 512), (1025, 300), (2300, 2049)]
)
@pytest.mark.parametrize("rows", [100, 896])
def test_every_level_is_that_of_the_tiff(tmp_path: Path, shape: tuple[int, int], rows: int) -> None:
    assert_as_tiff(tmp_path, blobs(*shape), rows)


@settings(max_examples=15)
@given(st.integers(1, 1100), st.integers(1, 1100), st.integers(1, 1200), st.integers(0, 99))
def test_masks_of_any_size_in_bands_of_any_height(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, rows: int, seed: int
) -> None:
    assert_as_tiff(tmp_path_factory.mktemp("mask"), blobs(height, width, seed), rows)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "mask.ome.zarr"
    write(path, blobs(1500, 3000), 512)
    return path


def test_the_whole_store_is_valid(written: Path) -> None:
    yaozarrs.validate_zarr_store(written)
    yaozarrs.validate_zarr_store(written / "mask")


def test_ome_zarr_models_opens_it(written: Path) -> None:
    group = open_ome_zarr(zarr.open_group(written, mode="r"), version="0.5")
    assert type(group).__name__ == "Labels"
    assert group.label_paths == ["mask"]
    label = open_ome_zarr(zarr.open_group(written / "mask", mode="r"), version="0.5")
    assert type(label).__name__ == "ImageLabel"
    (multiscale,) = label.ome_attributes.multiscales
    assert [axis.name for axis in multiscale.axes] == ["y", "x"]


def test_axes_scale_colours_and_names(written: Path) -> None:
    ome = json.loads((written / "mask" / "zarr.json").read_text())["attributes"]["ome"]
    assert ome["version"] == "0.5"
    (multiscale,) = ome["multiscales"]
    assert multiscale["axes"] == [
        {"name": axis, "type": "space", "unit": "micrometer"} for axis in "yx"
    ]
    scales = [dataset["coordinateTransformations"] for dataset in multiscale["datasets"]]
    assert [scale["scale"] for scale, _ in scales] == [[0.25, 0.5], [0.5, 1.0], [1.0, 2.0]]
    assert [move["translation"] for _, move in scales] == [[0, 0], [0.125, 0.25], [0.375, 0.75]]
    shown = ome["image-label"]
    assert {each["label-value"]: each["rgba"] for each in shown["colors"]} == {
        0: [0, 0, 0, 0],
        1: [200, 0, 0, 255],
        2: [0, 200, 0, 255],
        255: [110, 110, 110, 255],
    }
    assert {each["label-value"]: each["class"] for each in shown["properties"]} == {
        0: "background",
        1: "Tumör <&>",
        2: "stroma",
        255: "unread",
    }
    arrays = levels_of(written)
    assert [array.metadata.dimension_names for array in arrays] == [("y", "x")] * 3
    assert [array.chunks for array in arrays] == [(512, 512)] * 3
    files = [path for path in written.rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert len(files) == 3 + 2 + 1, "a file for each strip of each level"


@pytest.mark.parametrize("rows", [1023, 1025, 1024 + 512])
def test_bands_of_another_height_are_an_error_and_leave_nothing(tmp_path: Path, rows: int) -> None:
    def write_rows() -> None:
        with zarr_mask_writer(tmp_path / "m.ome.zarr", Size(64, 1024), MPP, CLASSES) as add:
            for band in in_bands(np.ones((rows, 64), np.uint8), 100):
                add(band)

    with pytest.raises(ValueError, match="1024"):
        write_rows()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mask.ome.zarr"
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(OSError, match=r"mask\.ome\.zarr"):
        write(path, blobs(64, 64), 64)
    assert [each.name for each in tmp_path.rglob("*")] == ["mask.ome.zarr", "file"]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1024, 2048), np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "mask.ome.zarr", noise, 512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_height(tmp_path: Path) -> None:
    write(tmp_path / "warm.ome.zarr", blobs(600, 600), 512)  # what zarr makes once
    band, peaks = blobs(300, 2000), []
    for bands in (12, 24):  # a level more
        tracemalloc.start()
        try:
            size = Size(2000, 300 * bands)
            with zarr_mask_writer(tmp_path / f"{bands}.ome.zarr", size, MPP, CLASSES) as add:
                for _ in range(bands):
                    add(band)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    strip = 512 * 2000
    assert peaks[1] < peaks[0] + strip, "the strips of that level, and zarr's names of shards"
    assert peaks[1] < 6 * strip, "and few of the mask's 14 strips"
