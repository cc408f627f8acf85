"""A step on one device that is given up or skipped: its state is as before, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import TrainConfig
from pathoseg.device import MEAN, STD
from pathoseg.giving_up import GivenUpError, asking, never
from pathoseg.models.bundle import Bundle
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig, ModelConfig
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.rng import WholeModel
from pathoseg.tiles.dataset import Batch
from pathoseg.training.engine import Loss
from pathoseg.training.one_device import OneDevice
from pathoseg.training.tasks import make_task

_CPU = torch.device("cpu")


class _Dropping(nn.Module):
    """A U-Net with batch norm, dropout, and an output that is no tensor on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.body, self.drop = UNet(2, width=4, depth=1), nn.Dropout(0.3)
        self.up = nn.MaxUnpool2d(2)
        self.lift = nn.Conv2d(3, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small, where = self.pool(self.lift(images))
        seen = self.drop(torch.cat([small, small[:, :1]], 1))
        made: torch.Tensor = self.up(self.body(seen), where)
        return made


class _Signal:
    """Answers True from its n-th question on; 0 is never.

    Attributes:
        look: Called where that is the answer.
    """

    def __init__(self) -> None:
        self.when = self.questions = 0
        self.look: Callable[[], None] = lambda: None

    def __call__(self) -> bool:
        self.questions += 1
        if self.questions == self.when:
            self.look()
        return 0 < self.when <= self.questions


def _engine(signal: _Signal | None, loss: Loss | None = None) -> OneDevice:
    torch.manual_seed(0)
    model, classes = _Dropping(), ClassTable(("disc",), ((255, 0, 0),))
    traced = Traced(model, torch.empty(2, 3, 16, 16, device="meta"))
    card = Bundle(
        ModelConfig("unet", "segment", 2), classes.names, classes.colours, 0.5, 16, 0, MEAN, STD, 4
    )
    return OneDevice(
        model,
        WholeModel(model, traced, 0, _CPU).forward,
        loss or build_loss(LossConfig(), "segment"),
        make_task("segment", classes, 0.5),
        card,
        TrainConfig(batch=4, microbatch=2),
        signal or never,
    )


def _batch(number: int) -> Batch:
    rng = np.random.default_rng(number)
    images = rng.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    return Batch(images, rng.integers(0, 2, (4, 16, 16), dtype=np.uint8), ())


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
def test_given_up_at_every_question_in_turn_a_step_ends_as_the_undisturbed_one() -> None:
    """Test that `begun` has the state ahead of it all the time, until the step is committed."""
    calm, signal = _engine(None), _Signal()
    disturbed = _engine(signal)
    generators = torch.get_rng_state()
    counts = []
    for number in range(2):
        before = copy.deepcopy(disturbed.state())
        signal.look = lambda before=before: _same(disturbed.begun(), before)  # type: ignore[misc]
        expected = calm.step(number, _batch(number), 1e-2)
        signal.when = 0
        while True:
            signal.when, signal.questions = signal.when + 1, 0
            try:
                made = disturbed.step(number, _batch(number), 1e-2, signal.look)
            except GivenUpError:
                assert signal.questions == signal.when
                _same(disturbed.state(), before)
                assert torch.equal(torch.get_rng_state(), generators)
            else:
                break
        counts.append(signal.questions)
        assert made == expected
        _same(disturbed.state(), calm.state())
        _same(disturbed.begun(), calm.state())
    layers = sum(next(each.children(), None) is None for each in _Dropping().modules())
    # Once ahead of each microbatch, then at each layer, there and back.
    assert counts == [2 * (1 + 2 * layers)] * 2


def test_a_step_that_is_not_finite_is_skipped_without_a_trace() -> None:
    """The running statistics of its batch norms, too."""
    engine = _engine(None, lambda logits, _: logits.mean((1, 2, 3)) * torch.inf)
    before = copy.deepcopy(engine.state())
    assert not engine.step(0, _batch(0), 1e-2).finite
    _same(engine.state(), before)


def test_a_prediction_is_given_up_between_two_layers() -> None:
    signal = _Signal()
    engine = _engine(signal)
    signal.when = 5
    with pytest.raises(GivenUpError):
        engine.predict([4], {0: _batch(0).images})
    assert signal.questions == 5


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_part_that_is_compiled_runs_without_questions() -> None:
    signal = _Signal()
    compiled = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))
    model = nn.Sequential(compiled, nn.Linear(2, 2))
    with asking(model, _CPU, signal):
        model(torch.ones(1, 2)).sum().backward()
    assert signal.questions == 2


def test_outside_the_context_nothing_asks() -> None:
    signal, model = _Signal(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with asking(model, _CPU, signal):
        model(torch.ones(1, 2))
    assert signal.questions == 2
    model(torch.ones(1, 2)).sum().backward()
    assert signal.questions == 2
