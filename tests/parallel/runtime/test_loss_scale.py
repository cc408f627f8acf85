"""The loss scale does what torch's does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pathoseg.parallel.runtime.grad_clip import LossScale


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 4))
def test_it_is_torchs(steps: list[bool], interval: int) -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scale = LossScale(enabled=True)
    scale.load_state_dict(scaler.state_dict())
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.0)
    for finite in steps:
        parameter.grad = torch.tensor([1.0 if finite else torch.inf])
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scale.update(finite)
        assert scale.scale == scaler.get_scale()
    assert scale.state_dict() == scaler.state_dict()


def test_without_half_precision_nothing_is_scaled() -> None:
    scale = LossScale(enabled=False)
    scale.update(finite=False)
    assert scale.scale == 1.0
    assert scale.state_dict() == torch.amp.GradScaler("cpu", enabled=False).state_dict()
    with pytest.raises(KeyError):
        LossScale(enabled=True).load_state_dict({})
