"""Traced regions are the connected regions of the whole mask, however it is cut into bands."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import shapely
from hypothesis import example, given
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

    def counted(edges: module.Edges) -> NDArray[np.object_]:
        handled.append(len(edges))
        return original(edges)

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


def test_a_simplified_outline_stays_near_the_true_one() -> None:
    y, x = np.mgrid[:120, :120]
    disc = (np.hypot(y - 60, x - 60) < 50).astype(np.uint8)
    disc[55:65, 55:65] = 0
    (exact,) = trace(disc, [40, 80])
    (simple,) = trace(disc, [40, 80], RegionTracer(simplify=1.0))
    assert simple.pixels == exact.pixels == exact.geometry.area
    assert len(shapely.get_coordinates(simple.geometry)) < 60
    assert len(simple.geometry.interiors) == 1
    assert 0 < shapely.hausdorff_distance(simple.geometry, exact.geometry) < 1.5
    assert shapely.is_valid(simple.geometry)


def test_an_outline_of_too_many_holes_keeps_its_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simplifying is quadratic in them: the noise of an untrained model would take hours."""
    rows, columns = np.mgrid[:60, :60]
    disc = (np.hypot(rows - 30, columns - 30) < 25).astype(np.uint8)
    ring = disc - (np.hypot(rows - 30, columns - 30) < 10)
    both = np.hstack([disc, ring])
    whole = trace(both, [])
    monkeypatch.setattr(module, "_MOST_SIMPLIFIED", 0)
    plain, holed = trace(both, [], RegionTracer(simplify=1.0))
    assert shapely.get_num_coordinates(plain.geometry) < shapely.get_num_coordinates(
        whole[0].geometry
    )
    assert holed.geometry.equals_exact(whole[1].geometry)


def test_regions_are_written_in_level_0_pixels(tmp_path: Path) -> None:
    path = tmp_path / "regions.geojson"
    mask = mask_of("1111.", "1..1.", "11112")
    classes = ClassTable(("gland", "stroma"), ((200, 0, 0), (0, 0, 200)))
    frame = Frame(Size(5, 3), 2.0, 4.0, Mpp(0.5, 0.5))
    with GeoJsonWriter(path, classes) as writer:
        assert write_regions(writer, trace(mask, [1, 2]), frame) == {1: 1, 2: 1}
    stroma, gland = sorted(read_geojson(path), key=lambda region: region.geometry.area)
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
