"""Boundary F1 against a search through all pairs of pixels, in bands of any height."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from pathoseg.models.boundary_f1 import BoundaryCounts, boundary_f1
from pathoseg.models.losses import IGNORE

CLASSES = 3
Mask = NDArray[np.uint8]


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, Mask]:
    """A prediction and a target made of blocks, so that there is more than boundary."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    block = draw(st.integers(1, 4))
    labels, target_labels = st.integers(0, 2), st.integers(0, 2) | st.just(IGNORE)
    pair = [
        np.kron(
            draw(npst.arrays(np.uint8, (rows, columns), elements=elements)),
            np.ones((block, block), np.uint8),
        )
        for elements in (labels, target_labels)
    ]
    shift = draw(st.integers(0, 2))
    return np.roll(pair[0], shift, 1), pair[1]


def _brute_force(prediction: Mask, target: Mask, tolerance: float) -> list[list[int]]:
    height, width = target.shape
    places = list(product(range(height), range(width)))
    unknown = [place for place in places if target[place] == IGNORE]

    def near(place: tuple[int, int], others: list[tuple[int, int]]) -> bool:
        return any(math.dist(place, other) <= tolerance for other in others)

    def boundary(labels: Mask, index: int) -> list[tuple[int, int]]:
        found = []
        for y, x in places:
            around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            known = [each for each in around if each in places and target[each] != IGNORE]
            is_known = target[y, x] != IGNORE
            if is_known and labels[y, x] == index and any(labels[e] != index for e in known):
                found.append((y, x))
        return found

    counts = []
    for index in range(1, CLASSES):
        predicted, true = boundary(prediction, index), boundary(target, index)
        row = []
        for own, other in ((predicted, true), (true, predicted)):
            counted = [place for place in own if not near(place, unknown)]
            row += [len(counted), sum(near(place, other) for place in counted)]
        counts.append(row)
    return counts


@pytest.mark.parametrize("least_rows", [1, 64])
@pytest.mark.parametrize("widest_disc", [0, 16])  # below it discs, above it distances
@given(
    pair=masks(),
    tolerance=st.sampled_from([0.5, 1.0, 1.5, 2.0, math.sqrt(5), 3.0, 4.2]),
    cuts=st.lists(st.integers(0, 28), max_size=6),
)
def test_bands_of_any_height_count_as_all_pairs_do(
    least_rows: int,
    widest_disc: int,
    pair: tuple[Mask, Mask],
    tolerance: float,
    cuts: list[int],
) -> None:
    prediction, target = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathoseg.models.boundary_f1._LEAST_ROWS", least_rows)
        patch.setattr("pathoseg.models.boundary_f1._WIDEST_DISC", widest_disc)
        seen = BoundaryCounts(CLASSES, tolerance)
        for own, truth in zip(
            np.split(prediction, sorted(cuts)), np.split(target, sorted(cuts)), strict=True
        ):
            seen.add(own, truth)
        seen.close()
    assert seen.counts.tolist() == _brute_force(prediction, target, tolerance)


def test_rows_held_depend_on_the_tolerance_alone() -> None:
    seen = BoundaryCounts(2, 3.0)
    band = np.zeros((10, 8), np.uint8)
    for _ in range(200):
        seen.add(band, band)
        assert len(seen._target) <= 2 * (3 + 1) + 64 + len(band)


def test_the_score_is_the_harmonic_mean() -> None:
    counts = np.array([[[10, 5, 8, 8], [0, 0, 4, 0], [0, 0, 0, 0]]])
    score = boundary_f1(counts)
    assert score.shape == (1, 3)
    assert score[0, 0] == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert score[0, 1] == 0
    assert math.isnan(score[0, 2])
