"""A plugin for pytest: every test begins with an idle device, and must leave no problem on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, settings

from tests.simulated_device import device

# For mutants the first failure is enough, and need not be made small.
settings.register_profile(
    "mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


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
