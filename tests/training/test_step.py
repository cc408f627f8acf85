"""The optimizer step: microbatches, clipping, precision as PyTorch's recipe, schedules."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.gradient_step import LossScale
from pathoseg.training.engine import Loss, StepResult
from pathoseg.training.one_device import train_step
from pathoseg.training.optimizer import learning_rate, make_optimizer


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4)).double()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _step(
    model: torch.nn.Module,
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    samples: int,
    optimizer: torch.optim.Optimizer,
    loss: Loss = _loss,
    scale: LossScale | None = None,
    dtype: torch.dtype | None = None,
    clip: float = 0.0,
) -> StepResult:
    scale = scale or LossScale(enabled=False)
    return train_step(
        model, lambda _, x: model(x), loss, parts, samples, optimizer, scale, dtype, clip
    )


def _run(sizes: list[int], clip: float = 0.0, lr: float = 0.1) -> tuple[torch.Tensor, float]:
    torch.manual_seed(1)
    inputs = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64)
    targets = torch.randint(0, 4, (sum(sizes),))
    model = _model()
    optimizer = make_optimizer(
        model.parameters(), TrainConfig(optimizer="sgd", lr=lr, weight_decay=0.0)
    )
    parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    done = _step(model, parts, sum(sizes), optimizer, clip=clip)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), done.loss_sum


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([0.0, 0.05]))
def test_uneven_microbatches_make_the_step_of_the_whole_batch(
    sizes: list[int], clip: float
) -> None:
    parts, part_loss = _run(sizes, clip)
    whole, whole_loss = _run([sum(sizes)], clip)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-13)
    assert part_loss == pytest.approx(whole_loss, rel=1e-12)


def test_clipping_bounds_the_step() -> None:
    before = torch.cat([p.detach().flatten() for p in _model().parameters()])
    # Nesterov's first step is lr (1 + momentum) g.
    assert (_run([4], clip=1e-3, lr=1.0)[0] - before).norm() <= 1.9e-3 * (1 + 1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model.parameters(), TrainConfig())
    batch = [(torch.full((1, 3, 2, 2), float("nan"), dtype=torch.float64), torch.tensor([0]))]
    done = _step(model, batch, 1, optimizer, clip=1.0)
    assert not done.finite
    assert not optimizer.state
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_is_that_of_pytorchs_own_recipe(dtype: torch.dtype | None, clip: float) -> None:
    """With a loss of the user's, who computes it inside autocast and scales it in float16."""
    torch.manual_seed(3)
    ours = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Conv2d(4, 3, 1))
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(4, 3, 9, 9), torch.randint(0, 3, (4, 7, 7))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        return entropy.mean((1, 2))

    scale, scaler = (
        kind(enabled=dtype is torch.float16)
        for kind in (LossScale, lambda enabled: torch.amp.GradScaler("cpu", enabled=enabled))
    )
    own, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (ours, theirs))
    for _ in range(3):
        done = _step(ours, [(inputs, targets)], 4, own, loss, scale, dtype, clip)
        other.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            expected = torch.nn.functional.cross_entropy(theirs(inputs), targets)
        scaler.scale(expected).backward()
        scaler.unscale_(other)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        scaler.step(other)
        scaler.update()
        assert done.finite
        assert done.loss_sum / 4 == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)
    assert scale.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("shape", [(), (1,), (2, 4)])
def test_a_loss_that_is_not_one_number_a_sample_is_refused(shape: tuple[int, ...]) -> None:
    model = torch.nn.Linear(4, 4)
    steps = torch.optim.SGD(model.parameters(), 0.1)
    parts = [(torch.ones(2, 4), torch.zeros(2))]
    with pytest.raises(PathosegError, match="not one number a sample"):
        _step(model, parts, 2, steps, lambda made, _: made.mean().expand(shape))


@given(st.sampled_from(["cosine", "poly", "constant"]), st.integers(2, 500), st.floats(0.0, 0.5))
def test_the_rate_rises_to_its_height_then_never_rises(
    schedule: str, total: int, warmup: float
) -> None:
    config = TrainConfig(schedule=schedule, warmup=warmup, lr=0.3)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, total) for step in range(total)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.3)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates) >= 0
    if schedule != "constant":
        assert learning_rate(config, total, total) == pytest.approx(0, abs=1e-12)


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = make_optimizer(model.parameters(), TrainConfig(weight_decay=0.1))
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert decayed == {id(model[0].weight)}
    assert optimizer.param_groups[1]["weight_decay"] == 0
