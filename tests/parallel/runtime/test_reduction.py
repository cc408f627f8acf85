"""Sums of gradients over ranks: bucket by bucket, whatever has none."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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
    def body(transport: ThreadTransport) -> list[torch.Tensor | None]:
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
