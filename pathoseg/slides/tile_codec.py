"""Decodes one stored tile of a TIFF to the RGB pixels that OpenSlide shows, where that is sure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Size


class Compression(IntEnum):
    """What is decoded here, in the numbers of TIFF's Compression tag."""

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
_END, _SCAN, _RESTARTS, _APP0, _APP14 = 0xD9, 0xDA, 0xDD, 0xE0, 0xEE
_FRAMES = range(0xC0, 0xD0)
_BASELINE, _EXTENDED = 0xC0, 0xC1  # Huffman-coded, in one pass from top to bottom
_NO_FRAMES = {0xC4, 0xC8, 0xCC}
_ZEROS = bytes(512)  # the smallest piece that a disk loses
_GRAY, _BLOCK, _MCU = 128, 8, 16
_SIZES = struct.Struct(">8IH")  # of the image and of its tiles, and the number of components
_8_BITS_EACH_PIXEL = bytes((7, 1, 1)) * 3


@dataclass(frozen=True)
class TileCodec:
    """How the tiles of one level are stored: RGB, 8 bits a sample, the samples side by side.

    Attributes:
        compression: The codec.
        size: Pixels of a tile.
        differences: Whether samples are stored as differences from their left neighbours.
        ycbcr: Whether JPEG streams hold YCbCr rather than RGB, whatever they say themselves.
        tables: JPEG tables that the streams share.
    """

    compression: Compression
    size: Size
    differences: bool = False
    ycbcr: bool = False
    tables: bytes | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the pixels of a tile."""
        return self.size.height, self.size.width, 3

    def decode(self, data: bytes, pixels: NDArray[np.uint8], rows: int) -> int:
        """Decodes the upper part of a tile, which releases the interpreter's lock meanwhile.

        Args:
            data: The tile as it is stored.
            pixels: Receives the tile, of `shape`, C-contiguous.
            rows: How many of its rows are needed.

        Returns:
            How many rows of `pixels` are surely what OpenSlide shows: `rows` or more, or 0 where
            it has to be asked.
        """
        # Codecs raise whatever a malformed stream makes them stumble over.
        try:
            if self.compression is Compression.JPEG:
                return self._decode_jpeg(data, pixels, rows)
            if self.compression in _BYTES:
                self._decode_bytes(data, pixels)
            else:
                self._decode_jpeg_2000(data, pixels)
        except Exception:
            return 0
        return self.size.height

    def _decode_jpeg(self, data: bytes, pixels: NDArray[np.uint8], rows: int) -> int:
        data = data.rstrip(b"\0")
        place = self._place_of_height(data)
        if place is None or not _seems_whole(data):
            return 0
        # A lower height makes libjpeg stop early; what it shows changes in the last two rows only,
        # whose colours it interpolates without those below.
        height = min(self.size.height, -(-(rows + _BLOCK) // _MCU) * _MCU)
        data = data[:place] + struct.pack(">H", height) + data[place + 2 :]
        imagecodecs.jpeg8_decode(
            data,
            tables=self.tables,
            colorspace="ycbcr" if self.ycbcr else "rgb",
            outcolorspace="rgb",
            out=pixels[:height],
        )
        # libjpeg makes gray of what it finds no data for, and imagecodecs does not pass its
        # warning on.
        if (pixels[height - _BLOCK : height, -_BLOCK:] == _GRAY).all():
            return 0
        return height if height == self.size.height else height - _BLOCK

    def _place_of_height(self, data: bytes) -> int | None:
        """Where a JPEG stream tells its height, None unless it is as plain as expected.

        That is: three colours, this tile's size, all data in one piece and in one pass.
        """
        if self.tables is not None and any(
            found[0] == _RESTARTS for found in _segments(self.tables)
        ):
            return None
        frame, place = None, 0
        for marker, start, content in _segments(data):
            if marker in _FRAMES and marker not in _NO_FRAMES:
                frame, place = (marker, content[:6]), start + 1
            elif marker == _RESTARTS or self.ycbcr != _says_ycbcr(marker, content, self.ycbcr):
                return None
        promised = struct.pack(">BHHB", 8, self.size.height, self.size.width, 3)
        return place if frame in ((_BASELINE, promised), (_EXTENDED, promised)) else None

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


def _segments(stream: bytes) -> list[tuple[int, int, bytes]]:
    """Marker, place and content of each segment of a JPEG stream's header, in order."""
    found = []
    position = 2
    while position + 4 <= len(stream) and stream[position] == 0xFF:
        marker = stream[position + 1]
        length = int.from_bytes(stream[position + 2 : position + 4], "big")
        if marker in (_SCAN, _END):
            break
        found.append((marker, position + 4, stream[position + 4 : position + 2 + length]))
        position += 2 + length
    return found


def _says_ycbcr(marker: int, content: bytes, otherwise: bool) -> bool:
    """Whether a stream says in a segment that it holds YCbCr; `otherwise` if it says nothing."""
    if marker == _APP0 and content.startswith(b"JFIF"):
        return True
    if marker == _APP14 and content.startswith(b"Adobe"):
        return content[11:12] != b"\0"
    return otherwise


def _seems_whole(stream: bytes) -> bool:
    """Whether a JPEG stream ends as it should and no part of it was lost to zeros.

    libjpeg decodes what follows a gap to other pixels and gives no error. Streams of a single
    colour hold as many zeros; OpenSlide tells one from the other.
    """
    return stream.endswith(bytes((0xFF, _END))) and _ZEROS not in stream
