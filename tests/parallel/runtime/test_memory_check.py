"""Tests which hosts are refused, and with what words."""

from __future__ import annotations

import pytest
import torch

from pathoseg.parallel.runtime.memory_check import Memory, too_small

GIB = 2**30


def test_a_system_that_does_not_tell_is_not_refused() -> None:
    assert too_small([("a", 10**15, None)]) is None


def test_a_small_host_is_refused_with_both_figures() -> None:
    ranks = [("a", 4 * GIB, 8 * GIB), ("b", 7 * GIB, 8 * GIB), ("a", 4 * GIB, 9 * GIB)]
    assert too_small(ranks) is None
    refused = too_small([*ranks, ("a", GIB, 8 * GIB)])
    assert refused is not None
    assert "9 GiB of tensors in the memory of host a, which has 8 GiB left" in str(refused)


def test_where_the_host_computes_the_refusal_says_how_to_take_less() -> None:
    refused = too_small([("a", 3 * GIB, 2 * GIB)], computes=True)
    assert refused is not None
    assert "Training takes about 3 GiB of the memory of host a, which has 2 GiB" in str(refused)
    assert '[parallel] memory = "1.8 GiB"' in refused.hint


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_rank_on_an_accelerator_says_that_the_host_is_full(error: Exception) -> None:
    memory = Memory(device_bytes=(2**20,), host_bytes=(2**30,))
    told = memory.exhausted(error, 0, 3, torch.device("cuda"), "in the forward")
    assert told.problem == "Rank 3 ran out of host memory in the forward: 1 GiB were planned."
    assert "--memory" not in told.hint
