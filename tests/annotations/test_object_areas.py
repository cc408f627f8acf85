"""True objects that come in strips are those of the whole plane."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.ndimage import label

from pathoseg.annotations.object_areas import ObjectAreas, TrueObject

Plane = NDArray[np.uint8]


def _told(objects: list[TrueObject]) -> set[tuple[int, frozenset[tuple[int, int]]]]:
    """Class and pixels of each object."""
    told = set()
    for each in objects:
        box = each.mask.box
        assert each.mask.pixels.shape == (box.height, box.width)
        for axis in (0, 1):
            edges = each.mask.pixels.any(axis=1 - axis)
            assert edges[0]
            assert edges[-1], "the box is the smallest"
        rows, columns = np.nonzero(each.mask.pixels)
        pixels = zip((rows + box.y).tolist(), (columns + box.x).tolist(), strict=True)
        told.add((each.class_index, frozenset(pixels)))
    assert len(told) == len(objects)
    return told


def _expected(colours: Plane, classes: Plane) -> set[tuple[int, frozenset[tuple[int, int]]]]:
    expected = set()
    for colour in set(np.unique(colours).tolist()) - {0, 255}:
        areas, count = label(colours == colour, np.ones((3, 3)))
        for number in range(1, count + 1):
            rows, columns = np.nonzero(areas == number)
            pixels = frozenset(zip(rows.tolist(), columns.tolist(), strict=True))
            expected.add((int(classes[rows[0], columns[0]]), pixels))
    return expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_objects_of_strips_are_those_of_the_plane(
    seed: int, rows: int, colours: int, coarse: int
) -> None:
    """Areas of any form: spirals and forks that meet again below, and unknown pixels."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, colours + 1, (16, 12)).astype(np.uint8)
    small[generator.random(small.shape) < 0.1] = 255
    plane = np.kron(small, np.ones((coarse, coarse), np.uint8))
    classes = np.where(plane < 255, 1 + plane % 2, 0).astype(np.uint8)
    areas, found, settled = ObjectAreas(plane.shape[1]), list[TrueObject](), 0
    for top in range(0, len(plane), rows):
        new = areas.add(plane[top : top + rows], classes[top : top + rows])
        assert all(each.mask.box.y >= settled for each in new)
        assert areas.settled >= settled
        settled = areas.settled
        found += new
    last = areas.close()
    assert all(each.mask.box.y >= settled for each in last)
    assert _told([*found, *last]) == _expected(plane, classes)
