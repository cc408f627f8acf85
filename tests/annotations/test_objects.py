"""The object plane of outlines and of masks, against painted arrays and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from rasterio.features import shapes

from pathoseg.annotations.annotation import IGNORE, Annotation, ClassTable, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.reading import class_table, read_labels
from pathoseg.geometry import Box, Frame, Mpp, Size

FILE = Path("slide.geojson")
TABLE = ClassTable(("a", "b"), ((1, 0, 0), (2, 0, 0)))
SLIDE = Size(48, 48)
NATIVE = Mpp(0.25, 0.25)
HALF = Frame.at(SLIDE, NATIVE, 0.5)  # 2 × 2 px of the slide are one
APART = 3.0
Planes = tuple[NDArray[np.uint8], NDArray[np.uint8]]

BOXES = st.lists(
    st.tuples(
        *[st.integers(-3, 44)] * 2, *[st.integers(1, 14)] * 2, st.sampled_from(["a", "b", "fold*"])
    ),
    max_size=12,
)
RULES: list[Literal["majority", "centre"]] = ["majority", "centre"]


def _planes(labels: Labels, frame: Frame, classes: ClassTable = TABLE) -> Planes:
    box = Box(0, 0, frame.size.width, frame.size.height)
    mask = labels.rasterise(box, frame, classes)
    return mask, labels.objects(box, frame, classes, mask, APART)


def _connected(objects: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Number the connected areas of each colour, 0 for none, shape (height, width)."""
    found = np.zeros(objects.shape, np.int64)
    for colour in range(1, IGNORE):
        _, areas = cv2.connectedComponents((objects == colour).astype(np.uint8), connectivity=8)
        found[areas > 0] = areas[areas > 0] + found.max()
    return found


def _assert_painted(objects: NDArray[np.uint8], number: NDArray[np.int64]) -> None:
    """The plane has one colour for each number of an object, and areas hold no two of them."""
    inside = (objects > 0) & (objects < IGNORE)
    np.testing.assert_array_equal(inside, number > 0)
    pairs = np.unique(np.stack([number[inside], objects[inside]]), axis=1)
    assert len(set(pairs[0].tolist())) == pairs.shape[1], "an object has two colours"
    areas = np.unique(np.stack([_connected(objects)[inside], number[inside]]), axis=1)
    assert len(set(areas[0].tolist())) == areas.shape[1], "two objects in one connected area"


