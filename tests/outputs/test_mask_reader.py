"""Reading parts of masks: any box of any level, other forms, and damage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Mpp, Size
from pathoseg.outputs.mask_reader import MaskReader
from pathoseg.outputs.mask_tiff import write_mask

CLASSES = ClassTable(("gland", "<odd> & name"), ((1, 2, 3), (4, 5, 6)))


@pytest.fixture(scope="module")
def mask(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mask") / "mask.ome.tiff"
    values = np.random.default_rng(3).choice([0, 1, 2, 255], (1100, 2100)).astype(np.uint8)
    values[:600, :700] = 0
    write_mask(path, Size(2100, 1100), Mpp(0.5, 0.25), [values], CLASSES)
    return path


@given(data=st.data())
@settings(max_examples=30)
def test_any_box_of_any_level(data: st.DataObject, mask: Path) -> None:
    with closing(MaskReader(mask)) as reader, tifffile.TiffFile(mask) as tiff:
        level = data.draw(st.integers(0, len(reader.levels) - 1))
        size = reader.levels[level]
        x = data.draw(st.integers(0, size.width - 1))
        y = data.draw(st.integers(0, size.height - 1))
        width = data.draw(st.integers(1, size.width - x))
        height = data.draw(st.integers(1, size.height - y))
        whole = tiff.series[0].levels[level].asarray()
        got = reader.read(level, Box(x, y, width, height))
        assert np.array_equal(got, whole[y : y + height, x : x + width])


def test_what_the_header_tells(mask: Path) -> None:
    with closing(MaskReader(mask)) as reader:
        assert reader.names == {1: "gland", 2: "<odd> & name"}
        assert [reader.colours[index] for index in (1, 2)] == [(1, 2, 3), (4, 5, 6)]
        assert reader.mpp == Mpp(0.5, 0.25)
        assert [level.width for level in reader.levels] == [2100, 1050, 525]
        assert reader.channels == ("",)


def test_several_channels_and_a_palette(tmp_path: Path) -> None:
    values = np.random.default_rng(4).integers(0, 256, (3, 700, 600), np.uint8)
    path = tmp_path / "probability.ome.tiff"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        metadata = {"axes": "CYX", "Channel": {"Name": ["background", "gland", "tumour"]}}
        how = {"tile": (256, 256), "compression": "zlib", "photometric": "minisblack"}
        tiff.write(values, subifds=1, metadata=metadata, **how)
        tiff.write(values[:, ::2, ::2], subfiletype=1, **how)
    with closing(MaskReader(path)) as reader:
        assert reader.channels == ("background", "gland", "tumour")
        for channel in range(3):
            got = reader.read(0, Box(100, 200, 333, 444), channel)
            assert np.array_equal(got, values[channel, 200:644, 100:433])
            assert np.array_equal(
                reader.read(1, Box(0, 0, 300, 350), channel), values[channel, ::2, ::2]
            )
    coloured = tmp_path / "coloured.ome.tiff"
    palette = np.zeros((3, 256), np.uint16)
    palette[:, 2] = np.array([10, 20, 30]) * 257
    with tifffile.TiffWriter(coloured, ome=True) as tiff:
        tiff.write(
            values[0], photometric="palette", colormap=palette, tile=(256, 256),
            metadata={"axes": "YX"},
        )  # fmt: skip
    with closing(MaskReader(coloured)) as reader:
        assert reader.colours[2] == (10, 20, 30)


@pytest.mark.parametrize("keep", [0, 4, 200, 2000])
def test_what_is_cut_short_is_one_error(mask: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "mask.ome.tiff"
    path.write_bytes(mask.read_bytes()[:keep])

    def read_all() -> None:
        with closing(MaskReader(path)) as reader:
            for level, size in enumerate(reader.levels):
                reader.read(level, Box(0, 0, size.width, size.height))

    with pytest.raises(PathosegError) as refused:
        read_all()
    assert str(path) in refused.value.problem
