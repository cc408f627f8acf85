"""A plugin for pytest: every test begins with an idle device, and must leave no problem on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_device import device


@pytest.fixture(autouse=True)
def _clean_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Raise what a test has left undone, and the races and uses of freed memory that it hid."""
    device.reset()
    yield
    if request.node.get_closest_marker("finds_problems") is None:
        for index in range(device.DEVICES):
            torch.accelerator.synchronize(index)
        assert device.problems() == []
    device.reset()
