"""QuPath GeoJSON: every form it comes in, and what the writer gives back to QuPath."""

from __future__ import annotations

import gzip
import json
import re
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathoseg.annotations.annotation import Annotation, ClassTable
from pathoseg.annotations.qupath_geojson import GeoJsonWriter, read_geojson
from pathoseg.errors import PathosegError

SHELL = [[0, 0], [10, 0], [10, 10], [0, 10], [0, 0]]
HOLE = [[2, 2], [4, 2], [4, 4], [2, 4], [2, 2]]
FAR = [[20, 20], [30, 20], [30, 30], [20, 20]]
POLYGON = {"type": "Polygon", "coordinates": [SHELL, HOLE]}
POINT = {"type": "Point", "coordinates": [1, 1]}
LINE = {"type": "LineString", "coordinates": [[0, 0], [5, 5]]}

TABLE = ClassTable(("tumour", "stroma"), ((200, 0, 100), (1, 2, 3)))


def _feature(geometry: Any = POLYGON, **properties: Any) -> dict[str, Any]:
    return {"type": "Feature", "id": "x", "geometry": geometry, "properties": properties}


def _read(tmp_path: Path, document: Any) -> list[Annotation]:
    path = tmp_path / "slide.geojson"
    path.write_text(json.dumps(document))
    return read_geojson(path).annotations


