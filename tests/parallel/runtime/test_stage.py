"""Test a stage alone, its visits run by hand in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.stage import Pass, Stage, Training

CPU = torch.device("cpu")


def made(model: nn.Module, example: Tensor, number: int, stages: int, loss: Any) -> Stage:
    """One of so many stages of a model that has several copies."""
    traced = Traced(model, example)
    training = Training(loss, partial(torch.optim.SGD, lr=0.1))
    cut = even(traced.graph, stages)
    return Stage(traced, cut, number, training, CPU, False, ActivationPolicy(), None)


class Checkpointed(nn.Module):
    """A norm that torch's checkpoint runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.norm, images, use_reentrant=False)
        return found


class CountingNorm(nn.BatchNorm2d):
    """A norm with a running state of its own beside torch's."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(images)


class Teacher(nn.Module):
    """A layer whose frozen copy follows it, as a moving average of its weights.

    Args:
        write: Moves the copy's weight towards the layer's; None leaves it.
    """

    def __init__(self, write: Callable[[Tensor, Tensor], Any] | None) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.write = write

    def forward(self, values: Tensor) -> Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self.teacher.weight, self.student.weight)
        found: Tensor = self.student(values) - self.teacher(values)
        return found


def _in_place(teacher: Tensor, student: Tensor) -> None:
    teacher.lerp_(student, 0.5)


def _in_its_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


def _anew(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data * 0.5 + student.data * 0.5


@pytest.mark.parametrize("write", [_in_place, _in_its_data, _anew])
def test_a_frozen_parameter_that_a_forward_changes_is_refused(write: Any) -> None:
    images, this = torch.randn(2, 4), Pass(0, [2], 1.0, training=True)
    stage = made(Teacher(write), images, 0, 1, lambda returned, _: returned.sum(1))
    stage.feed(0, {"values": images})
    with pytest.raises(PathosegError, match=r"changes teacher\.weight, which is no norm's"):
        stage.forward(0, this, keep=True)


def test_a_frozen_parameter_that_stays_may_be_in_copies() -> None:
    model, images = Teacher(None), torch.randn(2, 4)
    expected = model(images).sum().item()
    stage = made(model, images, 0, 1, lambda returned, _: returned.sum(1))
    stage.feed(0, {"values": images})
    stage.forward(0, Pass(0, [2], 1.0, training=True), keep=True)
    assert float(stage.losses[0]) == pytest.approx(expected)


class Replacing(nn.Module):
    """A layer that sets another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return values * self.calls


def test_a_buffer_that_a_forward_replaces_is_refused() -> None:
    model, images = nn.Sequential(nn.Linear(4, 4), Replacing()), torch.randn(2, 4)
    stage = made(model, images, 0, 1, lambda returned, _: returned.sum(1))
    stage.feed(0, {"input": images})
    with pytest.raises(PathosegError, match=r"changes 1\.calls, which is no norm's"):
        stage.forward(0, Pass(0, [2], 1.0, training=True), keep=True)


def test_further_state_of_a_norm_of_ones_own_is_refused() -> None:
    model, images = nn.Sequential(nn.Conv2d(3, 3, 1), CountingNorm()), torch.randn(2, 3, 4, 4)
    stage = made(model, images, 0, 1, lambda returned, _: returned.flatten(1).sum(1))
    stage.feed(0, {"input": images})
    with pytest.raises(PathosegError, match=r"changes 1\.calls, which is no norm's running stat"):
        stage.forward(0, Pass(0, [2], 1.0, training=True), keep=True)


def test_a_norm_that_a_backward_runs_again_counts_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Checkpointed()).double()
    batches = [torch.randn(2, 3, 4, 4).double() + index for index in range(3)]
    whole = deepcopy(model)
    for batch in batches:
        whole(batch)
    stage = made(model, batches[0], 0, 1, lambda returned, _: returned.flatten(1).sum(1))
    this = Pass(0, [2, 2, 2], 1.0, training=True)
    with stage.statistics.kept():
        for turn in ("F0", "F1", "B0", "F2", "B1", "B2"):
            kind, index = turn[0], int(turn[1])
            if kind == "F":
                stage.feed(index, {"input": batches[index]})
                stage.forward(index, this, keep=True)
            else:
                stage.backward(index)
    stage.statistics.apply(this.sizes, lambda rows: None)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-13, atol=1e-13)


def test_a_loss_without_a_gradient_gives_zeros() -> None:
    """Later microbatches of its size send a gradient, whose layout the first one announces."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    stage = made(model, torch.randn(2, 3, 4, 4), 1, 2, lambda returned, _: torch.zeros(2))
    [edge] = stage.entering
    value = torch.randn(2, 3, 4, 4)
    stage.receive(0, edge, value)
    stage.forward(0, Pass(0, [2], 1.0, training=True), keep=True)
    gradient = stage.backward(0)[edge]
    assert gradient is not None
    assert torch.equal(gradient, torch.zeros_like(value))
