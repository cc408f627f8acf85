"""TIFF of no scanner through tifffile: OME-TIFF, pyramids of tiles, images in strips."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tifffile import (
    COMPRESSION,
    PHOTOMETRIC,
    PLANARCONFIG,
    RESUNIT,
    TiffFile,
    TiffPage,
    TiffPageSeries,
)

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Mpp, Size
from pathoseg.slides.colour import SampleLayout
from pathoseg.slides.jpeg_stream import announced_size, check_jpeg, whole_stream
from pathoseg.slides.levels import exact_levels, whole_downsample
from pathoseg.slides.resolution import (
    MICRONS_PER_INCH,
    MICRONS_PER_UNIT,
    aperio_mpp,
    ome_magnification,
    ome_mpp,
    ome_pixel_sizes,
    ome_significant_bits,
    slide_mpp,
    tagged_mpp,
)
from pathoseg.slides.slide_file import SlideFile, reason

_SUB_IFDS = 330
# A slide has some ten levels, a label, an overview; an OME-TIFF may hold many images.
_MOST_DIRECTORIES, _MOST_SUB_IFDS, _MOST_ENTRIES = 1000, 100, 4096


def check_directories(path: Path) -> bool:
    """Check that the chain of directories of a TIFF ends, be it at the end of the file.

    Returns:
        Whether all of them are in the file; else it is cut short.

    Raises:
        ValueError: They run in a circle, or are more than any slide has.
    """
    with path.open("rb") as file:
        head = file.read(16)
        order, big = ("<" if head.startswith(b"II") else ">"), b"+" in head[2:4]
        layouts = ("Q", "HHQQ", "Q") if big else ("H", "HHII", "I")
        number, entry, place = (struct.Struct(order + layout) for layout in layouts)
        pointer = head[8:16] if big else head[4:8]
        seen: set[int] = set()
        while len(pointer) == place.size:
            (offset,) = place.unpack(pointer)
            if offset == 0:
                return True
            if offset in seen or len(seen) == _MOST_DIRECTORIES:
                raise ValueError("its list of images has no end")
            seen.add(offset)
            file.seek(offset)
            counted = file.read(number.size)
            entries = number.unpack(counted)[0] if len(counted) == number.size else 0
            table = file.read(min(entries, _MOST_ENTRIES) * entry.size)
            whole = len(table) // entry.size * entry.size
            for code, _, values, _ in entry.iter_unpack(table[:whole]):
                if code == _SUB_IFDS and values > _MOST_SUB_IFDS:
                    raise ValueError(f"an image in it claims {values} smaller ones")
            pointer = file.read(place.size)
    return False


_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_JPEG_STREAMS: set[int] = {COMPRESSION.JPEG, COMPRESSION.ALT_JPEG}
_JPEG: set[int] = {COMPRESSION.OJPEG, *_JPEG_STREAMS}
_COMPRESSIONS: set[int] = {
    *_JPEG,
    COMPRESSION.NONE,
    COMPRESSION.LZW,
    COMPRESSION.ADOBE_DEFLATE,
    COMPRESSION.DEFLATE,
    COMPRESSION.PACKBITS,
    COMPRESSION.LZMA,
    COMPRESSION.ZSTD,
    COMPRESSION.WEBP,
    COMPRESSION.APERIO_JP2000_YCBC,
    COMPRESSION.APERIO_JP2000_RGB,
    COMPRESSION.JPEG_2000_LOSSY,
    COMPRESSION.JPEG2000,
}
_MICRONS_PER_TAG_UNIT: dict[int, float] = {
    RESUNIT.INCH: MICRONS_PER_INCH,
    RESUNIT.CENTIMETER: 1e4,
    RESUNIT.MILLIMETER: 1e3,
    RESUNIT.MICROMETER: 1.0,
}
_MOST_SEGMENT_PIXELS = 400_000_000
_LARGE_SEGMENT_PIXELS = 64_000_000  # decoded by one reader at a time
# Decoded tiles and strips kept for the next read. Strips span the image, so that a row of boxes
# would decode the same ones again for each box.
_KEPT_TILE_BYTES, _KEPT_STRIP_BYTES = 32 << 20, 256 << 20


def is_tiff(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a TIFF."""
    return head.startswith(_MAGIC)