@pytest.mark.parametrize(
    "document",
    [
        {"type": "FeatureCollection", "features": [_feature()]},
        [_feature()],
        _feature(),
        POLYGON,
        [POLYGON],
        {"type": "Feature", "geometry": POLYGON, "properties": None},
    ],
    ids=["collection", "array", "feature", "geometry", "array of geometries", "no properties"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_top_level(tmp_path: Path, document: Any, packed: bool) -> None:
    path = tmp_path / ("slide.geojson.gz" if packed else "slide.geojson")
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    (found,) = read_geojson(path).annotations
    assert found.geometry.area == 96
    assert found.class_name is None


@pytest.mark.parametrize(
    ("geometry", "area"),
    [
        (POLYGON, 96),
        (POLYGON | {"isEllipse": True, "plane": {"c": -1, "z": 0, "t": 0}}, 96),
        ({"type": "MultiPolygon", "coordinates": [[SHELL, HOLE], [FAR]]}, 146),
        ({"type": "GeometryCollection", "geometries": [POINT, POLYGON, LINE]}, 96),
        (
            {
                "type": "GeometryCollection",
                "geometries": [
                    {"type": "GeometryCollection", "geometries": [POLYGON]},
                    {"type": "Polygon", "coordinates": [FAR]},
                ],
            },
            146,
        ),
        ({"type": "Polygon", "coordinates": [[[0, 0, 5], [4, 0, 5], [4, 4, 5]]]}, 8),
        ({"type": "MultiPolygon", "coordinates": [[SHELL], [SHELL]]}, 100),
    ],
)
def test_every_geometry_with_an_area(tmp_path: Path, geometry: Any, area: float) -> None:
    (found,) = _read(tmp_path, [_feature(geometry)])
    assert found.geometry.area == pytest.approx(area)


@pytest.mark.parametrize(
    "geometry",
    [
        None,
        POINT,
        LINE,
        {"type": "MultiPoint", "coordinates": [[1, 1]]},
        {"type": "MultiLineString", "coordinates": [[[0, 0], [1, 1]]]},
        {"type": "Polygon", "coordinates": []},
        {"type": "GeometryCollection", "geometries": []},
    ],
)
def test_what_has_no_area_is_passed_over(tmp_path: Path, geometry: Any) -> None:
    assert len(_read(tmp_path, [_feature(geometry), _feature()])) == 1
    with pytest.raises(PathosegError, match="encloses an area"):
        _read(tmp_path, [_feature(geometry)])


def test_an_empty_collection_is_a_slide_without_a_finding(tmp_path: Path) -> None:
    assert _read(tmp_path, {"type": "FeatureCollection", "features": []}) == []


@pytest.mark.parametrize(
    ("classification", "name", "colour"),
    [
        ("Tumor", "Tumor", None),
        ({"name": " Tumor ", "color": [200, 0, 0]}, "Tumor", (200, 0, 0)),
        ({"names": ["Tumor", "Positive"], "color": [1, 2, 3]}, "Tumor: Positive", (1, 2, 3)),
        ({"name": "Tumor", "colorRGB": -3670016}, "Tumor", (200, 0, 0)),
        ({"name": "Tumor", "colorRGB": 0xC80000}, "Tumor", (200, 0, 0)),
        ({"name": "Tumor", "color": [200, 0, 999]}, "Tumor", None),
        ({"name": "Tumor", "color": "red"}, "Tumor", None),
        ({"name": None}, None, None),
        ({}, None, None),
        (None, None, None),
        ("", None, None),
    ],
)
def test_every_form_of_classification(
    tmp_path: Path, classification: Any, name: str | None, colour: tuple[int, int, int] | None
) -> None:
    found = _read(tmp_path, [_feature(classification=classification), _feature(name="a region")])
    assert (found[0].class_name, found[0].colour) == (name, colour)


def test_names_are_classes_where_nothing_is_classified(tmp_path: Path) -> None:
    one, other = _feature(name="UT", color=[255, 0, 0]), _feature(name="I")
    found = _read(tmp_path, [one, other])
    assert [(each.class_name, each.colour) for each in found] == [
        ("UT", (255, 0, 0)),
        ("I", None),
    ]
    unnamed = _read(tmp_path, [one, other, _feature()])
    assert [each.class_name for each in unnamed] == [None] * 3
    classified = _read(tmp_path, [one, _feature(classification="Tumor", name="x")])
    assert [each.class_name for each in classified] == [None, "Tumor"]


@pytest.mark.parametrize("where", ["objectType", "object_type", "id"])
@pytest.mark.parametrize(
    ("kind", "kept"),
    [("annotation", 2), ("detection", 2), ("cell", 2), ("tile", 1), ("tma_core", 0), ("root", 0)],
)
def test_containers_are_not_labels(tmp_path: Path, where: str, kind: str, kept: int) -> None:
    old = {"tile": "PathTileObject", "tma_core": "TMACoreObject", "root": "PathRootObject"}
    objects = [_feature(classification="Tumor"), _feature()]
    for each in objects:
        if where == "id":
            each["id"] = old.get(kind, "PathDetectionObject")
        else:
            each["properties"][where] = kind
    assert len(_read(tmp_path, [*objects, _feature(name="other")])) == kept + 1


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([_feature(), 7], "a feature is no JSON object"),
        ([_feature(), _feature({"type": "Polygon", "coordinates": SHELL})], "ring"),
        ([_feature(), _feature({"type": "Polygon", "coordinates": [[SHELL]]})], "ring"),
        ([_feature(), _feature({"type": "MultiPolygon", "coordinates": [SHELL]})], "ring"),
        ([_feature(), _feature({"type": "Polygon"})], "coordinates is no list"),
        ([_feature(), _feature({"type": "Circle", "coordinates": []})], "Circle"),
        ([_feature(), _feature({"type": ["Polygon"]})], "neither feature nor geometry"),
        ([_feature(), _feature([1, 2])], "a geometry is no JSON object"),
        ([_feature(), _feature(classification=7)], "a classification is no JSON object"),
        ([_feature(), {"type": "Feature", "geometry": POLYGON, "properties": [1]}], "properties"),
        (
            [
                _feature(),
                _feature({"type": "Polygon", "coordinates": [[[0, 0], [1, float("nan")]]]}),
            ],
            "pixel of any slide",
        ),
    ],
)
def test_malformed_objects_are_refused_by_file_and_number(
    tmp_path: Path, document: Any, problem: str
) -> None:
    with pytest.raises(PathosegError, match=rf"slide\.geojson.*{problem}.*\(object 2\)"):
        _read(tmp_path, document)


def test_a_measurement_may_be_nan(tmp_path: Path) -> None:
    assert len(_read(tmp_path, [_feature(measurements={"Area": float("nan")})])) == 1


def test_a_real_export(shared_data: Path) -> None:
    found = read_geojson(shared_data / "annotations" / "qupath05.geojson").annotations
    assert Counter((one.class_name, one.colour) for one in found) == {
        ("UT", (255, 0, 0)): 1,
        ("I", (255, 0, 0)): 2,
    }


def test_json_of_another_program_is_refused(shared_data: Path) -> None:
    with pytest.raises(PathosegError, match=r"darwin_v7_103S\.json.*neither") as refused:
        read_geojson(shared_data / "annotations" / "darwin_v7_103S.json")
    assert "QuPath" in refused.value.hint


def _write(path: Path, regions: list[Any], measurements: dict[str, float] | None = None) -> None:
    with GeoJsonWriter(path, TABLE) as writer:
        for index, geometry in enumerate(regions):
            writer.add(geometry, 1 + index % 2, measurements)


