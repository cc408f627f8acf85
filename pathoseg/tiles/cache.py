"""The pixels of one slide on disk, in a Zarr array that several writers may fill at once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self
from uuid import uuid4

import google_crc32c
import imagecodecs
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import ArrayBytesCodec, BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON
from zarr.registry import register_codec

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Size
from pathoseg.platform_support import read_at
from pathoseg.slides.region import Region
from pathoseg.tiles.fingerprint import Fingerprint

Codec = Literal["lossless", "lossy"]

_FORMAT = 2
BLOCK = 256  # side of what is decoded at once
SHARD = 1024  # side of what is written at once, and is one file
_JPEG_QUALITY = 90
_ABANDONED = 3600.0  # seconds after which an unfinished file is taken for a killed writer's
_DESCRIPTION = "cache.json"
_CHECKSUM = 4  # bytes at the end of a block, and of a shard's index

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TileCacheKey:
    """All that the content of a cache follows from; tiles of any size and place are read from it.

    A network of several inputs has a cache for the resolution of each; inputs of one resolution, of
    whatever network, share one.

    Attributes:
        slide: The slide's file.
        fingerprint: What the file was like.
        frame: The resolution.
        codec: "lossless" (Blosc-LZ4) or "lossy" (JPEG, quality 90, full chroma).
    """

    slide: Path
    fingerprint: Fingerprint
    frame: Frame
    codec: Codec = "lossless"

    @property
    def digest(self) -> str:
        """Return the name of the cache's folder: 32 hexadecimal digits, a hash of `described`.

        The slide's path is left out, so a file that is moved keeps its cache.
        """
        content = {key: value for key, value in self.described().items() if key != "slide"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def described(self) -> dict[str, object]:
        """Return the key with names, as it is written beside the cache."""
        return {
            "format": _FORMAT,
            "slide": str(self.slide.resolve()),
            "fingerprint": asdict(self.fingerprint),
            "frame": asdict(self.frame),
            "block": BLOCK,
            "shard": SHARD,
            "codec": self.codec,
        }


Shard = tuple[int, int]  # row and column


class TileCache:
    """The pixels of a slide's frame in blocks, of which a square of 4 × 4 is a shard.

    A shard is one file. It is written whole, under another name, and then renamed, so a shard
    that is there is complete and never changes: two writers of one shard do the same work twice,
    and a killed one leaves only a draft, which is cleared away later. No locks are needed.

    Shards are written by Zarr. Blocks are read from them without it, as its machinery takes several
    times as long as decoding a block, and serves all threads of a process one after the other.

    Args:
        path: The folder of this cache, made by `open`.
        key: Its key.
    """

    def __init__(self, path: Path, key: TileCacheKey) -> None:
        self.path = path
        self._lossless = key.codec == "lossless"
        size = key.frame.size
        self._extent = Box(0, 0, size.width, size.height)
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
                _tell_of_former(path, key)
        except OSError as error:
            raise _unwritable(path, error) from error
        _clear(path, key)
        try:
            return cls(path, key)
        except Exception as error:  # zarr raises as many kinds as there are ways to be damaged
            raise _damaged(path, error) from error

    def shards(self, box: Box) -> Iterator[Shard]:
        """The shards that hold the pixels of a box."""
        inside = box.intersection(self._extent)
        if inside is not None:
            for row in range(inside.y // SHARD, -(-inside.bottom // SHARD)):
                for column in range(inside.x // SHARD, -(-inside.right // SHARD)):
                    yield row, column

    def box(self, shard: Shard) -> Box:
        """The pixels of a shard, which may reach outside the frame."""
        return Box(shard[1] * SHARD, shard[0] * SHARD, SHARD, SHARD)

    def has(self, shard: Shard) -> bool:
        return self._file(shard).exists()

    def read(self, box: Box) -> Region | None:
        """The pixels of a box, white outside the frame; None where a shard is not written yet.

        Raises:
            PathosegError: A shard is damaged or cannot be read.
        """
        pixels = np.full((box.height, box.width, 3), 255, np.uint8)
        unread: NDArray[np.bool_] | None = None
        shards = list(self.shards(box))
        try:
            for shard in shards:
                inside = box.intersection(self.box(shard))
                assert inside is not None
                self._read_blocks(shard, inside, box, pixels)
                if self._file(shard, "unread").exists():
                    if unread is None:
                        unread = np.zeros((box.height, box.width), np.bool_)
                    unread[inside.within(box)] = self._unread[inside.within(self._extent)]
        except FileNotFoundError:
            return None
        except MemoryError:
            raise
        except Exception as error:  # codecs raise as many kinds as there are ways to be damaged
            raise _damaged(self.path, error) from error
        # The flags of a shard that was removed meanwhile read as false.
        if unread is not None and not all(map(self.has, shards)):
            return None
        return Region(pixels, unread if unread is not None and unread.any() else None)

    def has_unread(self, box: Box) -> bool:
        """Return True if a shard that is written has pixels in a box that could not be read."""
        for shard in self.shards(box):
            inside = box.intersection(self.box(shard))
            assert inside is not None
            has_some = self._file(shard, "unread").exists()
            if has_some and np.any(self._unread[inside.within(self._extent)]):
                return True
        return False

    def write(self, shard: Shard, region: Region) -> None:
        """Store a shard, the region of its box; nothing is there before everything is.

        Raises:
            PathosegError: The disk is full, or the folder cannot be written.
        """
        place = self.box(shard).within(self._extent)
        try:
            if region.unread is not None and region.unread.any():
                self._unread[place] = region.unread
            # Last, because its presence says that the shard is complete.
            self._pixels[place] = region.pixels
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _read_blocks(self, shard: Shard, inside: Box, box: Box, pixels: NDArray[np.uint8]) -> None:
        """Put the pixels of `inside`, which is in one shard, where they lie in those of `box`.

        A shard ends with an index, offset and length of each block, and the index's checksum; a
        block ends with its own (Zarr 3, the codec "sharding_indexed").
        """
        a_row = SHARD // BLOCK
        index_bytes = 16 * a_row**2
        with self._file(shard).open("rb", buffering=0) as file:
            at = os.fstat(file.fileno()).st_size - index_bytes - _CHECKSUM
            index = _checked(_read_exactly(file.fileno(), index_bytes + _CHECKSUM, at))
            places = np.frombuffer(index, "<u8").reshape(a_row, a_row, 2)
            origin = self.box(shard)
            for row in range(
                (inside.y - origin.y) // BLOCK, -(-(inside.bottom - origin.y) // BLOCK)
            ):
                for column in range(
                    (inside.x - origin.x) // BLOCK, -(-(inside.right - origin.x) // BLOCK)
                ):
                    offset, length = map(int, places[row, column])
                    data = _checked(_read_exactly(file.fileno(), length, offset))
                    block = Box(origin.x + column * BLOCK, origin.y + row * BLOCK, BLOCK, BLOCK)
                    part = block.intersection(inside)
                    assert part is not None
                    pixels[part.within(box)] = self._decoded(data)[part.within(block)]

    def _decoded(self, data: bytes) -> NDArray[np.uint8]:
        if self._lossless:
            raw = imagecodecs.blosc_decode(data, numthreads=1)
            return np.frombuffer(raw, np.uint8).reshape(BLOCK, BLOCK, 3)
        found: NDArray[np.uint8] = imagecodecs.jpeg8_decode(data)
        return found

    def _file(self, shard: Shard, array: str = "pixels") -> Path:
        """Return the path of a shard by Zarr's default key encoding (separator ".")."""
        colours = ".0" if array == "pixels" else ""
        return self.path / array / f"c.{shard[0]}.{shard[1]}{colours}"


