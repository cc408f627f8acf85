"""Reads and writes the GeoJSON of QuPath."""

from __future__ import annotations

import gzip
import io
import json
import math
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon
from shapely.errors import ShapelyError

from pathoseg.annotations.annotation import (
    Annotation,
    AnnotationFile,
    ClassTable,
    Colour,
    PassedOver,
)
from pathoseg.annotations.feature_stream import features
from pathoseg.annotations.outline import WITHOUT_AREA, refuse_without_area, region, united
from pathoseg.errors import PathosegError, not_permitted

# QuPath's names of object types, those of versions before 0.3 (in `id`) last.
_ROOTS = {"root", "PathRootObject"}
_CORES = {"tma_core", "TMACoreObject"}
_TILES = {"tile", "PathTileObject"}

_WITHOUT_AREA = {
    "Point": "points",
    "MultiPoint": "points",
    "LineString": "lines",
    "MultiLineString": "lines",
}


def read_geojson(path: Path) -> AnnotationFile:
    """The regions of a GeoJSON file, gzipped or not, in pixels of the slide's bounds frame.

    A region's class is its classification, None where it has none. In a file that classifies
    nothing but names every region, the names are the classes. Points and lines have no area and
    are passed over; so are TMA cores and unclassified tiles, which say where to look, not what is
    there: they are counted. An ellipse is the polygon that QuPath wrote for it.

    Raises:
        PathosegError: The file is no GeoJSON, malformed, a bomb, or holds objects but no region.
    """
    count = 0
    objects: list[_Object] = []
    passed_over = Counter[PassedOver]()
    try:
        for feature in features(path):
            count += 1
            found = _read_object(feature)
            if isinstance(found, PassedOver):
                passed_over[found] += 1
            elif found:
                objects.append(found)
    except PermissionError:
        raise not_permitted(path) from None
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, ShapelyError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        where = f" (object {count})" if count else ""
        raise PathosegError(
            f"{path} cannot be read as GeoJSON: {problem}{where}.",
            "Export it again from QuPath as GeoJSON; other programs' JSON is not understood.",
        ) from error
    refuse_without_area(path, count, len(objects))
    if all(item.class_name is None and item.name for item in objects):
        regions = [Annotation(item.region, item.name, item.colour) for item in objects]
    else:
        regions = [
            Annotation(item.region, item.class_name, item.class_colour, item.name)
            for item in objects
        ]
    return AnnotationFile(regions, passed_over)


@dataclass(frozen=True, slots=True)
class _Object:
    region: Polygon | MultiPolygon
    class_name: str | None
    class_colour: Colour | None
    name: str | None
    colour: Colour | None


def _read_object(feature: Any) -> _Object | PassedOver | None:
    """The region of an object, or what it is that has none; None for the root of all objects."""
    feature = _mapping(feature, "a feature")
    if feature.get("type") == "Feature":
        geometry = feature.get("geometry")
        properties = _mapping(feature.get("properties") or {}, "a feature's properties")
    else:
        geometry, properties = feature, {}
    kind = str(properties.get("objectType", properties.get("object_type", feature.get("id"))))
    class_name, class_colour = _classification(properties.get("classification"))
    if kind in _ROOTS:
        return None
    if kind in _CORES:
        return PassedOver("TMA cores", class_name)
    if kind in _TILES and class_name is None:
        return PassedOver("tiles without a class")
    if geometry is None:
        return PassedOver("objects without an outline", class_name)
    parts = list(_polygons(geometry))
    if not (area := united(parts)):
        what = _WITHOUT_AREA.get(str(geometry.get("type")), WITHOUT_AREA)
        return PassedOver(what, class_name)
    return _Object(
        area, class_name, class_colour, _text(properties.get("name")), _colour(properties)
    )


def _polygons(geometry: Any) -> Iterator[Polygon]:
    geometry = _mapping(geometry, "a geometry")
    kind = str(geometry.get("type"))
    if kind == "GeometryCollection":
        for part in _list(geometry.get("geometries"), "a GeometryCollection's geometries"):
            yield from _polygons(part)
    elif kind in ("Polygon", "MultiPolygon"):
        coordinates = _list(geometry.get("coordinates"), f"a {kind}'s coordinates")
        for rings in [coordinates] if kind == "Polygon" else coordinates:
            if area := region(_list(rings, "a polygon")):
                yield from shapely.get_parts(area)
    elif kind not in _WITHOUT_AREA:
        raise ValueError(f"it is neither feature nor geometry (its type: {kind[:40]})")


