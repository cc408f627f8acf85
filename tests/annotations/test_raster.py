"""Rasterised regions against areas cut by GEOS, painted arrays, and their own traces."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import shapely
import shapely.affinity
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from rasterio.features import shapes

from pathoseg.annotations.annotation import IGNORE, Annotation, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.edges import Edges, Geometries
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


def _areas(area: shapely.Geometry, frame: Frame, box: Box) -> NDArray[np.float64]:
    """Return the share of each pixel of a box that an area covers, shape (height, width)."""
    x, y = np.meshgrid(np.arange(box.x, box.right), np.arange(box.y, box.bottom))
    pixels = shapely.box(
        x * frame.scale_x, y * frame.scale_y, (x + 1) * frame.scale_x, (y + 1) * frame.scale_y
    )
    covered: NDArray[np.float64] = shapely.area(shapely.intersection(pixels, area))
    return covered / (frame.scale_x * frame.scale_y)


@pytest.mark.slow
@given(areas=st.lists(blobs(), min_size=1, max_size=4), mpp=st.sampled_from([8.0, 13.7]))
@settings(max_examples=25)
def test_a_pixel_has_the_class_that_covers_most_of_it(
    areas: list[shapely.Polygon], mpp: float
) -> None:
    """Against areas cut by GEOS: blobs with holes, in several classes, over and in each other."""
    frame = Frame.at(SLIDE, NATIVE, mpp)
    names = [*TABLE.names, "fold*"][: len(areas)]
    found = _labels(*zip(areas, names, strict=True)).rasterise(_whole(frame), frame, TABLE)
    left = shapely.box(0, 0, SLIDE.width, SLIDE.height)
    on_slide, shares = _areas(left, frame, _whole(frame)), dict[int, NDArray[np.float64]]()
    painted = sorted(zip(areas, names, strict=True), key=lambda one: -one[0].area)
    for area, name in reversed(painted):
        value = IGNORE if name == "fold*" else TABLE.index(name)
        shares[value] = _areas(shapely.intersection(area, left), frame, _whole(frame))
        left = shapely.difference(left, area)
    shares[0] = on_slide - sum(shares.values())
    most = np.max(list(shares.values()), axis=0)
    taken = np.select([found == value for value in shares], list(shares.values()))
    assert ((taken >= most - 0.02) | (on_slide < 0.6)).all()


@pytest.mark.slow
@given(area=blobs(), mpp=MPPS)
@settings(max_examples=20)
def test_by_centres_a_pixel_is_that_of_its_centre(area: shapely.Polygon, mpp: float) -> None:
    frame, options = Frame.at(SLIDE, NATIVE, mpp), AnnotationOptions(labels="centre")
    labels = PolygonLabels(FILE, [Annotation(area, "stroma")], SLIDE, options)
    x = (np.arange(frame.size.width) + 0.5) * frame.scale_x
    y = (np.arange(frame.size.height) + 0.5) * frame.scale_y
    shapely.prepare(area)
    inside = shapely.contains_xy(area, x[None, :], y[:, None])
    wrong = np.argwhere((labels.rasterise(_whole(frame), frame, TABLE) == 2) != inside)
    centres = (wrong[:, ::-1] + 0.5) * [frame.scale_x, frame.scale_y]
    assert (shapely.distance(area.boundary, shapely.points(centres)) < 1e-6).all()


@pytest.mark.slow
@given(area=blobs(), mpp=st.sampled_from([0.5, 0.73, 1.0]))
@settings(max_examples=12)
def test_areas_are_those_of_the_outlines(area: shapely.Polygon, mpp: float) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    found = (_labels((area, "stroma")).rasterise(_whole(frame), frame, TABLE) == 2).sum()
    assert found * frame.scale_x * frame.scale_y == pytest.approx(area.area, rel=0.005)


@given(
    boxes=st.lists(
        st.tuples(*[st.integers(-3, 20)] * 2, *[st.integers(1, 15)] * 2, st.sampled_from("abcb*")),
        max_size=7,
    ),
    roi=st.booleans(),
)
def test_of_equal_areas_the_outline_painted_last_has_the_pixel(
    boxes: list[tuple[int, int, int, int, str]], roi: bool
) -> None:
    """Boxes on the slide's pixels, seen at twice their size: areas are halves and quarters."""
    table = ClassTable(("a", "b", "c"), ((1, 0, 0), (2, 0, 0), (3, 0, 0)))
    order = sorted(boxes, key=lambda box: -box[2] * box[3])
    painted = np.full((24, 24), -1)  # which box shows, -1 for none
    for number, (x, y, width, height, _) in enumerate(order):
        painted[max(0, y) : max(0, y + height), max(0, x) : max(0, x + width)] = number
    value = np.array([*(IGNORE if box[4] == "*" else " abc".index(box[4]) for box in order), 0])
    known = np.ones((24, 24), bool)
    regions = [(shapely.box(x, y, x + w, y + h), f"{name}") for x, y, w, h, name in boxes]
    if roi:
        known[:] = False
        known[3:17, 5:16] = True
        regions.append((shapely.box(5, 3, 16, 17), "ROI"))
    labels = _labels(*regions, slide=Size(24, 24))
    found = labels.rasterise(Box(0, 0, 12, 12), Frame.at(Size(24, 24), NATIVE, 0.5), table)
    np.testing.assert_array_equal(found, _at_half_size(np.where(known, painted, -2), value))


