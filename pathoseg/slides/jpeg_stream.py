"""JPEG streams as TIFF stores them: decoded only where libjpeg has nothing to warn of.

libjpeg goes on where a stream is damaged, shows something, and warns. OpenSlide takes the warning
for an error; most decoders, imagecodecs and Pillow among them, do not pass it on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from pathoseg.geometry import Size

_JPEG_START = b"\xff\xd8"
_JPEG_2000_SIZE = b"\xff\x4f\xff\x51"  # start of codestream, then the SIZ marker
_FRAME_MARKERS = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BOXES = 512  # a JP2 file's boxes before its codestream take less


def announced_size(stream: bytes) -> Size | None:
    """Width and height by the stream's own header, None where it is of neither kind."""
    if stream.startswith(_JPEG_START):
        return _jpeg_size(stream)
    start = stream.find(_JPEG_2000_SIZE, 0, _BOXES)
    if start < 0 or len(stream) < start + 24:
        return None
    right, bottom, left, top = struct.unpack_from(">4I", stream, start + 8)
    return Size(right - left, bottom - top)


def _jpeg_size(stream: bytes) -> Size | None:
    position = 2
    while position + 9 <= len(stream) and stream[position] == 0xFF:
        marker, length = stream[position + 1], int.from_bytes(stream[position + 2 : position + 4])
        if marker in _FRAME_MARKERS:
            height, width = struct.unpack_from(">2H", stream, position + 5)
            return Size(width, height)
        position += 2 + length
    return None


Segment = tuple[int, bytes]  # its marker and its content

_SOI, _EOI, _SCAN, _RESTARTS = b"\xff\xd8", b"\xff\xd9", 0xDA, 0xDD
_BASELINE, _EXTENDED = 0xC0, 0xC1
_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# What OpenSlide does not reach: it stops after the last row of a single piece.
_AFTER_THE_LAST_ROW = "extraneous bytes before marker 0xd9"


def whole_stream(stream: bytes, tables: bytes | None, ycbcr: bool | None = None) -> bytes:
    """A stream that needs nothing beside it.

    Args:
        stream: As it is stored in a tile or strip.
        tables: What the streams of a TIFF share, itself a stream without a picture.
        ycbcr: Whether it holds YCbCr or RGB, to be said where it says nothing itself.

    Raises:
        ValueError: It does not begin like one.
    """
    if not stream.startswith(_SOI):
        raise ValueError("it is no JPEG stream")
    if not tables and ycbcr is None:
        return stream
    says = b"" if ycbcr is None else b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([ycbcr])
    shared = (tables or b"").removeprefix(_SOI).removesuffix(_EOI)
    return b"".join((_SOI, says, shared, stream.removeprefix(_SOI)))


def header_of(stream: bytes) -> bytes:
    """The stream up to what is coded of the picture."""
    return stream[: max((end for _, end in _extents(stream)), default=len(_SOI))]


def segments(stream: bytes) -> list[Segment]:
    """The segments of a stream's header, in order, the first scan's last."""
    return [(stream[start + 1], stream[start + 4 : end]) for start, end in _extents(stream)]


def _extents(stream: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each segment of a header."""
    start = 2
    while start + 4 <= len(stream) and stream[start] == 0xFF:
        end = start + 2 + int.from_bytes(stream[start + 2 : start + 4], "big")
        yield start, end
        if stream[start + 1] == _SCAN:
            break
        start = end


def colours_in_one_piece(header: list[Segment]) -> int:
    """Return the number of interleaved components of a baseline scan without restarts.

    0 for a stream that consists of several pieces.
    """
    kinds, content = [marker for marker, _ in header if marker in _FRAMES], dict(header)
    if kinds not in ([_BASELINE], [_EXTENDED]) or _SCAN not in content or _RESTARTS in content:
        return 0
    colours = content[kinds[0]][5:6]
    return colours[0] if colours and colours == content[_SCAN][:1] else 0


def taken_for_ycbcr(header: list[Segment]) -> bool:
    """Return True if libjpeg takes three components for YCbCr where no marker says so.

    It does unless they are named "RGB" (its jdapimin.c).
    """
    frame = next((content for marker, content in header if marker in _FRAMES), b"")
    return frame[6:15:3] != b"RGB"


def decode_jpeg(stream: bytes, pixels: NDArray[np.uint8]) -> None:
    """Decode a whole stream, without Python's lock.

    Args:
        stream: See `whole_stream`.
        pixels: Receives RGB, of shape (height, width, 3), C-contiguous; where it has a half, a
            fourth or an eighth of the stream's height and width, the stream is decoded smaller.

    Raises:
        ValueError: It is damaged, or of another size.
    """
    height, width = pixels.shape[:2]
    decoded = simplejpeg.decode_jpeg(
        stream, "RGB", min_height=height, min_width=width, buffer=pixels, strict=True
    )
    if decoded.shape != pixels.shape:
        raise ValueError(f"it shows {decoded.shape}, not {pixels.shape}")


def check_jpeg(stream: bytes) -> None:
    """Raise ValueError where OpenSlide would: libjpeg finds a whole stream damaged."""
    try:
        # not scaled down: simplejpeg writes past its array where a stream is a lossless one
        simplejpeg.decode_jpeg(stream, "GRAY", strict=True)
    except ValueError as error:
        is_shown = _AFTER_THE_LAST_ROW in str(error) and colours_in_one_piece(segments(stream))
        if not is_shown:
            raise
