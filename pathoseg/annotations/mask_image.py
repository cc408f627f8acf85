"""Labels from a mask image, whose pixels are class indices or numbers of objects."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.TiffImagePlugin import TiffImageFile

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    TOUCHING,
    AnnotationReport,
    ClassTable,
    Colour,
    is_background,
    is_ignored,
)
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.coverage import (
    INTEREST,
    UNIT,
    Ints,
    Steps,
    counted,
    ignore_outside,
    most_covered,
    most_covering,
    object_value,
    pixel_centres,
    rows_at_once,
    to_units,
    units_on_slide,
)
from pathoseg.annotations.mask_file import (
    class_mask,
    decoded,
    open_mask,
    refuse_other_images,
    told,
)
from pathoseg.annotations.object_colours import colours, near_numbers, rows_of_cells
from pathoseg.annotations.object_numbers import ObjectNumbers
from pathoseg.annotations.tiled_mask import TiledMask
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Size

_NUMBERED = re.compile(r"class \d+")
_BAND = 256
_MOST_READ = 1 << 24  # values of a mask in memory at a time
_MOST_LAID = 1 << 19  # of those, values that are laid over pixels at a time: 200 bytes each at most


class MaskLabels:
    """A PNG or TIFF of class indices or object numbers, of any size with the slide's aspect.

    The header is checked at once. A TIFF of 8 bits in tiles may have any size: its tiles are
    decoded where they are asked for. Other pixels are decoded once and kept compressed. Value k is
    the class named "class k" if such names are renamed or the run's classes are named like that,
    and the k-th class otherwise.

    Args:
        path: The file.
        slide_size: Level-0 pixels of the slide, all of which the mask covers.
        options: How it is understood. `mask` "indices": 0 background, 1..254 classes, 255 ignored;
            "binary": class 1 where a value is above 0; "instances": numbers of objects, whose
            classes are in `X_classes.png` or `.tif` beside it, or all class 1. Regions of interest
            are outlines, so `roi` says nothing here.

    Raises:
        PathosegError: The file is no PNG or TIFF of one channel of whole numbers, is above 400
            megapixels without being such a TIFF, or has another aspect than the slide; or there are
            several masks of classes.
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
        self._ignored = options.mask_ignore
        self._colours = dict[float, NDArray[np.uint8]]()  # by distance
        self._working_out = Lock()
        numbered = self._values == "instances"
        self._class_path = class_mask(path) if numbered else None
        self._tiled: TiledMask | None = None
        with open_mask(path) as image:
            if isinstance(image, TiffImageFile) and not numbered:
                with told(path, Exception):  # a tag may hold anything
                    self._tiled = TiledMask.of(path, image)
            refuse_other_images(path, image, slide_size, self._tiled is not None)
        if self._class_path is not None:
            with open_mask(self._class_path) as image:
                refuse_other_images(self._class_path, image, slide_size, is_tiled=False)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def files(self) -> Sequence[Path]:
        """The mask, and that of the classes of its objects."""
        return [self._path, *([self._class_path] if self._class_path else [])]

    @property
    def report(self) -> AnnotationReport:
        """The kind of annotation and the number of objects without a class, for reports."""
        count = self._objects.unclassified if self._values == "instances" and self._objects else 0
        missed = {"objects without a class": count} if count else {}
        return AnnotationReport(self._path, passed_over=missed, is_mask=True)

    def classes(self) -> Mapping[str, Colour | None]:
        """Names ("class 1"…) in use with a palette's colours, without ignored and background."""
        classes: dict[str, Colour | None] = {}
        for value, name in self._names().items():
            if not is_ignored(name) and not is_background(name):
                classes[name] = classes.get(name) or self._pixels.colours[value]
        return classes

    def file_classes(self) -> Set[str]:
        """Return "class 1"… of the values in use."""
        return set(self._file_names().values())

    def _file_names(self) -> dict[int, str]:
        return {value: f"class {value}" for value in self._pixels.colours}

    def _names(self) -> dict[int, str]:
        """Return the class name of each value that the mask has."""
        own = self._file_names()
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
        table = self._table(classes)
        if (objects := self._objects) is not None:
            table = table[objects.classes]
        if self._by_centre:
            mask = self._read_centres(box, frame, table)
        else:
            height, rest = self._slide_size.height / frame.scale_y, int(table[0])

            def settle(steps: Steps, part: Box, widths: Ints) -> NDArray[np.uint8]:
                heights = units_on_slide(part.y, part.bottom, height)
                return most_covered(steps, heights, widths, rest)

            mask = self._read_majority(box, frame, table, settle)
        ignore_outside(mask, box, frame, self._slide_size)
        return mask

    def refuse_without_objects(self) -> None:
        """Refuse a mask that says which class a pixel has, and not which object.

        Raises:
            PathosegError: It is no mask of object numbers, or one that cannot be used.
        """
        if self._objects is None:
            raise PathosegError(
                f'{self._path} is read as `[annotations] mask = "{self._values}"`: it says which '
                "class a pixel has, and not which object.",
                'If its values number the objects, set `[annotations] mask = "instances"`; else '
                "number them, give outlines, or train a model of task `segment`.",
            )

    def object_counts(self, classes: ClassTable) -> Mapping[str, int]:
        """Return the number of objects of each class that has any, by its name.

        Raises:
            PathosegError: It is no mask of object numbers, or a class is not in `classes`.
        """
        self.refuse_without_objects()
        assert self._objects is not None
        index = self._table(classes)[self._objects.classes]
        counts = np.bincount(index, minlength=256)[1 : len(classes)].tolist()
        return {name: count for name, count in zip(classes.names, counts, strict=True) if count}

    def objects(
        self,
        box: Box,
        frame: Frame,
        classes: ClassTable,
        mask: NDArray[np.uint8],
        apart: float = TOUCHING,
    ) -> NDArray[np.uint8]:
        """Return the object plane, as `Labels.objects` has it: every number in a colour.

        Raises:
            PathosegError: It is no mask of object numbers, a class is not in `classes`, or more
                than 254 objects lie on one spot.
        """
        self.refuse_without_objects()
        assert self._objects is not None
        size = self._pixels.size
        sides = (
            (frame.scale_x, size.width / self._slide_size.width),
            (frame.scale_y, size.height / self._slide_size.height),
        )
        colour = self._coloured(apart * max(scale * per_pixel for scale, per_pixel in sides))
        index = self._table(classes)[self._objects.classes]
        learnt = (index != BACKGROUND) & (index != IGNORE)
        if self._by_centre:
            painted = self._read_centres(box, frame, np.where(learnt, colour, np.uint8(0)))
            return np.where((mask == BACKGROUND) | (mask == IGNORE), mask, painted)
        of = np.where(learnt, object_value(index.astype(np.int64), colour), INTEREST)
        of[index == index[0]] = 0

        def settle(steps: Steps, part: Box, widths: Ints) -> NDArray[np.uint8]:
            return most_covering(steps, mask[part.within(box)], widths)

        return self._read_majority(box, frame, of, settle)

    def _coloured(self, distance: float) -> NDArray[np.uint8]:
        """Return the colour of each number.

        Args:
            distance: Pixels of the mask within which two have different colours.
        """
        with self._working_out:  # which reads the whole mask
            if distance not in self._colours:
                pixels, found = self._pixels, self._objects
                assert found is not None
                size, rows = pixels.size, rows_of_cells(distance)
                bands = (
                    pixels.read(Box(0, first, size.width, last - first))
                    for first, last in _parts(0, size.height, rows)
                )
                pairs = near_numbers(bands, found.boxes, distance)
                self._colours[distance] = colours(len(found.boxes), pairs, self._path)
            return self._colours[distance]

    def _read_majority(
        self,
        box: Box,
        frame: Frame,
        table: NDArray[np.integer],
        settle: Callable[[Steps, Box, Ints], NDArray[np.uint8]],
    ) -> NDArray[np.uint8]:
        """Paint a box some rows at a time.

        Args:
            box: In pixels of `frame`.
            frame: Their resolution.
            table: The meaning of each of the mask's values.
            settle: Makes pixels of the steps in a part of the box and the widths of its columns.
        """
        pixels = self._pixels
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
            with told(self._path, *_DAMAGE):
                values = pixels.read(Box(columns[0], rows[0], len(columns), len(rows)))
            for first, last in _parts(top, bottom, most):
                near = down.under(first, last)
                lines = values[near.start - rows.start : near.stop - rows.start]
                part = Box(box.x, first, box.width, last - first)
                steps = _steps(lines, table, near, columns, down, across, part)
                mask[first - box.y : last - box.y] = settle(steps, part, widths)
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
            with told(self._path, *_DAMAGE):
                values = pixels.read(part)
            mask[start:end] = table[values[(rows[start:end] - part.y)[:, None], columns - part.x]]
            start = end
        return mask

    def _table(self, classes: ClassTable) -> NDArray[np.uint8]:
        """The class index of each class value, shape (256,)."""
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
                "Name as many in `[data] classes` as the mask has; 255 means ignored. "
                + ("" if self._values == "instances" else _IF_NUMBERS),
            )
        table[1 : len(classes)] = np.arange(1, len(classes))
        return table

    @property
    def _pixels(self) -> _Pixels | _Tiles:
        return self._decoded[0]

    @property
    def _objects(self) -> ObjectNumbers | None:
        """The objects of a mask of their numbers; None for another mask."""
        return self._decoded[1]

    @cached_property
    def _decoded(self) -> tuple[_Pixels | _Tiles, ObjectNumbers | None]:
        binary = self._values == "binary"
        if self._tiled is not None:
            with told(self._path, *_DAMAGE):
                found = self._tiled.values()
            self._refuse_no_indices(found)
            colours = _colours(found, self._tiled.palette, binary)
            return _Tiles(self._tiled, colours, binary), None
        values, palette = decoded(self._path)
        if self._values == "instances":
            return self._numbered(values)
        found = _values_of(values)
        self._refuse_no_indices(found)
        indices = (values > 0).astype(np.uint8) if binary else values.astype(np.uint8)
        return _Pixels.of(indices, _colours(found, palette, binary)), None

    def _numbered(self, values: NDArray[Any]) -> tuple[_Pixels, ObjectNumbers]:
        """The numbers of the objects, and what is known of them."""
        classes, palette = None, list[int]()
        if self._class_path is not None:
            classes, palette = decoded(self._class_path)
            _refuse_values(self._class_path, _values_of(classes), "Save it with fewer classes.")
            classes = classes.astype(np.uint8)
        size = self._slide_size
        found, numbers = ObjectNumbers.of(self._path, values, self._ignored, classes, size)
        used = set(np.unique(found.classes).tolist())
        return _Pixels.of(numbers, _colours(used, palette, False)), found

    def _refuse_no_indices(self, values: Set[int]) -> None:
        if self._values == "binary":
            return
        _refuse_values(self._path, values, _IF_NUMBERS)
        if max(values) == IGNORE and values <= {BACKGROUND, IGNORE}:
            raise PathosegError(
                f"{self._path} holds no class: all of it is 0 or 255, and 255 means ignored.",
                'If 255 is the foreground, set `[annotations] mask = "binary"`.',
            )


