"""The rule of a step: loss scale as torch's, norms in the model's order, failures that are told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.gradient_step import (
    LossScale,
    StepVerdict,
    clip_gradients,
    gradient_norms,
    judge_step,
)

GOOD, BAD = StepVerdict(1.0, 1.0, None), StepVerdict(1.0, math.inf, "the gradient of x is inf")


@given(
    st.lists(st.booleans(), max_size=20),
    st.integers(1, 4),
    st.sampled_from([2.0**16, 2.0**125, 3.0e38]),
)
def test_the_loss_scale_is_torchs(steps: list[bool], interval: int, first: float) -> None:
    """Up to the largest float32, where both stop to grow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=interval)
    scaler.scale(torch.zeros(()))  # which makes its state float32
    scale = LossScale(enabled=True)
    scale.load_state_dict(scaler.state_dict())
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.0)
    for finite in steps:
        parameter.grad = torch.tensor([1.0 if finite else torch.inf])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scale.update(GOOD if finite else BAD)
        assert scale.scale == scaler.get_scale()
    assert scale.state_dict() == scaler.state_dict()


def test_without_half_precision_nothing_is_scaled() -> None:
    scale = LossScale(enabled=False)
    scale.update(BAD)
    assert scale.scale == 1.0
    assert scale.state_dict() == torch.amp.GradScaler("cpu", enabled=False).state_dict()


def test_a_run_begun_without_half_precision_goes_on_with_it() -> None:
    scale = LossScale(enabled=True)
    scale.load_state_dict(LossScale(enabled=False).state_dict())
    assert scale.state_dict() == LossScale(enabled=True).state_dict()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_in_which_no_step_is_finite_ends(enabled: bool) -> None:
    scale = LossScale(enabled)
    for _ in range(29):
        scale.update(BAD)
    scale.update(GOOD)
    for _ in range(0 if enabled else 29):
        scale.update(BAD)
    with pytest.raises(PathosegError, match="the gradient of x is inf") as told:
        scale.update(BAD)
    assert ("loss scale has fallen" in told.value.problem) == enabled


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(st.lists(shapes, min_size=1, max_size=6), st.floats(1e-3, 10), st.integers(0, 99))
def test_clipping_bounds_the_norm_of_all_gradients(
    sizes: list[list[int]], most: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(*size, generator=generator) for size in sizes]
    before = [each.clone() for each in gradients]
    verdict = judge_step([], _named(gradients))
    whole = torch.cat([each.flatten().double() for each in gradients]).norm().item()
    assert verdict.finite
    assert verdict.norm == pytest.approx(whole, rel=1e-14)
    clip_gradients(gradients, verdict.norm, most)
    for each, first in zip(gradients, before, strict=True):
        # In one multiplication by one number, as float64 rounds it.
        assert torch.equal(each, first * min(1.0, most / (whole + 1e-6)))


@given(st.lists(st.sampled_from([1.0, math.inf, math.nan]), min_size=1, max_size=5))
def test_what_is_not_finite_is_named(values: list[float]) -> None:
    verdict = judge_step([], _named([torch.tensor([1.0, value]) for value in values]))
    bad = [number for number, value in enumerate(values) if not math.isfinite(value)]
    assert verdict.cause == (f"the gradient of p{bad[0]} is not finite" if bad else None)
    assert judge_step(values, {"p": 1.0}).finite, "as in torch, gradients alone decide"
    first = judge_step(values, {"p": math.nan})
    expected = f"the loss of microbatch {bad[0]} is" if bad else "the gradient of p is"
    assert first.cause is not None
    assert first.cause.startswith(expected)


def _named(gradients: list[Tensor]) -> dict[str, float]:
    return {f"p{at}": norm.item() for at, norm in enumerate(gradient_norms(gradients))}