def _at_half_size(shown: NDArray[np.int64], value: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The class of each 2 × 2 block that has most of it; of equals, the one that is painted last.

    Args:
        shown: Which outline shows, in the order of painting; -1 for none, -2 outside the region of
            interest.
        value: Of each outline, its class; last that of none.
    """
    height, width = shown.shape
    found = np.empty((height // 2, width // 2), np.uint8)
    for row, column in np.ndindex(found.shape):
        # class -> how many quarters it covers, and its last outline
        quarters: dict[int, list[int]] = {}
        for one in shown[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].ravel().tolist():
            key = IGNORE if one == -2 else int(value[one])
            quarters.setdefault(key, []).append(one)
        found[row, column] = max(quarters, key=lambda key: (len(quarters[key]), max(quarters[key])))
    return found


@given(
    layers=st.lists(
        st.tuples(arrays(np.bool_, (12, 14)), st.sampled_from(["a", "b", "c", "fold*", "ROI"])),
        max_size=4,
    ),
    long=st.integers(1, 9),
    most=st.integers(1, 100),
    data=st.data(),
)
def test_outlines_that_are_cut_into_lines_are_painted_the_same(
    layers: list[tuple[NDArray[np.bool_], str]], long: int, most: int, data: st.DataObject
) -> None:
    """Multi-polygons of many parts with holes, which touch at corners, one over the other."""
    slide, table = Size(14, 12), ClassTable(("a", "b", "c"), ((1, 0, 0), (2, 0, 0), (3, 0, 0)))
    layers = [(cells, name) for cells, name in layers if cells.any()]
    regions = []
    for cells, name in layers:
        rows, columns = np.nonzero(cells)
        regions.append((shapely.union_all(shapely.box(columns, rows, columns + 1, rows + 1)), name))
    drawn = sorted((one for one in layers if one[1] != "ROI"), key=lambda one: -one[0].sum())
    of_interest = [cells for cells, name in layers if name == "ROI"]
    shown = np.full((12, 14), -1)
    for number, (cells, _) in enumerate(drawn):
        shown[cells] = number
    if of_interest:
        shown[~np.any(of_interest, axis=0)] = -2
    value = [IGNORE if name == "fold*" else table.index(name) for _, name in drawn]
    expected = _at_half_size(shown, np.array([*value, 0]))

    frame = Frame.at(slide, NATIVE, 0.5)
    whole = _whole(frame)
    plane = _labels(*regions, slide=slide).objects(whole, frame, table, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathoseg.annotations.raster._LONG", long)
        patch.setattr("pathoseg.annotations.raster._MOST_CORNERS", most)
        labels = _labels(*regions, slide=slide)
        np.testing.assert_array_equal(labels.rasterise(whole, frame, table), expected)
        np.testing.assert_array_equal(labels.objects(whole, frame, table, expected), plane)
        box = Box(*(data.draw(st.integers(*limits)) for limits in [(0, 6), (0, 5), (1, 7), (1, 6)]))
        if part := box.intersection(whole):
            found = labels.rasterise(part, frame, table)
            np.testing.assert_array_equal(found, expected[part.within(whole)])


def _discs(count: int, corners: int) -> NDArray[np.object_]:
    """Polygons in `count` rows and columns, 100 px apart."""
    angle = np.linspace(0, 2 * np.pi, corners)
    rows, columns = np.mgrid[0:count, 0:count].reshape(2, -1, 1) * 100 + 50
    rings = np.stack([columns + 40 * np.cos(angle), rows + 40 * np.sin(angle)], axis=2)
    return np.array(shapely.polygons(rings), dtype=object)


def _islands() -> shapely.Geometry:
    return shapely.MultiPolygon(list(_discs(40, 30)))


def _with_holes() -> shapely.Geometry:
    return shapely.Polygon(
        shapely.box(0, 0, 4000, 4000).exterior, [disc.exterior for disc in _discs(40, 30)]
    )


def _winding() -> shapely.Geometry:
    """One outline without holes, that goes to and fro from the top to the bottom."""
    x = np.arange(100, 3900, 5.0)
    y = np.arange(20, 4000, 60.0)
    across = np.where(np.arange(len(y))[:, None] % 2, x[::-1], x)
    middle = shapely.LineString(np.stack([across.ravel(), y.repeat(len(x))], axis=1))
    return middle.buffer(10, cap_style="flat", join_style="bevel")


@pytest.fixture
def corners(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of corners whose edges are looked for, each time that any are."""
    found, edges_of = list[int](), Edges.of

    def counted_edges_of(lines: Geometries, *rest: Any) -> Edges:
        found.append(int(shapely.get_num_coordinates(lines).sum()))
        return edges_of(lines, *rest)

    monkeypatch.setattr(Edges, "of", counted_edges_of)
    return found


@pytest.mark.parametrize("drawn", [_islands, _with_holes, _winding])
def test_a_box_takes_those_corners_of_a_large_region_that_are_near_it(
    drawn: Callable[[], shapely.Geometry], corners: list[int]
) -> None:
    """Work for one box of a slide-wide region: one of many parts, of many holes, of one line."""
    area, slide = shapely.segmentize(drawn(), 5), Size(4000, 4000)
    labels, frame = _labels((area, "tumour"), slide=slide), Frame.at(slide, NATIVE, 0.25)
    for x, y in ((0, 0), (1930, 2050), (3936, 3936)):
        labels.rasterise(Box(x, y, 64, 64), frame, TABLE)
    assert shapely.get_num_coordinates(area) > 50_000
    assert max(corners) < 5_000


def test_not_each_region_across_a_large_one_is_looked_for_in_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work for the intersections of one multi-polygon with 400 squares across its parts."""
    area, slide = shapely.segmentize(_islands(), 5), Size(4000, 4000)
    left, top = np.mgrid[50:4000:200, 50:4000:200].reshape(2, -1)
    squares = shapely.box(left, top, left + 60, top + 60)
    labels = _labels((area, "tumour"), *((square, "stroma") for square in squares), slide=slide)
    clipped, clip_by_rect = list[int](), shapely.clip_by_rect

    def counted(geometry: shapely.Geometry, *sides: float) -> shapely.Geometry:
        clipped.append(int(shapely.get_num_coordinates(geometry)))
        return clip_by_rect(geometry, *sides)

    monkeypatch.setattr(shapely, "clip_by_rect", counted)
    found = labels.rasterise(Box(0, 0, 200, 200), Frame.at(slide, NATIVE, 0.25), TABLE)
    assert (found == 2).sum() == 60 * 60
    assert found[50, 30] == 1
    assert sum(clipped) < 20 * shapely.get_num_coordinates(area)


def test_a_box_is_not_halved_where_both_halves_have_all_corners(
    corners: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stripes from top to bottom, of more corners than are painted at once."""
    slide = Size(400, 300)
    stripes = shapely.MultiPolygon([shapely.box(x, 0, x + 5, 300) for x in range(0, 400, 10)])
    labels, frame = _labels((stripes, "tumour"), slide=slide), Frame.at(slide, NATIVE, 0.25)
    whole = labels.rasterise(_whole(frame), frame, TABLE)
    monkeypatch.setattr("pathoseg.annotations.raster._MOST_CORNERS", 100)
    np.testing.assert_array_equal(labels.rasterise(_whole(frame), frame, TABLE), whole)
    assert len(corners) == 2


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


@given(area=blobs(), mpp=MPPS, tile=st.integers(37, 300), roi=st.booleans(), data=st.data())
def test_a_tile_is_a_piece_of_the_whole(
    area: shapely.Polygon, mpp: float, tile: int, roi: bool, data: st.DataObject
) -> None:
    frame = Frame.at(SLIDE, NATIVE, mpp)
    regions = [(area, "tumour"), (shapely.box(700, 600, 720.3, 1400.7), "stroma")]
    if roi:
        regions.append((shapely.affinity.rotate(shapely.box(500, 300, 1500, 1200), 20), "ROI"))
    labels = _labels(*regions)
    whole = labels.rasterise(_whole(frame), frame, TABLE)
    x = data.draw(st.integers(-tile, frame.size.width))
    y = data.draw(st.integers(-tile, frame.size.height))
    with pytest.MonkeyPatch.context() as patch:  # several parts
        patch.setattr("pathoseg.annotations.coverage._MOST_SUMS", 1 << 16)
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
    frame, options = Frame.at(Size(8, 8), NATIVE, 0.25), AnnotationOptions(labels="centre")
    halves = [
        Annotation(shapely.box(0, 0, 3.5, 3.5), "tumour"),
        Annotation(shapely.box(3.5, 0, 8, 3.5), "stroma"),
        Annotation(shapely.box(0, 3.5, 8, 8), "necrosis"),
    ]
    alone = [
        PolygonLabels(FILE, [half], SLIDE, options).rasterise(_whole(frame), frame, TABLE) > 0
        for half in halves
    ]
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


@pytest.mark.parametrize("angle", [10, 20, 40])
def test_an_outline_holds_what_was_clipped_to_it(angle: float) -> None:
    """Tissue without a class around a tumour whose corners lie beside its edges by rounding."""
    tissue = shapely.affinity.rotate(shapely.box(40, 40, 160, 120), angle)
    tumour = shapely.intersection(tissue, shapely.box(10, 20.3, 100, 180))
    assert not tissue.contains(tumour)
    frame = Frame.at(Size(200, 160), NATIVE, 0.25)
    labels = _labels((tissue, None), (tumour, "tumour"), slide=frame.size)
    found = labels.rasterise(_whole(frame), frame, TABLE)
    assert set(np.unique(found)) == {0, 1}
    assert labels.report.passed_over == {"outlines without a class that hold others": 1}


@pytest.mark.parametrize(("outside", "is_held"), [(0.5, True), (2, False)])
def test_an_outline_holds_what_lies_in_it_by_99_percent(outside: float, is_held: bool) -> None:
    """A tumour of which some percent lie beside an outline without a class."""
    around = (shapely.box(outside, 0, 150, 150), None)
    report = _labels(around, (shapely.box(0, 10, 100, 20), "tumour")).report
    assert report.unclassified == (not is_held)


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


@given(area=blobs(), most=st.integers(4, 400))
@settings(max_examples=10)
def test_outlines_in_bounded_memory_are_the_same(area: shapely.Polygon, most: int) -> None:
    frame = Frame.at(SLIDE, NATIVE, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathoseg.annotations.raster._LONG", 3)
        labels = _labels((area, "tumour"), (shapely.box(700, 600, 720.3, 1400.7), "stroma"))
        whole = labels.rasterise(_whole(frame), frame, TABLE)
        patch.setattr("pathoseg.annotations.raster._MOST_CORNERS", most)
        np.testing.assert_array_equal(labels.rasterise(_whole(frame), frame, TABLE), whole)
