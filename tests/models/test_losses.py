"""Losses against plain numpy, and the properties that cutting a step into microbatches needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.models.losses import IGNORE, build_loss
from pathoseg.models.model_options import LossConfig

ONLY_CE = LossConfig(cross_entropy=1, dice=0)
ONLY_DICE = LossConfig(cross_entropy=0, dice=1)
ONLY_FOCAL = LossConfig(cross_entropy=0, dice=0, focal=1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, classes, h, w) in float64 and targets, some ignored, some samples wholly so."""
    n, classes = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    h, w = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.1, 1.0, 10.0, 1000.0]))
    logits = scale * torch.randn(n, classes, h, w, generator=generator, dtype=torch.double)
    targets = torch.randint(0, classes, (n, h, w), generator=generator)
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    targets[torch.rand(n, h, w, generator=generator) < share] = IGNORE
    if draw(st.booleans()):
        targets[0] = IGNORE
    return logits, targets


@st.composite
def configs(draw: st.DrawFn, classes: int = 4) -> LossConfig:
    weights = st.sampled_from([0.0, 0.5, 1.0])
    return LossConfig(
        cross_entropy=1.0,
        dice=draw(weights),
        focal=draw(weights),
        focal_gamma=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        class_weights=draw(st.sampled_from([None, (0.5, 1.0, 2.0, 0.0)])),
    )


def _fitted(config: LossConfig, logits: torch.Tensor) -> LossConfig:
    weights = config.class_weights
    return replace(config, class_weights=weights and weights[: logits.shape[1]])


def _probabilities(logits: torch.Tensor) -> NDArray[np.float64]:
    shifted = logits.numpy() - logits.numpy().max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    return powers / powers.sum(axis=1, keepdims=True)


@given(batches(), st.sampled_from([None, (0.5, 1.0, 2.0, 0.0)]), st.sampled_from([0.0, 2.0]))
def test_cross_entropy_and_focal_are_their_formulas(
    batch: tuple[torch.Tensor, torch.Tensor], weights: tuple[float, ...] | None, gamma: float
) -> None:
    logits, targets = batch
    logits = logits.clamp(-30, 30)  # so that the plain formula stays finite
    p = _probabilities(logits)
    used = weights and weights[: logits.shape[1]]
    entropy, focal = np.zeros(len(p)), np.zeros(len(p))
    for sample, row, column in np.argwhere(targets.numpy() != IGNORE):
        index = int(targets[sample, row, column])
        true = p[sample, index, row, column]
        term = -(used[index] if used else 1.0) * np.log(true)
        entropy[sample] += term
        focal[sample] += (1 - true) ** gamma * term
    valid = np.maximum(1, (targets.numpy() != IGNORE).sum(axis=(1, 2)))
    loss = build_loss(replace(ONLY_CE, class_weights=used))
    np.testing.assert_allclose(loss(logits, targets), entropy / valid, rtol=1e-9, atol=1e-12)
    loss = build_loss(replace(ONLY_FOCAL, class_weights=used, focal_gamma=gamma))
    np.testing.assert_allclose(loss(logits, targets), focal / valid, rtol=1e-6, atol=1e-9)


