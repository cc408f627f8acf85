"""Sums of gradients over ranks: bucket by bucket, within the backward, whatever has none."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.runtime.reduction import GradientReduction
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

_DTYPES = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 5), _DTYPES, st.tuples(st.booleans(), st.booleans()))),
    st.integers(1, 4),
)
def test_gradients_are_summed_where_any_rank_has_one(
    kinds: list[tuple[int, torch.dtype, tuple[bool, bool]]], buckets: int
) -> None:
    def body(transport: ThreadTransport) -> list[Tensor | None]:
        parameters = []
        for number, (size, dtype, present) in enumerate(kinds):
            parameters.append(nn.Parameter(torch.zeros(size, dtype=dtype)))
            if present[transport.rank]:
                value = 10.0 * number + transport.rank + 1
                parameters[-1].grad = torch.full_like(parameters[-1], value)
        reduction = GradientReduction(parameters, buckets, transport, (0, 1))
        for bucket in range(buckets):
            reduction.start(bucket)
        for bucket in reversed(range(buckets)):
            reduction.wait(bucket)
            reduction.wait(bucket)
        return [parameter.grad for parameter in parameters]

    for found in run_ranks(2, body):
        for number, (gradient, (size, dtype, present)) in enumerate(zip(found, kinds, strict=True)):
            assert (gradient is not None) == any(present)
            if gradient is not None:
                total = sum(10.0 * number + rank + 1 for rank in (0, 1) if present[rank])
                assert torch.equal(gradient, torch.full((size,), total, dtype=dtype))


def test_one_holder_keeps_its_gradients() -> None:
    def body(transport: ThreadTransport) -> bool:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = gradient = torch.ones(2)
        reduction = GradientReduction([parameter], 1, transport, (0,))
        reduction.start(0)
        reduction.wait(0)
        return parameter.grad is gradient

    assert run_ranks(1, body) == [True]


class _Slow:
    """A transport of two ranks on which nothing is done until it is said to be."""

    rank, ranks = 0, 2

    def __init__(self) -> None:
        self.begun: list[Tensor] = []
        self.over = 0

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> _SlowSum:
        self.begun.append(tensor)
        return _SlowSum(self, len(self.begun))


@dataclass
class _SlowSum:
    transport: _Slow
    number: int

    def done(self) -> bool:
        return self.number <= self.transport.over

    def wait(self) -> None:
        pass


def _layers(widths: list[int]) -> list[nn.Linear]:
    """Layers of so many outputs each, and as many for the next one's inputs."""
    torch.manual_seed(0)
    return [nn.Linear(size, following) for size, following in pairwise(widths)]


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(4, 100),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 4))),
)
def test_sums_are_the_same_to_the_bit_whether_they_overlap_or_not(
    widths: list[int], buckets: int, part_bytes: int, idle: set[tuple[int, int]]
) -> None:
    """Layers that are `idle` (rank, layer) have no gradient in the last backward, or in none."""

    first = _layers(widths)

    def body(transport: ThreadTransport, overlaps: bool) -> list[Tensor | None]:
        model = deepcopy(first)
        parameters = [each for layer in reversed(model) for each in (layer.bias, layer.weight)]
        reduction = GradientReduction(parameters, buckets, transport, (0, 1), part_bytes)

        def backward(part: int) -> None:
            value = torch.arange(1.0, widths[0] + 1).mul(1 + transport.rank + 2 * part)
            for number, layer in enumerate(model):
                is_idle = (transport.rank, number) in idle and (part == 1 or number % 2 == 0)
                value = F.linear(value, layer.weight.detach()) if is_idle else layer(value)
            if value.requires_grad:
                torch.autograd.backward(value.square().sum())

        backward(0)
        with reduction.overlapping(range(buckets)) if overlaps else nullcontext():
            backward(1)
        for bucket in range(buckets):
            reduction.start(bucket)
        for bucket in range(buckets):
            reduction.wait(bucket)
        return [parameter.grad for parameter in parameters]

    late = run_ranks(2, lambda transport: body(transport, False))
    early = run_ranks(2, lambda transport: body(transport, True))
    for gradients in (early[1], late[0], late[1]):
        for found, expected in zip(gradients, early[0], strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found, expected)


def test_parts_begin_in_order_and_two_are_under_way_at_most() -> None:
    layers, transport = _layers([3, 3, 3, 3, 3]), _Slow()
    weights = [layer.weight for layer in reversed(layers)]
    reduction = GradientReduction(weights, 1, cast(Transport, transport), (0, 1), 1)

    def backward() -> None:
        torch.autograd.backward(nn.Sequential(*layers)(torch.ones(3)).sum())

    with reduction.overlapping([0]):
        backward()
        transport.over = 1  # which nobody asks any more
    assert [weight.grad is None for weight in weights] == [True, True, False, False]
    assert len(transport.begun) == 2
    reduction.start(0)
    assert [weight.grad is None for weight in weights] == [True] * 4
    assert len(transport.begun) == 4
    backward()  # no hook is left
    assert len(transport.begun) == 4


def test_a_gradient_that_misses_its_sum_is_an_error() -> None:
    layer = nn.Linear(3, 3, bias=False)
    reduction = GradientReduction([layer.weight], 1, cast(Transport, _Slow()), (0, 1))
    value = torch.ones(3, requires_grad=True)
    for _ in range(2):  # each runs a backward of its own within the whole one
        value = checkpoint(layer, value, use_reentrant=True)
    with reduction.overlapping([0]), pytest.raises(PathosegError, match=r"twice .* use_reentrant"):
        torch.autograd.backward(value.sum())
