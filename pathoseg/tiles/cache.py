"""Keeps the tiles of one slide on disk in a Zarr array that several writers may fill at once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self
from uuid import uuid4

import imagecodecs
import numpy as np
import zarr
from zarr.abc.codec import ArrayBytesCodec, BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON
from zarr.registry import register_codec

from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame
from pathoseg.slides.region import Region
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.tiles.grid import TileGrid

Codec = Literal["lossless", "lossy"]

_FORMAT = 1
_SHARD_BYTES = 32 * 1024**2  # before compression; a writer takes about five times as much memory
_MOST_TILES_A_SHARD = 32
_JPEG_QUALITY = 90
_ABANDONED = 3600.0  # seconds after which an unfinished file is taken for a killed writer's
_DESCRIPTION = "cache.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TileCacheKey:
    """All that the content of a cache follows from.

    Attributes:
        slide: The slide's file.
        fingerprint: What the file was like.
        frame: The resolution of the tiles.
        grid: Where they lie.
        indices: Which tiles of the grid are kept, in the order of the cache.
        codec: "lossless" (Blosc-LZ4) or "lossy" (JPEG, quality 90, full chroma).
    """

    slide: Path
    fingerprint: Fingerprint
    frame: Frame
    grid: TileGrid
    indices: tuple[int, ...]
    codec: Codec = "lossless"

    @property
    def digest(self) -> str:
        """Names the content; the slide's path is no part of it."""
        content = {key: value for key, value in self.described().items() if key != "slide"}
        content["indices"] = self.indices
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def described(self) -> dict[str, object]:
        """The key for a reader's eye, with a count in place of the indices."""
        return {
            "format": _FORMAT,
            "slide": str(self.slide.resolve()),
            "fingerprint": asdict(self.fingerprint),
            "frame": asdict(self.frame),
            "grid": asdict(self.grid),
            "tiles": len(self.indices),
            "codec": self.codec,
        }