def _read_exactly(descriptor: int, length: int, offset: int) -> bytes:
    data = read_at(descriptor, length, offset)
    if len(data) != length:
        raise ValueError("a shard is cut short")
    return data


def _checked(data: bytes) -> bytes:
    """Return the bytes before their checksum.

    Raises:
        ValueError: The checksum is wrong.
    """
    content = data[:-_CHECKSUM]
    if google_crc32c.value(content) != int.from_bytes(data[-_CHECKSUM:], "little"):
        raise ValueError("a checksum is wrong")
    return content


@dataclass(frozen=True)
class _JpegCodec(ArrayBytesCodec):
    """A block (height, width, 3) as one JPEG file without chroma subsampling."""

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
        pixels = np.ascontiguousarray(chunk_data.as_numpy_array())
        data = await asyncio.to_thread(
            imagecodecs.jpeg8_encode, pixels, level=self.quality, subsampling="444"
        )
        return chunk_spec.prototype.buffer.from_bytes(data)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError("the size of a JPEG file follows from its content")


register_codec("pathoseg.jpeg", _JpegCodec)


def _create(path: Path, key: TileCacheKey) -> None:
    """Make the folder with its empty arrays under another name and rename it."""
    draft = path.with_name(f".{uuid4().hex}.draft")
    lossless = (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec())
    lossy = (Crc32cCodec(),)
    extent = key.frame.size.rounded_up(SHARD)
    try:
        draft.mkdir(parents=True)
        (draft / _DESCRIPTION).write_text(json.dumps(key.described(), indent=2), "ascii")
        serializer = BytesCodec() if key.codec == "lossless" else _JpegCodec(_JPEG_QUALITY)
        compressors = lossless if key.codec == "lossless" else lossy
        _create_array(draft / "pixels", extent, (3,), "uint8", serializer, compressors)
        _create_array(draft / "unread", extent, (), "bool", BytesCodec(), lossless)
        draft.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another writer was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _create_array(
    path: Path,
    extent: Size,
    channels: tuple[int, ...],
    dtype: str,
    serializer: ArrayBytesCodec,
    compressors: Sequence[BytesBytesCodec],
) -> None:
    zarr.create_array(
        path,
        shape=(extent.height, extent.width, *channels),
        chunks=(BLOCK, BLOCK, *channels),
        shards=(SHARD, SHARD, *channels),
        dtype=dtype,
        serializer=serializer,
        compressors=compressors,
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
    )


def _tell_of_former(path: Path, key: TileCacheKey) -> None:
    """Log that caches of the slide in an earlier format are not used: the slide is read again."""
    now = key.described()
    for other in path.parent.glob("*/" + _DESCRIPTION):
        with suppress(OSError, ValueError, KeyError):
            then = json.loads(other.read_text())
            if all(then[part] == now[part] for part in ("slide", "fingerprint")) and (
                then["format"] < now["format"]
            ):
                _log.warning(
                    "%s is of an earlier version and not used: the slide is read again. Delete it.",
                    other.parent,
                )


def _clear(path: Path, key: TileCacheKey) -> None:
    """Remove what killed writers left, and caches of the slide as it was before it changed."""
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
