"""The least certain fields are those of a count over the whole map, however its rows come."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.uncertain_fields import MOST, FieldRanking, UncertainField

MPP = Mpp(0.5, 0.5)


def ranked(
    values: np.ndarray, counts: np.ndarray, side: int, cuts: list[int], scale: float = 2.0
) -> tuple[UncertainField, ...]:
    """The fields of a map whose rows come in pieces."""
    size = Size(values.shape[1], values.shape[0])
    ranking = FieldRanking(size, side)
    for top, bottom in pairwise([0, *cuts, size.height]):
        ranking.add(values[top:bottom], counts[top:bottom])
    level0 = Size(round(size.width * scale), round(size.height * scale))
    return ranking.least_certain(Frame(size, scale, scale, MPP), level0)


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    side=st.integers(1, 12),
    share=st.sampled_from([0.3, 0.6, 1.0]),
    levels=st.sampled_from([2, 256]),  # few levels make many ties
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_fields_are_those_of_a_count(
    height: int, width: int, side: int, share: float, levels: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, (height, width)).astype(np.uint8)
    counts = rng.random((height, width)) < share
    cuts = sorted(data.draw(st.lists(st.integers(0, height), max_size=4)))
    expected = []
    for y in range(0, height, side):
        for x in range(0, width, side):
            here = np.s_[y : y + side, x : x + side]
            inside = values[here][counts[here]]
            if inside.any() and 2 * inside.size >= min(side, width) * min(side, height):
                mean = int(inside.sum(dtype=int)) / (255 * inside.size)
                across, down = min(side, width - x), min(side, height - y)
                expected.append((-mean, y, x, across, down))
    found = ranked(values, counts, side, cuts)
    assert len(found) == min(MOST, len(expected))
    for field, (mean, y, x, across, down) in zip(found, sorted(expected), strict=False):
        assert (field.x, field.y) == (2 * x, 2 * y)
        assert (field.width, field.height) == (2 * across, 2 * down)
        assert field.uncertainty == pytest.approx(-mean, abs=1e-6)
        assert 0 < field.uncertainty <= 1


def test_fields_of_a_resolution_that_does_not_divide_lie_side_by_side() -> None:
    values = np.full((10, 25), 99, np.uint8)
    found = ranked(values, np.ones_like(values, bool), 5, [], scale=1.7)
    for one in found:
        assert one.x + one.width in {0, *(other.x for other in found), round(25 * 1.7)}
    assert sum(one.width * one.height for one in found) == round(25 * 1.7) * round(10 * 1.7)
