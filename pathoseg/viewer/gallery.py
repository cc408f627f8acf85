"""Answers the page: slides, tiles through a bounded cache, tables, features at a point."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.outputs.report import Summary
from pathoseg.viewer.drawing import DIFFERENCES, Style
from pathoseg.viewer.feature_index import MOST_BYTES, FeatureIndex, NotFoundError, Turns
from pathoseg.viewer.slide_view import OBJECT_FILES, REGION_FILES, TILE, Entry, Handles, SlideView

LAYERS = ("slide", "prediction", "truth", "difference", "probability")
DRAWN_OVER = ("truth", "difference")  # the layers for which annotations have to be read
_CACHE_BYTES = 128 << 20
_MOST_OPEN = 16  # slides whose headers and annotations are held
_PATIENCE = 0.3  # seconds that an answer waits for a table
_TABLES: Mapping[str, tuple[str, ...]] = {"regions": REGION_FILES, "objects": OBJECT_FILES}


class EncodedTiles:
    """Encoded tiles, the ones used last, within a bound of bytes. Any thread may ask.

    Args:
        most: Bytes of all tiles together.
    """

    def __init__(self, most: int = _CACHE_BYTES) -> None:
        self._most, self.held = most, 0
        self._tiles: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return the tile of a key, made where it is not held."""
        with self._lock:
            if (found := self._tiles.get(key)) is not None:
                self._tiles.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self.held += len(made) - len(self._tiles.pop(key, b""))
            self._tiles[key] = made
            while self.held > self._most:
                self.held -= len(self._tiles.popitem(last=False)[1])
        return made


