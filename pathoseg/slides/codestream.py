"""The size that a JPEG or JPEG 2000 stream announces, read before decoding allocates for it."""

from __future__ import annotations

import struct

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
