"""Tables of regions and objects: what is found where, and files that are not whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.viewer.feature_index import FeatureIndex, NotFoundError, Turns

Open = Callable[[Path], FeatureIndex]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Open]:
    """Reads a file into a table, and waits for it."""
    with ExitStack() as stack:
        count = iter(range(1000))

        def read(path: Path) -> FeatureIndex:
            made = FeatureIndex(path, tmp_path / f"{next(count)}.sqlite", 0.25)
            stack.callback(made.close)
            assert made.wait(20)
            return made

        yield read


def _feature(polygon: Any, name: str = "cell", **properties: Any) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": shapely.geometry.mapping(polygon),
        "properties": {"classification": {"name": name}, **properties},
    }


@given(
    boxes=st.lists(
        st.tuples(*[st.integers(0, 60)] * 2, *[st.integers(1, 30)] * 2), min_size=1, max_size=12
    ),
    point=st.tuples(st.integers(0, 90), st.integers(0, 90)),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_smallest_that_holds_a_point_is_found(
    boxes: list[tuple[int, int, int, int]], point: tuple[int, int], index: Open, tmp_path: Path
) -> None:
    shapes = [shapely.box(x, y, x + width, y + height) for x, y, width, height in boxes]
    path = tmp_path / "objects.geojson"
    path.write_text(json.dumps([_feature(shape) for shape in shapes]))
    made = index(path)
    x, y = point[0] + 0.5, point[1] + 0.5
    areas = [shape.area for shape in shapes if shape.contains(shapely.Point(x, y))]
    found = made.at(x, y)
    assert (found is None) == (not areas)
    if found is not None:
        assert found["area_um2"] == pytest.approx(min(areas) * 0.25)
    page = made.page("area", False, None, 0)
    assert [row["area_um2"] for row in page["rows"]] == pytest.approx(
        sorted(shape.area * 0.25 for shape in shapes)
    )


def test_pages_classes_and_both_forms_of_measurements(index: Open, tmp_path: Path) -> None:
    features = [
        _feature(shapely.box(i, i, i + 2, i + 2), "ab"[i % 2], measurements={"Area µm^2": i})
        for i in range(230)
    ]
    older = [{"name": "Solidity", "value": 0.5}, {"name": "Odd", "value": None}]
    features.append(_feature(shapely.box(900, 900, 910, 910), "c", measurements=older))
    features += [{"type": "Feature", "geometry": None}, _feature(shapely.Point(1, 1))]
    path = tmp_path / "objects.geojson.gz"
    path.write_bytes(gzip.compress(json.dumps(features).encode()))
    made = index(path)
    assert made.progress.problem == ""
    pages = [made.page("area", True, None, number) for number in range(3)]
    assert [len(page["rows"]) for page in pages] == [100, 100, 31]
    areas = [row["area_um2"] for page in pages for row in page["rows"]]
    assert areas == sorted(areas, reverse=True)
    assert made.page("x", True, "b", 0)["total"] == 115
    found = made.at(905, 905)
    assert found is not None
    assert found["measurements"] == {"Solidity": 0.5}
    for wrong in ("rings", "area; drop table feature"):
        with pytest.raises(NotFoundError):
            made.page(wrong, True, None, 0)


@pytest.mark.parametrize("cut", [0.3, 0.99])
def test_a_file_that_is_cut_short_gives_what_it_has(
    index: Open, tmp_path: Path, cut: float
) -> None:
    path = tmp_path / "regions.geojson"
    text = json.dumps([_feature(shapely.box(i, 0, i + 1, 1)) for i in range(2000)])
    path.write_text(text[: int(cut * len(text))])
    made = index(path)
    assert str(path) in made.progress.problem
    assert made.page("x", False, None, 0)["total"] == made.progress.read


def test_a_file_that_is_gone_is_told(index: Open, tmp_path: Path) -> None:
    made = index(tmp_path / "none.geojson")
    assert "none.geojson" in made.progress.problem
    assert made.page("x", False, None, 0)["rows"] == []


def test_an_index_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "regions.geojson"
    path.write_text(json.dumps([_feature(shapely.box(0, 0, 9, 9))]))
    made = FeatureIndex(path, tmp_path / "none" / "0.sqlite", 0.25)
    assert made.wait(20)
    for ask in (lambda: made.page("x", False, None, 0), lambda: made.at(1, 1)):
        with pytest.raises(PathosegError) as refused:
            ask()
        assert str(path) in refused.value.problem
        assert "TMPDIR" in refused.value.hint


def test_a_temporary_folder_of_any_name_holds_an_index(tmp_path: Path) -> None:
    path, folder = tmp_path / "regions.geojson", tmp_path / "odd #1?50%41 name"
    folder.mkdir()
    path.write_text(json.dumps([_feature(shapely.box(0, 0, 9, 9))]))
    made = FeatureIndex(path, folder / "0.sqlite", 0.25)
    assert made.wait(20)
    assert made.page("x", False, None, 0)["total"] == 1


_WRONG = st.sampled_from(
    [
        "x", 7, None, [], {}, {"geometry": 5}, {"geometry": {"type": "Polygon", "coordinates": 5}},
        _feature(shapely.box(0, 0, 9, 9), "\ud800"),
        _feature(shapely.box(0, 0, 9, 9), measurements={"n": 10**400}),
        {"geometry": {"type": "Polygon", "coordinates": [[["a", 0], [9, 0], [9, 9]]]}},
        {"geometry": {"type": "Polygon", "coordinates": [[[1e60, 0], [9, 0], [9, 9]]]}},
    ]
)  # fmt: skip


@given(entries=st.lists(st.none() | st.just(1) | _WRONG, max_size=12))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_malformed_entry_loses_itself_alone(
    entries: list[Any], index: Open, tmp_path: Path
) -> None:
    good = _feature(shapely.box(3, 3, 5, 5), "good")
    wrong = [entry for entry in entries if entry != 1]
    path = tmp_path / "objects.geojson"
    path.write_text(json.dumps([good if entry == 1 else entry for entry in entries]))
    made = index(path)
    assert made.page("id", False, "good", 0)["total"] == len(entries) - len(wrong)
    assert (f"{len(wrong)} entries of {path}" in made.progress.problem) == bool(wrong)


def test_the_index_asked_for_last_is_read_first(tmp_path: Path) -> None:
    large, small = tmp_path / "large.geojson", tmp_path / "small.geojson"
    large.write_text(json.dumps([_feature(shapely.box(i, 0, i + 1, 1)) for i in range(5000)]))
    small.write_text(json.dumps([_feature(shapely.box(0, 0, 1, 1))]))
    turns = Turns()
    with turns.picture():  # while pictures are drawn, each batch waits
        first = FeatureIndex(large, tmp_path / "0.sqlite", 1.0, turns)
        second = FeatureIndex(small, tmp_path / "1.sqlite", 1.0, turns)
        assert second.wait(20)
        assert not first.progress.done
    assert first.wait(20)
    assert first.page("id", False, None, 0)["total"] == 5000
    for made in (first, second):
        made.remove()
    assert not [*tmp_path.glob("*.sqlite")]
