"""Labels from a mask image, whose pixels are class indices."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    AnnotationReport,
    ClassTable,
    Colour,
    is_background,
    is_ignored,
)
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.coverage import (
    UNIT,
    Steps,
    counted,
    ignore_outside,
    most_covered,
    pixel_centres,
    rows_at_once,
    to_units,
    units_on_slide,
)
from pathoseg.annotations.tiled_mask import TiledMask
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Size

_LARGEST = 400_000_000
_INDEX_MODES = {"1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N"}
_NUMBERED = re.compile(r"class \d+")
_BAND = 256
_MOST_READ = 1 << 24  # values of a mask in memory at a time
_MOST_LAID = 1 << 19  # of those, values that are laid over pixels at a time: 200 bytes each at most


class MaskLabels:
    """A PNG or TIFF of class indices, of any size with the slide's aspect.

    The header is checked at once. A TIFF of 8 bits in tiles may have any size: its tiles are
    decoded where they are asked for. Other pixels are decoded once and kept compressed. Value k is
    the class named "class k" if such names are renamed or the run's classes are named like that,
    and the k-th class otherwise.

    Args:
        path: The file.
        slide_size: Level-0 pixels of the slide, all of which the mask covers.
        options: How it is understood. `mask` "indices": 0 background, 1..254 classes, 255 ignored;
            "binary": class 1 where a value is above 0. Regions of interest are outlines, so `roi`
            says nothing here.

    Raises:
        PathosegError: The file is no PNG or TIFF of one channel of whole numbers, is above 400
            megapixels without being such a TIFF, or has another aspect than the slide.
    """

    def __init__(
        self,
        path: Path,
        slide_size: Size,
        options: AnnotationOptions | None = None,
    ) -> None:
        options = options or AnnotationOptions()
        self._path = path
        self._slide_size = slide_size
        self._values = options.mask
        self._rename = options.rename
        self._by_centre = options.labels == "centre"
        self._unlabelled = IGNORE if options.unlabelled == "ignore" else BACKGROUND
        with self._open() as image:
            size, mode = Size(*image.size), image.mode
            self._tiled = TiledMask.of(path, image) if isinstance(image, TiffImageFile) else None
        if size.pixels > _LARGEST and self._tiled is None:
            raise PathosegError(
                f"{path} has {size.width} × {size.height} px; a mask may have {_LARGEST:,} pixels.",
                "Save it smaller (any size with the slide's aspect will do), or as an 8-bit tiled "
                "TIFF.",
            )
        if mode not in _INDEX_MODES:
            raise PathosegError(
                f"{path} holds {mode} pixels, not one class index per pixel.",
                "Save it as an 8- or 16-bit greyscale or palette image.",
            )
        if not _same_aspect(size, slide_size):
            raise PathosegError(
                f"{path} has {size.width} × {size.height} px, another shape than its slide "
                f"({slide_size.width} × {slide_size.height} px).",
                "Use the mask of this slide, covering all of it.",
            )

    @property
    def path(self) -> Path:
        return self._path

    @property
    def report(self) -> AnnotationReport:
        """That it is a mask."""
        return AnnotationReport(self._path, is_mask=True)

    def classes(self) -> Mapping[str, Colour | None]:
        """Names ("class 1"…) in use with a palette's colours, without ignored and background."""
        classes: dict[str, Colour | None] = {}
        for value, name in self._names().items():
            if not is_ignored(name) and not is_background(name):
                classes[name] = classes.get(name) or self._pixels.colours[value]
        return classes

    def _names(self) -> dict[int, str]:
        """Return the class name of each value that the mask has."""
        own = {value: f"class {value}" for value in self._pixels.colours}
        return {value: self._rename.get(name, name) for value, name in own.items()}

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Return the class index of each pixel of `box`, in pixels of `frame`.

        A pixel has the class that covers most of it; where two cover as much, the higher index has
        it, so that a class comes before background. Where the options say "centre", it has that of
        the mask's pixel under its centre.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide.

        Raises:
            PathosegError: A class is not in `classes`, or the mask cannot be decoded.
        """
        read = self._read_centres if self._by_centre else self._read_majority
        mask = read(box, frame, self._table(classes))
        ignore_outside(mask, box, frame, self._slide_size)
        return mask

    def _read_majority(self, box: Box, frame: Frame, table: NDArray[np.uint8]) -> NDArray[np.uint8]:
        pixels, rest = self._pixels, int(table[0])
        across = _Axis(pixels.size.width, self._slide_size.width / frame.scale_x)
        down = _Axis(pixels.size.height, self._slide_size.height / frame.scale_y)
        widths = units_on_slide(box.x, box.right, across.length)
        columns = across.under(box.x, box.right)
        mask = np.full((box.height, box.width), IGNORE, dtype=np.uint8)
        values_a_row = 1 + len(columns) * (1 + down.count / down.length)
        most = min(rows_at_once(box.width, len(np.unique(table))), int(_MOST_LAID / values_a_row))
        for top, bottom in _parts(box.y, box.bottom, int(_MOST_READ / values_a_row)):
            rows = down.under(top, bottom)
            if not rows or not columns:
                continue  # it lies off the slide
            with self._told(*_DAMAGE):
                values = pixels.read(Box(columns[0], rows[0], len(columns), len(rows)))
            for first, last in _parts(top, bottom, most):
                near = down.under(first, last)
                lines = values[near.start - rows.start : near.stop - rows.start]
                part = Box(box.x, first, box.width, last - first)
                heights = units_on_slide(first, last, down.length)
                steps = _steps(lines, table, near, columns, down, across, part)
                mask[first - box.y : last - box.y] = most_covered(steps, heights, widths, rest)
        return mask

    def _read_centres(self, box: Box, frame: Frame, table: NDArray[np.uint8]) -> NDArray[np.uint8]:
        pixels = self._pixels
        x, y = pixel_centres(box, frame)
        columns = np.floor(x * (pixels.size.width / self._slide_size.width)).astype(np.int64)
        rows = np.floor(y * (pixels.size.height / self._slide_size.height)).astype(np.int64)
        columns = columns.clip(0, pixels.size.width - 1)
        rows = rows.clip(0, pixels.size.height - 1)
        # Both ascend. A band at a time, for a frame may be much coarser than the mask.
        mask = np.empty((len(rows), len(columns)), np.uint8)
        width = int(columns[-1] - columns[0]) + 1
        most = max(1, _MOST_READ // width)
        start = 0
        while start < len(rows):
            end = max(start + 1, int(np.searchsorted(rows, rows[start] + most)))
            part = Box(
                int(columns[0]), int(rows[start]), width, int(rows[end - 1] - rows[start]) + 1
            )
            with self._told(*_DAMAGE):
                values = pixels.read(part)
            mask[start:end] = table[values[(rows[start:end] - part.y)[:, None], columns - part.x]]
            start = end
        return mask

    def _table(self, classes: ClassTable) -> NDArray[np.uint8]:
        """The class index of each value, shape (256,)."""
        table = np.full(256, IGNORE, dtype=np.uint8)
        table[0] = self._unlabelled
        if any(map(_NUMBERED.fullmatch, (*self._rename, *classes.names))):
            names = self._names()
            learnt = (name for name in names.values() if not is_ignored(name))
            found = classes.indices(learnt, self._path)
            for value, name in names.items():
                table[value] = found.get(name, IGNORE)
            return table
        if self._pixels.colours and max(self._pixels.colours) >= len(classes):
            raise PathosegError(
                f"{self._path} holds the value {max(self._pixels.colours)}, but the run has "
                f"{len(classes) - 1} classes.",
                "Name as many `classes` in the config as the mask has; 255 means ignored.",
            )
        table[1 : len(classes)] = np.arange(1, len(classes))
        return table

    @cached_property
    def _pixels(self) -> _Pixels | _Tiles:
        binary = self._values == "binary"
        if self._tiled is not None:
            with self._told(*_DAMAGE):
                found = self._tiled.values()
            self._refuse_no_indices(found)
            return _Tiles(self._tiled, _colours(found, self._tiled.palette, binary), binary)
        with self._open() as image:
            with self._told(Exception):  # Pillow's decoders raise nearly everything
                values, palette = np.asarray(image), image.getpalette() or []
            found = _values_of(values)
            self._refuse_no_indices(found)
            indices = (values > 0).astype(np.uint8) if binary else values.astype(np.uint8)
            return _Pixels.of(indices, _colours(found, palette, binary))

    def _refuse_no_indices(self, values: Set[int]) -> None:
        if self._values == "binary":
            return
        low, high = min(values), max(values)
        if low < 0 or high > IGNORE:
            raise PathosegError(
                f"{self._path} holds the values {low} to {high}; class indices end at 254.",
                'If it numbers instances, set `[annotations] mask = "binary"`.',
            )
        if high == IGNORE and values <= {BACKGROUND, IGNORE}:
            raise PathosegError(
                f"{self._path} holds no class: all of it is 0 or 255, and 255 means ignored.",
                'If 255 is the foreground, set `[annotations] mask = "binary"`.',
            )

    @contextmanager
    def _told(self, *errors: type[Exception]) -> Iterator[None]:
        try:
            yield
        except errors as error:
            raise _unreadable(self._path, error) from error

    def _open(self) -> ImageFile:
        # Not Image.open: its bound is a global, below ours, and it would try 40 other formats.
        kind = PngImageFile if self._path.suffix.lower() == ".png" else TiffImageFile
        try:
            return kind(self._path)
        except Exception as error:  # Pillow's parsers raise nearly everything
            raise _unreadable(self._path, error) from error


_DAMAGE = (OSError, ValueError, RuntimeError)  # as `TiledMask` says


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Indices that stay in their file."""

    mask: TiledMask
    colours: Mapping[int, Colour | None]
    binary: bool

    @property
    def size(self) -> Size:
        return self.mask.size

    def read(self, box: Box) -> NDArray[np.uint8]:
        """The pixels of a box inside the mask."""
        values = self.mask.read(box)
        return np.minimum(values, 1) if self.binary else values


