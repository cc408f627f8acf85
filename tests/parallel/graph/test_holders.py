"""Tests that what torch says of a gradient's holders is understood, or refused."""

from __future__ import annotations

import pytest
import torch

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.traced import alone, held_once


def test_this_torch_is_understood() -> None:
    with torch.no_grad():
        assert held_once.__wrapped__() == held_once()


@pytest.mark.parametrize("holders", [[], [4, 4], [4, 4, 4], [8, 4, 5], [3, 4, 4]])
def test_another_way_of_counting_is_refused(holders: list[int]) -> None:
    with pytest.raises(PathosegError, match="counts the holders of gradients"):
        alone(holders)