@contextmanager
def tifffile_door(refusal: type[PathosegError], problem: str, hint: str) -> Iterator[None]:
    """Raise tifffile's failures as `refusal`, and hide its log, which repeats them.

    While a file is opened, memory runs out over absurd sizes in a damaged header; but pixels that
    are not read for want of memory are no damage.
    """
    log, silence = logging.getLogger("tifffile"), lambda record: False
    log.addFilter(silence)
    try:
        yield
    except Exception as error:  # TypeError, IndexError, struct.error, DeflateError, MemoryError…
        if isinstance(error, MemoryError) and issubclass(refusal, UnreadableError):
            raise
        raise refusal(f"{problem}: {reason(error)}.", hint) from error
    finally:
        log.removeFilter(silence)


class _PyramidLevel:
    """One stored resolution: a page whose tiles or strips decode one by one.

    Raises:
        ValueError: The page is no RGB image that can be read in such pieces.
    """

    def __init__(self, level: TiffPageSeries) -> None:
        page, key = level.pages[0], level.keyframe
        axes = dict(zip(level.axes, level.shape, strict=True))
        planes = prod(count for axis, count in axes.items() if axis not in "YXS")
        if page is None or planes != 1 or key.imagedepth != 1:
            raise ValueError(f"it is a stack of {planes} planes (axes {level.axes}), not one image")
        if key.compression not in _COMPRESSIONS:
            raise ValueError(f"its compression ({key.compression}) is not read here")
        if key.dtype is None or key.dtype.kind not in "bu":
            raise ValueError(f"its {key.bitspersample}-bit values ({key.dtype}) are not colours")
        self.size = _size(key)
        self.segment = (
            Size(key.tilewidth, key.tilelength)
            if key.is_tiled
            else Size(key.imagewidth, min(key.rowsperstrip, key.imagelength))
        )
        if not (self.size.pixels and 0 < self.segment.pixels <= _MOST_SEGMENT_PIXELS):
            raise ValueError(
                f"{_text(self.size)} in pieces of {_text(self.segment)} cannot be held in memory"
            )
        self._columns = -(-self.size.width // self.segment.width)
        self._per_plane = self._columns * -(-self.size.height // self.segment.height)
        self._planes = key.samplesperpixel if key.planarconfig == PLANARCONFIG.SEPARATE else 1
        promised = self._per_plane * self._planes
        if min(len(page.dataoffsets), len(page.databytecounts)) < promised:
            raise ValueError(f"it does not say where its {promised} tiles or strips lie")
        self._layout = _layout(key)
        self._page, self._key = page, key
        self._raw_bytes = self.segment.pixels * key.samplesperpixel * key.dtype.itemsize

    def decode(self, row: int, column: int) -> NDArray[np.uint8] | None:
        """RGB pixels of one tile or strip, shape (height, width, 3); None if it was left out."""
        first = row * self._columns + column
        planes = [self._samples(first + plane * self._per_plane) for plane in range(self._planes)]
        stored = [samples for samples in planes if samples is not None]
        if not stored:
            return None
        if len(stored) < self._planes:
            raise ValueError("some of its colours are left out")
        samples = stored[0] if self._planes == 1 else np.concatenate(stored, axis=-1)
        return self._layout.to_rgb(samples)

    def _samples(self, index: int) -> NDArray[Any] | None:
        """Samples of one tile or strip of one plane, shape (height, width, samples)."""
        offset, count = self._page.dataoffsets[index], self._page.databytecounts[index]
        if count == 0:
            return None
        # Before anything is allocated: no codec here doubles what it encodes, and no stream in a
        # tile is larger than the tile but by its padding.
        if count > 2 * self._raw_bytes + 65_536:
            raise ValueError(f"{count} bytes claim to encode {self._raw_bytes}")
        file = self._page.parent.filehandle
        file.seek(offset)
        data = file.read(count)
        if len(data) < count:
            raise ValueError("the file ends before its pixels do")
        announced = announced_size(data)
        if announced is not None and announced.pixels > 4 * self.segment.pixels:
            raise ValueError(f"{_text(announced)} claim to lie in {_text(self.segment)}")
        if self._key.compression in _JPEG_STREAMS and self._key.bitspersample == 8:
            check_jpeg(whole_stream(data, self._page.jpegtables))
        decoded, _, _ = self._key.decode(
            data, index, jpegtables=self._page.jpegtables, jpegheader=self._key.jpegheader
        )
        samples: NDArray[Any] = np.asarray(decoded)[0]  # of depth 1
        return samples


def _layout(key: TiffPage) -> SampleLayout:
    """Return the meaning of the page's samples as tifffile decodes them."""
    becomes_rgb = (
        key.photometric == PHOTOMETRIC.YCBCR
        and key.compression in _JPEG
        and key.planarconfig == PLANARCONFIG.CONTIG
        and not key.extrasamples
    )
    return SampleLayout(
        photometric=PHOTOMETRIC.RGB if becomes_rgb else key.photometric,
        bits=_used_bits(key) if key.bitspersample > 8 else key.bitspersample,
        samples=key.samplesperpixel,
        extra=key.extrasamples,
        palette=key.colormap,
    )


def _used_bits(key: TiffPage) -> int:
    """The bits that the values use by OME-XML or MaxSampleValue, else those that are stored."""
    xml = key.parent.ome_metadata
    used = ome_significant_bits(xml) if xml else 0
    largest = key.tags.get("MaxSampleValue")
    if not used and largest:
        used = int(np.max(largest.value)).bit_length()
    return used if 8 < used < key.bitspersample else key.bitspersample


class _OpenTiff:
    """An open file, the levels of the largest image in it, and the number of scenes."""

    def __init__(self, path: Path) -> None:
        self.file = TiffFile(path)
        try:
            if not self.file.series:
                raise ValueError("it holds no image")
            pyramid, others = _largest_pyramid(self.file.series, _stated_widths(self.file))
            self.key, self.scenes = pyramid[0].keyframe, 1 + others
            self.levels = [_PyramidLevel(level) for level in pyramid]
        except BaseException:
            self.file.close()
            raise
        kept = _KEPT_TILE_BYTES if self.key.is_tiled else _KEPT_STRIP_BYTES
        largest = max(level.segment.pixels * 3 for level in self.levels)
        self._decode = lru_cache(max(1, kept // largest))(_PyramidLevel.decode)

    def segment(self, level: int, row: int, column: int) -> NDArray[np.uint8] | None:
        """RGB pixels of one tile or strip; see `_PyramidLevel.decode`."""
        return self._decode(self.levels[level], row, column)

    def close(self) -> None:
        self._decode.cache_clear()
        self.file.close()


def _text(size: Size) -> str:
    return f"{size.width} × {size.height} px"


_SAME_WIDTH = 0.1  # part by which widths of pixels differ at most that are meant to be equal
_SCENE = 0.1  # a scene has at least so many of the largest one's pixels; labels have fewer


def _stated_widths(file: TiffFile) -> list[float | None]:
    """The width of a pixel of each series by OME-XML, None where it states none."""
    sizes, xml = [_size(image.keyframe) for image in file.series], file.ome_metadata
    found = ome_pixel_sizes(xml) if xml and len(sizes) > 1 else {}
    stated = [found.get((str(size.width), str(size.height))) for size in sizes]
    return [None if mpp is None else mpp.x for mpp in stated]


def _largest_pyramid(
    series: Sequence[TiffPageSeries], widths: Sequence[float | None]
) -> tuple[list[TiffPageSeries], int]:
    """The largest image and its reductions, largest first, and how many other scenes there are.

    tifffile finds the levels of a pyramid where each is reduced by the same factor; the others
    are found here among the remaining images, as those of the same make and a fitting size. An
    image whose pixels are stated not to be wider by as much as it is smaller shows something else,
    and so do its own reductions; with pixels as wide and about as many, it is another scene.

    Args:
        series: The images.
        widths: The width of a pixel of each as OME-XML states it, or None.
    """
    image, width = max(
        zip(series, widths, strict=True), key=lambda each: _size(each[0].keyframe).pixels
    )
    size, scenes = _size(image.keyframe), 0
    by_size = {_size(level.keyframe): level for level in image.levels}
    for other, stated in zip(series, widths, strict=True):
        smaller = _size(other.keyframe)
        if other is image or _make(other) != _make(image):
            continue
        shrinks, wider = size.width / smaller.width, stated / width if stated and width else None
        is_level = smaller != size and whole_downsample(size, smaller) is not None
        if is_level and (wider is None or isclose(wider, shrinks, rel_tol=_SAME_WIDTH)):
            for level in other.levels:
                reduced = _size(level.keyframe)
                if _make(level) == _make(image) and whole_downsample(size, reduced):
                    by_size.setdefault(reduced, level)
        elif wider is not None and isclose(wider, 1, rel_tol=_SAME_WIDTH):
            scenes += smaller.pixels > _SCENE * size.pixels
    return sorted(by_size.values(), key=lambda level: -_size(level.keyframe).pixels), scenes


def _make(image: TiffPageSeries) -> tuple[object, ...]:
    key = image.keyframe
    return image.axes, key.dtype, key.photometric, key.is_tiled


def _size(page: TiffPage) -> Size:
    return Size(page.imagewidth, page.imagelength)


class TiffSlide(SlideFile[_OpenTiff]):
    """A TIFF of no scanner: the largest image in it, with the pyramid that belongs to it.

    `warnings` says that the file is cut short, and of an OME-TIFF that there are other scenes.

    Tiles that a sparse file leaves out are white. The orientation tag turns nothing.
    """

    def _open(self) -> _OpenTiff:
        with self._refusing():
            check_directories(self.path)
            return _OpenTiff(self.path)

    def _read_header(self, assume_mpp: float | None) -> None:
        tiff = self._opened()
        with self._refusing():
            xml = tiff.file.ome_metadata
            self.vendor = "ome" if xml else "tiff"
            self.levels = exact_levels([level.size for level in tiff.levels])
            stated = (ome_mpp(xml, self.size) if xml else None) or _tagged(tiff)
            magnification = ome_magnification(xml) if xml else None
            whole = check_directories(self.path)
            scanned = aperio_mpp(tiff.key.description)
        if stated is None and assume_mpp is None and not whole:
            raise PathosegError(
                f"{self.path} is cut short: images that it lists lie behind its end.",
                "Copy it again. With --assume-mpp, what is left of it is read.",
            )
        self.mpp = slide_mpp(self.path, stated or scanned, magnification, assume_mpp)
        largest = max(level.segment.pixels for level in tiff.levels)
        self.held_pixels = largest if largest > _LARGE_SEGMENT_PIXELS else 0
        if tiff.scenes > 1:
            read = f"only one of {_text(self.size)} is read: export each to a file of its own"
            self.warnings = (f"it holds {tiff.scenes} scenes, of which {read}",)
        if not whole:
            self.warnings += (
                "the file is cut short, and what is left of it is read: copy it again",
            )

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """See `Slide.read_level`."""
        tiff = self._opened()
        side = tiff.levels[level].segment
        pixels = np.full((box.height, box.width, 3), 255, np.uint8)
        with tifffile_door(
            UnreadableError,
            f"{self.path} cannot be read around ({box.x}, {box.y}) of level {level}",
            "Copy the file again from where it came.",
        ):
            for row in range(box.y // side.height, -(-box.bottom // side.height)):
                for column in range(box.x // side.width, -(-box.right // side.width)):
                    segment = tiff.segment(level, row, column)
                    if segment is not None:
                        _paste(segment, column * side.width, row * side.height, pixels, box)
        return pixels

    def _refusing(self) -> AbstractContextManager[None]:
        return tifffile_door(
            PathosegError,
            f"{self.path} cannot be read as a TIFF slide",
            "Check that the copy is complete, or export it again as 8-bit RGB OME-TIFF.",
        )


def _paste(segment: NDArray[np.uint8], x: int, y: int, pixels: NDArray[np.uint8], box: Box) -> None:
    """Copy what `pixels`, which show `box`, share with a segment whose corner is (x, y)."""
    height, width = segment.shape[:2]
    whole = Box(x, y, width, height)
    part = whole.intersection(box)
    if part is not None:
        pixels[part.within(box)] = segment[part.within(whole)]


def _tagged(tiff: _OpenTiff) -> Mpp | None:
    """The resolution in the TIFF's tags, whose unit ImageJ writes elsewhere."""
    across, down = tiff.key.resolution
    imagej = tiff.file.imagej_metadata
    if imagej is None:
        unit = _MICRONS_PER_TAG_UNIT.get(tiff.key.resolutionunit)
    else:
        unit = MICRONS_PER_UNIT.get(str(imagej.get("unit")).replace("\\u00B5", "µ"))
    return tagged_mpp(across, down, unit) if unit else None
