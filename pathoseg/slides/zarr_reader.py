"""Slides that are OME-Zarr (OME-NGFF 0.4 and 0.5): folders of compressed chunks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from pydantic import TypeAdapter
from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Mpp, Size
from pathoseg.slides.levels import exact_levels
from pathoseg.slides.resolution import MICRONS_PER_UNIT, slide_mpp, stated_mpp
from pathoseg.slides.slide_file import SlideFile, reason
from pathoseg.slides.zarr_folder import LAYOUT, METADATA, is_zarr, ome_attributes, read_json

# NGFF writes units in full.
_MICRONS_PER_UNIT = {
    **MICRONS_PER_UNIT,
    "nanometer": 1e-3,
    "micrometer": 1.0,
    "meter": 1e6,
    "angstrom": 1e-4,
    "picometer": 1e-6,
}
# Others can run code of the file's choice (pickle), or are not installed everywhere.
_CODECS = {"blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma", "crc32c", "bytes", "transpose"}
_CHECKSUM = 4  # bytes
_LEFT_OUT = 2**64 - 1
_WHITE = 255
_MOST_CHUNK_PIXELS = 64_000_000
_MOST_LEVELS = 100
_KEPT_BYTES = 64 << 20


@dataclass
class _Axis:
    name: str
    unit: str | None = None


@dataclass
class _Transformation:
    type: str
    scale: list[float] | None = None


@dataclass
class _Dataset:
    path: str
    coordinateTransformations: list[_Transformation]  # noqa: N815 the file's name


@dataclass
class _Multiscale:
    """The fields of the OME metadata that are read, by their names; pydantic checks the types."""

    axes: list[_Axis]
    datasets: list[_Dataset]
    coordinateTransformations: list[_Transformation] = field(  # noqa: N815 the file's name
        default_factory=list
    )
    version: str | None = None

    def microns(self, name: str) -> float | None:
        """Return the size of a pixel of level 0 along an axis; None where it has no unit."""
        number = [axis.name for axis in self.axes].index(name)
        unit = _MICRONS_PER_UNIT.get(self.axes[number].unit or "")
        every = [*self.datasets[0].coordinateTransformations, *self.coordinateTransformations]
        scales = [each.scale[number] for each in every if each.scale is not None]
        return None if unit is None or not scales else unit * prod(scales)


class _ChunkStore(LocalStore):
    """The files of an array; refuses chunks that are missing or cut short.

    Args:
        folder: The array's.
        metadata: The array's, as its file has it.

    Raises:
        ValueError: It has codecs that are not read here.
        LookupError, TypeError: It is damaged.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        super().__init__(folder, read_only=True)
        self._may_miss = metadata.get("fill_value") == _WHITE
        self._blosc = _Blosc.of(metadata)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a file, or part of it; None for one that may be missing.

        Raises:
            ValueError: It is missing, or cut short.
        """
        found = await super().get(key, prototype, byte_range)
        if key in METADATA:
            return found
        if found is None and not self._may_miss:
            raise ValueError(f"the chunk {key} is missing")
        # From the end of a shard its index is read.
        if found is not None and self._blosc and not isinstance(byte_range, SuffixByteRequest):
            self._blosc.check(found.to_bytes(), is_part=byte_range is not None)
        return found


@dataclass(frozen=True)
class _Blosc:
    """The place of Blosc's streams in the files of an array.

    Blosc believes the length that a stream states, and reads past the end of one that is cut short.

    Attributes:
        pixels: Bytes of a chunk, decoded.
        after: Bytes that follow a stream in its chunk, a checksum's.
        in_shard: Chunks of a shard; 0 without shards.
        after_index: Bytes that follow the index in its shard, a checksum's.
    """

    pixels: int
    after: int
    in_shard: int
    after_index: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _Blosc | None:
        """Return it for an array; None where Blosc is not used.

        Raises:
            ValueError: There are codecs that are not read here.
            LookupError, TypeError: The metadata is damaged.
        """
        index, inside = list[str](), dict[str, Any]()
        if metadata.get("zarr_format") == 2:
            used = [*(metadata.get("filters") or ()), metadata.get("compressor")]
            chain = [str(each["id"]) for each in used if each is not None]
            chunk = shard = metadata["chunks"]
        else:
            chain = _names(metadata["codecs"])
            chunk = shard = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            if chain == ["sharding_indexed"]:
                inside = metadata["codecs"][0]["configuration"]
                chain, index = _names(inside["codecs"]), _names(inside["index_codecs"])
                chunk = inside["chunk_shape"]
        after = chain[chain.index("blosc") + 1 :] if "blosc" in chain else []
        is_known = {*chain, *index} <= _CODECS and after in ([], ["crc32c"])
        if inside:
            is_known &= index in (["bytes"], ["bytes", "crc32c"])
            is_known &= inside.get("index_location", "end") == "end"
        if not is_known:
            raise ValueError(f"its codecs {', '.join(chain + index)} are not read here")
        if "blosc" not in chain:
            return None
        in_shard = prod(shard) // prod(chunk) if inside else 0
        return cls(prod(chunk), _CHECKSUM * len(after), in_shard, _CHECKSUM * (len(index) - 1))

    def check(self, data: bytes, is_part: bool) -> None:
        """Refuse streams that state other lengths than they have.

        Args:
            data: A chunk, or a shard.
            is_part: True for a chunk of a shard.

        Raises:
            ValueError, struct.error: There are some.
        """
        chunks = [data]
        if self.in_shard and not is_part:
            end = len(data) - self.after_index
            index = struct.iter_unpack("<QQ", data[end - 16 * self.in_shard : end])
            chunks = [data[at : at + length] for at, length in index if at != _LEFT_OUT]
        for chunk in chunks:
            decoded, _, encoded = struct.unpack_from("<III", chunk, 4)
            if (decoded, encoded) != (self.pixels, len(chunk) - self.after):
                raise ValueError("a chunk is cut short")


def _names(codecs: Sequence[Any]) -> list[str]:
    return [each if isinstance(each, str) else str(each["name"]) for each in codecs]


@dataclass(frozen=True, eq=False)
class _ZarrLevel:
    """An array of a pyramid.

    Attributes:
        array: Open.
        axes: Names of its axes.
    """

    array: zarr.Array[Any]
    axes: Sequence[str]

    @property
    def size(self) -> Size:
        return self._plane(self.array.shape)

    @property
    def chunk(self) -> Size:
        """Pixels of what is decoded at once."""
        return self._plane(self.array.chunks)

    def _plane(self, lengths: Sequence[int]) -> Size:
        return Size(lengths[self.axes.index("x")], lengths[self.axes.index("y")])

    def decode(self, row: int, column: int) -> NDArray[np.uint8]:
        """Decode a chunk in all channels, shape (height, width, 3), less at the far edges.

        Raises:
            Exception: It is damaged, or a file of it is missing, and what is missing is not white.
        """
        side = self.chunk
        places = {
            "y": slice(row * side.height, min((row + 1) * side.height, self.size.height)),
            "x": slice(column * side.width, min((column + 1) * side.width, self.size.width)),
            "c": slice(0, 3),
        }
        pixels = np.asarray(self.array[tuple(places.get(axis, 0) for axis in self.axes)])
        left = [axis for axis in self.axes if axis in places]
        return np.ascontiguousarray(pixels.transpose([left.index(axis) for axis in "yxc"]))


class _OpenZarr:
    """The open arrays of a slide, largest first, and some of their chunks, decoded."""

    def __init__(self, levels: Iterable[_ZarrLevel]) -> None:
        self.levels = sorted(levels, key=lambda level: -level.size.pixels)
        largest = max(level.chunk.pixels * 3 for level in self.levels)
        self.chunk = lru_cache(max(1, _KEPT_BYTES // largest))(self._decode)

    def _decode(self, level: int, row: int, column: int) -> NDArray[np.uint8]:
        return self.levels[level].decode(row, column)

    def close(self) -> None:
        self.chunk.cache_clear()


class ZarrSlide(SlideFile[_OpenZarr]):
    """An OME-Zarr image in RGB, or series 0 of what bioformats2raw wrote.

    A chunk without a file has the fill value, as Zarr says, where that is white. Any other is
    unread: no glass is black, but a file that was lost on the way would be.
    """

    def _open(self) -> _OpenZarr:
        try:
            group, multiscale = _image(self.path)
            axes = _checked_axes(multiscale)
            if not 0 < len(multiscale.datasets) <= _MOST_LEVELS:
                raise ValueError(f"it has {len(multiscale.datasets)} levels")
            levels = [_level(group, dataset.path, axes) for dataset in multiscale.datasets]
            return _OpenZarr(levels)
        except MemoryError:
            raise
        except Exception as error:  # zarr raises as many kinds as there are ways to be damaged
            raise self._refusal(error) from error

    def _read_header(self, assume_mpp: float | None) -> None:
        levels = self._opened().levels
        try:
            _, multiscale = _image(self.path)
            stated: Mpp | None = stated_mpp(multiscale.microns("x"), multiscale.microns("y"))
        except (OSError, ValueError, LookupError) as error:
            raise self._refusal(error) from error
        self.vendor = "ome-zarr"
        self.levels = exact_levels([level.size for level in levels])
        self.mpp = slide_mpp(self.path, stated, None, assume_mpp)

    def _refusal(self, error: Exception) -> PathosegError:
        return PathosegError(
            f"{self.path} cannot be read as an OME-Zarr slide: {reason(error)}.",
            "Check that the copy is complete. What is read is RGB of 8 bits, in the axes c, y and "
            "x (others of length 1), by OME-NGFF 0.4 or 0.5.",
        )

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """See `Slide.read_level`."""
        opened = self._opened()
        side = opened.levels[level].chunk
        pixels = np.empty((box.height, box.width, 3), np.uint8)
        for row in range(box.y // side.height, -(-box.bottom // side.height)):
            for column in range(box.x // side.width, -(-box.right // side.width)):
                try:
                    chunk = opened.chunk(level, row, column)
                except MemoryError:
                    raise
                except Exception as error:  # codecs raise as many kinds
                    raise UnreadableError(
                        f"{self.path} cannot be read around ({box.x}, {box.y}) of level {level}: "
                        f"{reason(error)}.",
                        "Copy the folder again from where it came.",
                    ) from error
                height, width = chunk.shape[:2]
                whole = Box(column * side.width, row * side.height, width, height)
                part = whole.intersection(box)
                assert part is not None
                pixels[part.within(box)] = chunk[part.within(whole)]
        return pixels


def _image(path: Path) -> tuple[Path, _Multiscale]:
    """Return the group of a slide's image, and its first multiscale.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: There is no image, or its metadata is damaged.
    """
    group, attributes = path, ome_attributes(path)
    if LAYOUT in attributes and "multiscales" not in attributes:
        series = ["0"]
        if is_zarr(path / "OME"):
            series = TypeAdapter(list[str]).validate_python(
                ome_attributes(path / "OME").get("series", series)
            )
        group = _inside(path, series[0] if series else "0")
        attributes = ome_attributes(group)
    if "multiscales" not in attributes or "image-label" in attributes:
        kinds = ("image-label", "labels", "plate", "well")
        kind = next((kind for kind in kinds if kind in attributes), "something else")
        raise ValueError(f"it is no image but {kind}")
    try:
        multiscale = TypeAdapter(list[_Multiscale]).validate_python(attributes["multiscales"])[0]
    except (ValueError, LookupError) as error:
        raise ValueError("its multiscales are not as OME-NGFF 0.4 or 0.5 has them") from error
    is_zarr_3 = (group / "zarr.json").is_file()
    version = attributes.get("version") if is_zarr_3 else multiscale.version
    if version not in (("0.5",) if is_zarr_3 else ("0.4", None)):
        raise ValueError(f"it is of OME-NGFF {version}")
    return group, multiscale


def _checked_axes(multiscale: _Multiscale) -> list[str]:
    axes = [axis.name for axis in multiscale.axes]
    if len(set(axes)) != len(axes) or not {"c", "y", "x"} <= set(axes):
        raise ValueError(f"its axes are {', '.join(axes)}")
    return axes


def _inside(folder: Path, name: str) -> Path:
    """Return a path in a folder.

    Raises:
        ValueError: The name leads out of it.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is outside of it")
    return path


def _level(group: Path, name: str, axes: Sequence[str]) -> _ZarrLevel:
    """Open an array, and refuse what is no plane of RGB.

    Raises:
        OSError: It is missing.
        ValueError: It is damaged, or something else.
    """
    folder = _inside(group, name)
    is_zarr_3 = (folder / "zarr.json").is_file()
    metadata = read_json(folder / ("zarr.json" if is_zarr_3 else ".zarray"))
    store = _ChunkStore(folder, metadata)
    array = zarr.open_array(store, mode="r", zarr_format=3 if is_zarr_3 else 2)
    if array.dtype != np.uint8:
        raise ValueError(f"its pixels are {array.dtype}, not uint8")
    lengths = dict(zip(axes, array.shape, strict=True))
    wrong = {axis: length for axis, length in lengths.items() if axis not in "cyx" and length != 1}
    if lengths["c"] != 3 or wrong or not all(array.shape):
        told = ", ".join(f"{axis} {length}" for axis, length in lengths.items())
        raise ValueError(f"its axes have the lengths {told}")
    level = _ZarrLevel(array, axes)
    if level.chunk.pixels > _MOST_CHUNK_PIXELS:
        raise ValueError(f"its chunks have {level.chunk.width} × {level.chunk.height} px")
    return level
