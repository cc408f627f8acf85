"""Regions of interest one by one: their names, and their pixels whatever the band."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.reading import annotation_of, read_regions_of_interest
from pathoseg.annotations.regions_of_interest import RegionOfInterest, regions_on_slide
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

SLIDE = Size(60, 44)
FRAME = Frame.at(SLIDE, Mpp(0.25, 0.25), 0.5)
CORNERS = st.tuples(st.floats(0, 60), st.floats(0, 44))


@given(st.lists(CORNERS, min_size=3, max_size=12), st.integers(1, 21), st.booleans())
def test_pixels_are_those_whose_centres_are_inside_in_any_bands(
    corners: list[tuple[float, float]], cut: int, hole: bool
) -> None:
    outline = shapely.convex_hull(shapely.multipoints(corners))
    if outline.area < 1:
        return
    if hole:
        inner = shapely.affinity.scale(outline, 0.5, 0.5)
        outline = shapely.difference(outline, inner)
    region = RegionOfInterest("1", outline)
    width, height = FRAME.size.width, FRAME.size.height
    seen = np.zeros((height, width), bool)
    for rows in (Box(0, 0, width, cut), Box(0, cut, width, height - cut)):
        found = region.pixels(rows, FRAME)
        if found is not None:
            part, inside = found
            seen[part.within(Box(0, 0, width, height))] = inside
    x, y = np.meshgrid(np.arange(width) * 2 + 1.0, np.arange(height) * 2 + 1.0)
    sure = ~shapely.dwithin(outline.boundary, shapely.points(x, y), 1e-6)
    assert (seen == shapely.contains_xy(outline, x, y))[sure].all()


def _named(*names: str | None) -> list[str]:
    outlines = [
        Annotation(shapely.box(4 * place, 0, 4 * place + 3, 9), "ROI", name=name)
        for place, name in enumerate(names)
    ]
    return [region.name for region in regions_on_slide(outlines, SLIDE)]


def test_a_name_of_its_own_or_a_number() -> None:
    assert _named("margin", None, "core") == ["margin", "2", "core"]
    assert _named("margin", "margin", None) == ["1", "2", "3"]
    assert _named("2", None, "") == ["1", "2", "3"]
    assert _named() == []


@given(st.lists(st.sampled_from([None, "", "1", "2", "3", "a", "b"]), max_size=6))
def test_no_two_regions_have_one_name(names: list[str | None]) -> None:
    assert len(set(_named(*names))) == len(names)


def test_the_slide_cuts_regions_and_leaves_out_those_beside_it(tmp_path: Path) -> None:
    def feature(left: int, name: str | None, kind: str) -> dict[str, object]:
        shape = shapely.geometry.mapping(shapely.box(left, 10, left + 20, 20))
        properties = {"objectType": "annotation", "classification": {"name": kind}, "name": name}
        return {"type": "Feature", "geometry": shape, "properties": properties}

    path = tmp_path / "a.geojson"
    features = [
        feature(50, "edge", "Region*"),
        feature(5, "gland", "gland"),
        feature(70, None, "Region*"),
        feature(30, None, "roi"),
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    options = AnnotationOptions()
    found, off_slide = read_regions_of_interest(path, SLIDE, (0, 0), options)
    assert off_slide == 1
    assert [(region.name, region.geometry.area) for region in found] == [("edge", 100), ("3", 200)]
    learnt = options.for_classes(["ROI"])
    found, _ = read_regions_of_interest(path, SLIDE, (0, 0), learnt)
    assert [one.name for one in found] == ["edge"]
    assert read_regions_of_interest(tmp_path / "a_mask.png", SLIDE, (0, 0), options) == ([], 0)


def test_an_annotation_is_of_one_slide(tmp_path: Path) -> None:
    for folder in ("slides/x", "slides/y", "drawn/x"):
        (tmp_path / folder).mkdir(parents=True)
    drawn, used = tmp_path / "drawn", dict[Path, Path]()
    for name in ("drawn/a.geojson", "drawn/x/a.geojson"):
        (tmp_path / name).write_text("{}")
    one, other = tmp_path / "slides/x/a.svs", tmp_path / "slides/y/a.svs"
    assert annotation_of("x/a.svs", one, drawn, used) == drawn / "x/a.geojson"
    assert annotation_of("y/a.svs", other, drawn, used) == drawn / "a.geojson"
    assert annotation_of("y/b.svs", other.with_name("b.svs"), drawn, used) is None
    with pytest.raises(PathosegError, match=r"of both \S*/y/a\.svs and \S*/z/a\.svs"):
        annotation_of("z/a.svs", tmp_path / "slides/z/a.svs", drawn, used)
