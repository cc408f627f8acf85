"""Judges: what several ranks have seen adds up to what one would have seen."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import ClassTable
from pathoseg.training.tasks import Task, make_task

CLASSES = ClassTable(("gland", "stroma"), ((255, 0, 0), (0, 255, 0)))


def _tiles(task: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    pixels = () if task == "classify" else (4, 4)
    logits = torch.randn(count, 3, *pixels, generator=dice)
    return logits, torch.randint(0, 3, (count, *pixels), generator=dice)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segment", "classify"])
@given(owners=st.lists(st.integers(0, 2), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_ranks_together_see_what_one_sees(kind: str, owners: list[int], seed: int) -> None:
    task: Task = make_task(kind, CLASSES, 0.5)  # type: ignore[arg-type]  # one of the two
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
