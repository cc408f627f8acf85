"""The byte ranges and the encoding of the tiles of a TIFF's levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tifffile import FILLORDER, PHOTOMETRIC, PLANARCONFIG, PREDICTOR, TiffFile, TiffPage

from pathoseg.errors import PathosegError
from pathoseg.geometry import Size
from pathoseg.slides.tiff_reader import check_directories, tifffile_door
from pathoseg.slides.tile_codec import Compression, TileCodec

_MOST_TILE_PIXELS = 4_194_304  # larger ones are no tiles but whole images
_COMPRESSIONS: set[int] = set(Compression)


@dataclass(frozen=True, eq=False)
class TileTable:
    """The tiles of one level, row by row.

    Attributes:
        codec: How each is stored.
        columns: Tiles in a row.
        offsets: Where each begins in the file, in bytes; shape (tiles,).
        counts: How long each is, 0 for one that was left out.
    """

    codec: TileCodec
    columns: int
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]


def tile_tables(path: Path, sizes: Sequence[Size]) -> list[TileTable | None]:
    """The tables of the images of these sizes in a TIFF.

    None stands for an image that is not stored in RGB tiles of a kind that `TileCodec` decodes,
    or that is not the only one of its size.
    """
    nothing: list[TileTable | None] = [None] * len(sizes)
    try:
        with tifffile_door(PathosegError, f"{path} is no TIFF", ""):
            check_directories(path)
            with TiffFile(path) as tiff:
                pages = list(_pages(tiff))
                return [_table_of_size(pages, size) for size in sizes]
    except PathosegError:  # another reader opened it and knows how
        return nothing


def _pages(tiff: TiffFile) -> Iterator[TiffPage]:
    """Every image of a file, reduced ones included."""
    for number in range(len(tiff.pages)):
        page = tiff.pages[number].aspage()
        yield page
        if page.pages is not None:
            yield from (page.pages[index].aspage() for index in range(len(page.pages)))


def _table_of_size(pages: Sequence[TiffPage], size: Size) -> TileTable | None:
    same = [
        page for page in pages if (page.imagewidth, page.imagelength) == (size.width, size.height)
    ]
    return _table(same[0], size) if len(same) == 1 else None


def _table(page: TiffPage, size: Size) -> TileTable | None:
    if not (page.is_tiled and page.compression in _COMPRESSIONS):
        return None
    compression = Compression(page.compression)
    tile = Size(page.tilewidth, page.tilelength)
    columns, rows = -(-size.width // tile.width), -(-size.height // tile.height)
    ycbcr = page.photometric == PHOTOMETRIC.YCBCR
    is_known = (
        (page.photometric == PHOTOMETRIC.RGB or (ycbcr and compression is Compression.JPEG))
        and (page.samplesperpixel, page.bitspersample, page.imagedepth) == (3, 8, 1)
        and page.dtype == np.uint8
        and page.planarconfig == PLANARCONFIG.CONTIG
        and page.predictor in (PREDICTOR.NONE, PREDICTOR.HORIZONTAL)
        and page.fillorder == FILLORDER.MSB2LSB
        and not page.extrasamples
        and 0 < tile.pixels <= _MOST_TILE_PIXELS
        and len(page.dataoffsets) == len(page.databytecounts) == columns * rows
    )
    if not is_known:
        return None
    return TileTable(
        TileCodec(
            compression,
            tile,
            differences=page.predictor == PREDICTOR.HORIZONTAL,
            ycbcr=ycbcr,
            tables=page.jpegtables,
        ),
        columns,
        np.asarray(page.dataoffsets, np.int64),
        np.asarray(page.databytecounts, np.int64),
    )
