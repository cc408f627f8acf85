"""The sum of a stage's gradients over the ranks that hold a copy, in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pathoseg.parallel.comm.transport import Pending, Transport
from pathoseg.parallel.runtime.messages import Layout


class GradientReduction:
    """Sums the gradients of one stage.

    A gradient is flattened as its parameter lies in memory, channels last in most convolutions:
    in another order it would be transposed on the way there and back.

    A parameter that has no gradient on any rank has none afterwards.

    Args:
        parameters: The stage's trained parameters, in the same order on every rank.
        buckets: In how many parts they are summed; parts of about as many bytes.
        transport: Joins the ranks.
        holders: The ranks with a copy, ascending.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: int,
        transport: Transport,
        holders: tuple[int, ...],
    ) -> None:
        self._transport, self._holders = transport, holders
        sizes = [parameter.nbytes for parameter in parameters]
        total = max(1, sum(sizes))
        parts: list[list[Tensor]] = [[] for _ in range(buckets)]
        for parameter, end in zip(parameters, accumulate(sizes), strict=True):
            # The middle of the parameter decides.
            parts[min(buckets - 1, (2 * end - parameter.nbytes) * buckets // (2 * total))].append(
                parameter
            )
        self._buckets = [_by_dtype(part) for part in parts]
        self._pending: dict[int, list[tuple[Pending, Tensor, list[Tensor]]]] = {}

    def start(self, bucket: int) -> None:
        """Start to sum the gradients of a bucket, complete on this rank; all holders call it."""
        if len(self._holders) > 1:
            self._pending[bucket] = [self._start(part) for part in self._buckets[bucket]]

    def wait(self, bucket: int) -> None:
        """Wait for the sums of a bucket, and make them the parameters' `grad`.

        A gradient that is None on all holders stays None. A second call does nothing.
        """
        for pending, flat, parameters in self._pending.pop(bucket, ()):
            pending.wait()
            sizes = [parameter.numel() for parameter in parameters]
            *sums, present = torch.split(flat, [*sizes, len(parameters)])
            for parameter, total, copies in zip(parameters, sums, present.tolist(), strict=True):
                parameter.grad = Layout.of(parameter).unpacked(total) if copies else None

    def _start(self, parameters: list[Tensor]) -> tuple[Pending, Tensor, list[Tensor]]:
        gradients = [parameter.grad for parameter in parameters]
        present = [float(gradient is not None) for gradient in gradients]
        parts = [
            torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            if gradient is None
            else Layout.of(parameter).packed(gradient).view(-1)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        flat = torch.cat([*parts, parts[0].new_tensor(present)])
        for parameter in parameters:
            parameter.grad = None
        return self._transport.sum(flat, self._holders), flat, parameters


def _by_dtype(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())
