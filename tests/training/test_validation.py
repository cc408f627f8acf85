"""Validations: the tiles that a loss is the mean of, and the tile that is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig
from pathoseg.tiles.tiles import Tile
from pathoseg.training.tasks import make_task
from pathoseg.training.validation import Validation

CLASSES = ClassTable(("gland", "stroma"), ((255, 0, 0), (0, 255, 0)))


class _Tiles:
    """Tiles of one value each, whose image has their number."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self.class_pixels = np.array([[16 * (v == each) for each in range(3)] for v in values])
        self.slide = Path("slide.png")

    def __len__(self) -> int:
        return len(self._values)

    def read(self, number: int) -> Tile:
        image = np.full((4, 4, 3), number, np.uint8)
        return Tile(image, np.full((4, 4), self._values[number], np.uint8), 0)


class _Engine:
    """A model that is as sure of each class, or has no numbers."""

    round, reads = 1, (0,)

    def __init__(self, value: float = 0.0, pixels: tuple[int, ...] = ()) -> None:
        self._value, self._pixels = value, pixels

    def predict(self, sizes: Sequence[int], images: Mapping[int, Any]) -> dict[int, torch.Tensor]:
        return {at: torch.full((sizes[at], 3, *self._pixels), self._value) for at in images}

    def gather(self, text: str) -> list[str]:
        return [text]


def _verdict(kind: Any, tiles: Any, engine: Any) -> Any:
    validation = Validation([tiles], make_task(kind, CLASSES, 0.5), CLASSES, 4, 1)
    return validation.run(engine, build_loss(LossConfig(), kind, 3))


@pytest.mark.parametrize("unknown", [0, 1, 9])
def test_tiles_of_unknown_class_count_for_no_loss(unknown: int) -> None:
    verdict = _verdict("classify", _Tiles([1, 2, 1, *[IGNORE] * unknown]), _Engine())
    assert verdict.figures["val_loss"] == pytest.approx(math.log(3))


def test_without_a_known_tile_a_loss_is_nan() -> None:
    assert math.isnan(_verdict("classify", _Tiles([IGNORE]), _Engine()).figures["val_loss"])


def test_a_classifier_that_has_diverged_is_judged_least() -> None:
    verdict = _verdict("classify", _Tiles([1, 2]), _Engine(math.nan))
    assert verdict.score == -math.inf
    assert math.isnan(verdict.figures["val_auc_gland"])


def test_the_tile_that_is_shown_has_most_classes() -> None:
    tiles = _Tiles([0, 1, 1, 0, 1])
    for number, pixels in {1: (13, 3, 0), 2: (8, 8, 0), 3: (15, 0, 1), 4: (0, 16, 0)}.items():
        tiles.class_pixels[number] = pixels
    for shown, change in [(4, None), (1, (1, 13, 2)), (3, (1, 12, 3))]:
        if change:
            tiles.class_pixels[shown] = change
        verdict = _verdict("segment", tiles, _Engine(pixels=(4, 4)))
        assert verdict.picture[0, 0, 0] == shown