class TileCache:
    """Tiles by position (0, 1, … in the order of the key's indices), stored in shards.

    A shard is one file. It is written whole, under another name, and then renamed, so a shard
    that is there is complete and never changes: two writers of one shard do the same work twice,
    and a killed one leaves only a draft, which is cleared away later. No locks are needed.

    Args:
        path: The folder of this cache, made by `open`.
        key: Its key.
    """

    def __init__(self, path: Path, key: TileCacheKey) -> None:
        self.path = path
        self._count = len(key.indices)
        self._a_shard = _tiles_a_shard(key)
        # Where all values are 0 (black glass) the file is to appear all the same.
        pixels = zarr.open_array(path / "pixels", mode="r+")
        self._pixels = pixels.with_config({"write_empty_chunks": True})
        self._unread = zarr.open_array(path / "unread", mode="r+")

    @classmethod
    def open(cls, folder: Path, key: TileCacheKey) -> Self:
        """The cache of `key` below `folder`, made where it is missing.

        Caches of the same slide as it was before it changed are removed.

        Raises:
            PathosegError: The folder cannot be written, or what is there is damaged.
        """
        path = folder / key.slide.name / key.digest
        try:
            if not path.is_dir():
                _create(path, key)
        except OSError as error:
            raise _unwritable(path, error) from error
        _clear(path, key)
        try:
            return cls(path, key)
        except Exception as error:  # zarr raises as many kinds as there are ways to be damaged
            raise _damaged(path, error) from error

    @property
    def shards(self) -> int:
        return -(-self._count // self._a_shard)

    def shard_of(self, position: int) -> int:
        return position // self._a_shard

    def positions(self, shard: int) -> range:
        """The tiles of a shard."""
        start = shard * self._a_shard
        return range(start, min(start + self._a_shard, self._count))

    def has(self, shard: int) -> bool:
        return _shard_file(self.path / "pixels", shard).exists()

    def read(self, position: int) -> Region | None:
        """The tile at `position`, or None where its shard is not written yet.

        Raises:
            PathosegError: The shard is damaged or cannot be read.
        """
        shard = self.shard_of(position)
        if not self.has(shard):
            return None
        try:
            pixels = np.asarray(self._pixels[position])
            unread = None
            if _shard_file(self.path / "unread", shard).exists():
                unread = np.asarray(self._unread[position])
        except MemoryError:
            raise
        except Exception as error:  # codecs raise as many kinds as there are ways to be damaged
            raise _damaged(self.path, error) from error
        # A shard that was removed meanwhile reads as black.
        if not self.has(shard):
            return None
        return Region(pixels, unread if unread is not None and unread.any() else None)

    def write(self, shard: int, regions: Iterable[Region]) -> None:
        """Stores all tiles of a shard, in order; nothing is there before everything is.

        Raises:
            PathosegError: The disk is full, or the folder cannot be written.
        """
        positions = self.positions(shard)
        pixels = np.empty((len(positions), *self._pixels.shape[1:]), dtype=np.uint8)
        unread = np.zeros(pixels.shape[:3], dtype=np.bool_)
        for row, (_, region) in enumerate(zip(positions, regions, strict=True)):
            pixels[row] = region.pixels
            if region.unread is not None:
                unread[row] = region.unread
        span = slice(positions.start, positions.stop)
        try:
            if unread.any():
                self._unread[span] = unread
            # Last, because its presence says that the shard is complete.
            self._pixels[span] = pixels
        except OSError as error:
            raise _unwritable(self.path, error) from error


@dataclass(frozen=True)
class _JpegCodec(ArrayBytesCodec):
    """A tile (1, height, width, 3) as one JPEG file without chroma subsampling."""

    quality: int
    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        configuration = data["configuration"]
        assert isinstance(configuration, dict)
        return cls(int(str(configuration["quality"])))

    def to_dict(self) -> dict[str, JSON]:
        return {"name": "pathoseg.jpeg", "configuration": {"quality": self.quality}}

    # In a thread, as zarr's loop serves all readers of the process.
    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        pixels = await asyncio.to_thread(imagecodecs.jpeg8_decode, chunk_data.to_bytes())
        return chunk_spec.prototype.nd_buffer.from_numpy_array(pixels.reshape(chunk_spec.shape))

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        pixels = np.ascontiguousarray(chunk_data.as_numpy_array()[0])
        data = await asyncio.to_thread(
            imagecodecs.jpeg8_encode, pixels, level=self.quality, subsampling="444"
        )
        return chunk_spec.prototype.buffer.from_bytes(data)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError("the size of a JPEG file follows from its content")


register_codec("pathoseg.jpeg", _JpegCodec)


def _tiles_a_shard(key: TileCacheKey) -> int:
    fit = max(1, _SHARD_BYTES // (3 * key.grid.tile.pixels))
    return min(fit, _MOST_TILES_A_SHARD, max(1, len(key.indices)))


def _create(path: Path, key: TileCacheKey) -> None:
    """Makes the folder with its empty arrays under another name and renames it."""
    draft = path.with_name(f".{uuid4().hex}.draft")
    tile = (key.grid.tile.height, key.grid.tile.width)
    lossless = (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec())
    lossy = (Crc32cCodec(),)
    try:
        draft.mkdir(parents=True)
        (draft / _DESCRIPTION).write_text(json.dumps(key.described(), indent=2))
        serializer = BytesCodec() if key.codec == "lossless" else _JpegCodec(_JPEG_QUALITY)
        compressors = lossless if key.codec == "lossless" else lossy
        _create_array(draft / "pixels", key, (*tile, 3), "uint8", serializer, compressors)
        _create_array(draft / "unread", key, tile, "bool", BytesCodec(), lossless)
        draft.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another writer was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _create_array(
    path: Path,
    key: TileCacheKey,
    tile: tuple[int, ...],
    dtype: str,
    serializer: ArrayBytesCodec,
    compressors: Sequence[BytesBytesCodec],
) -> None:
    zarr.create_array(
        path,
        shape=(len(key.indices), *tile),
        chunks=(1, *tile),
        shards=(_tiles_a_shard(key), *tile),
        dtype=dtype,
        serializer=serializer,
        compressors=compressors,
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
    )


def _shard_file(array: Path, shard: int) -> Path:
    """Return the file of a shard under Zarr's default key encoding (separator ".")."""
    dimensions = 4 if array.name == "pixels" else 3
    return array / ".".join(["c", str(shard), *["0"] * (dimensions - 1)])


def _clear(path: Path, key: TileCacheKey) -> None:
    """Removes what killed writers left, and caches of the slide as it was before it changed."""
    now = key.described()
    for other in path.parent.glob("*/" + _DESCRIPTION):
        # Another process may be removing the same; a folder that is read-only stays as it is.
        with suppress(OSError, ValueError, KeyError):
            then = json.loads(other.read_text())
            if then["slide"] == now["slide"] and then["fingerprint"] != now["fingerprint"]:
                shutil.rmtree(other.parent)
                _log.warning("%s has changed: its old tiles are removed.", key.slide)
    oldest = time.time() - _ABANDONED
    for draft in (*path.parent.glob(".*.draft"), *path.glob("*/*.partial")):
        with suppress(OSError):
            if draft.stat().st_mtime < oldest:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _unwritable(path: Path, error: OSError) -> PathosegError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PathosegError(
            f"The disk of the tile cache {path} is full.",
            "Free space there, or put the cache on a larger disk; what it holds stays valid.",
        )
    return PathosegError(
        f"The tile cache {path} cannot be written ({os.strerror(error.errno or errno.EIO)}).",
        "Name a folder that can be written, or run without a cache.",
    )


def _damaged(path: Path, error: Exception) -> PathosegError:
    return PathosegError(
        f"The tile cache {path} is damaged ({type(error).__name__}: {error}).",
        "Delete that folder: it is filled again from the slide.",
    )
