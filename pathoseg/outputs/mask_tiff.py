"""Writes masks and maps as pyramidal OME-TIFFs while their bands arrive.

    bands      (channels, any number of rows, width)
      |
    level 0    (1) a strip of 512 rows is filled, and then
      |        (2) its tiles wait, encoded, in a nameless file beside the result
      |        (3) its half are the next rows of the level below
    level 1    likewise, until one is small enough
      :
    the TIFF   (4) a page for each channel of each level, whole before the next: tiles are copied

So what is held is a strip of each level, together twice that of level 0, whatever the height.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import NAMESPACE_OID, uuid4, uuid5

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffWriter

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, ClassTable, Colour
from pathoseg.geometry import Mpp, Size
from pathoseg.outputs.atomic import replaced

_TILE = 512
_SMALLEST_LEVEL = 1024
_CLASSIC_TIFF = 2**32 - 2**25
_ZLIB_LEVEL = 4  # on masks 2 to 4 times as fast as the usual 6, and a third larger

Add = Callable[[NDArray[np.uint8]], None]


@dataclass(frozen=True)
class _Form:
    """The way in which the pixels of a kind of image are stored.

    Attributes:
        halve: Makes the rows of the level below out of a strip of a channel.
        encode: Makes zlib's bytes of a tile, in which TIFF has what `page` says.
        page: Options of tifffile for each page.
    """

    halve: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    encode: Callable[[NDArray[np.uint8]], bytes]
    page: Mapping[str, Any]


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
    level has the classes' colours as its palette, with black background and grey 255.

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
    names = {str(classes.index(name)): name for name in classes.names}
    metadata = {
        "axes": "YX",
        **_metadata(path.name, mpp, origin),
        "MapAnnotation": {
            "Namespace": "pathoseg/classes",
            str(BACKGROUND): "background",
            **names,
            str(IGNORE): "unread",
        },
    }
    colours = classes.palette().T.astype(np.uint16) * 257  # TIFF's palettes have 16 bits
    form = _Form(_mode_of_four, _encoded, {"photometric": "palette", "colormap": colours})
    with _pyramid(path, size, mpp, 1, form, metadata) as add:
        for band in bands:
            add(band[None])


@contextmanager
def map_writer(
    path: Path,
    size: Size,
    mpp: Mpp,
    channels: Sequence[tuple[str, Colour]],
    origin: str | None = None,
) -> Iterator[Add]:
    """Make a context that yields what takes the next rows of a map; the file appears at its end.

    A map has shares of 255 in one or more channels, stored as masks are. A pixel of a lower level
    is the mean of its four pixels.

    Args:
        path: As for `write_mask`.
        size: As for `write_mask`.
        mpp: As for `write_mask`.
        channels: Their names, and the colours in which programs that show several at once may add
            them up.
        origin: As for `write_mask`.

    Yields:
        A function of a band of shape (channels, any number of rows, width).

    Raises:
        OSError: The disk is full or cannot be written.
        ValueError: The bands have more or fewer rows than `size`.
    """
    metadata = {
        "axes": "CYX",
        **_metadata(path.name, mpp, origin),
        "Channel": {
            "Name": [name for name, _ in channels],
            "Color": [_rgba(colour) for _, colour in channels],
        },
    }
    form = _Form(
        _mean_of_four, _encoded_differences, {"photometric": "minisblack", "predictor": True}
    )
    with _pyramid(path, size, mpp, len(channels), form, metadata) as add:
        yield add


def _rgba(colour: Colour) -> int:
    """A colour as OME-XML has it: a signed number of 32 bits."""
    return int.from_bytes(bytes((*colour, 255)), "big", signed=True)


def _metadata(name: str, mpp: Mpp, origin: str | None) -> dict[str, object]:
    identity = uuid4() if origin is None else uuid5(NAMESPACE_OID, origin)
    return {
        "UUID": f"urn:uuid:{identity}",
        "Name": name,
        "PhysicalSizeX": mpp.x,
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": mpp.y,
        "PhysicalSizeYUnit": "µm",
    }


@contextmanager
def _pyramid(
    path: Path,
    size: Size,
    mpp: Mpp,
    channels: int,
    form: _Form,
    metadata: Mapping[str, object],
) -> Iterator[Add]:
    """Make a context that yields what takes the next rows; the file appears at its end."""
    sizes = _level_sizes(size)
    # Noise grows a little when it is compressed.
    largest = 1.01 * channels * sum(level.rounded_up(_TILE).pixels for level in sizes)
    with replaced(path) as draft, tempfile.TemporaryFile(dir=path.parent) as waiting:
        below: _Level | None = None
        levels = list[_Level]()
        for each in reversed(sizes):
            below = _Level(each, channels, waiting, form, below)
            levels.insert(0, below)
        yield levels[0].add
        levels[0].finish()
        with TiffWriter(draft, bigtiff=largest > _CLASSIC_TIFF, ome=True) as tiff:
            for number, level in enumerate(levels):
                rows, width = level.size.height, level.size.width
                tiff.write(
                    level.tiles(),
                    shape=(rows, width) if metadata["axes"] == "YX" else (channels, rows, width),
                    dtype=np.uint8,
                    tile=(_TILE, _TILE),
                    compression="zlib",
                    **form.page,
                    resolution=(
                        1e4 / mpp.x * width / size.width,
                        1e4 / mpp.y * rows / size.height,
                    ),
                    resolutionunit="CENTIMETER",
                    subfiletype=int(number > 0),
                    subifds=0 if number else len(levels) - 1,
                    metadata=None if number else dict(metadata),
                )


def _level_sizes(size: Size) -> list[Size]:
    sizes = [size]
    while max(sizes[-1].width, sizes[-1].height) > _SMALLEST_LEVEL:
        sizes.append(Size(-(-sizes[-1].width // 2), -(-sizes[-1].height // 2)))
    return sizes


class _Level:
    """A level while its rows arrive.

    Args:
        size: Its extent.
        channels: How many it has.
        waiting: Where encoded tiles wait, with those of other levels.
        form: The way in which it is stored.
        below: The next level, or None.
    """

    def __init__(
        self, size: Size, channels: int, waiting: IO[bytes], form: _Form, below: _Level | None
    ) -> None:
        self.size = size
        self._padded = np.zeros((channels, _TILE, size.rounded_up(_TILE).width), np.uint8)
        self._strip = self._padded[:, :, : size.width]
        self._filled = self._rows = 0  # of the strip, of all
        self._waiting, self._form, self._below = waiting, form, below
        # By channel, where each tile lies in the file, and its bytes.
        self._places: Sequence[list[tuple[int, int]]] = [[] for _ in range(channels)]

    def add(self, band: NDArray[np.uint8]) -> None:
        """(1) Take the next rows, shape (channels, rows, width).

        Raises:
            ValueError: They are more than the level has.
        """
        self._rows += band.shape[1]
        if self._rows > self.size.height:
            raise self._wrong_rows()
        while band.shape[1]:
            taken, band = np.split(band, [_TILE - self._filled], axis=1)
            self._strip[:, self._filled : self._filled + taken.shape[1]] = taken
            self._filled += taken.shape[1]
            if self._filled == _TILE:
                self._encode()

    def finish(self) -> None:
        """Take what has been added for all rows, here and below.

        Raises:
            ValueError: They are fewer than the level has.
        """
        if self._rows != self.size.height:
            raise self._wrong_rows()
        if self._filled:
            self._strip[:, self._filled :] = 0
            self._encode()
        if self._below is not None:
            self._below.finish()

    def tiles(self) -> Iterator[bytes]:
        """(4) Yield the encoded tiles of each channel, row by row."""
        for places in self._places:
            for start, length in places:
                self._waiting.seek(start)
                yield self._waiting.read(length)

    def _encode(self) -> None:
        """(2), (3) Encode the strip, and hand its half down."""
        for channel, places in zip(self._padded, self._places, strict=True):
            for x in range(0, channel.shape[1], _TILE):
                tile = self._form.encode(channel[:, x : x + _TILE])
                places.append((self._waiting.tell(), len(tile)))
                self._waiting.write(tile)
        if self._below is not None:
            rows = self._strip[:, : self._filled]
            self._below.add(np.stack([self._form.halve(channel) for channel in rows]))
        self._filled = 0

    def _wrong_rows(self) -> ValueError:
        return ValueError(f"the bands' rows are not the image's {self.size.height}")


def _encoded(tile: NDArray[np.uint8]) -> bytes:
    return zlib.compress(tile.tobytes(), _ZLIB_LEVEL)


def _encoded_differences(tile: NDArray[np.uint8]) -> bytes:
    """Encode what a pixel differs by from the one on its left (TIFF's predictor 2).

    Of maps, whose pixels are like their neighbours, this makes smaller files, twice as fast.
    """
    differences = tile.copy()
    differences[:, 1:] -= tile[:, :-1]
    encoder = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return encoder.compress(differences.tobytes()) + encoder.flush()


def _quarters(strip: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The four pixels of each pixel of the next level; an odd last row or column counts twice."""
    height, width = strip.shape
    even = strip
    if height % 2 or width % 2:
        even = np.pad(strip, ((0, height % 2), (0, width % 2)), mode="edge")
    return [even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]]


def _mode_of_four(strip: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mode of every 2 × 2 pixels, the upper left one's value where two pairs tie."""
    a, b, c, d = _quarters(strip)
    without_a = np.where((b == c) | (b == d), b, np.where(c == d, c, a))
    return np.where((a == b) | (a == c) | (a == d), a, without_a)


def _mean_of_four(strip: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mean of every 2 × 2 pixels, half a level rounded up."""
    a, b, c, d = _quarters(strip)
    total = np.add(a, b, dtype=np.uint16)
    total += c
    total += d
    total += 2
    return (total >> 2).astype(np.uint8)
