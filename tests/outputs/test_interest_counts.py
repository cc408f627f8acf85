"""Figures of regions of interest equal a plain count, whatever the bands."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.regions_of_interest import RegionOfInterest
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.outputs import interest_counts
from pathoseg.outputs.interest_counts import InterestCounts

CLASSES = ClassTable(("gland", "stroma"), ((200, 0, 0), (0, 0, 200)))
FRAME = Frame.at(Size(80, 120), Mpp(0.25, 0.25), 0.5)
BOXES = st.builds(Box, *(st.integers(*each) for each in ((0, 19), (0, 29), (1, 21), (1, 31))))


@given(st.lists(BOXES, max_size=3), st.integers(0, 9), st.lists(st.integers(1, 59), max_size=4))
def test_figures_are_a_plain_count(boxes: list[Box], seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.choice(np.array([0, 1, 2, 255], np.uint8), (60, 40))
    centroids, kinds = rng.uniform(0, (80, 120), (200, 2)), rng.integers(1, 3, 200)
    regions = [
        RegionOfInterest(str(box), shapely.box(*(2 * edge for edge in _edges(box))))
        for box in boxes
    ]
    counts = InterestCounts(regions, FRAME, CLASSES, with_objects=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interest_counts, "_STRIP", 7)
        for band in np.split(mask, sorted(cuts)):
            counts.add_band(band)
    for part in np.split(np.arange(200), [50, 50, 120]):
        counts.add_objects(centroids[part], kinds[part])
    found = counts.summaries()
    assert [one.name for one in found] == [str(box) for box in boxes]
    for one, box in zip(found, boxes, strict=True):
        left, top, right, bottom = _edges(box)
        inside = mask[top:bottom, left:right]
        whole = (right - left) * (bottom - top) * 0.25e-6
        assert one.area_mm2 == pytest.approx(whole)
        assert one.unread_pixels == (inside == 255).sum()
        x, y = centroids.T / 2
        lies = (left <= x) & (x <= right) & (top <= y) & (y <= bottom)
        objects = Counter(kinds[lies].tolist())
        for index, of in enumerate(one.classes, start=1):
            assert of.pixels == (inside == index).sum()
            assert of.share_of_tissue == pytest.approx(of.pixels * 0.25e-6 / whole)
            assert (of.regions, of.objects) == (None, objects[index])
            read = (inside != 255).sum() * 0.25e-6
            density = objects[index] / read if read else 0.0
            assert of.objects_per_mm2 == pytest.approx(density)


def _edges(box: Box) -> tuple[int, int, int, int]:
    return box.x, box.y, box.right, box.bottom
