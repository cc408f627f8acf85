"""The training loop with an engine that computes nothing: what it validates, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pathoseg.config import TrainConfig
from pathoseg.device import MEAN, STD
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import Bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.time_spent import TimeSpent
from pathoseg.training.checkpoint import LAST, Progress, read_progress, save_checkpoint
from pathoseg.training.trainer import Trainer
from pathoseg.training.validation import Verdict

CARD = Bundle(ModelConfig("unet", "segment", 2), ("disc",), ((9, 9, 9),), 0.5, 16, 0, MEAN, STD, 4)


class _Engine:
    leads, rows, round, reads = True, range(4), 1, (0,)

    def gather(self, text: str) -> list[str]:
        return [text]

    def state(self) -> dict[str, Any]:
        return {"model": {"weight": torch.zeros(1)}, "optimizer": {}, "scaler": {}}

    def load(self, state: dict[str, Any]) -> None:
        assert state["model"] == self.state()["model"]


class _Tiles:
    batch, steps_per_epoch = 4, 10

    def batches(self, *_: object) -> Iterator[Any]:
        pytest.fail("time is up")
        yield


class _Validation:
    columns = ()

    def __init__(self, tiles: int) -> None:
        self.tiles, self.runs = tiles, 0

    def run(self, *_: object) -> Verdict:
        self.runs += 1
        return Verdict({"val_loss": 1.0} if self.tiles else {}, 0.5, None)


@pytest.mark.parametrize("tiles", [0, 12])
def test_a_run_that_goes_on_when_its_time_is_up_has_a_model(tmp_path: Path, tiles: int) -> None:
    """A run that was killed after an epoch that `validate_every` leaves out."""
    last = tmp_path / "checkpoints" / LAST
    row = {"epoch": 2.0, "step": 20.0, "train_loss": 1.5, "tiles_per_s": 3.0}
    at = Progress(
        epoch=2, step=20, total_steps=99, seconds=41.0, validation_seconds=2.0, rows=[row]
    )
    save_checkpoint(last, at, _Engine().state())
    validation = _Validation(tiles)
    for _ in range(2):  # the second time nothing is left
        given: Any = _Engine(), CARD, None, _Tiles(), validation
        config = TrainConfig(time_limit=40.0, validate_every=5)
        loop = Trainer(tmp_path, config, *given, time.monotonic(), TimeSpent())
        assert loop.fit(Interruption("")).best_epoch == 2
    assert validation.runs == 1
    assert (tmp_path / "model" / "model.json").is_file()
    assert read_progress(last).rows == [row | ({"val_loss": 1.0} if tiles else {})]
