"""Judges: what ranks have seen adds up to what one would have; heights of objects as counted."""

from __future__ import annotations

import json
import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.training.tasks import MOST_HEIGHT, Task, make_task, object_height

CLASSES = ClassTable(("gland", "stroma"), ((255, 0, 0), (0, 255, 0)))


def _tiles(task: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    pixels = () if task == "classify" else (4, 4)
    logits = torch.randn(count, 3 + (task == "objects"), *pixels, generator=dice)
    targets = torch.randint(0, 3, (count, *pixels), generator=dice)
    if task == "objects":
        targets = torch.stack([targets, torch.randint(-1, 5, targets.shape, generator=dice)], 1)
    return logits, targets


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segment", "classify", "objects"])
@given(owners=st.lists(st.integers(0, 2), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_ranks_together_see_what_one_sees(kind: str, owners: list[int], seed: int) -> None:
    task: Task = make_task(kind, CLASSES, 0.5)  # type: ignore[arg-type]  # one of the three
    logits, targets = _tiles(kind, len(owners), seed)
    alone, whole = task.judge(), task.judge()
    ranks = [task.judge() for _ in range(3)]
    for row, owner in enumerate(owners):
        ranks[owner].add(logits[row : row + 1], targets[row : row + 1])
    for rank in ranks:
        whole.merge(json.loads(json.dumps(rank.seen())))
    alone.add(logits, targets)
    assert whole.figures() == pytest.approx(alone.figures(), rel=1e-6, nan_ok=True)
    assert whole.score() == pytest.approx(alone.score(), rel=1e-6)


COLOURS = hnp.arrays(
    np.uint8,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.sampled_from([0, 1, 1, 2, 255]),
)


@given(COLOURS)
def test_a_height_is_the_distance_to_what_is_another_objects(colours: NDArray[np.uint8]) -> None:
    found = object_height(colours)
    outside = np.pad(colours, 40, constant_values=255)  # what lies beyond is unknown
    places = np.stack(np.nonzero(outside != 254), axis=-1)
    kinds = outside[tuple(places.T)]
    for at in np.ndindex(colours.shape):
        colour = colours[at]
        distance = np.hypot(*(places - 40 - at).T) - 0.5
        other, unknown = (distance[kinds == kind].min(initial=99.0) for kind in (0, 255))
        if colour not in (0, 255):
            others = (kinds != colour) & (kinds != 255)
            other = distance[others].min(initial=99.0)
        if colour == 0:
            expected = 0.0
        elif colour == 255 or min(other, MOST_HEIGHT) > unknown:
            expected = -1.0
        else:
            expected = min(other, MOST_HEIGHT)
        assert found[at] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_heights_that_are_no_numbers_score_least(wrong: float) -> None:
    task = make_task("objects", CLASSES, 0.5)
    targets = torch.tensor([1.0, 2.0])[None, :, None, None].expand(1, 2, 4, 4)
    scores = []
    for height in (2.0, 9.0, wrong):
        judge = task.judge()
        logits = torch.zeros(1, len(CLASSES) + 1, 4, 4)
        logits[:, 1], logits[:, -1] = 5.0, height
        judge.add(logits, targets)
        scores.append(judge.score())
    assert scores[0] > scores[1] > scores[2] == -math.inf


@pytest.mark.parametrize("kind", ["segment", "objects"])
def test_a_class_that_no_validation_tile_shows_is_not_scored(
    kind: Literal["segment", "objects"],
) -> None:
    """Its false positives take from the Dice of the classes that they are painted over."""
    task = make_task(kind, CLASSES, 0.5)
    truth = torch.zeros(1, 8, 8, dtype=torch.int64)
    truth[:, :4] = 1
    targets = torch.stack([truth, torch.ones_like(truth)], 1) if kind == "objects" else truth
    scores = []
    for strokes in (0, 1, 3):  # rows of background that are called stroma
        guess = truth.clone()
        guess[:, 8 - strokes :] = 2
        logits = torch.nn.functional.one_hot(guess, 3).movedim(-1, 1).float()
        if kind == "objects":
            logits = torch.cat([logits, torch.ones(1, 1, 8, 8)], 1)
        judge = task.judge()
        judge.add(logits, targets)
        figures = judge.figures()
        assert math.isnan(figures["val_dice_stroma"])
        assert math.isnan(figures["val_iou_stroma"])
        assert figures["val_dice_mean"] == figures["val_dice_gland"] == 1
        scores.append(judge.score())
    assert scores == [1, 1, 1]
