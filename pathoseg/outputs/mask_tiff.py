"""Writes a mask as a pyramidal OME-TIFF while its bands arrive."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from uuid import NAMESPACE_OID, uuid4, uuid5

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffWriter

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, ClassTable
from pathoseg.geometry import Mpp, Size
from pathoseg.outputs.atomic import replaced

_TILE = 512
_SMALLEST_LEVEL = 1024
_CLASSIC_TIFF = 2**32 - 2**25
_ZLIB_LEVEL = 4  # on masks 2 to 4 times as fast as the usual 6, and a third larger


def write_mask(
    path: Path,
    size: Size,
    mpp: Mpp,
    bands: Iterable[NDArray[np.uint8]],
    classes: ClassTable,
    origin: str | None = None,
) -> None:
    """Writes class indices in tiles of 512 px, each level half as large and a SubIFD.

    A pixel of a lower level has the value that most of its four pixels have, the upper left one's
    where two pairs tie. A map annotation in the OME-XML tells which index is which class, and every
    level has the classes' colours as its palette, with black background and grey 255. One row
    of tiles is held; the next level waits, compressed, in a nameless file beside `path`.

    Args:
        path: Replaced whole, or left as it was where an error occurs.
        size: The mask's extent.
        mpp: Microns per pixel.
        bands: Arrays of shape (any number of rows, width), from top to bottom.
        classes: Names and colours of the indices.
        origin: What the mask was made of: the file's UUID follows from it, so that the same mask
            is the same file. None takes a random one.

    Raises:
        OSError: The disk is full or cannot be written.
        ValueError: The bands have more or fewer rows than `size`.
    """
    levels = _level_sizes(size)
    colours = classes.palette().T.astype(np.uint16) * 257  # TIFF's palettes have 16 bits
    # Noise grows a little when it is compressed.
    largest = 1.01 * sum(level.rounded_up(_TILE).pixels for level in levels)
    with ExitStack() as stack:
        draft = stack.enter_context(replaced(path))
        tiff = stack.enter_context(TiffWriter(draft, bigtiff=largest > _CLASSIC_TIFF, ome=True))
        for number, level in enumerate(levels):
            below = _Spill(stack.enter_context(tempfile.TemporaryFile(dir=path.parent)))
            tiles = _tiles(bands, level, below)
            tiff.write(
                tiles,
                shape=(level.height, level.width),
                dtype=np.uint8,
                tile=(_TILE, _TILE),
                compression="zlib",
                photometric="palette",
                colormap=colours,
                resolution=(
                    1e4 / mpp.x * level.width / size.width,
                    1e4 / mpp.y * level.height / size.height,
                ),
                resolutionunit="CENTIMETER",
                subfiletype=int(number > 0),
                subifds=0 if number else len(levels) - 1,
                metadata=None if number else _metadata(path.name, mpp, classes, origin),
            )
            # tifffile stops at the last tile; what the bands check at their end is still to come.
            next(tiles, None)
            bands = below


def _level_sizes(size: Size) -> list[Size]:
    sizes = [size]
    while max(sizes[-1].width, sizes[-1].height) > _SMALLEST_LEVEL:
        sizes.append(Size(-(-sizes[-1].width // 2), -(-sizes[-1].height // 2)))
    return sizes


def _metadata(name: str, mpp: Mpp, classes: ClassTable, origin: str | None) -> dict[str, object]:
    identity = uuid4() if origin is None else uuid5(NAMESPACE_OID, origin)
    names = {str(classes.index(name)): name for name in classes.names}
    return {
        "axes": "YX",
        "UUID": f"urn:uuid:{identity}",
        "Name": name,
        "PhysicalSizeX": mpp.x,
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": mpp.y,
        "PhysicalSizeYUnit": "µm",
        "MapAnnotation": {
            "Namespace": "pathoseg/classes",
            str(BACKGROUND): "background",
            **names,
            str(IGNORE): "unread",
        },
    }


def _tiles(bands: Iterable[NDArray[np.uint8]], size: Size, below: _Spill) -> Iterator[bytes]:
    """The encoded tiles of a level, row by row; its half goes to `below` ahead of them."""
    padded = np.zeros((_TILE, size.rounded_up(_TILE).width), np.uint8)
    strip = padded[:, : size.width]
    for rows in _refilled(strip, bands, size.height):
        below.put(_halved(strip[:rows]))
        for x in range(0, padded.shape[1], _TILE):
            yield zlib.compress(padded[:, x : x + _TILE].tobytes(), _ZLIB_LEVEL)


def _refilled(
    strip: NDArray[np.uint8], bands: Iterable[NDArray[np.uint8]], height: int
) -> Iterator[int]:
    """Fills `strip` again and again with the rows of `bands`; gives how many rows it has of them.

    Only the last time may they be fewer than all, with zeros below them.
    """
    filled = total = 0
    for band in bands:
        total += len(band)
        if total > height:
            break
        rest = band
        while len(rest):
            taken, rest = np.split(rest, [len(strip) - filled])
            strip[filled : filled + len(taken)] = taken
            filled += len(taken)
            if filled == len(strip):
                yield filled
                filled = 0
    if total != height:
        raise ValueError(f"the bands' rows are not the mask's {height}")
    if filled:
        strip[filled:] = 0
        yield filled


def _halved(strip: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mode of every 2 × 2 pixels; an odd last row or column counts twice."""
    height, width = strip.shape
    even = np.pad(strip, ((0, height % 2), (0, width % 2)), mode="edge")
    a, b, c, d = even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]
    without_a = np.where((b == c) | (b == d), b, np.where(c == d, c, a))
    return np.where((a == b) | (a == c) | (a == d), a, without_a)


class _Spill:
    """Bands that wait on disk, compressed, to be read back once in their order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._entries: list[tuple[int, tuple[int, ...]]] = []

    def put(self, band: NDArray[np.uint8]) -> None:
        length = self._file.write(zlib.compress(band.tobytes(), level=1))
        self._entries.append((length, band.shape))

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        self._file.seek(0)
        for length, shape in self._entries:
            yield np.frombuffer(zlib.decompress(self._file.read(length)), np.uint8).reshape(shape)