_IF_NUMBERS = (
    'If they number objects, set `[annotations] mask = "binary"` to learn where there are any, or '
    '"instances" to separate them.'
)
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
    """Rows of indices or numbers in compressed bands, for many slides' masks are held at a time."""

    size: Size
    colours: Mapping[int, Colour | None]
    dtype: np.dtype[Any]
    bands: tuple[bytes, ...]

    @classmethod
    def of(
        cls, values: NDArray[np.uint8] | NDArray[np.uint16], colours: Mapping[int, Colour | None]
    ) -> _Pixels:
        height, width = values.shape
        bands = [values[top : top + _BAND] for top in range(0, height, _BAND)]
        packed = tuple(zlib.compress(band.tobytes(), 1) for band in bands)
        return cls(Size(width, height), colours, values.dtype, packed)

    def read(self, box: Box) -> NDArray[Any]:
        """The pixels of a box inside the mask."""
        first, last = box.y // _BAND, (box.bottom - 1) // _BAND
        text = b"".join(map(zlib.decompress, self.bands[first : last + 1]))
        pixels = np.frombuffer(text, dtype=self.dtype).reshape(-1, self.size.width)
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
    values: NDArray[np.integer],
    table: NDArray[np.integer],
    rows: range,
    columns: range,
    down: _Axis,
    across: _Axis,
    box: Box,
) -> Steps:
    """The stretches of equal class in the rows of a mask, as they lie in a box of a frame.

    Args:
        values: Of the mask's pixels where `rows` and `columns` cross.
        table: What each value stands for; stretches of what 0 stands for are left out.
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
        np.arange(int(table.max()) + 1),
    )


def _parts(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range into parts of at most so many, at least one."""
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


def _refuse_values(path: Path, values: Set[int], hint: str) -> None:
    """Refuse values that are no class indices."""
    low, high = min(values), max(values)
    if low < 0 or high > IGNORE:
        raise PathosegError(
            f"{path} holds the values {low} to {high}; class indices end at 254.", hint
        )


def _palette_colour(palette: list[int], value: int) -> Colour | None:
    match palette[3 * value : 3 * value + 3]:
        case [red, green, blue]:
            return red, green, blue
    return None
