"""Tests that run in a process with the simulated device; `tests/simulated_device/README.md`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_device import device

# Other processes have no such device, and it cannot be taken out again: see test_inside.py.
collect_ignore_glob = [] if device.is_loaded() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _clean_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin with an idle device, and end with none of its problems but those that are asked for."""
    device.reset()
    yield
    if request.node.get_closest_marker("finds_problems") is None:
        for index in range(device.DEVICES):
            torch.accelerator.synchronize(index)
        assert device.problems() == []
    device.reset()
