"""Reads parts of the masks and probabilities of results, at any level of their pyramids."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import defusedxml.ElementTree
import numpy as np
from defusedxml.common import DefusedXmlException
from numpy.typing import NDArray
from tifffile import PHOTOMETRIC, TiffFile, TiffPage

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, Colour
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Mpp, Size
from pathoseg.platform_support import open_for_reading, read_at

_MOST_TILE_PIXELS = 4_194_304
_MOST_XML = 1 << 22
_MOST_PIXELS = 4096**2  # of the coarsest level, of which a small picture is made
_OME = "{http://www.openmicroscopy.org/Schemas/OME/2016-06}"


@dataclass(frozen=True, eq=False)
class _Plane:
    """One channel of one level: where each tile lies in the file."""

    page: TiffPage
    size: Size
    tile: Size
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, page: TiffPage) -> _Plane:
        size, tile = Size(page.imagewidth, page.imagelength), Size(page.tilewidth, page.tilelength)
        offsets = np.asarray(page.dataoffsets, np.int64)
        counts = np.asarray(page.databytecounts, np.int64)
        tiles = -(-size.width // max(1, tile.width)) * -(-size.height // max(1, tile.height))
        if not (
            page.is_tiled
            and page.dtype == np.uint8
            and page.samplesperpixel == 1
            and 0 < tile.pixels <= _MOST_TILE_PIXELS
            and len(offsets) == len(counts) == tiles
        ):
            raise ValueError("it is not stored in tiles of 8-bit numbers")
        return cls(page, size, tile, offsets, counts)


class MaskReader:
    """An open pyramid of 8-bit numbers, as `write_mask` writes it. Any thread may read.

    The file is closed by `close`, or with the last reference to the reader.

    Args:
        path: `mask.ome.tiff`, or a file of the same form with several channels.

    Attributes:
        path: The file.
        levels: Pixels of each level, each half of the one before, rounded up.
        channels: The channels' names, "" where the file gives none.
        mpp: Microns per pixel of level 0; None where the file does not tell.
        names: Index → name of the classes, without background and unread.
        colours: Index → colour, where the file has a palette.

    Raises:
        PathosegError: It is missing, cut short, or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # OME-XML may name further files: they are not opened.
            with TiffFile(path, _multifile=False) as tiff:
                self._read_header(tiff)
            self._descriptor = open_for_reading(path)
        except Exception as error:  # tifffile raises of all kinds over malformed files
            raise PathosegError(
                f"{path} cannot be read: {str(error).rstrip('.') or type(error).__name__}.",
                "Segment the slide again.",
            ) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def _read_header(self, tiff: TiffFile) -> None:
        xml = tiff.ome_metadata
        if xml is None or len(xml) > _MOST_XML:
            raise ValueError("it is no OME-TIFF")
        levels = tiff.series[0].levels
        pages = [[page.aspage() for page in level.pages if page is not None] for level in levels]
        if any(page.parent is not tiff for level in pages for page in level):
            raise ValueError("its pixels are in another file")
        self._planes = [[_Plane.of(page) for page in level] for level in pages]
        whole = len(self._planes[0])
        if not whole or any(len(planes) != whole for planes in self._planes):
            raise ValueError("its levels have different channels")
        self.levels = tuple(planes[0].size for planes in self._planes)
        halves = [Size(-(-size.width // 2), -(-size.height // 2)) for size in self.levels]
        if (*self.levels[1:],) != (*halves[:-1],) or self.levels[-1].pixels > _MOST_PIXELS:
            raise ValueError("it is no pyramid of levels half as large as the one before")
        self._read_metadata(xml, whole)
        first = self._planes[0][0].page
        self.colours: dict[int, Colour] = {}
        if first.photometric == PHOTOMETRIC.PALETTE and first.colormap is not None:
            palette = (np.asarray(first.colormap) >> 8).T.tolist()
            self.colours = {index: tuple(colour) for index, colour in enumerate(palette)}

    def _read_metadata(self, xml: str, channels: int) -> None:
        try:
            root = defusedxml.ElementTree.fromstring(xml)
        except (ParseError, DefusedXmlException) as error:
            raise ValueError("its OME-XML is malformed") from error
        pixels = root.find(f"{_OME}Image/{_OME}Pixels")
        sides = (pixels.get(f"PhysicalSize{axis}") for axis in "XY") if pixels is not None else ()
        given = [float(side) for side in sides if side is not None]
        self.mpp = Mpp(*given) if len(given) == 2 else None
        named = [] if pixels is None else pixels.findall(f"{_OME}Channel")
        names = [channel.get("Name") or "" for channel in named]
        self.channels = tuple(names) if len(names) == channels else ("",) * channels
        entries = {int(m.get("K", -1)): m.text or "" for m in root.iter(f"{_OME}M")}
        self.names = {
            index: name for index, name in sorted(entries.items()) if BACKGROUND < index < IGNORE
        }

    @property
    def size(self) -> Size:
        """Pixels of level 0."""
        return self.levels[0]

    def read(self, level: int, box: Box, channel: int = 0) -> NDArray[np.uint8]:
        """Return the pixels of `box`, in pixels of `level` and wholly inside it.

        Returns:
            Shape (height, width).

        Raises:
            PathosegError: The file is cut short or damaged there.
        """
        plane = self._planes[level][channel]
        found = np.zeros((box.height, box.width), np.uint8)
        width, height = plane.tile.width, plane.tile.height
        across = -(-plane.size.width // width)
        for row in range(box.y // height, -(-box.bottom // height)):
            for column in range(box.x // width, -(-box.right // width)):
                tile = Box(column * width, row * height, width, height)
                part = tile.intersection(box)
                index = row * across + column
                if part is not None and plane.counts[index]:
                    found[part.within(box)] = self._tile(plane, index)[part.within(tile)]
        return found

    def _tile(self, plane: _Plane, index: int) -> NDArray[np.uint8]:
        count = int(plane.counts[index])
        try:
            data = read_at(self._descriptor, count, int(plane.offsets[index]))
            decoded: Any = plane.page.decode(data, index)[0] if len(data) == count else None
        except Exception as error:  # each codec has errors of its own
            raise self._damaged() from error
        if decoded is None or decoded.shape[1:3] != (plane.tile.height, plane.tile.width):
            raise self._damaged()
        pixels: NDArray[np.uint8] = decoded[0, :, :, 0]
        return pixels

    def _damaged(self) -> PathosegError:
        return PathosegError(f"{self.path} is damaged or cut short.", "Segment the slide again.")

    def close(self) -> None:
        """Close the file. No thread may be reading it."""
        self._descriptor = -1
        self._close()
