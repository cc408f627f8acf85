"""Rasterised regions against pixel centres, a supersampled reference, and their own traces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import shapely
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from rasterio.features import shapes

from pathoseg.annotations.annotation import IGNORE, Annotation, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

FILE = Path("slide.geojson")
TABLE = ClassTable(("tumour", "stroma", "necrosis"), ((1, 0, 0), (2, 0, 0), (3, 0, 0)))
SLIDE = Size(2000, 1600)
NATIVE = Mpp(0.25, 0.25)
MPPS = st.sampled_from([0.25, 0.5, 0.37, 1.0]) | st.floats(0.2, 2.0)


def _labels(*regions: tuple[shapely.Polygon, str | None], slide: Size = SLIDE) -> PolygonLabels:
    return PolygonLabels(FILE, [Annotation(area, name) for area, name in regions], slide)


def _whole(frame: Frame) -> Box:
    return Box(0, 0, frame.size.width, frame.size.height)


@st.composite
def blobs(draw: st.DrawFn) -> shapely.Polygon:
    """Star-shaped outlines about 700 px across, with a hole, somewhere on the slide."""
    count = draw(st.integers(5, 40))
    radii = np.array(draw(st.lists(st.floats(250, 400), min_size=count, max_size=count)))
    centre = np.array([draw(st.floats(500, 1500)), draw(st.floats(500, 1100))])
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    corners = np.column_stack([np.cos(angle), np.sin(angle)])
    return shapely.Polygon(
        centre + corners * radii[:, None], [centre + corners * draw(st.floats(20, 150))]
    )


def _covered(area: shapely.Polygon, frame: Frame, fine: int = 1) -> NDArray[np.bool_]:
    """Whether `area` holds each of `fine` × `fine` points, evenly spread, of every pixel."""
    x = (np.arange(frame.size.width * fine) + 0.5) * frame.scale_x / fine
    y = (np.arange(frame.size.height * fine) + 0.5) * frame.scale_y / fine
    shapely.prepare(area)
    inside: NDArray[np.bool_] = shapely.contains_xy(area, x[None, :], y[:, None])
    return inside


@pytest.mark.slow
@given(area=blobs(), mpp=MPPS)
@settings(max_examples=40)
def test_every_pixel_is_that_of_its_centre(area: shapely.Polygon, mpp: float) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    found = _labels((area, "stroma")).rasterise(_whole(frame), frame, TABLE) == 2
    wrong = np.argwhere(found != _covered(area, frame))
    centres = (wrong[:, ::-1] + 0.5) * [frame.scale_x, frame.scale_y]
    assert (shapely.distance(area.boundary, shapely.points(centres)) < 1e-6).all()


@pytest.mark.slow
@given(area=blobs(), mpp=st.sampled_from([0.5, 0.73, 1.0]))
@settings(max_examples=12)
def test_areas_are_those_of_a_supersampled_reference(area: shapely.Polygon, mpp: float) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    found = (_labels((area, "stroma")).rasterise(_whole(frame), frame, TABLE) == 2).sum()
    reference = _covered(area, frame, fine=4).sum() / 16
    assert found == pytest.approx(reference, rel=0.005)
    assert found * frame.scale_x * frame.scale_y == pytest.approx(area.area, rel=0.005)


MASKS = arrays(
    np.uint8, st.tuples(st.integers(1, 12), st.integers(1, 12)), elements=st.integers(0, 3)
)


@given(mask=MASKS, scale=st.floats(0.3, 9))
def test_a_traced_mask_is_rasterised_to_itself(mask: NDArray[np.uint8], scale: float) -> None:
    height, width = mask.shape
    slide = Size(int(np.ceil(width * scale)), int(np.ceil(height * scale)))
    frame = Frame(Size(width, height), scale, scale, Mpp(scale, scale))
    traced = [
        (shapely.transform(shapely.geometry.shape(shape), lambda xy: xy * scale), int(value))
        for shape, value in shapes(mask, mask=mask > 0)
    ]
    labels = _labels(*((area, TABLE.names[value - 1]) for area, value in traced), slide=slide)
    found = labels.rasterise(_whole(frame), frame, TABLE)
    np.testing.assert_array_equal(found, mask)


@pytest.mark.slow
@given(area=blobs(), mpp=MPPS)
@settings(max_examples=40)
def test_a_rasterised_region_is_traced_to_itself(area: shapely.Polygon, mpp: float) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    mask = _labels((area, "tumour")).rasterise(_whole(frame), frame, TABLE)
    parts = [shapely.geometry.shape(part) for part, value in shapes(mask) if value == 1]
    traced = shapely.transform(
        shapely.union_all(parts), lambda xy: xy * [frame.scale_x, frame.scale_y]
    )
    assert traced.area == pytest.approx((mask == 1).sum() * frame.scale_x * frame.scale_y)
    diagonal = np.hypot(frame.scale_x, frame.scale_y)
    # what differs lies within half a pixel's diagonal of the outline
    assert area.boundary.buffer(diagonal / 2 + 1e-6).covers(traced.symmetric_difference(area))


@given(area=blobs(), mpp=MPPS, tile=st.integers(37, 300), data=st.data())
def test_a_tile_is_a_piece_of_the_whole(
    area: shapely.Polygon, mpp: float, tile: int, data: st.DataObject
) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    labels = _labels((area, "tumour"), (shapely.box(700, 600, 720.3, 1400.7), "stroma"))
    whole = labels.rasterise(_whole(frame), frame, TABLE)
    x = data.draw(st.integers(-tile, frame.size.width))
    y = data.draw(st.integers(-tile, frame.size.height))
    found = labels.rasterise(Box(x, y, tile, tile), frame, TABLE)
    padded = np.pad(whole, tile, constant_values=IGNORE)
    np.testing.assert_array_equal(found, padded[y + tile :, x + tile :][:tile, :tile])


def test_threads_share_labels() -> None:
    frame = Frame.at(SLIDE, NATIVE, 0.5)
    blob = shapely.Point(900, 800).buffer(600)
    labels = _labels((blob, "tumour"), (shapely.box(700, 600, 720.3, 1400.7), "stroma"))
    boxes = [Box(x, y, 64, 64) for x in range(0, 1000, 64) for y in range(0, 800, 64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda box: labels.rasterise(box, frame, TABLE), boxes))
    for box, mask in zip(boxes, found, strict=True):
        np.testing.assert_array_equal(mask, labels.rasterise(box, frame, TABLE))


def test_outlines_on_centres_share_no_pixel_and_leave_none() -> None:
    frame = Frame.at(Size(8, 8), NATIVE, 0.25)
    halves = [
        (shapely.box(0, 0, 3.5, 3.5), "tumour"),
        (shapely.box(3.5, 0, 8, 3.5), "stroma"),
        (shapely.box(0, 3.5, 8, 8), "necrosis"),
    ]
    alone = [_labels(half).rasterise(_whole(frame), frame, TABLE) > 0 for half in halves]
    np.testing.assert_array_equal(sum(mask.astype(int) for mask in alone), 1)


def test_the_smaller_of_two_regions_shows() -> None:
    frame = Frame.at(Size(10, 10), NATIVE, 0.25)
    small, large = (shapely.box(2, 2, 4, 4), "tumour"), (shapely.box(0, 0, 10, 10), "stroma")
    for order in ([small, large], [large, small]):
        mask = _labels(*order, slide=Size(10, 10)).rasterise(_whole(frame), frame, TABLE)
        assert (mask == 1).sum() == 4
        assert (mask == 2).sum() == 96


def test_pixels_whose_centre_is_off_the_slide_are_ignored() -> None:
    slide = Size(9, 5)
    frame = Frame.at(slide, NATIVE, 1.0)  # 2.25 × 1.25 pixels
    everywhere = (shapely.box(-50, -50, 50, 50), "tumour")
    mask = _labels(everywhere, slide=slide).rasterise(Box(-1, -1, 5, 4), frame, TABLE)
    np.testing.assert_array_equal(
        mask,
        [
            [255, 255, 255, 255, 255],
            [255, 1, 1, 255, 255],
            [255, 255, 255, 255, 255],
            [255, 255, 255, 255, 255],
        ],
    )


def test_pixels_need_not_be_square() -> None:
    slide = Size(100, 100)
    frame = Frame.at(slide, Mpp(0.5, 0.25), 0.5)
    mask = _labels((shapely.box(10, 10, 20, 20), "tumour")).rasterise(_whole(frame), frame, TABLE)
    assert mask.shape == (50, 100)
    assert (mask[5:10, 10:20] == 1).all()
    assert (mask == 1).sum() == 50


def test_starred_classes_are_ignored_and_are_no_classes() -> None:
    frame = Frame.at(Size(10, 10), NATIVE, 0.25)
    labels = _labels((shapely.box(0, 0, 5, 5), "Ignore*"), (shapely.box(6, 6, 8, 8), "tumour"))
    mask = labels.rasterise(Box(0, 0, 10, 10), frame, TABLE)
    assert (mask == IGNORE).sum() == 25
    assert dict(labels.classes()) == {"tumour": None}


def test_unclassified_regions_count_only_where_nothing_is_classified() -> None:
    frame = Frame.at(Size(10, 10), NATIVE, 0.25)
    looked, found = shapely.box(0, 0, 9, 9), shapely.box(1, 1, 2, 2)
    mixed = _labels((looked, None), (found, "tumour"), slide=Size(10, 10))
    assert (mixed.rasterise(_whole(frame), frame, TABLE) > 0).sum() == 1
    assert list(_labels((looked, None), (found, None)).classes()) == ["annotation"]


BOXES = st.tuples(
    st.integers(-10, 30), st.integers(-10, 30), st.integers(1, 30), st.integers(1, 30)
)
ROI_NAMES = st.sampled_from(["Region*", "ROI", "region", "roi"])


@given(
    boxes=st.lists(st.tuples(BOXES, ROI_NAMES), max_size=3),
    outlines=st.lists(st.tuples(BOXES, st.sampled_from(["tumour", "Background", "fold*"]))),
    unlabelled=st.sampled_from(["background", "ignore"]),
)
def test_nothing_is_known_outside_the_regions_of_interest(
    boxes: list[tuple[tuple[int, ...], str]],
    outlines: list[tuple[tuple[int, ...], str]],
    unlabelled: Literal["background", "ignore"],
) -> None:
    """Against painted arrays: boxes nested, apart, beyond the slide, and outlines across them."""
    values = {"tumour": 1, "Background": 0, "fold*": IGNORE}
    expected = np.full((60, 60), IGNORE if unlabelled == "ignore" else 0, np.uint8)
    known = np.zeros((60, 60), bool) if boxes else np.ones((60, 60), bool)
    regions = []
    for (x, y, width, height), name in sorted(outlines, key=lambda one: -one[0][2] * one[0][3]):
        expected[y + 10 : y + 10 + height, x + 10 : x + 10 + width] = values[name]
        regions.append((shapely.box(x, y, x + width, y + height), name))
    for (x, y, width, height), name in boxes:
        known[y + 10 : y + 10 + height, x + 10 : x + 10 + width] = True
        regions.append((shapely.box(x, y, x + width, y + height), name))
    expected[~known] = IGNORE
    slide = Size(40, 30)
    annotations = [Annotation(area, name) for area, name in regions]
    labels = PolygonLabels(FILE, annotations, slide, AnnotationOptions(unlabelled=unlabelled))
    frame = Frame.at(slide, NATIVE, 0.25)
    found = labels.rasterise(_whole(frame), frame, TABLE)
    np.testing.assert_array_equal(found, expected[10:40, 10:50])
    assert set(labels.classes()) <= {"tumour"}


def test_a_model_that_knows_a_class_of_such_a_name_keeps_it() -> None:
    slide = Size(10, 10)
    frame = Frame.at(slide, NATIVE, 0.25)
    old = ClassTable(("ROI", "Background"), ((1, 0, 0), (2, 0, 0)))
    outlines = [
        Annotation(shapely.box(0, 0, 5, 5), "ROI"),
        Annotation(shapely.box(6, 6, 8, 8), "Background"),
    ]
    options = AnnotationOptions().for_classes(old.names)
    mask = PolygonLabels(FILE, outlines, slide, options).rasterise(_whole(frame), frame, old)
    assert np.bincount(mask.ravel()).tolist() == [71, 25, 4]


def test_no_regions_are_background() -> None:
    frame = Frame.at(Size(10, 10), NATIVE, 0.25)
    labels = _labels(slide=Size(10, 10))
    assert not labels.rasterise(_whole(frame), frame, TABLE).any()
    assert dict(labels.classes()) == {}


def test_the_first_colour_of_a_class_is_kept() -> None:
    square = shapely.box(0, 0, 1, 1)
    annotations = [
        Annotation(square, "tumour"),
        Annotation(square, "tumour", (9, 9, 9)),
        Annotation(square, "tumour", (8, 8, 8)),
    ]
    assert PolygonLabels(FILE, annotations, SLIDE).classes() == {"tumour": (9, 9, 9)}


def test_an_unknown_class_is_refused_even_where_the_tile_has_none_of_it() -> None:
    frame = Frame.at(SLIDE, NATIVE, 0.25)
    labels = _labels((shapely.box(900, 900, 950, 950), "fat"))
    with pytest.raises(PathosegError, match=r'slide\.geojson.*"fat"'):
        labels.rasterise(Box(0, 0, 8, 8), frame, TABLE)


@given(
    corners=st.lists(st.tuples(st.integers(-9, 20), st.integers(-9, 20)), min_size=3, max_size=6)
)
def test_a_region_that_only_touches_a_tile_paints_nothing_there(
    corners: list[tuple[int, int]],
) -> None:
    area = shapely.Polygon(corners)
    assume(area.is_valid and area.area > 0)
    frame = Frame.at(Size(40, 40), NATIVE, 0.25)
    right, bottom = int(area.bounds[2]), int(area.bounds[3])
    labels = _labels((area, "tumour"), slide=Size(40, 40))
    for box in (Box(right, 0, 5, 5), Box(0, bottom, 5, 5)):
        assert not (labels.rasterise(box, frame, TABLE) == 1).any()