def _shown_most(painted: NDArray[np.int64], fits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The number that has most of each 2 × 2 block, the higher of equals.

    Args:
        painted: Numbers from 1, shape (48, 48).
        fits: Whether a number may have a block, shape (numbers, 24, 24).
    """
    blocks = painted.reshape(24, 2, 24, 2)
    counts = np.stack([(blocks == one).sum(axis=(1, 3)) for one in range(len(fits))]) * fits
    most = len(fits) - 1 - counts[::-1].argmax(axis=0)
    return np.where(counts.max(axis=0) > 0, most, 0)


@pytest.mark.parametrize("rule", RULES)
@given(boxes=BOXES, roi=st.booleans(), drawn_background=st.booleans())
@settings(max_examples=60)
def test_outlines_are_painted_as_an_array_of_their_numbers(
    rule: Literal["majority", "centre"],
    boxes: list[tuple[int, int, int, int, str]],
    roi: bool,
    drawn_background: bool,
) -> None:
    """Smaller ones on top, ignored and background ones as well; a pixel's class is as it was."""
    if drawn_background:
        boxes = [(x, y, w, h, "Background" if name == "b" else name) for x, y, w, h, name in boxes]
    regions = [(shapely.box(x, y, x + w, y + h), name) for x, y, w, h, name in boxes]
    annotations = [Annotation(area, name) for area, name in regions]
    if roi:
        annotations.append(Annotation(shapely.box(6, 6, 40, 30), "ROI"))
    labels = PolygonLabels(FILE, annotations, SLIDE, AnnotationOptions(labels=rule))
    mask, objects = _planes(labels, HALF)
    order = sorted(boxes, key=lambda box: -box[2] * box[3])
    painted = np.zeros((48, 48), np.int64)
    for number, (x, y, width, height, _) in enumerate(order, start=1):
        painted[max(0, y) : max(0, y + height), max(0, x) : max(0, x + width)] = number
    classes = np.array([-1, *({"a": 1, "b": 2}.get(box[4], -1) for box in order)])
    if rule == "majority":
        if roi:
            painted[:6], painted[30:], painted[:, :6], painted[:, 40:] = 0, 0, 0, 0
        expected = _shown_most(painted, mask == classes[:, None, None])
    else:
        expected = painted[1::2, 1::2]  # the centre is the corner of the lower right pixel
        expected = np.where(mask == classes[expected], expected, 0)
    _assert_painted(objects, expected)
    np.testing.assert_array_equal(objects == IGNORE, mask == IGNORE)
    np.testing.assert_array_equal(objects == 0, mask == 0)


def _numbers(boxes: list[tuple[int, int, int, int, str]]) -> NDArray[np.uint16]:
    numbers = np.zeros((48, 48), np.uint16)
    for number, (x, y, width, height, _) in enumerate(boxes, start=1):
        numbers[max(0, y) : max(0, y + height), max(0, x) : max(0, x + width)] = number * 5000
    return numbers


@pytest.mark.parametrize("rule", RULES)
@given(boxes=BOXES.filter(lambda boxes: len(boxes) > 4), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_masks_are_painted_as_an_array_of_their_numbers(
    tmp_path: Path,
    rule: Literal["majority", "centre"],
    boxes: list[tuple[int, int, int, int, str]],
    data: st.DataObject,
) -> None:
    """With classes beside them, and ignored numbers; a box of the plane is a piece of it."""
    numbers = _numbers(boxes)
    names = [box[4] for box in boxes]
    values = np.array([0, *({"a": 1, "b": 2, "fold*": IGNORE}[name] for name in names)], np.uint8)
    drawn = numbers.astype(np.int64) // 5000
    Image.fromarray(numbers).save(tmp_path / "s_mask.png")
    Image.fromarray(values[drawn]).save(tmp_path / "s_classes.tif")
    options = AnnotationOptions(mask="instances", mask_ignore=(25_000,), labels=rule)
    labels = MaskLabels(tmp_path / "s_mask.png", SLIDE, options)
    table = ClassTable(("class 1", "class 2"), ((1, 0, 0), (2, 0, 0)))
    mask, objects = _planes(labels, HALF, table)
    values[5] = IGNORE
    classes = np.where((values > 0) & (values < IGNORE), values, 250)
    if rule == "majority":
        fits = mask == classes[:, None, None]
        expected = _shown_most(drawn, fits)
        # Of equal areas, the higher colour has the pixel, which need not be the higher number.
        lower = len(fits) - 1 - _shown_most(np.where(drawn, len(fits) - drawn, 0), fits[::-1])
        tied = (expected > 0) & (lower + 1 != expected)
        np.testing.assert_array_equal((objects > 0) & (objects < IGNORE), expected > 0)
        _assert_painted(np.where(tied, np.uint8(0), objects), np.where(tied, 0, expected))
    else:
        expected = drawn[1::2, 1::2]
        expected = np.where(mask == classes[expected], expected, 0)
        _assert_painted(objects, expected)
    np.testing.assert_array_equal(objects == IGNORE, mask == IGNORE)
    np.testing.assert_array_equal(objects == 0, mask == 0)
    held = np.unique(drawn[drawn > 0])
    counts = [int((values[held] == value).sum()) for value in (1, 2)]
    assert labels.object_counts(table) == {
        name: count for name, count in zip(table.names, counts, strict=True) if count
    }
    box = Box(*(data.draw(st.integers(*limits)) for limits in [(0, 20)] * 2 + [(1, 4)] * 2))
    part = labels.objects(box, HALF, table, mask[box.within(Box(0, 0, 24, 24))].copy(), APART)
    np.testing.assert_array_equal(part, objects[box.within(Box(0, 0, 24, 24))])


@given(boxes=BOXES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_at_its_own_pixels_a_mask_and_its_traced_outlines_have_the_same_objects(
    tmp_path: Path, boxes: list[tuple[int, int, int, int, str]]
) -> None:
    numbers = _numbers(boxes)
    Image.fromarray(numbers).save(tmp_path / "s_mask.png")
    labels = MaskLabels(tmp_path / "s_mask.png", SLIDE, AnnotationOptions(mask="instances"))
    frame, table = Frame.at(SLIDE, NATIVE, 0.25), ClassTable(("class 1",), ((1, 0, 0),))
    mask, objects = _planes(labels, frame, table)
    _assert_painted(objects, numbers.astype(np.int64))
    traced = [
        Annotation(shapely.geometry.shape(area), "class 1")
        for area, value in shapes(numbers, connectivity=4)
        if value
    ]
    again = PolygonLabels(FILE, traced, SLIDE)
    same, outlines = _planes(again, frame, table)
    np.testing.assert_array_equal(same, mask)
    np.testing.assert_array_equal(outlines > 0, objects > 0)
    pieces = cv2.connectedComponents  # each traced piece is an object of its own
    counted = sum(
        pieces((numbers == value).astype(np.uint8), connectivity=4)[0] - 1
        for value in np.unique(numbers[numbers > 0])
    )
    assert _connected(outlines).max() == counted
    assert sum(again.object_counts(table).values()) == counted


def test_holes_are_no_object_and_what_lies_in_them_is_another() -> None:
    ring = shapely.box(4, 4, 40, 40) - shapely.box(10, 10, 34, 34)
    labels = PolygonLabels(
        FILE, [Annotation(ring, "a"), Annotation(shapely.box(16, 16, 28, 28), "a")], SLIDE
    )
    _, objects = _planes(labels, HALF)
    assert objects[10, 6] == 0
    assert 0 != objects[2, 2] != objects[10, 10] != 0
    assert (objects == objects[2, 2]).sum() == 18 * 18 - 12 * 12
    assert (objects == objects[10, 10]).sum() == 36


def test_outlines_without_a_class_are_objects_where_nothing_has_a_class() -> None:
    plain = [Annotation(shapely.box(x, 4, x + 8, 12), None) for x in (4, 12, 30)]
    labels = PolygonLabels(FILE, plain, SLIDE)
    table = class_table([labels], None)
    assert table.names == ("annotation",)
    _, objects = _planes(labels, HALF, table)
    assert _connected(objects).max() == 3
    assert labels.object_counts(table) == {"annotation": 3}
    beside = PolygonLabels(FILE, [*plain, Annotation(shapely.box(4, 30, 12, 40), "a")], SLIDE)
    _, objects = _planes(beside, HALF)
    assert _connected(objects).max() == 1
    assert beside.object_counts(TABLE) == {"a": 1}


@pytest.mark.slow
def test_real_nuclei_keep_their_number(shared_data: Path) -> None:
    """MoNuSeg: as many connected areas as numbers in the file, and few colours."""
    files = sorted((shared_data / "monuseg-train" / "instances").glob("*.png"))
    if not files:
        pytest.skip("no monuseg-train/instances among the real data")
    for path in files[:3]:
        with Image.open(path) as image:
            size, values = Size(*image.size), len(np.unique(np.asarray(image))) - 1
        labels = MaskLabels(path, size, AnnotationOptions(mask="instances"))
        table = class_table([labels], None)
        mask, objects = _planes(labels, Frame.at(size, NATIVE, 0.25), table)
        assert labels.object_counts(table) == {"class 1": values}
        assert _connected(objects).max() == values
        assert set(np.unique(objects)) <= set(range(12))
        np.testing.assert_array_equal(objects > 0, mask > 0)


@pytest.mark.slow
def test_real_outlines_are_objects(shared_data: Path) -> None:
    path = shared_data / "monuseg-train" / "annotations_xml" / "TCGA-B0-5710-01Z-00-DX1.xml"
    if not path.is_file():
        pytest.skip("no monuseg-train/annotations_xml among the real data")
    size = Size(1000, 1000)
    labels = read_labels(path, size, (0, 0), AnnotationOptions())
    table = class_table([labels], None)
    mask, objects = _planes(labels, Frame.at(size, NATIVE, 0.25), table)
    count = sum(labels.object_counts(table).values())
    assert abs(_connected(objects).max() - count) < 0.03 * count
    assert set(np.unique(objects)) <= set(range(12))
    np.testing.assert_array_equal(objects > 0, mask > 0)
