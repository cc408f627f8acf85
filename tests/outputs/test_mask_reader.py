"""Reading parts of masks: any box of any level, other forms, and damage."""

from __future__ import annotations

import itertools
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

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


def test_no_other_file_is_opened(tmp_path: Path) -> None:
    """OME-XML may say that pixels are in another file, of any path."""
    other, path = tmp_path / "secret.tif", tmp_path / "results" / "mask.ome.tiff"
    path.parent.mkdir()
    tifffile.imwrite(other, np.full((512, 512), 7, np.uint8), tile=(256, 256))
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1">'
        '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="512" '
        'SizeY="512" SizeZ="1" SizeC="1" SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>'
        '<TiffData IFD="0" FirstC="0" FirstT="0" FirstZ="0" PlaneCount="1">'
        '<UUID FileName="../secret.tif">urn:uuid:2</UUID></TiffData></Pixels></Image></OME>'
    )
    values = np.full((512, 512), 1, np.uint8)
    tifffile.imwrite(path, values, tile=(256, 256), description=xml, metadata=None)
    opened = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        read = tifffile.TiffFile.__init__

        def recorded(tiff: tifffile.TiffFile, file: object, *options: Any, **more: Any) -> None:
            opened.append(str(file))
            read(tiff, file, *options, **more)

        patch.setattr(tifffile.TiffFile, "__init__", recorded)
        with suppress(PathosegError), closing(MaskReader(path)) as reader:
            assert reader.read(0, Box(0, 0, 1, 1))[0, 0] == 1
    assert opened == [str(path)]


@pytest.mark.parametrize("sides", [[(9000, 9000)], [(9000, 9000), (900, 900)]])
def test_what_would_be_read_whole_for_a_small_picture_is_refused(
    tmp_path: Path, sides: list[tuple[int, int]]
) -> None:
    path = tmp_path / "mask.ome.tiff"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        for number, (height, width) in enumerate(sides):
            tiff.write(
                itertools.repeat(np.zeros((1024, 1024), np.uint8), (-(-width // 1024)) ** 2),
                shape=(height, width), dtype=np.uint8, tile=(1024, 1024), compression="zlib",
                subifds=0 if number else len(sides) - 1, subfiletype=min(number, 1),
            )  # fmt: skip
    with pytest.raises(PathosegError, match="pyramid"):
        MaskReader(path)
