"""The class indices of a tiled TIFF of any size, decoded tile by tile where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from PIL.TiffImagePlugin import TiffImageFile

from pathoseg.annotations.annotation import BACKGROUND
from pathoseg.geometry import Box, Size

_MOST_TILE_PIXELS = 4_194_304  # larger ones are no tiles but whole images

# Numbers of TIFF's tags.
_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 258, 259, 262, 266
_PREDICTOR, _COLOURS, _WIDTH, _HEIGHT, _OFFSETS, _COUNTS = 317, 320, 322, 323, 324, 325
_SAMPLE_FORMAT = 339
_INDICES = (1, 3)  # dark is 0, or the number of a colour in a palette
_DIFFERENCES = 2  # the predictor that stores of a pixel what it is above its left neighbour
_UNPREDICTED = (1, 32773)  # codecs that have none, whatever the tag says

_DECODERS: dict[int, Callable[..., Any]] = {
    1: lambda data, out: data,
    5: imagecodecs.lzw_decode,
    8: imagecodecs.zlib_decode,
    32773: imagecodecs.packbits_decode,
    32946: imagecodecs.zlib_decode,
}


@dataclass(frozen=True, slots=True, eq=False)
class TiledMask:
    """The first image of a TIFF, stored in tiles of 8-bit indices.

    Attributes:
        path: The file, opened for each read: any thread may read.
        size: Its pixels.
        tile: Pixels of a tile.
        compression: The number that TIFF gives to the codec.
        differs: Whether pixels are stored as differences from their left neighbours.
        places: Offset and length of each tile in bytes, row by row; length 0 for one that is
            left out, which is background. Shape (tiles, 2).
        palette: Red, green and blue of index 0, of index 1, and so on; empty where there is none.
    """

    path: Path
    size: Size
    tile: Size
    compression: int
    differs: bool
    places: NDArray[np.int64]
    palette: list[int]

    @classmethod
    def of(cls, path: Path, image: TiffImageFile) -> TiledMask | None:
        """The mask of an opened file, or None where it is stored in another way."""
        tags: Mapping[int, Any] = image.tag_v2
        tile = Size(tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0))
        compression = tags.get(_COMPRESSION, 1)
        if not (
            0 < tile.pixels <= _MOST_TILE_PIXELS
            and compression in _DECODERS
            and tags.get(_BITS, (1,)) == (8,)
            and tags.get(_PHOTOMETRIC) in _INDICES
            and tags.get(_FILL_ORDER, 1) == 1
            and tags.get(_PREDICTOR, 1) in (1, _DIFFERENCES)
            and tags.get(_SAMPLE_FORMAT, (1,)) == (1,)
        ):
            return None
        size = Size(*image.size)
        offsets, counts = tags.get(_OFFSETS, ()), tags.get(_COUNTS, ())
        columns, rows = -(-size.width // tile.width), -(-size.height // tile.height)
        if not len(offsets) == len(counts) == columns * rows:
            return None
        places = np.stack([np.array(offsets, np.int64), np.array(counts, np.int64)], axis=1)
        # All reds, then all greens, then all blues, in 16 bits.
        colours = np.array(tags.get(_COLOURS, ()), np.int64).reshape(3, -1).T.ravel() >> 8
        differs = tags.get(_PREDICTOR) == _DIFFERENCES and compression not in _UNPREDICTED
        return cls(path, size, tile, compression, differs, places, colours.tolist())

    def values(self) -> set[int]:
        """The indices in use.

        Of tiles that are stored alike, as empty ones are, one is decoded.

        Raises:
            OSError: The file cannot be read.
            ValueError, RuntimeError: A tile is damaged.
        """
        found, seen = set[int](), set[tuple[int, int, bytes]]()
        columns = -(-self.size.width // self.tile.width)
        with self.path.open("rb") as file:
            for number, place in enumerate(self.places):
                row, column = divmod(number, columns)
                # Of a tile at an edge, a part counts.
                height = min(self.tile.height, self.size.height - row * self.tile.height)
                width = min(self.tile.width, self.size.width - column * self.tile.width)
                data = _read(file, place)
                key = height, width, blake2b(data, digest_size=16).digest()
                if key in seen:
                    continue
                seen.add(key)
                pixels = self._decoded(data)[:height, :width]
                found.update(np.flatnonzero(np.bincount(pixels.ravel(), minlength=256)).tolist())
        return found

    def read(self, box: Box) -> NDArray[np.uint8]:
        """The pixels of a box inside the mask, shape (height, width).

        Raises:
            OSError: The file cannot be read.
            ValueError, RuntimeError: A tile is damaged.
        """
        found = np.zeros((box.height, box.width), np.uint8)
        width, height = self.tile.width, self.tile.height
        across = -(-self.size.width // width)
        with self.path.open("rb") as file:
            for row in range(box.y // height, -(-box.bottom // height)):
                for column in range(box.x // width, -(-box.right // width)):
                    place = self.places[row * across + column]
                    tile = Box(column * width, row * height, width, height)
                    if place[1] == 0 or not (part := tile.intersection(box)):
                        continue
                    pixels = self._decoded(_read(file, place))
                    found[part.within(box)] = pixels[part.within(tile)]
        return found

    def _decoded(self, data: bytes) -> NDArray[np.uint8]:
        if not data:
            return np.full((self.tile.height, self.tile.width), BACKGROUND, np.uint8)
        decoded = _DECODERS[self.compression](data, out=self.tile.pixels)
        pixels = np.frombuffer(decoded, np.uint8)
        if pixels.size != self.tile.pixels:
            raise ValueError(f"a tile has {pixels.size} of its {self.tile.pixels} pixels")
        pixels = pixels.reshape(self.tile.height, self.tile.width)
        return np.cumsum(pixels, axis=1, dtype=np.uint8) if self.differs else pixels


def _read(file: BinaryIO, place: NDArray[np.int64]) -> bytes:
    offset, count = place.tolist()
    file.seek(offset)
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends before its last tile")
    return data
