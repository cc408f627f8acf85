"""Traced regions are the connected regions of the whole mask, however it is cut into bands."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import shapely
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from rasterio.features import rasterize
from scipy import ndimage
from shapely import Polygon, box

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.qupath_geojson import GeoJsonWriter, read_geojson
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs import polygons as module
from pathoseg.outputs.polygons import RegionTracer, TracedRegion, write_regions

Mask = NDArray[np.uint8]

masks = hnp.arrays(
    np.uint8,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=24),
    elements=st.sampled_from([0, 1, 1, 1, 2, 254, 255]),
    fill=st.sampled_from([0, 1]),
)


def mask_of(*rows: str) -> Mask:
    """A mask drawn in digits; a dot is background."""
    return np.array(
        [[0 if pixel == "." else int(pixel) for pixel in row] for row in rows], np.uint8
    )


def disc(radius: int) -> Mask:
    y, x = np.mgrid[: 3 * radius, : 3 * radius]
    return (np.hypot(y - 1.5 * radius, x - 1.4 * radius) < radius).astype(np.uint8)


def trace(mask: Mask, cuts: list[int], tracer: RegionTracer | None = None) -> list[TracedRegion]:
    tracer = tracer or RegionTracer()
    regions = []
    for band in np.split(mask, sorted(cuts)):
        regions += tracer.add(band)
    return [*regions, *tracer.close()]


def pixels_inside(geometry: Polygon, mask: Mask) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = rasterize([(geometry, 1)], out_shape=mask.shape).astype(bool)
    return inside


def labelled(mask: Mask) -> dict[tuple[int, bytes], int]:
    """Every region of the whole mask, as its class and its pixels, with their number."""
    regions = {}
    for value in set(np.unique(mask)) - {0, 255}:
        label, count = ndimage.label(mask == value)
        for number in range(1, count + 1):
            pixels = label == number
            regions[int(value), pixels.tobytes()] = int(pixels.sum())
    return regions


@given(masks, st.lists(st.integers(0, 24), max_size=6), st.integers(1, 60))
@example(mask_of("111", "1.1", "11.", "111"), [], 99)  # closes around a hole by a corner alone
@example(mask_of("1111", "1.11", "11.1", "1111"), [2], 99)  # holes that touch at a corner
@example(mask_of("1111", "1..1", "1.11", "1111"), [1, 2, 3], 99)
@example(mask_of(".1.", "1.1", ".1."), [1, 2], 99)  # four regions around one corner each
@example(mask_of("11111", "1...1", "1.1.1", "1...1", "11111"), [2, 2, 3], 99)  # region in a hole
@example(mask_of("1.1.1", "1.1.1", "111.1", "..111"), [1, 2, 3], 99)  # joined from below
def test_regions_are_those_of_the_whole_mask(mask: Mask, cuts: list[int], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIXELS_AT_ONCE", at_once)  # bands are cut further inside
        regions = trace(mask, cuts)
    found = {
        (region.class_index, pixels_inside(region.geometry, mask).tobytes()): region.pixels
        for region in regions
    }
    assert len(found) == len(regions)
    assert found == labelled(mask)
    for region in regions:
        assert shapely.is_valid(region.geometry)
        assert region.geometry.area == region.pixels
    uncut = {shapely.normalize(region.geometry) for region in trace(mask, [])}
    assert uncut == {shapely.normalize(region.geometry) for region in regions}


@given(masks)
def test_every_corner_is_a_turn_by_a_right_angle(mask: Mask) -> None:
    for region in trace(mask, [mask.shape[0] // 2]):
        assert region.geometry.exterior.is_ccw
        for ring in [region.geometry.exterior, *region.geometry.interiors]:
            corners = np.asarray(ring.coords)[:-1]
            steps = np.roll(corners, -1, axis=0) - corners
            assert (np.count_nonzero(steps, axis=1) == 1).all()
            assert (np.einsum("ij,ij->i", steps, np.roll(steps, 1, axis=0)) == 0).all()


def test_a_region_is_given_as_soon_as_it_is_complete() -> None:
    mask = mask_of("11.2", "...2", "...2", "22..")
    tracer = RegionTracer()
    seen = [[region.geometry.bounds for region in tracer.add(row[None])] for row in mask]
    seen.append([region.geometry.bounds for region in tracer.close()])
    assert seen == [[], [(0, 0, 2, 1)], [], [(3, 0, 4, 3)], [(0, 3, 2, 4)]]


def test_a_band_counts_even_if_its_result_is_not_looked_at() -> None:
    tracer = RegionTracer()
    tracer.add(np.ones((2, 3), np.uint8))
    tracer.add(np.ones((2, 3), np.uint8))
    assert [region.pixels for region in tracer.close()] == [12]


def test_regions_are_traced_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the regions of a wide band are never held together."""
    monkeypatch.setattr(module, "_PIXELS_AT_ONCE", 2 * 4)  # two rows
    band = mask_of("1.1.", "....", "2.2.", "....", "1.1.", "....")
    tracer = RegionTracer()
    with monkeypatch.context() as patch:
        patch.setattr(module, "polygons", traced := Mock(side_effect=module.polygons))
        regions = tracer.add(band)
        assert traced.call_count == 0
        assert next(regions).class_index == 1
        assert traced.call_count == 1
        assert [region.class_index for region in regions] == [1, 2, 2, 1, 1]
        assert traced.call_count == 3


