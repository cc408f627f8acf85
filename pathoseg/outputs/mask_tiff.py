"""Writes masks and maps as pyramidal OME-TIFFs while their bands arrive.

strips     of all levels, as they are finished (pyramid.py)
  |        (1) their tiles wait, encoded, in a nameless file beside the result
the TIFF   (2) a page for each channel of each level, whole before the next: tiles are copied
"""

from __future__ import annotations

import re
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
from pathoseg.outputs.pyramid import (
    TILE,
    Add,
    FinishedRows,
    Halve,
    Pyramid,
    mean_of_four,
    mode_of_four,
)

_CLASSIC_TIFF = 2**32 - 2**25
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ZLIB_LEVEL = 4  # on masks 2 to 4 times as fast as the usual 6, and a third larger


@dataclass(frozen=True)
class _Form:
    """The way in which the pixels of a kind of image are stored.

    Attributes:
        halve: Makes the rows of the level below out of a strip of a channel.
        encode: Makes zlib's bytes of a tile, in which TIFF has what `page` says.
        page: Options of tifffile for each page.
    """

    halve: Halve
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
    """Write class indices in tiles of 512 px, each level half as large and a SubIFD.

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
    # A reader refuses the file for a character that XML has no form for.
    names = {str(classes.index(name)): _NO_XML.sub("\ufffd", name) for name in classes.names}
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
    form = _Form(mode_of_four, _encoded, {"photometric": "palette", "colormap": colours})
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
            "Name": [_NO_XML.sub("\ufffd", name) for name, _ in channels],
            "Color": [_rgba(colour) for _, colour in channels],
        },
    }
    form = _Form(
        mean_of_four, _encoded_differences, {"photometric": "minisblack", "predictor": True}
    )
    with _pyramid(path, size, mpp, len(channels), form, metadata) as add:
        yield add


def _rgba(colour: Colour) -> int:
    """A colour as OME-XML has it: a signed number of 32 bits."""
    return int.from_bytes(bytes((*colour, 255)), "big", signed=True)


def _metadata(name: str, mpp: Mpp, origin: str | None) -> dict[str, object]:
    identity = uuid4()
    if origin is not None:
        # A file's name may hold bytes that are no UTF-8, which Python keeps as lone surrogates.
        told = origin.encode(errors="surrogateescape").decode(errors="backslashreplace")
        identity = uuid5(NAMESPACE_OID, told)
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
    pyramid = Pyramid(size, channels, form.halve)
    # Noise grows a little when it is compressed.
    largest = 1.01 * channels * sum(level.rounded_up(TILE).pixels for level in pyramid.sizes)
    with replaced(path) as draft, tempfile.TemporaryFile(dir=path.parent) as waiting:
        levels = [_EncodedTiles(channels, waiting, form.encode) for _ in pyramid.sizes]

        def add(band: NDArray[np.uint8]) -> None:
            for strip in pyramid.add(band):
                levels[strip.level].add(strip)

        yield add
        for strip in pyramid.finish():
            levels[strip.level].add(strip)
        with TiffWriter(draft, bigtiff=largest > _CLASSIC_TIFF, ome=True) as tiff:
            for number, (level, tiles) in enumerate(zip(pyramid.sizes, levels, strict=True)):
                rows, width = level.height, level.width
                tiff.write(
                    tiles.read(),
                    shape=(rows, width) if metadata["axes"] == "YX" else (channels, rows, width),
                    dtype=np.uint8,
                    tile=(TILE, TILE),
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


class _EncodedTiles:
    """The tiles of a level, which wait in a file.

    Args:
        channels: How many the level has.
        waiting: The file, with those of other levels.
        encode: See `_Form`.
    """

    def __init__(
        self, channels: int, waiting: IO[bytes], encode: Callable[[NDArray[np.uint8]], bytes]
    ) -> None:
        self._waiting, self._encode = waiting, encode
        # By channel, where each tile lies in the file, and its bytes.
        self._places: Sequence[list[tuple[int, int]]] = [[] for _ in range(channels)]

    def add(self, strip: FinishedRows) -> None:
        """(1) Take the next strip of the level."""
        for channel, places in zip(strip.padded, self._places, strict=True):
            for x in range(0, channel.shape[1], TILE):
                tile = self._encode(channel[:, x : x + TILE])
                places.append((self._waiting.tell(), len(tile)))
                self._waiting.write(tile)

    def read(self) -> Iterator[bytes]:
        """(2) Yield the encoded tiles of each channel, row by row."""
        for places in self._places:
            for start, length in places:
                self._waiting.seek(start)
                yield self._waiting.read(length)


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
