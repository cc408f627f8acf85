"""An index of a file of regions or objects: pages of a sorted table, and what lies at a place."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from zlib import error as zlib_error

from pathoseg.annotations.feature_stream import features
from pathoseg.errors import PathosegError

_AT_ONCE = 200  # features, between two pictures
_PAUSE = 0.1  # seconds that an index waits at most for pictures
MOST_BYTES = 4 << 30
_ROWS = 100
_MOST_PAGES = 1 << 40  # what the database can count
_SORTS = {"id", "class", "area", "x", "y"}
_TABLES = """
create table feature (
    id integer primary key, class text, area real, x real, y real, rings blob, measured text
);
create virtual table place using rtree(id, left, right, top, bottom);
"""


class NotFoundError(Exception):
    """A request for a slide, layer, tile, table, page or feature that does not exist."""


def classification(feature: object) -> tuple[str | None, tuple[int, int, int] | None]:
    """The class of a GeoJSON feature and its colour, each None where it has none."""
    properties = feature.get("properties") if isinstance(feature, Mapping) else None
    given = properties.get("classification") if isinstance(properties, Mapping) else None
    if isinstance(given, str):
        return given, None
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        return None, None
    name, colour = given["name"], given.get("color")
    if isinstance(colour, list) and len(colour) == 3:
        red, green, blue = colour
        if all(isinstance(part, int) and 0 <= part <= 255 for part in (red, green, blue)):
            return name, (red, green, blue)
    return name, None


class Turns:
    """Lets one index at a time read on: the one asked for last, and after pictures."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = list[FeatureIndex]()  # the one asked for last at the end
        self._pictures = 0

    def ask(self, index: FeatureIndex) -> None:
        """Put an index before all others."""
        with self._changed:
            self.end(index)
            self._begun.append(index)

    def end(self, index: FeatureIndex) -> None:
        """Take out an index that is done or closed."""
        with self._changed:
            self._begun = [one for one in self._begun if one is not index]
            self._changed.notify_all()

    def wait(self, index: FeatureIndex) -> None:
        """Wait until it is this index's turn, or the index was taken out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pictures, _PAUSE)
            self._changed.wait_for(lambda: index not in self._begun[:-1])

    @contextmanager
    def picture(self) -> Iterator[None]:
        """Make a context in which a picture is drawn."""
        with self._changed:
            self._pictures += 1
        try:
            yield
        finally:
            with self._changed:
                self._pictures -= 1
                self._changed.notify_all()


@dataclass(frozen=True)
class IndexProgress:
    """The progress of reading a file into an index.

    Attributes:
        read: Features so far.
        done: True once it answers.
        problem: The reason for ending early or passing over features, else empty. Features read
            before that are served.
    """

    read: int
    done: bool
    problem: str


class FeatureIndex:
    """The features of a GeoJSON file in a database on disk, filled once by a thread of its own.

    Memory is that of one feature and a few pages of the database, however many there are.

    Args:
        path: The file, gzipped or not.
        database: A file that does not exist yet.
        pixel_um2: Area of a level-0 pixel in µm², for features that have no area among their
            measurements.
        turns: Shared by indexes that are to be read in turn; None means that there is no other.
    """

    def __init__(
        self, path: Path, database: Path, pixel_um2: float, turns: Turns | None = None
    ) -> None:
        self._path, self._database, self._pixel_um2 = path, database, pixel_um2
        self._read, self._done, self._problem = 0, threading.Event(), ""
        self._closing, self._bad = False, 0
        self._turns = turns or Turns()
        self._turns.ask(self)
        self._thread = threading.Thread(target=self._fill, daemon=True, name=f"index {path.name}")
        self._thread.start()

    @property
    def progress(self) -> IndexProgress:
        """The number of features read so far, and the state of reading."""
        problem = self._problem
        if self._bad and not problem:
            problem = f"{self._bad} entries of {self._path} are malformed and not listed."
        return IndexProgress(self._read, self._done.is_set(), problem)

    def wait(self, seconds: float) -> bool:
        """Wait until it answers; return True if it does."""
        return self._done.wait(seconds)

    def close(self) -> None:
        """End the thread, soon."""
        self._closing = True
        self._turns.end(self)
        self._thread.join(timeout=5)

    @property
    def size(self) -> int:
        """Bytes of the database."""
        return self._database.stat().st_size if self._database.exists() else 0

    def remove(self) -> None:
        """End the thread and remove the database."""
        self.close()
        self._database.unlink(missing_ok=True)

    def hurry(self) -> None:
        """Read on before all other indexes."""
        if not self._done.is_set():
            self._turns.ask(self)

    def _fill(self) -> None:
        try:
            with closing(sqlite3.connect(self._database)) as connection:
                # Lost with the process anyway: nothing is worth a journal.
                connection.executescript(
                    f"pragma journal_mode=off; pragma synchronous=off; {_TABLES}"
                )
                try:
                    self._insert(connection)
                finally:
                    for column in ("class", "area", "x", "y"):
                        connection.execute(f"create index by_{column} on feature ({column})")
                    connection.commit()
        # A file that is malformed, cut short, or grows on unpacking; a disk that is full.
        except (OSError, EOFError, ValueError, RecursionError, zlib_error, sqlite3.Error) as error:
            self._problem = f"{self._path} is not read whole: {error}."
        finally:
            self._done.set()
            self._turns.end(self)

    def _insert(self, connection: sqlite3.Connection) -> None:
        waiting = features(self._path)
        while not self._closing:
            self._turns.wait(self)
            rows, places, count = list[_Row](), list[tuple[float, ...]](), 0
            for feature in islice(waiting, _AT_ONCE):
                number = self._read + count
                count += 1
                try:
                    row = _row(number, feature, self._pixel_um2)
                # Of a feature any value may be of any type.
                except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
                    self._bad += 1
                    continue
                if row is not None:
                    rows.append(row[0])
                    places.append(row[1])
            if not count:
                return
            connection.executemany("insert into feature values (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.executemany("insert into place values (?, ?, ?, ?, ?)", places)
            self._read += count
            if self._database.stat().st_size > MOST_BYTES:
                self._problem = f"{self._path} is listed only up to entry {self._read} (4 GiB)."
                return

    def page(
        self, sort: str, descending: bool, class_name: str | None, page: int
    ) -> dict[str, Any]:
        """Return a page of the table and how many rows there are.

        Args:
            sort: A column: id, class, area, x or y.
            descending: The largest first.
            class_name: Only those of this class.
            page: Its number, from 0.

        Raises:
            NotFoundError: There is no such column or page.
            PathosegError: The index could not be made.
        """
        if sort not in _SORTS or not 0 <= page < _MOST_PAGES:
            raise NotFoundError("no such column or page")
        where, given = ("where class = ?", [class_name]) if class_name is not None else ("", [])
        order = "desc" if descending else "asc"
        with self._connection() as connection:
            total = connection.execute(f"select count(*) from feature {where}", given).fetchone()
            rows = connection.execute(
                f"select id, class, area, x, y from feature {where} "
                f"order by {sort} {order}, id limit ? offset ?",
                [*given, _ROWS, page * _ROWS],
            ).fetchall()
        keys = ("id", "class", "area_um2", "x", "y")
        found = [dict(zip(keys, row, strict=True)) for row in rows]
        return {"total": total[0], "rows_a_page": _ROWS, "rows": found}

    def at(self, x: float, y: float) -> dict[str, Any] | None:
        """Return the smallest feature that holds a point of level 0, or None.

        Raises:
            PathosegError: The index could not be made.
        """
        where = "left <= ? and right >= ? and top <= ? and bottom >= ?"
        with self._connection() as connection:
            for found in self._found(connection, where, (x, x, y, y)):
                if _holds(found["rings"], x, y):
                    return found
        return None

    def feature(self, number: int) -> dict[str, Any]:
        """Return a feature by its number in the table.

        Raises:
            NotFoundError: There is none, or it is not read yet.
            PathosegError: The index could not be made.
        """
        if not self._done.is_set() or number >= 2**63:  # the database's largest
            raise NotFoundError("no such feature, or not read yet")
        with self._connection() as connection:
            for found in self._found(connection, "feature.id = ?", (number,)):
                return found
        raise NotFoundError("no such feature")

    def _found(
        self, connection: sqlite3.Connection, where: str, given: tuple[float, ...]
    ) -> Iterator[dict[str, Any]]:
        rows = connection.execute(
            "select feature.id, class, area, x, y, rings, measured from place "
            f"join feature on feature.id = place.id where {where} order by area",
            given,
        )
        for number, name, area, x, y, packed, measured in rows:
            yield {
                "id": number,
                "class": name,
                "area_um2": area,
                "x": x,
                "y": y,
                "measurements": json.loads(measured),
                "rings": [ring.tolist() for ring in _unpacked(packed)],
            }

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        address = f"{self._database.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise PathosegError(
                self._problem or f"The index of {self._path} cannot be read: {error}.",
                "Free space where temporary files go, or set TMPDIR to another disk.",
            ) from error


_Row = tuple[int, str, float, float, float, bytes, str]


def _row(
    number: int, feature: Any, pixel_um2: float
) -> tuple[_Row, tuple[float, float, float, float, float]] | None:
    """The row of a feature and its box; None if it has no polygon.

    Raises:
        TypeError, ValueError, LookupError, OverflowError, AttributeError: It is malformed.
    """
    rings = list(_rings(feature["geometry"]))
    if not rings:
        return None
    properties = feature.get("properties") or {}
    measured = _measurements(properties)
    area = measured.get("Area µm^2")
    if area is None:
        area = abs(sum(_area(ring) for ring in rings)) * pixel_um2
    outer = rings[0] if len(rings) == 1 else array("f", chain.from_iterable(rings))
    x, y = outer[::2], outer[1::2]
    left, right, top, bottom = min(x), max(x), min(y), max(y)
    packed = b"".join(array("I", [len(ring)]).tobytes() + ring.tobytes() for ring in rings)
    name = classification(feature)[0] or ""
    name.encode()  # half of a surrogate pair is none that the database takes
    row = (
        *(number, name, area, (left + right) / 2, (top + bottom) / 2, packed),
        json.dumps(measured) if measured else "{}",
    )
    return row, (number, left, right, top, bottom)


def _rings(geometry: Any) -> Iterator[array[float]]:
    """The rings of a polygon or of several as x, y, x, y…; nothing for other geometries."""
    if geometry is None:
        return
    kind, given = geometry["type"], geometry.get("coordinates") or ()
    if kind == "GeometryCollection":
        for part in geometry.get("geometries") or ():
            yield from _rings(part)
    polygons = given if kind == "MultiPolygon" else [given] if kind == "Polygon" else ()
    for polygon in polygons:
        for ring in polygon:
            flat = array("f", chain.from_iterable(ring))
            if len(flat) != 2 * len(ring):  # heights, too
                flat = array("f", chain.from_iterable(corner[:2] for corner in ring))
            if not math.isfinite(sum(flat)):
                raise ValueError("a corner is not finite")
            if len(flat) >= 6:
                yield flat


def _unpacked(packed: bytes) -> Iterator[array[float]]:
    at, word = 0, array("I").itemsize
    while at < len(packed):
        length = array("I", packed[at : at + word])[0] * word
        yield array("f", packed[at + word : at + word + length])
        at += word + length


def _area(ring: Sequence[float]) -> float:
    """Return the signed area of a ring: holes of GeoJSON turn the other way."""
    x, y = ring[::2], ring[1::2]
    pairs = zip(x, y, [*x[1:], x[0]], [*y[1:], y[0]], strict=True)
    return sum(x0 * y1 - x1 * y0 for x0, y0, x1, y1 in pairs) / 2


def _holds(rings: Sequence[Sequence[float]], x: float, y: float) -> bool:
    """Return True if a ray from a point crosses the rings an odd number of times."""
    inside = False
    for ring in rings:
        xs, ys = ring[::2], ring[1::2]
        for x0, y0, x1, y1 in zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True):
            if (y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0:
                inside = not inside
    return inside


def _measurements(properties: Mapping[str, Any]) -> dict[str, float]:
    """The measurements of a feature, in QuPath's form of today or its older list."""
    given = properties.get("measurements")
    if isinstance(given, list):
        given = {
            entry.get("name"): entry.get("value") for entry in given if isinstance(entry, dict)
        }
    if not isinstance(given, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in given.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
