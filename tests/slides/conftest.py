"""Small slides of many formats with known pixels, and a slide in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image

from pathoseg.errors import UnreadableError
from pathoseg.geometry import Box, Level, Mpp, Size
from pathoseg.slides.levels import exact_levels

Pixels = NDArray[np.uint8]
Writer = Callable[..., Path]


def _picture(width: int, height: int, seed: int = 0) -> Pixels:
    """Clouds of colour with some noise: compressible, and different at every pixel."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8))
    clouds = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return np.clip(clouds + rng.integers(-9, 10, clouds.shape), 0, 255).astype(np.uint8)


def _reduced(pixels: Pixels, factor: int) -> Pixels:
    """Means of factor² pixels; what does not fill a pixel at the far edges is dropped."""
    height, width = (side // factor * factor for side in pixels.shape[:2])
    cells = pixels[:height, :width].reshape(height // factor, factor, width // factor, factor, 3)
    return cells.mean((1, 3)).round().astype(np.uint8)


@pytest.fixture(scope="session")
def picture() -> Callable[..., Pixels]:
    return _picture


@pytest.fixture(scope="session")
def pyramid() -> Callable[..., list[Pixels]]:
    """pyramid(width, height, factors): a picture and its reductions."""

    def make(width: int, height: int, factors: tuple[int, ...] = (4,)) -> list[Pixels]:
        level0 = _picture(width, height)
        return [level0, *(_reduced(level0, factor) for factor in factors)]

    return make


@pytest.fixture(scope="session")
def write_svs() -> Writer:
    """write_svs(path, levels, says=…, **tifffile's): what Aperio's scanners write."""

    def write(
        path: Path, levels: list[Pixels], says: str = "AppMag = 20|MPP = 0.5", **how: Any
    ) -> Path:
        how = {"compression": "adobe_deflate", "tile": (256, 256), **how}
        with tifffile.TiffWriter(path) as tiff:
            for pixels in levels:
                height, width = pixels.shape[:2]
                size = f"Aperio Image Library v12\r\n{width}x{height} (256x256)"
                tiff.write(
                    pixels, photometric="rgb", description=f"{size}|{says}", metadata=None, **how
                )
        return path

    return write


@pytest.fixture(scope="session")
def write_zarr() -> Writer:
    """write_zarr(path, levels, version, axes=…, unit=…, says=…, **zarr's): an OME-Zarr image."""

    def write(
        path: Path,
        levels: list[Pixels],
        version: str = "0.5",
        axes: str = "cyx",
        unit: str | None = "micrometer",
        says: dict[str, Any] | None = None,
        **how: Any,
    ) -> Path:
        space = {"type": "space"} if unit is None else {"type": "space", "unit": unit}
        kinds = {"t": {"type": "time"}, "c": {"type": "channel"}}
        downsamples = [round(levels[0].shape[1] / level.shape[1]) for level in levels]
        multiscale = {
            "axes": [{"name": axis, **kinds.get(axis, space)} for axis in axes],
            "datasets": [
                {
                    "path": str(number),
                    "coordinateTransformations": [
                        {
                            "type": "scale",
                            "scale": [0.5 * downsample if axis in "yx" else 1 for axis in axes],
                        }
                    ],
                }
                for number, downsample in enumerate(downsamples)
            ],
            **({} if version == "0.5" else {"version": version}),
            **(says or {}),
        }
        multiscales = {"multiscales": [multiscale]}
        attributes = (
            {"ome": {"version": version, **multiscales}} if version == "0.5" else multiscales
        )
        zarr_format = 3 if version == "0.5" else 2
        group = zarr.create_group(path, attributes=attributes, zarr_format=zarr_format)
        for number, level in enumerate(levels):
            shape = tuple(
                {"y": level.shape[0], "x": level.shape[1], "c": level.shape[2]}.get(axis, 1)
                for axis in axes
            )
            options = {"chunks": tuple({"y": 192, "x": 256}.get(axis, 1) for axis in axes), **how}
            array = group.create_array(str(number), shape=shape, dtype=level.dtype, **options)
            order = [axis for axis in axes if axis in "cyx"] + [
                axis for axis in "c" if axis not in axes
            ]
            array[:] = level.transpose(["yxc".index(axis) for axis in order]).reshape(shape)
        return path

    return write


@pytest.fixture(scope="session")
def write_ome() -> Writer:
    """write_ome(path, levels, metadata, **tifffile's): an OME-TIFF, its pyramid in SubIFDs."""

    def write(
        path: Path, levels: list[Pixels], metadata: dict[str, Any] | None = None, **how: Any
    ) -> Path:
        how = {"compression": "adobe_deflate", "tile": (128, 128), "photometric": "rgb", **how}
        stated = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
        with tifffile.TiffWriter(path, ome=True) as tiff:
            tiff.write(
                levels[0],
                subifds=len(levels) - 1,
                metadata={"axes": "YXS", **(stated if metadata is None else metadata)},
                **how,
            )
            for pixels in levels[1:]:
                tiff.write(pixels, subfiletype=1, **how)
        return path

    return write


def _scn_image(number: int, place: Box, pixels: Pixels) -> str:
    """One image of a Leica slide in the words of its XML; a nominal pixel is 500 nm."""
    height, width = pixels.shape[:2]
    view = " ".join(
        f'{name}="{value * 500}"'
        for name, value in zip(
            ("sizeX", "sizeY", "offsetX", "offsetY"),
            (place.width, place.height, place.x, place.y),
            strict=True,
        )
    )
    return (
        f'<image name="{number}" uuid="{number}"><creationDate>2020-01-01</creationDate>'
        f'<device model="M" version="1"/><pixels sizeX="{width}" sizeY="{height}">'
        f'<dimension sizeX="{width}" sizeY="{height}" r="0" ifd="{number}"/></pixels>'
        f'<view {view} spacingZ="0"/><scanSettings><objectiveSettings><objective>20</objective>'
        "</objectiveSettings><illuminationSettings><numericalAperture>0.5</numericalAperture>"
        "<illuminationSource>brightfield</illuminationSource></illuminationSettings>"
        "</scanSettings></image>"
    )


@pytest.fixture(scope="session")
def write_scn() -> Writer:
    """write_scn(path, size, [(x, y, pixels)…]): a Leica slide, its scanned areas within bounds."""

    def write(path: Path, size: Size, areas: list[tuple[int, int, Pixels]]) -> Path:
        macro = _picture(128, 96)
        images = [(Box(0, 0, size.width, size.height), macro)]
        images += [(Box(x, y, p.shape[1], p.shape[0]), p) for x, y, p in areas]
        xml = (
            '<scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" uuid="s">'
            f'<collection name="c" uuid="c" sizeX="{size.width * 500}" sizeY="{size.height * 500}">'
            "<barcode>QQ==</barcode>"
            + "".join(_scn_image(number, *image) for number, image in enumerate(images))
            + "</collection></scn>"
        )
        with tifffile.TiffWriter(path, bigtiff=True) as tiff:
            for number, (_, pixels) in enumerate(images):
                tiff.write(
                    pixels,
                    photometric="rgb",
                    tile=(256, 256),
                    compression="adobe_deflate",
                    metadata=None,
                    description=None if number else xml,
                    resolution=(20_000, 20_000),
                    resolutionunit="CENTIMETER",
                )
        return path

    return write


@pytest.fixture(scope="session")
def spoil() -> Callable[..., None]:
    """spoil(path, index, page=0): overwrites one tile or strip of a TIFF with garbage."""

    def spoil_segment(path: Path, index: int, page: int = 0) -> None:
        with tifffile.TiffFile(path) as tiff:
            offset = tiff.pages[page].dataoffsets[index]
            count = tiff.pages[page].databytecounts[index]
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\x13\x37" * (count // 2))

    return spoil_segment


@dataclass
class MemorySlide:
    """A slide of arrays. Reads that touch a box in `bad`, given in pixels of a level, fail."""

    arrays: list[Pixels]
    mpp: Mpp = Mpp(0.5, 0.5)  # noqa: RUF009 - frozen
    bad: dict[int, Box] = field(default_factory=dict)
    downsamples: list[float] | None = None
    reads: list[tuple[int, Box]] = field(default_factory=list)
    path: Path = Path("memory.svs")
    vendor: str = "memory"
    origin: tuple[int, int] = (0, 0)
    reduced: tuple[Level, ...] = ()
    warnings: tuple[str, ...] = ()
    held_pixels = 0

    @property
    def levels(self) -> tuple[Level, ...]:
        sizes = [Size(array.shape[1], array.shape[0]) for array in self.arrays]
        if self.downsamples is None:
            return exact_levels(sizes)
        return tuple(Level(*pair) for pair in zip(sizes, self.downsamples, strict=True))

    @property
    def size(self) -> Size:
        return self.levels[0].size

    def read_level(self, level: int, box: Box) -> Pixels:
        self.reads.append((level, box))
        size = self.levels[level].size
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= size.width
        assert box.bottom <= size.height
        assert box.width > 0
        assert box.height > 0
        if level in self.bad and box.intersection(self.bad[level]):
            raise UnreadableError("memory.svs is bad there.", "Mend it.")
        return self.arrays[level][box.y : box.bottom, box.x : box.right].copy()

    def close(self) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None: ...


@pytest.fixture(scope="session")
def memory_slide() -> type[MemorySlide]:
    return MemorySlide
