"""The optimizer of a run: torch's own numbers, however gradients and state lie in memory."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

import pytest
import torch
from torch import nn

from pathoseg.config import TrainConfig
from pathoseg.gradient_step import load_by_name, state_by_name
from pathoseg.training.optimizer import make_optimizer


def _step(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int, layout: str) -> None:
    drawn = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        gradient = torch.randn(parameter.shape, generator=drawn)
        if layout == "channels last" and gradient.ndim == 4:
            gradient = gradient.to(memory_format=torch.channels_last)
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_gradients_and_state_of_any_layout_give_what_torch_gives(
    kind: Literal["adamw", "sgd"], layout: str
) -> None:
    config = TrainConfig(optimizer=kind, lr=0.01)
    judge = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1), nn.ConvTranspose2d(16, 4, 2))
    network = deepcopy(judge).to(memory_format=torch.channels_last)
    plain = make_optimizer(judge.parameters(), config)
    for group in plain.param_groups:
        group["fused"], group["foreach"] = False, False
    first = make_optimizer(network.parameters(), config)
    ours = dict(zip(network.parameters(), map(str, range(6)), strict=True))
    for seed in range(2):
        _step(judge, plain, seed, "contiguous")
        _step(network, first, seed, layout)
    # As of a checkpoint of a network in the usual layout.
    names = {parameter: ours[own] for parameter, own in zip(judge.parameters(), ours, strict=True)}
    second = make_optimizer(network.parameters(), config)
    load_by_name(second, ours, deepcopy(state_by_name(plain, names)))
    _step(judge, plain, 2, "contiguous")
    _step(network, second, 2, layout)
    for found, expected in zip(network.parameters(), judge.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        assert found.stride() != expected.stride() or found.ndim < 4 or found.shape[2] == 1


def test_a_parameter_that_the_loss_does_not_reach_has_no_state_to_load() -> None:
    network = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # the second is not used
    names = {parameter: name for name, parameter in network.named_parameters()}
    first = make_optimizer(network.parameters(), TrainConfig())
    network[0](torch.ones(1, 2)).sum().backward()
    first.step()
    kept = state_by_name(first, names)
    second = make_optimizer(network.parameters(), TrainConfig())
    load_by_name(second, names, kept)
    assert state_by_name(second, names).keys() == kept.keys() == {"0.weight", "0.bias"}