class Gallery:
    """The slides that were given, by number.

    Args:
        entries: Their files.
        folder: Exists; for the databases of tables.
        readers: Threads that read slides at a time.
        assume_mpp: Microns per pixel of slides that state none.
        options: Options for reading annotations.
        tell: Called once with each problem.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        folder: Path,
        readers: int,
        assume_mpp: float | None = None,
        options: AnnotationOptions | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.readers = readers
        self._tell = tell
        self.cache = EncodedTiles()
        self._handles = Handles(readers)
        self._views = [
            SlideView(entry, self._handles, assume_mpp, options, tell) for entry in entries
        ]
        self._open = OrderedDict[int, SlideView]()  # the one used last at the end
        self._folder = folder
        self._indexes = OrderedDict[tuple[int, str], FeatureIndex]()  # the one used last at the end
        self._turns, self._numbers = Turns(), count()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files, and end the threads that fill tables."""
        for index in self._indexes.values():
            index.close()
        for view in self._views:
            view.close()
        self._handles.close()

    def tell(self, problem: str) -> None:
        """Pass a problem that belongs to no slide to the terminal."""
        if self._tell is not None:
            self._tell(problem)

    def view(self, slide: int) -> SlideView:
        """Return a slide by its number; the one that nobody asked for the longest is closed.

        Raises:
            NotFoundError: There is none.
        """
        if not 0 <= slide < len(self._views):
            raise NotFoundError("no such slide")
        view = self._views[slide]
        with self._lock:
            self._open[slide] = view
            self._open.move_to_end(slide)
            surplus = [self._open.popitem(last=False)[1]] if len(self._open) > _MOST_OPEN else []
        for old in surplus:
            old.close()
        return view

    def overview(self) -> list[dict[str, Any]]:
        """Return what is known of all slides without opening their files."""
        return [_listed(number, view.entry) for number, view in enumerate(self._views)]

    def details(self, slide: int) -> dict[str, Any]:
        """Return what the page asks of one slide: its extent, classes and layers.

        Args:
            slide: Its number.

        Returns:
            By key, ready for JSON: `width` and `height` in level-0 pixels, `mpp` as [x, y], `tile`
            in pixels, `halvings` from level 0 to one tile, `classes`, which layers and tables there
            are, and `problems` met so far.

        Raises:
            NotFoundError: There is no such slide.
            PathosegError: Neither it nor its mask can be opened.
        """
        view = self.view(slide)
        opened, entry = view.opened, view.entry
        longest = max(opened.size.width, opened.size.height)
        tables = [kind for kind, names in _TABLES.items() if view.file_of(names) is not None]
        has_truth = entry.annotation is not None and opened.slide is not None
        return {
            **_listed(slide, entry),
            "width": opened.size.width,
            "height": opened.size.height,
            "mpp": [opened.mpp.x, opened.mpp.y],
            "tile": TILE,
            "halvings": max(0, math.ceil(math.log2(longest / TILE))),
            "slide": None if opened.slide is None else opened.slide.path.name,
            "classes": _classes(opened.classes.names, opened.classes.colours, entry.summary),
            "prediction": opened.mask is not None,
            "truth": has_truth,
            "difference": has_truth and opened.mask is not None,
            "differences": [
                {"name": name, "colour": colour} for name, colour in DIFFERENCES.items()
            ],
            "probabilities": [channel.name for channel in opened.channels],
            "tables": tables if opened.has_level0 else [],
            "problems": view.problems,
        }

    def status(self, slide: int) -> dict[str, Any]:
        """Return the problems met so far with a slide and its tables.

        Raises:
            NotFoundError: There is no such slide.
        """
        view = self.view(slide)
        with self._lock:
            indexes = [index for (number, _), index in self._indexes.items() if number == slide]
        for index in indexes:
            if index.progress.done and index.progress.problem:
                view.tell(index.progress.problem)
        return {"problems": view.problems}

    def truth(self, slide: int) -> dict[str, Any]:
        """Return the classes with those that were only drawn, once the annotations are read.

        Raises:
            NotFoundError: There is no such slide.
            PathosegError: The annotations cannot be read.
        """
        view = self.view(slide)
        classes = view.truth()[1]
        return {"classes": _classes(classes.names, classes.colours, view.entry.summary)}

    def tile(
        self,
        slide: int,
        layer: str,
        place: tuple[int, int, int],
        shown: tuple[int, ...] = (),
        style: Style = "filled",
        channel: int = 0,
    ) -> bytes:
        """Return a tile of a layer: JPEG of the slide, PNG of the others.

        Args:
            slide: Its number.
            layer: One of `LAYERS`.
            place: (halvings of level 0, column, row).
            shown: Class indices that are drawn, 255 among them for what is unread.
            style: Filled or outlines.
            channel: Index of the probability channel.

        Raises:
            NotFoundError: There is no such slide, layer or tile.
            PathosegError: A file cannot be read.
        """
        view = self.view(slide)
        halvings, column, row = place
        box = view.tile_box(halvings, column, row) if 0 <= halvings < 32 else None
        if layer not in LAYERS or box is None:
            raise NotFoundError("no such tile")
        key = (slide, layer, place, shown, style, channel)
        frame = view.frame(halvings)
        with self._turns.picture():
            return self.cache.get(
                key, lambda: _drawn(view, layer, frame, box, shown, style, channel)
            )

    def thumbnail(self, slide: int, layer: str) -> bytes:
        """Return a small picture of a whole slide, or of its prediction in all classes.

        Raises:
            NotFoundError: There is no such slide or layer.
            PathosegError: A file cannot be read.
        """
        view = self.view(slide)
        if layer not in ("slide", "prediction"):
            raise NotFoundError("no such layer")
        frame = view.thumbnail_frame()
        box = Box(0, 0, frame.size.width, frame.size.height)
        shown = tuple(range(1, 256))
        return self.cache.get(
            (slide, layer), lambda: _drawn(view, layer, frame, box, shown, "filled", 0)
        )

    def index(self, slide: int, kind: str) -> FeatureIndex:
        """Return the table of a slide's regions or objects, begun if it was not.

        Raises:
            NotFoundError: There is no such slide or table.
            PathosegError: Neither the slide nor its mask can be opened.
        """
        view = self.view(slide)
        path = view.file_of(_TABLES.get(kind, ()))
        if path is None or not view.opened.has_level0:
            raise NotFoundError("no such table")
        mpp = view.opened.mpp
        key = slide, kind
        surplus = list[FeatureIndex]()
        with self._lock:
            if key not in self._indexes:
                while sum(index.size for index in self._indexes.values()) > MOST_BYTES:
                    surplus.append(self._indexes.popitem(last=False)[1])
                database = self._folder / f"{next(self._numbers)}.sqlite"
                area = mpp.x * mpp.y
                self._indexes[key] = FeatureIndex(path, database, area, self._turns)
            self._indexes.move_to_end(key)
            index = self._indexes[key]
        index.hurry()
        for old in surplus:
            old.remove()
        return index

    def at(self, slide: int, x: float, y: float) -> dict[str, Any] | None:
        """Return the object that holds a point of level 0, or else the region, or None.

        While a file is being read the answer is how far, as `reading`.

        Raises:
            NotFoundError: There is no such slide.
            PathosegError: Neither the slide nor its mask can be opened.
        """
        view = self.view(slide)
        for kind in ("objects", "regions"):
            if view.file_of(_TABLES[kind]) is None or not view.opened.has_level0:
                continue
            index = self.index(slide, kind)
            if not index.wait(_PATIENCE):
                return {"reading": index.progress.read}
            found = index.at(x, y)
            if found is not None:
                return {**found, "kind": kind}
        return None

    def table(self, slide: int, kind: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of a table, or how far its file is read, as `reading`.

        Args:
            slide: Its number.
            kind: "regions" or "objects".
            asked: `sort`, `order`, `class`, `page`, see `FeatureIndex.page`.

        Raises:
            NotFoundError: There is no such slide or table.
            PathosegError: Neither the slide nor its mask can be opened.
        """
        index = self.index(slide, kind)
        if not index.wait(_PATIENCE):
            return {"reading": index.progress.read}
        try:
            page = int(asked.get("page", 0))
        except ValueError as error:
            raise NotFoundError("no such page") from error
        descending = asked.get("order", "desc") == "desc"
        return index.page(asked.get("sort", "area"), descending, asked.get("class"), page)

    def feature(self, slide: int, kind: str, number: int) -> dict[str, Any]:
        """Return a feature by its number in a table.

        Raises:
            NotFoundError: There is no such slide, table or feature, or it is not read yet.
            PathosegError: Neither the slide nor its mask can be opened.
        """
        return self.index(slide, kind).feature(number)


def _drawn(
    view: SlideView,
    layer: str,
    frame: Frame,
    box: Box,
    shown: tuple[int, ...],
    style: Style,
    channel: int,
) -> bytes:
    try:
        if layer == "slide":
            return view.picture(frame, box)
        if layer == "prediction":
            return view.prediction(frame, box, shown, style)
        if layer == "truth":
            return view.annotated(frame, box, shown, style)
        if layer == "difference":
            return view.difference(frame, box, shown)
        return view.probability(frame, box, channel)
    except PathosegError as error:
        view.tell(str(error))
        raise
    except OSError as error:  # a disk that is gone
        view.tell(f"{error.filename or view.entry.name} cannot be read ({error.strerror}).")
        raise


def _listed(number: int, entry: Entry) -> dict[str, Any]:
    summary = entry.summary
    listed: dict[str, Any] = {
        "id": number,
        "name": entry.name,
        "status": entry.status,
        "problem": entry.problem,
        "annotated": entry.annotation is not None,
    }
    if summary is not None:
        unread = summary.unread_pixels * summary.mpp.pixel_mm2
        listed |= {
            "tissue_mm2": summary.tissue_mm2,
            "unread_mm2": unread,
            "areas": [asdict(one) for one in summary.classes],
            "warnings": list(summary.warnings),
            "model": summary.model,
        }
    return listed


def _classes(
    names: Sequence[str], colours: Sequence[tuple[int, int, int]], summary: Summary | None
) -> list[dict[str, Any]]:
    areas = {} if summary is None else {one.name: one for one in summary.classes}
    return [
        {
            "index": index,
            "name": name,
            "colour": colour,
            "area_mm2": areas[name].area_mm2 if name in areas else None,
            "share_of_tissue": areas[name].share_of_tissue if name in areas else None,
        }
        for index, (name, colour) in enumerate(zip(names, colours, strict=True), start=1)
    ]