def test_a_region_of_many_bands_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comb of 30 prongs with 2 holes a band: the work is that of its edges, once."""
    handled = []

    def counted(edges: module.Edges, tolerance: float) -> NDArray[np.object_]:
        handled.append(len(edges))
        return original(edges, tolerance)

    original = module.polygons
    monkeypatch.setattr(module, "polygons", counted)
    bands, prongs = 300, 30
    band = np.tile(mask_of("111.", "1.1.", "111."), (1, prongs))
    tracer = RegionTracer()
    early = [region for _ in range(bands) for region in tracer.add(band)]
    early += tracer.add(np.ones((1, 4 * prongs), np.uint8))
    (region,) = tracer.close()
    assert early == []
    assert len(region.geometry.interiors) == bands * prongs
    edges = sum(len(ring.coords) // 2 for ring in region.geometry.interiors)
    assert handled == [edges + len(region.geometry.exterior.coords) // 2]


def test_memory_is_that_of_the_open_regions() -> None:
    rng = np.random.default_rng(0)
    band = ndimage.zoom(rng.integers(0, 3, (20, 60), np.uint8), 10, order=0)
    band[-1] = 0

    def peak(bands: int) -> int:
        tracer = RegionTracer()
        tracemalloc.start()
        try:
            for _ in range(bands):
                for _ in tracer.add(band):
                    pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)
    assert peak(40) < 1.1 * peak(4)


@given(masks, st.integers(1, 20))
def test_specks_are_left_out(mask: Mask, least: int) -> None:
    kept = Counter(region.pixels for region in trace(mask, [5], RegionTracer(min_pixels=least)))
    every = Counter(region.pixels for region in trace(mask, [5]))
    assert kept == Counter({pixels: n for pixels, n in every.items() if pixels >= least})


@st.composite
def blobs(draw: st.DrawFn) -> Mask:
    """Smooth regions of several classes that touch, background and unread pixels among them."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=40))
    sigma = draw(st.sampled_from([0.7, 1.5, 4.0]))
    fields = [ndimage.gaussian_filter(rng.standard_normal(shape), sigma) for _ in range(4)]
    return np.array([1, 2, 0, 255], np.uint8)[np.argmax(fields, axis=0)]