@dataclass(frozen=True, slots=True)
class _Pixels:
    """Rows of indices in compressed bands, for many slides' masks are held at a time."""

    size: Size
    colours: Mapping[int, Colour | None]
    bands: tuple[bytes, ...]

    @classmethod
    def of(cls, indices: NDArray[np.uint8], colours: Mapping[int, Colour | None]) -> _Pixels:
        height, width = indices.shape
        bands = [indices[top : top + _BAND] for top in range(0, height, _BAND)]
        packed = tuple(zlib.compress(band.tobytes(), 1) for band in bands)
        return cls(Size(width, height), colours, packed)

    def read(self, box: Box) -> NDArray[np.uint8]:
        """The pixels of a box inside the mask."""
        first, last = box.y // _BAND, (box.bottom - 1) // _BAND
        text = b"".join(map(zlib.decompress, self.bands[first : last + 1]))
        pixels = np.frombuffer(text, dtype=np.uint8).reshape(-1, self.size.width)
        top = box.y - first * _BAND
        return pixels[top : top + box.height, box.x : box.right]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Pixels of a mask along one side of the slide, laid over those of a frame.

    Attributes:
        count: How many the mask has.
        length: Of the slide, in pixels of the frame.
    """

    count: int
    length: float

    def edges(self, pixels: range) -> NDArray[np.int64]:
        """Return the edges of mask pixels, one more than pixels, in 1/256 pixel of the frame."""
        every = np.arange(pixels.start, pixels.stop + 1, dtype=np.float64)
        return to_units(every * (self.length / self.count))

    def under(self, first: int, last: int) -> range:
        """The pixels of the mask that reach into pixels `first` to `last` of the frame."""
        low, high = (edge * self.count / self.length for edge in (first, last))
        # One more on each side, as edges are rounded.
        low, high = max(0, math.floor(low) - 1), min(self.count, math.ceil(high) + 1)
        return range(low, max(low, high))


def _steps(
    values: NDArray[np.uint8],
    table: NDArray[np.uint8],
    rows: range,
    columns: range,
    down: _Axis,
    across: _Axis,
    box: Box,
) -> Steps:
    """The stretches of equal class in the rows of a mask, as they lie in a box of a frame.

    Args:
        values: Of the mask's pixels where `rows` and `columns` cross.
        table: The class index of each value; stretches of that of 0 are left out.
        rows: Which rows these are.
        columns: Which columns.
        down: How rows lie over the frame.
        across: How columns do.
        box: In pixels of the frame; a row that reaches into several of its rows counts in each.
    """
    changed = np.ones(values.shape, np.bool_)
    np.not_equal(values[:, 1:], values[:, :-1], out=changed[:, 1:])
    at = np.flatnonzero(changed)
    row, first = np.divmod(at, len(columns))
    last = first + np.diff(at, append=values.size)  # a row's first pixel is a change
    value = table[values[row, first]]
    kept = value != table[0]
    row, first, last, value = row[kept], first[kept], last[kept], value[kept]
    x = (across.edges(columns) - box.x * UNIT).clip(0, box.width * UNIT)

    y = down.edges(rows).clip(box.y * UNIT, box.bottom * UNIT)
    lines = (np.arange(box.y, box.bottom + 1) * UNIT).clip(y[0], y[-1])
    cuts = np.unique(np.concatenate([y, lines]))
    mask_row = np.searchsorted(y, cuts[:-1], side="right") - 1
    begin = np.searchsorted(row, np.arange(len(rows) + 1))
    count = (begin[1:] - begin[:-1])[mask_row]
    strip = np.repeat(np.arange(len(count)), count)
    which = np.repeat(begin[mask_row], count) + counted(count)
    ends = np.concatenate([x[first[which]], x[last[which]]])
    pixel = ends // UNIT
    tall = 2 * np.diff(cuts)[strip]
    tall = np.concatenate([tall, -tall])
    beyond = tall * (ends - pixel * UNIT)
    pixel_row = cuts[strip] // UNIT - box.y
    return Steps(
        np.tile(value[which].astype(np.int64), 2),
        np.tile(pixel_row, 2),
        pixel,
        tall * UNIT - beyond,
        beyond,
        np.arange(256),
    )


def _parts(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into parts of at most so many, at least one."""
    for begin in range(first, last, max(1, most)):
        yield begin, min(last, begin + max(1, most))


def _values_of(pixels: NDArray[Any]) -> set[int]:
    """The values in use."""
    bands = (pixels[top : top + _BAND] for top in range(0, len(pixels), _BAND))
    return set[int]().union(*(np.unique(band).tolist() for band in bands))


def _colours(values: Set[int], palette: list[int], binary: bool) -> Mapping[int, Colour | None]:
    """The classes among the values, with the colours that a palette gives them."""
    if binary:
        values = {int(value > 0) for value in values}
    return {
        value: _palette_colour(palette, value) for value in sorted(values - {BACKGROUND, IGNORE})
    }


def _palette_colour(palette: list[int], value: int) -> Colour | None:
    match palette[3 * value : 3 * value + 3]:
        case [red, green, blue]:
            return red, green, blue
    return None


def _same_aspect(mask: Size, slide: Size) -> bool:
    """Return True if the mask is the slide at one scale, with sides rounded up or down."""
    return abs(mask.width * slide.height - mask.height * slide.width) <= slide.width + slide.height


def _unreadable(path: Path, error: Exception) -> PathosegError:
    return PathosegError(
        f"{path} cannot be read as a mask: {type(error).__name__}: {error}.",
        "Save it again as PNG or TIFF; values must be kept, so not as JPEG.",
    )
