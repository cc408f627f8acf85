"""The optimizer step: microbatches equal the whole batch, schedules, non-finite gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import TrainConfig
from pathoseg.training.one_device import train_step
from pathoseg.training.optimizer import learning_rate, make_optimizer


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4)).double()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _run(sizes: list[int], clip: float = 0.0, lr: float = 0.1) -> tuple[torch.Tensor, float]:
    torch.manual_seed(1)
    inputs = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64)
    targets = torch.randint(0, 4, (sum(sizes),))
    model = _model()
    optimizer = make_optimizer(
        model.parameters(), TrainConfig(optimizer="sgd", lr=lr, weight_decay=0.0)
    )
    parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    done = train_step(model, _loss, parts, sum(sizes), optimizer, scaler, None, clip)
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
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    done = train_step(model, _loss, batch, 1, optimizer, scaler, None, 1.0)
    assert not done.finite
    assert not optimizer.state
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


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