def _classification(value: Any) -> tuple[str | None, Colour | None]:
    """Name and colour; derived classes ("Tumor: Positive") may come as a list of `names`."""
    if value is None or isinstance(value, str):
        return _text(value), None
    value = _mapping(value, "a classification")
    names = value.get("names")
    derived = ": ".join(map(str, names)) if isinstance(names, list) else None
    return _text(value.get("name")) or _text(derived), _colour(value)


def _colour(value: Mapping[str, Any]) -> Colour | None:
    """The colour [r, g, b], or the older colorRGB, a signed integer of alpha, r, g, b."""
    packed = value.get("colorRGB")
    if isinstance(packed, int):
        return packed >> 16 & 255, packed >> 8 & 255, packed & 255
    match value.get("color"):
        case [int(red), int(green), int(blue), *_] if all(
            0 <= channel <= 255 for channel in (red, green, blue)
        ):
            return red, green, blue
    return None


def _text(value: Any) -> str | None:
    """The text, or None; half of a surrogate pair, which is no text, becomes U+FFFD."""
    if not isinstance(value, str):
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").strip() or None


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list")
    return value


class GeoJsonWriter:
    """Writes regions one by one as QuPath's FeatureCollection, in constant memory.

    Coordinates are level-0 pixels of the slide's bounds frame, which the file records as
    `"frame": "bounds"`, with at most two decimals. Ids follow from content and order, so that the
    same regions give the same file. A file that is left by an exception is not completed.

    Args:
        path: Where to write; gzipped where its name ends in .gz.
        classes: Names and colours.
        object_type: "annotation", or "detection", which QuPath draws faster in large numbers.

    Raises:
        OSError: The file cannot be written; any method may raise it.
    """

    def __init__(
        self,
        path: Path,
        classes: ClassTable,
        object_type: Literal["annotation", "detection"] = "annotation",
    ) -> None:
        self._properties = {
            # QuPath fails on a class with a name and no colour.
            classes.index(name): f'"objectType":"{object_type}","classification":'
            + _dump({"name": name, "color": colour})
            for name, colour in zip(classes.names, classes.colours, strict=True)
        }
        self._count = 0
        self._stack = ExitStack()
        with self._stack:
            file = self._stack.enter_context(path.open("wb"))
            binary: Any = file
            if path.suffix == ".gz":
                # no name and no time in the header: the same regions give the same bytes
                binary = gzip.GzipFile("", "wb", 6, file, mtime=0)
                self._stack.enter_context(binary)
            self._text = self._stack.enter_context(io.TextIOWrapper(binary, encoding="ascii"))
            self._text.write('{"type":"FeatureCollection","frame":"bounds","features":[')
            self._stack = self._stack.pop_all()

    def add(
        self,
        geometry: Polygon | MultiPolygon,
        class_index: int,
        measurements: Mapping[str, float] | None = None,
    ) -> None:
        """Write one region.

        Args:
            geometry: In level-0 pixels.
            class_index: 1 to the number of classes.
            measurements: Name to value, shown by QuPath; what is not finite is left out.
        """
        self.add_all([geometry], [class_index], [measurements or {}])

    def add_all(
        self,
        geometries: Sequence[Polygon | MultiPolygon] | NDArray[np.object_],
        class_indices: Sequence[int],
        measurements: Sequence[Mapping[str, float]],
    ) -> None:
        """Write regions, faster than one by one: what `add` takes of each."""
        # Whole numbers come as 12.0; without the .0 a file of pixel edges is a third smaller.
        rounded = shapely.transform(
            np.array(geometries, object), lambda corners: np.round(corners, 2)
        )
        shapes = shapely.to_geojson(rounded)
        for shape, class_index, measured in zip(shapes, class_indices, measurements, strict=True):
            short = shape.replace(".0,", ",").replace(".0]", "]")
            self._write(short, class_index, measured)

    def _write(self, shape: str, class_index: int, measurements: Mapping[str, float]) -> None:
        identity = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._count} {class_index} {shape}")
        finite = {name: x for name, x in measurements.items() if math.isfinite(x)}
        measured = f',"measurements":{_dump(finite)}' if finite else ""
        self._text.write(
            f'{"," if self._count else ""}\n{{"type":"Feature","id":"{identity}",'
            f'"geometry":{shape},"properties":{{{self._properties[class_index]}{measured}}}}}'
        )
        self._count += 1

    def close(self) -> None:
        """Completes the file."""
        with self._stack:
            self._text.write("\n]}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stack.close()


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
