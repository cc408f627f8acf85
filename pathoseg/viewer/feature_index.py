"""An index of a file of regions or objects: pages of a sorted table, and what lies at a place."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from zlib import error as zlib_error

from pathoseg.annotations.feature_stream import features

_AT_ONCE = 500  # features
_MOST_BYTES = 4 << 30
_ROWS = 100
_SORTS = {"id", "class", "area", "x", "y"}
_TABLES = """
create table feature (
    id integer primary key, class text, area real, x real, y real, rings blob, measured text
);
create virtual table place using rtree(id, left, right, top, bottom);
"""
_indexing = threading.Lock()  # one file at a time: tiles go first


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


@dataclass(frozen=True)
class Progress:
    """The progress of reading a file into an index.

    Attributes:
        read: Features so far.
        done: True once it answers.
        problem: Why it ended early; empty where it did not. What was read answers all the same.
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
    """

    def __init__(self, path: Path, database: Path, pixel_um2: float) -> None:
        self._path, self._database, self._pixel_um2 = path, database, pixel_um2
        self._read, self._done, self._problem = 0, threading.Event(), ""
        self._closing = False
        self._thread = threading.Thread(target=self._fill, daemon=True, name=f"index {path.name}")
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """The number of features read so far, and the state of reading."""
        return Progress(self._read, self._done.is_set(), self._problem)

    def wait(self, seconds: float) -> bool:
        """Wait until it answers; return True if it does."""
        return self._done.wait(seconds)

    def close(self) -> None:
        """End the thread, soon."""
        self._closing = True
        self._thread.join(timeout=5)

    def _fill(self) -> None:
        try:
            with _indexing, closing(sqlite3.connect(self._database)) as connection:
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
        except (
            *(OSError, EOFError, ValueError, TypeError, LookupError, RecursionError),
            *(OverflowError, zlib_error, sqlite3.Error),
        ) as error:
            self._problem = f"{self._path} is not read whole: {error}."
        finally:
            self._done.set()

    def _insert(self, connection: sqlite3.Connection) -> None:
        waiting = features(self._path)
        while some := list(islice(waiting, _AT_ONCE)):
            rows = [
                (number, *row)
                for number, feature in enumerate(some, start=self._read)
                if (row := self._row(feature)) is not None
            ]
            connection.executemany(
                "insert into feature values (?, ?, ?, ?, ?, ?, ?)",
                [(n, name, area, (x0 + x1) / 2, (y0 + y1) / 2, rings, measured)
                 for n, name, area, (x0, x1, y0, y1), rings, measured in rows],
            )  # fmt: skip
            connection.executemany(
                "insert into place values (?, ?, ?, ?, ?)", [(row[0], *row[3]) for row in rows]
            )
            self._read += len(some)
            if self._closing:
                return
            if self._database.stat().st_size > _MOST_BYTES:
                self._problem = f"Of {self._path} only the first {self._read} entries are listed."
                return

    def _row(self, feature: Any) -> tuple[str, float, tuple[float, ...], bytes, str] | None:
        if not isinstance(feature, Mapping):
            return None
        rings = list(_rings(feature.get("geometry")))
        if not rings:
            return None
        properties = feature.get("properties")
        measured = _measurements(properties if isinstance(properties, Mapping) else {})
        area = measured.get("Area µm^2")
        if area is None:
            area = abs(sum(_area(ring) for ring in rings)) * self._pixel_um2
        x = array("f", chain.from_iterable(ring[::2] for ring in rings))
        y = array("f", chain.from_iterable(ring[1::2] for ring in rings))
        packed = b"".join(array("I", [len(ring)]).tobytes() + ring.tobytes() for ring in rings)
        name = classification(feature)[0] or ""
        return name, area, (min(x), max(x), min(y), max(y)), packed, json.dumps(measured)

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
            ValueError: There is no such column or page.
        """
        if sort not in _SORTS or page < 0:
            raise ValueError("no such column or page")
        where, given = ("where class = ?", [class_name]) if class_name is not None else ("", [])
        order = "desc" if descending else "asc"
        with closing(self._connection()) as connection:
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
        """Return the smallest feature that holds a point of level 0, or None."""
        where = "left <= ? and right >= ? and top <= ? and bottom >= ?"
        with closing(self._connection()) as connection:
            for found in self._found(connection, where, (x, x, y, y)):
                if _holds(found["rings"], x, y):
                    return found
        return None

    def feature(self, number: int) -> dict[str, Any]:
        """Return a feature by its number in the table.

        Raises:
            LookupError: There is none, or it is not read yet.
        """
        if not self._done.is_set():
            raise LookupError("not read yet")
        with closing(self._connection()) as connection:
            for found in self._found(connection, "feature.id = ?", (number,)):
                return found
        raise LookupError("no such feature")

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

    def _connection(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)


def _rings(geometry: Any) -> Iterator[array[float]]:
    """The rings of a polygon or of several as x, y, x, y…; nothing for other geometries."""
    if not isinstance(geometry, Mapping):
        return
    kind, given = geometry.get("type"), geometry.get("coordinates") or ()
    if kind == "GeometryCollection":
        for part in geometry.get("geometries") or ():
            yield from _rings(part)
    polygons = {"MultiPolygon": given, "Polygon": [given]}.get(kind or "", ())
    for polygon in polygons:
        for ring in polygon:
            flat = array("f", chain.from_iterable(corner[:2] for corner in ring))
            if len(flat) >= 6 and all(map(math.isfinite, flat)):
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