@given(batches())
def test_dice_is_its_formula(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, targets = batch
    p, truth = _probabilities(logits), targets.numpy()
    wanted = []
    for sample in range(len(p)):
        valid = truth[sample] != IGNORE
        missed = []
        for index in range(1, p.shape[1]):
            y = truth[sample] == index
            predicted = (p[sample].argmax(axis=0) == index) & valid
            if y.any() or predicted.any():
                overlap = p[sample, index][y].sum()
                total = p[sample, index][valid].sum() + y.sum()
                missed.append(1 - (2 * overlap + 1) / (total + 1))
        wanted.append(np.mean(missed) if missed else 0.0)
    np.testing.assert_allclose(build_loss(ONLY_DICE)(logits, targets), wanted, atol=1e-9)


@given(batches(), configs(), st.data())
def test_microbatches_add_up_to_the_whole(
    batch: tuple[torch.Tensor, torch.Tensor], config: LossConfig, data: st.DataObject
) -> None:
    logits, targets = batch
    loss = build_loss(_fitted(config, logits))
    leaf = logits.clone().requires_grad_()
    loss(leaf, targets).sum().backward()
    cut = data.draw(st.integers(0, len(logits)))
    parts = logits.clone().requires_grad_()
    total = sum(
        loss(part, target).sum()
        for part, target in zip(
            parts.split([cut, len(logits) - cut]),
            targets.split([cut, len(logits) - cut]),
            strict=True,
        )
        if len(part)
    )
    assert isinstance(total, torch.Tensor)
    total.backward()
    torch.testing.assert_close(total, loss(logits, targets).sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.grad, leaf.grad, rtol=1e-12, atol=1e-12)


@given(batches(), configs())
def test_ignored_pixels_do_not_matter(
    batch: tuple[torch.Tensor, torch.Tensor], config: LossConfig
) -> None:
    logits, targets = batch
    loss = build_loss(_fitted(config, logits))
    ignored = (targets == IGNORE)[:, None].expand_as(logits)
    leaf = logits.clone().requires_grad_()
    before = loss(leaf, targets)
    before.sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert not leaf.grad[ignored].any()
    after = loss(torch.where(ignored, -7.0, logits), targets)
    torch.testing.assert_close(after, before.detach(), rtol=1e-12, atol=1e-12)
    empty = (targets == IGNORE).flatten(1).all(1)
    assert not before[empty].any()


@settings(max_examples=20)
@given(batches(), configs())
def test_gradient_is_that_of_the_value(
    batch: tuple[torch.Tensor, torch.Tensor], config: LossConfig
) -> None:
    logits, targets = batch
    leaf = (logits / logits.abs().max()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: build_loss(_fitted(config, z))(z, targets), leaf)


def test_a_class_absent_from_both_leaves_the_dice() -> None:
    targets = torch.tensor([[[0, 1], [1, 1]]])
    logits = torch.randn(1, 2, 2, 2, dtype=torch.double)
    absent = torch.full((1, 1, 2, 2), -50.0, dtype=torch.double)
    loss = build_loss(ONLY_DICE)
    torch.testing.assert_close(loss(torch.cat([logits, absent], 1), targets), loss(logits, targets))
    nothing = torch.zeros(1, 2, 2, dtype=torch.long)
    certain = torch.tensor([9.0, -9.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2)
    assert loss(certain, nothing).item() == 0


def test_a_class_predicted_in_vain_is_pushed_down() -> None:
    targets = torch.zeros(1, 2, 2, dtype=torch.long)
    logits = torch.zeros(1, 2, 2, 2).requires_grad_()
    with torch.no_grad():
        logits[:, 1] = 1
    value = build_loss(ONLY_DICE)(logits, targets)
    value.sum().backward()
    assert value.item() > 0.5
    assert logits.grad is not None
    assert (logits.grad[:, 1] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(1, 3, 400, 400)).to(dtype)
    targets = torch.randint(0, 3, (1, 400, 400))
    loss = build_loss(LossConfig(focal=1.0))
    with torch.autocast("cpu", dtype=dtype):
        half = loss(logits, targets)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, loss(logits.double(), targets).float(), rtol=1e-5, atol=0)


def test_tile_labels_have_the_same_rule() -> None:
    logits, targets = torch.randn(4, 3), torch.tensor([0, 2, IGNORE, 1])
    loss = build_loss(LossConfig(class_weights=(1.0, 2.0, 3.0)), task="classify")
    plain = -logits.log_softmax(1)
    wanted = torch.stack([plain[0, 0], 3 * plain[1, 2], torch.tensor(0.0), 2 * plain[3, 1]])
    torch.testing.assert_close(loss(logits, targets), wanted)


def test_uint8_targets_do() -> None:
    logits, targets = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    loss = build_loss(LossConfig())
    assert torch.equal(loss(logits, targets.byte()), loss(logits, targets))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (LossConfig(cross_entropy=-1), "cross_entropy is -1"),
        (LossConfig(dice=float("nan")), "dice is nan"),
        (LossConfig(focal_gamma=float("inf")), "focal_gamma is inf"),
        (LossConfig(class_weights=(1.0, -2.0)), r"class_weights\[1\] is -2"),
        (LossConfig(cross_entropy=0, dice=0), "nothing would be learnt"),
    ],
)
def test_impossible_weights_are_refused(config: LossConfig, what: str) -> None:
    with pytest.raises(PathosegError, match=what):
        build_loss(config)


def test_class_weights_must_match_the_classes() -> None:
    loss = build_loss(LossConfig(class_weights=(1.0, 2.0)))
    with pytest.raises(PathosegError, match="2 numbers for 3 classes"):
        loss(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    with pytest.raises(PathosegError, match="2 numbers for 3 classes"):
        build_loss(LossConfig(class_weights=(1.0, 2.0)), classes=3)


def test_tile_labels_have_no_dice() -> None:
    with pytest.raises(PathosegError, match="area"):
        build_loss(LossConfig(dice=1.0), task="classify")
    build_loss(LossConfig(), task="classify")


@given(st.integers(1, 4), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 2.0]))
def test_heights_count_where_they_are_known(n: int, seed: int, weight: float) -> None:
    dice = torch.Generator().manual_seed(seed)
    answer = 4 * torch.randn(n, 3, 5, 6, generator=dice, dtype=torch.double)
    heights = torch.randint(-2, 6, (n, 5, 6), generator=dice)
    heights[0] = -1
    classes = torch.randint(0, 2, (n, 5, 6), generator=dice)
    targets = torch.stack([classes, heights], dim=1)
    found = build_loss(LossConfig(height=weight), "objects")(answer, targets)
    alone = build_loss(LossConfig())(answer[:, :2], classes)
    assert found[0] == alone[0]
    for sample in range(1, n):
        known = heights[sample].numpy() >= 0
        error = np.abs(answer[sample, 2].numpy() - heights[sample].numpy())[known]
        huber = np.where(error < 1, error**2 / 2, error - 0.5)
        expected = float(alone[sample]) + weight * (huber.mean() if huber.size else 0)
        assert float(found[sample]) == pytest.approx(expected)


@pytest.mark.parametrize("task", ["segment", "objects"])
def test_a_context_counts_as_a_tile_of_its_own(task: Literal["segment", "objects"]) -> None:
    separates = task == "objects"
    own, around = torch.randn(2, 3, 4 + separates, 5, 6, dtype=torch.float64)
    planes = torch.randint(0, 4, (3, 2 + separates, 5, 6)).double()
    found = build_loss(LossConfig(context=0.3), task)((own, around), planes)
    alone = build_loss(LossConfig(), task)(own, planes[:, :2] if separates else planes[:, 0])
    beside = build_loss(LossConfig())(around[:, :4], planes[:, -1])
    torch.testing.assert_close(found, alone + 0.3 * beside)