@pytest.mark.parametrize("name", ["out.geojson", "out.geojson.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    donut = shapely.box(0, 0, 10, 10) - shapely.box(2, 2, 4, 4)
    pair = shapely.MultiPolygon([shapely.box(0, 0, 1, 1), shapely.box(5, 5, 6, 6)])
    _write(path, [donut, pair])
    found = read_geojson(path).annotations
    assert [one.class_name for one in found] == ["tumour", "stroma"]
    assert [one.colour for one in found] == list(TABLE.colours)
    assert found[0].geometry.equals(donut)
    assert found[1].geometry.equals(pair)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_the_file_is_as_qupath_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "out.geojson"
    measured = {"Area µm^2": 12.5, "Circularity": float("nan")}
    with GeoJsonWriter(path, TABLE, "detection") as writer:
        writer.add(shapely.box(0.123456, 0, 10, 10), 2, measured)
    document = json.loads(path.read_text())
    assert document["type"] == "FeatureCollection"
    assert document["frame"] == "bounds"
    (feature,) = document["features"]
    assert feature["type"] == "Feature"
    uuid.UUID(feature["id"])
    assert feature["properties"] == {
        "objectType": "detection",
        "classification": {"name": "stroma", "color": [1, 2, 3]},
        "measurements": {"Area µm^2": 12.5},
    }
    assert feature["geometry"]["coordinates"] == [
        [[10, 0], [10, 10], [0.12, 10], [0.12, 0], [10, 0]]
    ]


def test_regions_written_together_are_those_written_one_by_one(tmp_path: Path) -> None:
    hole = shapely.box(0, 0, 9.006, 9).difference(shapely.box(1, 1, 2, 2))
    regions = [
        hole,
        shapely.MultiPolygon([shapely.box(20, 0, 30, 1), shapely.box(40, 0, 41, 100)]),
        hole,
    ]
    measured = [{"Area": 2.5}, {}, {"Area": float("nan")}]
    with GeoJsonWriter(tmp_path / "one.geojson", TABLE) as writer:
        for region, index, values in zip(regions, (1, 2, 2), measured, strict=True):
            writer.add(region, index, values)
    with GeoJsonWriter(tmp_path / "all.geojson", TABLE) as writer:
        writer.add_all(regions, (1, 2, 2), measured)
    assert (tmp_path / "all.geojson").read_bytes() == (tmp_path / "one.geojson").read_bytes()
    assert len(read_geojson(tmp_path / "all.geojson").annotations) == 3


@given(
    st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(-1e5, 1e5), st.floats(1, 1e4)), max_size=5)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_coordinates_have_two_decimals_and_reruns_are_identical(
    tmp_path: Path, squares: list[tuple[float, float, float]]
) -> None:
    path, again = tmp_path / "out.geojson", tmp_path / "again.geojson.gz"
    boxes = [shapely.box(x, y, x + side, y + side) for x, y, side in squares]
    _write(path, boxes)
    document = json.loads(path.read_text())
    for feature, box in zip(document["features"], boxes, strict=True):
        corners = shapely.get_coordinates(shapely.geometry.shape(feature["geometry"]))
        assert abs(corners - shapely.get_coordinates(box)).max() <= 0.005 + 1e-9
    assert not re.search(r"\.\d{3}", path.read_text())
    ids = [feature["id"] for feature in document["features"]]
    assert len(set(ids)) == len(ids)
    _write(again, boxes)
    assert gzip.decompress(again.read_bytes()) == path.read_bytes()
    assert again.read_bytes()[4:8] == bytes(4)  # no time of writing


def test_a_writer_that_is_left_by_an_exception_leaves_no_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "out.geojson"

    def fail() -> None:
        with GeoJsonWriter(path, TABLE) as writer:
            writer.add(shapely.box(0, 0, 1, 1), 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with pytest.raises(PathosegError, match="cannot be read"):
        read_geojson(path)


def test_background_is_no_region(tmp_path: Path) -> None:
    with GeoJsonWriter(tmp_path / "out.geojson", TABLE) as writer, pytest.raises(KeyError):
        writer.add(shapely.box(0, 0, 1, 1), 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
@pytest.mark.parametrize("name", ["out.geojson", "out.geojson.gz"])
def test_a_full_disk_is_an_os_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        _write(path, [shapely.box(0, 0, 1, 1)] * 2000)


def test_half_an_emoji_in_a_name_is_replaced(tmp_path: Path) -> None:
    [found] = _read(
        tmp_path, _feature(classification={"name": "A \ud83db"}, name="\ude00 \U0001f600")
    )
    assert (found.class_name, found.name) == ("A \ufffdb", "\ufffd \U0001f600")
