"""Decodes one stored tile of a TIFF to the RGB pixels that OpenSlide shows, where that is sure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Size
from pathoseg.slides.jpeg_stream import (
    announced_size,
    colours_in_one_piece,
    decode_jpeg,
    header_of,
    segments,
    taken_for_ycbcr,
    whole_stream,
)


class Compression(IntEnum):
    """The compressions that are decoded here, by TIFF's Compression tag."""

    NONE = 1
    LZW = 5
    JPEG = 7
    DEFLATE = 8
    OLD_DEFLATE = 32946
    APERIO_JPEG_2000_RGB = 33005
    JPEG_2000 = 34712


_BYTES: dict[Compression, Callable[..., bytes | bytearray]] = {
    Compression.NONE: lambda data, out: data,
    Compression.LZW: imagecodecs.lzw_decode,
    Compression.DEFLATE: imagecodecs.zlib_decode,
    Compression.OLD_DEFLATE: imagecodecs.zlib_decode,
}
# What codecs and parsers raise on a malformed stream; imagecodecs' errors are RuntimeErrors.
_MALFORMED = (ValueError, RuntimeError, IndexError, struct.error, MemoryError)
_USUAL_HEADER = 16_384  # bytes; what is said of longer ones is not kept
_APP0, _APP14 = 0xE0, 0xEE
_SIZES = struct.Struct(">8IH")  # of the image and of its tiles, and the number of components
_8_BITS_EACH_PIXEL = bytes((7, 1, 1)) * 3


@dataclass(frozen=True)
class TileCodec:
    """The encoding of the tiles of one level: RGB, 8 bits a sample, interleaved.

    Attributes:
        compression: The codec.
        size: Pixels of a tile, as it is decoded.
        shrink: Pixels of the stored tile per decoded one, across and down: 1, and 2, 4 or 8 for
            JPEG.
        differences: Whether samples are stored as differences from their left neighbours.
        ycbcr: Whether JPEG streams hold YCbCr rather than RGB, whatever they say themselves.
        tables: JPEG tables that the streams share.
    """

    compression: Compression
    size: Size
    differences: bool = False
    ycbcr: bool = False
    tables: bytes | None = None
    shrink: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the pixels of a tile."""
        return self.size.height, self.size.width, 3

    def decode(self, data: bytes, pixels: NDArray[np.uint8]) -> bool:
        """Decode a tile, which releases the interpreter's lock meanwhile.

        Args:
            data: The tile as it is stored.
            pixels: Receives the tile, of `shape`, C-contiguous.

        Returns:
            Whether `pixels` are surely what OpenSlide shows; where not, it has to be asked.
        """
        try:
            if self.compression is Compression.JPEG:
                self._decode_jpeg(data, pixels)
            elif self.compression in _BYTES:
                self._decode_bytes(data, pixels)
            else:
                self._decode_jpeg_2000(data, pixels)
        except _MALFORMED:
            return False
        return True

    def _decode_jpeg(self, data: bytes, pixels: NDArray[np.uint8]) -> None:
        stored = Size(self.size.width * self.shrink, self.size.height * self.shrink)
        header = header_of(data)
        judge = _to_be_told if len(header) <= _USUAL_HEADER else _to_be_told.__wrapped__
        told = judge(header, self.tables, stored, self.ycbcr)
        decode_jpeg(whole_stream(data, self.tables, told), pixels)

    def _decode_bytes(self, data: bytes, pixels: NDArray[np.uint8]) -> None:
        decoded = _BYTES[self.compression](data, out=pixels.size)
        samples = np.frombuffer(decoded, np.uint8).reshape(self.shape)
        if self.differences:
            np.add.accumulate(samples, 1, out=pixels, dtype=np.uint8)
        else:
            pixels[:] = samples

    def _decode_jpeg_2000(self, data: bytes, pixels: NDArray[np.uint8]) -> None:
        start = data.find(b"\xff\x4f\xff\x51", 0, 512) + 8
        right, bottom, left, top, _, _, _, _, components = _SIZES.unpack_from(data, start)
        kinds = data[start + _SIZES.size : start + _SIZES.size + 9]
        if (left, top, right, bottom) != (0, 0, self.size.width, self.size.height):
            raise ValueError("of another size")
        # OpenSlide has its own ways with the rest
        if components != 3 or kinds != _8_BITS_EACH_PIXEL:
            raise ValueError("not three components of 8 bits at each pixel")
        imagecodecs.jpeg2k_decode(data, numthreads=1, out=pixels)


@lru_cache(256)  # most tiles of a slide have the same header
def _to_be_told(header: bytes, tables: bytes | None, size: Size, ycbcr: bool) -> bool | None:
    """Return the colour space to force on libjpeg: True for YCbCr, False for RGB, None for none.

    Args:
        header: The stream's.
        tables: See `TileCodec`.
        size: What it has to show.
        ycbcr: See `TileCodec`.

    Raises:
        ValueError: OpenSlide has its own ways with such a stream.
    """
    found = segments(tables or b"") + segments(header)
    if any(_says_ycbcr(*segment, ycbcr) != ycbcr for segment in found):
        raise ValueError("says other things of its colours than the TIFF does")
    if colours_in_one_piece(found) != 3:
        raise ValueError("not three colours in one piece")
    if announced_size(header) != size:
        raise ValueError("of another size")
    return None if taken_for_ycbcr(found) == ycbcr else ycbcr


def _says_ycbcr(marker: int, content: bytes, otherwise: bool) -> bool:
    """Return True if a marker states YCbCr; `otherwise` if none states anything."""
    if marker == _APP0 and content.startswith(b"JFIF"):
        return True
    if marker == _APP14 and content.startswith(b"Adobe"):
        return content[11:12] != b"\0"
    return otherwise
