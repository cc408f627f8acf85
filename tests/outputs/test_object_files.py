"""Measurements of objects of known shape, and the files that hold them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs import object_files
from pathoseg.outputs.object_files import (
    AREA,
    CIRCULARITY,
    EOSIN,
    HEMATOXYLIN,
    LONGEST,
    PERIMETER,
    PROBABILITY,
    SHORTEST,
    SOLIDITY,
    ObjectWriter,
    measure,
)
from pathoseg.outputs.objects import FoundObjects, ObjectFinder, ObjectOptions

CLASSES = ClassTable(("tumour", "lymphocyte"), ((200, 0, 0), (0, 0, 200)))


def _found(kind: NDArray[np.uint8]) -> FoundObjects:
    """Objects of a mask in which none touch another."""
    planes = np.stack([kind, (kind > 0) * np.uint8(8), (kind > 0) * np.uint8(204)])
    finder = ObjectFinder(Size(kind.shape[1], kind.shape[0]), ObjectOptions(1000, 50))
    [found] = finder.add(planes)
    return found


def _ellipse(long: float, short: float, angle: float, centre: float = 0.0) -> NDArray[np.uint8]:
    y, x = np.mgrid[-60:61, -60:61] - centre
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    return ((along / long) ** 2 + (across / short) ** 2 <= 1).astype(np.uint8)


@given(
    st.floats(15, 50), st.floats(0.5, 1), st.floats(0, math.pi), st.floats(0, 1), st.floats(0.2, 2)
)
def test_ellipses_measure_as_they_are(
    long: float, share: float, angle: float, centre: float, mpp: float
) -> None:
    short = long * share
    found = _found(_ellipse(long, short, angle, centre))
    values = measure(found, mpp, np.zeros((*found.labels.shape, 2), np.float32))
    one = {name: float(value[0]) for name, value in values.items()}
    area = math.pi * long * short
    around = shapely.affinity.scale(shapely.Point(0, 0).buffer(1, 200), long, short).length
    assert one[AREA] == pytest.approx(area * mpp**2, rel=0.06)
    assert one[PERIMETER] == pytest.approx(around * mpp, rel=0.05)
    assert one[CIRCULARITY] == pytest.approx(min(1, 4 * math.pi * area / around**2), abs=0.1)
    assert one[SOLIDITY] > 0.9
    # Pixels have corners: a caliper is up to the diagonal of one too wide.
    assert 2 * long - 1.1 <= one[LONGEST] / mpp <= 2 * long + 1.5
    assert 2 * short - 1.4 <= one[SHORTEST] / mpp <= 2 * short + 1.5


@given(st.floats(10, 40), st.floats(0.05, 1), st.floats(0, math.pi))
def test_calipers_are_those_of_a_turned_rectangle(long: float, share: float, angle: float) -> None:
    upright = shapely.box(0, 0, long, long * share)
    rectangle = shapely.affinity.rotate(upright, angle, use_radians=True)
    other = shapely.affinity.rotate(shapely.box(0, 0, 3, 4), 1)
    longest, shortest = object_files._calipers(np.array([other, rectangle, other], object))
    np.testing.assert_allclose(longest, [5, math.hypot(long, long * share), 5])
    np.testing.assert_allclose(shortest, [3, long * share, 3])


def test_intensities_are_means_of_what_was_read() -> None:
    kind = np.zeros((20, 30), np.uint8)
    kind[2:6, 3:9], kind[10:18, 12:25] = 1, 2
    found = _found(kind)
    stains = np.zeros((20, 30, 2), np.float32)
    stains[kind == 1], stains[kind == 2] = (0.4, 0.1), (0.8, 0.2)
    stains[2, 3:9], stains[10:18, 12:25] = np.nan, np.nan
    values = measure(found, 0.5, stains)
    np.testing.assert_allclose(values[HEMATOXYLIN], [0.4, np.nan], rtol=1e-6)
    np.testing.assert_allclose(values[EOSIN], [0.1, np.nan], rtol=1e-6)
    np.testing.assert_allclose(values[PROBABILITY], 0.8)


def test_files_hold_the_same_objects(tmp_path: Path) -> None:
    kind = np.zeros((40, 60), np.uint8)
    kind[2:6, 3:9], kind[10:18, 12:25], kind[30:40, 50:60] = 1, 2, 2
    frame = Frame(Size(60, 40), 2.0, 2.0, Mpp(0.5, 0.5))
    found = _found(kind)
    with ObjectWriter(tmp_path / "o.geojson", tmp_path / "o.csv", CLASSES, frame) as writer:
        writer.add(found, np.full((*kind.shape, 2), np.nan, np.float32))
    assert writer.written == {1: 1, 2: 2}
    features = json.loads((tmp_path / "o.geojson").read_text())["features"]
    with (tmp_path / "o.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(features) == len(rows) == 3
    for feature, row in zip(features, rows, strict=True):
        properties = feature["properties"]
        assert properties["objectType"] == "detection"
        assert properties["classification"]["name"] == row["class"]
        shape = shapely.from_geojson(json.dumps(feature["geometry"]))
        assert shape.area * 0.25**2 == pytest.approx(float(row[AREA]))
        centre = float(row["Centroid X px"]), float(row["Centroid Y px"])
        assert centre == pytest.approx((shape.centroid.x, shape.centroid.y))
        for name, value in properties["measurements"].items():
            assert float(row[name]) == value
        assert row[HEMATOXYLIN] == ""
        assert HEMATOXYLIN not in properties["measurements"]
