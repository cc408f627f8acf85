"""One slide of the gallery: its pixels, its layers, its classes, read when they are asked for."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock
from zlib import error as zlib_error

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable, Colour, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.feature_stream import features
from pathoseg.annotations.reading import class_table, read_labels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.inference.result_folder import MASK, OBJECTS, PROBABILITY, REGIONS, UNCERTAINTY
from pathoseg.outputs.mask_reader import MaskReader
from pathoseg.outputs.overlay import thumbnail_frame
from pathoseg.outputs.report import Summary
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, is_picture, open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.viewer import drawing
from pathoseg.viewer.drawing import MARGIN, Style
from pathoseg.viewer.feature_index import classification

TILE = 512
THUMBNAIL = 320
_FEATURES_FOR_COLOURS = 5_000
REGION_FILES, OBJECT_FILES = ((name, f"{name}.gz") for name in (REGIONS, OBJECTS))
_MOST_PROBLEMS = 20
_MOST_KNOWN = 64  # headers of slides that may have to be opened once more: more than threads read
_UNKNOWN_MPP = Mpp(1.0, 1.0)
# Colours of classes for which no file has one; those of the tissue come late.
_COLOURS: tuple[Colour, ...] = (
    *((20, 180, 190), (240, 170, 20), (60, 120, 230), (40, 170, 90)),
    *((130, 130, 40), (230, 80, 60), (150, 80, 200), (220, 80, 160)),
)


@dataclass(frozen=True)
class Entry:
    """A slide of the gallery and the files that belong to it.

    Attributes:
        name: Its name, which no other has.
        slide: Its file; None where it is not known.
        result: The folder of its result, if there is one.
        annotation: Its annotation file, if there is one.
        status: "done", "begun", "failed" or "cut short" for a result, "" for none.
        problem: The problem and a hint; empty if none.
        summary: The figures of its result.
        batch: The folder of the batch that began it, if it has no result.
    """

    name: str
    slide: Path | None
    result: Path | None = None
    annotation: Path | None = None
    status: str = ""
    problem: str = ""
    summary: Summary | None = None
    batch: Path = Path()


class Handles:
    """Lends slides to threads: a plain picture, which is held whole, to one at a time.

    Args:
        readers: Threads that read at a time.
    """

    def __init__(self, readers: int) -> None:
        self._known = OrderedDict[Path, Slide]()  # the one used last at the end
        self._pyramids = SlidePool(self._opened, idle=4 * readers, known=0)
        self._pictures = SlidePool(self._opened, idle=1, known=0)
        self._one_picture, self._lock = Lock(), Lock()

    def header(self, path: Path, assume_mpp: float | None) -> Slide:
        """Open a slide and close its file; what is returned has the header for `borrow`.

        Raises:
            PathosegError: It cannot be opened.
        """
        with self._one_picture if is_picture(path) else nullcontext():
            slide = open_slide(path, assume_mpp)
            slide.close()
        return slide

    def _opened(self, path: Path) -> Slide:
        return copy.copy(self._known[path])  # opens the file anew, without its header

    @contextmanager
    def borrow(self, slide: Slide) -> Iterator[Slide]:
        """Make a context with a copy of a slide that no other thread reads.

        Raises:
            PathosegError: Its file can no longer be opened.
        """
        with self._lock:
            self._known[slide.path] = slide
            self._known.move_to_end(slide.path)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        if slide.vendor != "image":
            with self._pyramids.borrow(slide.path) as lent:
                yield lent
            return
        with self._one_picture, self._pictures.borrow(slide.path) as lent:
            yield lent

    def close(self) -> None:
        """Close what nobody reads now."""
        self._pyramids.close()
        self._pictures.close()


@dataclass(frozen=True)
class Channel:
    """A channel of a probability file.

    Attributes:
        name: The display name.
        file: The open file.
        number: Index of the channel in the file.
    """

    name: str
    file: MaskReader
    number: int


@dataclass
class _Opened:
    """The headers of an entry's files, and its annotations once they are read.

    No thread closes them: the mask and the probabilities are closed with the last reference.

    Attributes:
        slide: None where it cannot be opened.
        size: Pixels of level 0; those of the mask where neither the slide nor its summary tells.
        mpp: Microns per pixel.
        mask: None where there is none, or it cannot be read.
        mask_frame: The mask's frame.
        classes: Names and colours of what is predicted.
        channels: Probabilities.
        has_level0: False where pixels of the mask stand for level 0.
        truth: The annotations and the classes with theirs, or why they cannot be read.
        reading: Held while the annotations are read.
    """

    slide: Slide | None
    size: Size
    mpp: Mpp
    mask: MaskReader | None
    mask_frame: Frame | None
    classes: ClassTable
    channels: list[Channel]
    has_level0: bool = True
    truth: tuple[Labels, ClassTable] | PathosegError | None = None
    reading: Lock = field(default_factory=Lock)


class SlideView:
    """The pictures of one slide. Any thread may ask.

    Args:
        entry: Its files.
        handles: Lends the slide.
        assume_mpp: Microns per pixel where the file states none.
        options: Options for reading annotations.
        tell: Called once with each problem.
    """

    def __init__(
        self,
        entry: Entry,
        handles: Handles,
        assume_mpp: float | None = None,
        options: AnnotationOptions | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.entry = entry
        self._handles = handles
        self._assume_mpp = assume_mpp
        self._options = options or AnnotationOptions()
        self._lock = Lock()
        self._headers: _Opened | None = None
        self._tell = tell
        self._problems = list[str]()
        self._tells_damage = True

    @property
    def problems(self) -> list[str]:
        """The problems met with its files so far, without repeats."""
        return list(self._problems)

    def tell(self, problem: str) -> None:
        """Record a problem for the page, and pass it to the terminal."""
        if problem in self._problems or len(self._problems) >= _MOST_PROBLEMS:
            return
        self._problems.append(problem)
        if self._tell is not None:
            self._tell(problem)

    def close(self) -> None:
        """Drop its headers and annotations; readers under way keep theirs, and are not awaited."""
        self._headers = None

    @property
    def opened(self) -> _Opened:
        """Its headers, read once.

        Raises:
            PathosegError: Neither the slide nor a mask can be opened.
        """
        with self._lock:
            opened = self._headers
            if opened is None:
                opened = self._headers = self._open()
            return opened

    def _open(self) -> _Opened:
        problems = list[str]()
        slide, mask = None, None
        refused: PathosegError | None = None
        if self.entry.slide is not None:
            try:
                slide = self._handles.header(self.entry.slide, self._assumed_mpp())
            except PathosegError as error:
                refused = error
                problems.append(str(error))
        if self.entry.result is not None and (self.entry.result / MASK).exists():
            try:
                mask = MaskReader(self.entry.result / MASK)
            except PathosegError as error:
                refused = refused or error
                problems.append(str(error))
        summary, has_level0 = self.entry.summary, True
        if slide is not None:
            size, mpp = slide.size, slide.mpp
        elif mask is not None and summary is not None and summary.level0 is not None:
            size, mpp = summary.level0.size, summary.level0.mpp
        elif mask is not None:
            size, mpp, has_level0 = mask.size, mask.mpp or _UNKNOWN_MPP, False
        else:
            raise refused or PathosegError(
                f"The file of the slide {self.entry.name} is not known.",
                "Name the folder that it is in with --slides DIR.",
            )
        frame = None if mask is None else _frame_of(mask, size, mpp)
        if mask is not None and frame != _frame_by_mpp(mask, mpp):
            problems.append(
                f"{mask.path} has another extent than {self.entry.slide}: it was made of another "
                "file, or with another --assume-mpp. It is stretched over the slide."
            )
        for problem in problems:
            self.tell(problem)
        classes = ClassTable((), ()) if mask is None else self._predicted_classes(mask)
        channels = self._channels(classes)
        return _Opened(slide, size, mpp, mask, frame, classes, channels, has_level0)

    def _assumed_mpp(self) -> float | None:
        """Return the resolution of a slide that states none: as given, or as `infer` took it."""
        summary = self.entry.summary
        if self._assume_mpp is not None or summary is None or summary.level0 is None:
            return self._assume_mpp
        return summary.level0.mpp.mean

    def _predicted_classes(self, mask: MaskReader) -> ClassTable:
        last = max(mask.names, default=0)
        names = tuple(mask.names.get(index, f"class {index}") for index in range(1, last + 1))
        by_name = {name: mask.colours[i] for i, name in mask.names.items() if i in mask.colours}
        if missing := set(names) - by_name.keys():
            by_name |= self._colours_of_regions(missing)
        spare = [colour for colour in _COLOURS if colour not in by_name.values()] or [*_COLOURS]
        for number, name in enumerate(name for name in names if name not in by_name):
            by_name[name] = spare[number % len(spare)]
        return ClassTable(names, tuple(by_name[name] for name in names))

    def _colours_of_regions(self, missing: set[str]) -> dict[str, Colour]:
        """The colours that the first regions have in GeoJSON."""
        found = dict[str, Colour]()
        path = self.file_of(REGION_FILES)
        if path is None:
            return found
        with suppress(OSError, EOFError, ValueError, RecursionError, zlib_error):
            for feature in islice(features(path), _FEATURES_FOR_COLOURS):
                name, colour = classification(feature)
                if name is not None and colour is not None:
                    found.setdefault(name, colour)
                if missing <= found.keys():
                    break
        return found

    def _channels(self, classes: ClassTable) -> list[Channel]:
        found = list[Channel]()
        if self.entry.result is None:
            return found
        for name in (PROBABILITY, UNCERTAINTY):
            path = self.entry.result / name
            if not path.exists():
                continue
            try:
                file = MaskReader(path)
            except PathosegError as error:
                self.tell(str(error))
                continue
            stem = name.partition(".")[0]
            names = ("background", *classes.names)
            for number, own in enumerate(file.channels):
                usual = names[number] if len(file.channels) == len(names) else str(number)
                word = own or (usual if len(file.channels) > 1 else "")
                shown = stem if word == stem else f"{stem} {word}".strip()
                found.append(Channel(shown, file, number))
        return found

    def file_of(self, names: tuple[str, ...]) -> Path | None:
        """Return the first of these files that its result has."""
        if self.entry.result is None:
            return None
        paths = [self.entry.result / name for name in names]
        return next((path for path in paths if path.is_file()), None)

    def truth(self) -> tuple[Labels, ClassTable]:
        """Return its annotations, and the classes: those predicted first, then those only drawn.

        Raises:
            PathosegError: There are none, they cannot be read, or have too many classes.
        """
        opened = self.opened
        with opened.reading:
            if opened.truth is None:
                try:
                    opened.truth = self._read_truth(opened)
                except PathosegError as error:
                    self.tell(str(error))
                    opened.truth = error
        if isinstance(opened.truth, PathosegError):
            raise PathosegError(opened.truth.problem, opened.truth.hint)
        return opened.truth

    def _read_truth(self, opened: _Opened) -> tuple[Labels, ClassTable]:
        path = self.entry.annotation
        if path is None or opened.slide is None:
            raise PathosegError(
                f"{self.entry.name} has no annotations.", "Name their folder with --annotations."
            )
        options = self._options.for_classes(opened.classes.names)
        labels = read_labels(path, opened.size, opened.slide.origin, options)
        if not labels.classes() and not labels.report.unclassified:
            return labels, opened.classes
        drawn = class_table([labels], None, opened.classes.colours)
        more = {
            name: colour
            for name, colour in zip(drawn.names, drawn.colours, strict=True)
            if name not in opened.classes.names
        }
        names = (*opened.classes.names, *more)
        if len(names) >= IGNORE:
            raise PathosegError(f"{path} has {len(more)} classes.", "254 can be shown.")
        return labels, ClassTable(names, (*opened.classes.colours, *more.values()))

    def frame(self, halvings: int) -> Frame:
        """Return the frame of a level of the pyramid that the page sees."""
        opened, scale = self.opened, float(2**halvings)
        mpp = opened.mpp
        size = drawing.halved(opened.size, halvings)
        return Frame(size, scale, scale, Mpp(mpp.x * scale, mpp.y * scale))

    def tile_box(self, halvings: int, column: int, row: int) -> Box | None:
        """Return the pixels of a tile, None where the level has no such tile."""
        size = self.frame(halvings).size
        tile = Box(column * TILE, row * TILE, TILE, TILE)
        return tile.intersection(Box(0, 0, size.width, size.height))

    def thumbnail_frame(self) -> Frame:
        """Return the frame of the picture in the gallery."""
        opened = self.opened
        return thumbnail_frame(opened.size, opened.mpp, THUMBNAIL)

    def picture(self, frame: Frame, box: Box) -> bytes:
        """Return the slide's pixels as JPEG; white where the slide is not at hand.

        Raises:
            PathosegError: The file can no longer be opened.
        """
        slide = self.opened.slide
        if slide is None:
            white = np.full((box.height, box.width, 3), 255, np.uint8)
            return drawing.jpeg(Region(white), box)
        with self._handles.borrow(slide) as lent:
            region = read_region(lent, frame, box)
        if region.unread is not None and self._is_damage_new():
            x, y, width, height = (round(side) for side in frame.to_level0(box))
            self.tell(
                f"{slide.path} cannot be read everywhere (first seen in {width} × {height} px at "
                f"{x}, {y}, perhaps elsewhere, too): what is missing is hatched. Copy the file "
                "again from where it came."
            )
        return drawing.jpeg(region, box)

    def _is_damage_new(self) -> bool:
        """Return True once: damage is seldom in one tile alone, and would fill the page."""
        with self._lock:
            is_new, self._tells_damage = self._tells_damage, False
        return is_new

    def prediction(self, frame: Frame, box: Box, shown: Collection[int], style: Style) -> bytes:
        """Return the predicted classes as PNG.

        Raises:
            PathosegError: There is no mask, or it is damaged.
        """
        found = drawing.shown(self._predicted(frame, _wider(box)), box, shown, style)
        return drawing.png(found, drawing.class_palette(self.opened.classes.colours))

    def annotated(self, frame: Frame, box: Box, shown: Collection[int], style: Style) -> bytes:
        """Return the annotated classes as PNG; what is not known is left clear.

        Raises:
            PathosegError: There are no annotations, or they cannot be read.
        """
        labels, classes = self.truth()
        mask = labels.rasterise(_wider(box), frame, classes)
        found = drawing.shown(mask, box, set(shown) - {IGNORE}, style)
        return drawing.png(found, drawing.class_palette(classes.colours))

    def difference(self, frame: Frame, box: Box, shown: Collection[int]) -> bytes:
        """Return where prediction and annotations differ as PNG.

        Raises:
            PathosegError: One of them is missing or cannot be read.
        """
        labels, classes = self.truth()
        truth = labels.rasterise(box, frame, classes)
        found = drawing.differences(self._predicted(frame, box), truth, shown)
        return drawing.png(found, drawing.difference_palette())

    def probability(self, frame: Frame, box: Box, channel: int) -> bytes:
        """Return a channel of the probabilities as PNG.

        Raises:
            PathosegError: There is none of that number, or it is damaged.
        """
        channels = self.opened.channels
        if not 0 <= channel < len(channels):
            raise PathosegError(f"{self.entry.name} has no such probability.", "Choose another.")
        one = channels[channel]
        whole = _frame_of(one.file, self.opened.size, self.opened.mpp)
        values = drawing.sampled(one.file, whole, frame, box, one.number)
        return drawing.png(values, drawing.probability_palette())

    def _predicted(self, frame: Frame, box: Box) -> NDArray[np.uint8]:
        opened = self.opened
        if opened.mask is None or opened.mask_frame is None:
            raise PathosegError(f"{self.entry.name} has no mask.", "Segment it first.")
        return drawing.sampled(opened.mask, opened.mask_frame, frame, box)


def _frame_of(file: MaskReader, size: Size, mpp: Mpp) -> Frame:
    """The frame in which a file covers a slide: by its resolution, or else stretched over it.

    By its resolution it has to end where the slide does, to within two of its pixels.
    """
    frame = _frame_by_mpp(file, mpp)
    across = abs(file.size.width - size.width / frame.scale_x)
    down = abs(file.size.height - size.height / frame.scale_y)
    if max(across, down) < 2:
        return frame
    scales = size.width / file.size.width, size.height / file.size.height
    return Frame(file.size, *scales, frame.mpp)


def _frame_by_mpp(file: MaskReader, mpp: Mpp) -> Frame:
    own = file.mpp or mpp
    return Frame(file.size, own.x / mpp.x, own.y / mpp.y, own)


def _wider(box: Box) -> Box:
    return Box(box.x - MARGIN, box.y - MARGIN, box.width + 2 * MARGIN, box.height + 2 * MARGIN)