@given(
    masks | blobs(),
    st.lists(st.integers(0, 24), max_size=3),
    st.sampled_from([0.3, 0.5, 0.71, 1.0, 1.5, 30.0]),
)
@example(mask_of("1122", "1322", "1144"), [1], 30.0)  # a pixel between two joints
@example(mask_of("2111", "2121", "2111"), [], 30.0)  # a pixel in a hole
@example(disc(10) + 1, [], 0.5)  # an arc that is closed, with many corners equally far
@example(np.tri(200, dtype=np.uint8) + 1, [100], 1.0)  # arcs that are split in the middle
def test_simplified_neighbours_share_their_edges(
    mask: Mask, cuts: list[int], tolerance: float
) -> None:
    assume(((mask != 0) & (mask != 255)).any())
    exact = np.array([region.geometry for region in trace(mask, [])], object)
    simple = np.array(
        [region.geometry for region in trace(mask, cuts, RegionTracer(tolerance))], object
    )
    assert len(simple) == len(exact)
    assert shapely.is_valid(simple).all()
    assert shapely.coverage_is_valid(simple), "neighbours overlap, or do not share their vertices"
    uncut = [region.geometry for region in trace(mask, [], RegionTracer(tolerance))]
    assert set(shapely.normalize(uncut)) == set(shapely.normalize(simple))
    # No gap: all of them together differ from the mask along its outer boundary alone.
    whole, parts = shapely.union_all(exact), shapely.union_all(simple)
    near = shapely.buffer(whole.boundary, min(tolerance, 1.42) + 1e-6)
    assert (whole ^ parts).difference(near).area == pytest.approx(0, abs=1e-9)
    # No outline is farther away than the tolerance.
    corners = shapely.points(shapely.get_coordinates(exact))
    edges = shapely.union_all(shapely.boundary(simple))
    assert (shapely.distance(corners, edges) <= tolerance + 1e-9).all()


def test_a_simplified_outline_has_few_vertices() -> None:
    mask = disc(40)
    mask[55:65, 55:65] = 2
    exact, simple = (trace(mask, [40, 80], RegionTracer(tolerance)) for tolerance in (0, 1.0))
    assert [region.pixels for region in simple] == [region.pixels for region in exact]
    count = [sum(shapely.get_num_coordinates(r.geometry) for r in some) for some in (exact, simple)]
    assert count[1] < count[0] / 3


def test_a_comb_is_split_in_a_few_rounds() -> None:
    """Vertex by vertex, which each tooth would ask for, its 10,000 teeth would take minutes."""
    comb = np.zeros((20, 20_000), np.uint8)
    comb[:10] = 1
    comb[:, ::2] = 1
    with patch("numpy.hypot", side_effect=np.hypot) as rounds:
        assert len(trace(comb, [], RegionTracer(0.5))) == 1
    assert 0 < rounds.call_count < 200


def test_neighbours_share_their_edges_in_the_file(tmp_path: Path) -> None:
    """Coordinates are rounded to hundredths of a pixel: the same ones on both sides."""
    rng = np.random.default_rng(0)
    fields = [ndimage.gaussian_filter(rng.standard_normal((200, 200)), 4) for _ in range(3)]
    mask = np.argmax(fields, axis=0).astype(np.uint8)
    frame = Frame(Size(200, 200), 2.0247, 1.9871, Mpp(0.5, 0.5))
    with GeoJsonWriter(
        path := tmp_path / "regions.geojson", ClassTable(("a", "b"), ((9, 0, 0), (0, 9, 0)))
    ) as writer:
        write_regions(writer, trace(mask, [100], RegionTracer(0.5)), frame)
    features = json.loads(path.read_text())["features"]
    outlines = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    assert len(outlines) > 20
    assert shapely.coverage_is_valid(outlines)


def test_regions_are_written_in_level_0_pixels(tmp_path: Path) -> None:
    path = tmp_path / "regions.geojson"
    mask = mask_of("1111.", "1..1.", "11112")
    classes = ClassTable(("gland", "stroma"), ((200, 0, 0), (0, 0, 200)))
    frame = Frame(Size(5, 3), 2.0, 4.0, Mpp(0.5, 0.5))
    with GeoJsonWriter(path, classes) as writer:
        assert write_regions(writer, trace(mask, [1, 2]), frame) == {1: 1, 2: 1}
    stroma, gland = sorted(read_geojson(path).annotations, key=lambda region: region.geometry.area)
    assert gland.geometry.equals(box(0, 0, 8, 12).difference(box(2, 4, 6, 8)))
    assert stroma.geometry.equals(box(8, 8, 10, 12))
    assert (gland.class_name, gland.colour) == ("gland", (200, 0, 0))
    assert (stroma.class_name, stroma.colour) == ("stroma", (0, 0, 200))
    features = json.loads(path.read_text())["features"]
    areas = {
        feature["properties"]["classification"]["name"]: feature["properties"]["measurements"]
        for feature in features
    }
    assert areas == {"gland": {"Area µm^2": 2.5}, "stroma": {"Area µm^2": 0.25}}
