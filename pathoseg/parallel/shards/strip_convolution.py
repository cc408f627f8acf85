"""A convolution of a strip as it lies, to which its halos' part is added.

A convolution is linear, so a strip with its halos gives the sum of what each gives alone, with
zeros in place of the others. Rank 1 of three, kernel 3, stride 1, padding 1:

    rows of the input      3 | 4  5  6  7 | 8          (1) begin to exchange rows 3, 4, 7 and 8
                           | |              |
    conv(0 4 5 6 7 0)      | y4 y5 y6 y7    |          (2) meanwhile the large kernel, padded by 0
    conv(3 0 0)            +->+             |          (3) one row of output for each halo
    conv(0 0 8)                        +<---+

    backward, dy of rows 4-7
    dy4 -> d3, part of dW    dy7 -> d8, part of dW     (4) small kernels; begin to give d3, d8 back
    dy4-dy7 -> d4-d7, dW                               (5) meanwhile the large one
    d4 += what rank 0 has of it, d7 += rank 2's        (6)

Strip and halos are never joined: neither copied nor held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pathoseg.parallel.shards.exchange import Halos, cut
from pathoseg.parallel.shards.rows import Rows, SlidingWindow


@dataclass(frozen=True)
class Convolution:
    """A convolution's settings, and the rows that it makes of a strip.

    Attributes:
        function: torch's.
        strides: By dimension of the kernel.
        paddings: Likewise, the same on both sides.
        dilations: Likewise.
        groups: Groups of channels.
        window: How its output rows look at its input rows.
        made: The output rows of this rank.
    """

    function: Callable[..., Tensor]
    strides: Sequence[int]
    paddings: Sequence[int]
    dilations: Sequence[int]
    groups: int
    window: SlidingWindow
    made: Rows

    def runs_on(self, own: Rows) -> bool:
        """Return True if a kernel over the strip alone makes just this rank's output rows.

        Args:
            own: The strip's rows.
        """
        first = self.window.reads(self.made).first
        rows = self.window.height(own.height, self.window.padding)
        return first == own.first - self.window.padding and rows == self.made.height


class StripConvolution(torch.autograd.Function):
    """A convolution of a strip and its halos.

    Args of `forward`:
        strip: This rank's rows (samples, channels, …).
        weight: The kernels.
        bias: (channels,) or None.
        halos: The rows that ranks read of one another.
        layer: The convolution; it `runs_on` the strip.
    """

    @staticmethod
    def forward(
        ctx: Any,
        strip: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        halos: Halos,
        layer: Convolution,
    ) -> Tensor:
        arrive = halos.fetch(strip)
        made = layer.function(
            strip, weight, bias, layer.strides, layer.paddings, layer.dilations, layer.groups
        )
        came = arrive()
        for rank, halo in came.items():
            edge = _Edge(layer, halos.dim, halos.of(rank))
            part = layer.function(
                edge.padded(halo),
                weight,
                None,
                layer.strides,
                edge.paddings,
                layer.dilations,
                layer.groups,
            )
            cut(made, halos.dim, layer.made, edge.made).add_(part)
        ctx.save_for_backward(strip, weight, *came.values())
        ctx.facts = halos, layer, tuple(came), None if bias is None else list(bias.shape)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        halos, layer, ranks, bias = ctx.facts
        strip, weight, *came = ctx.saved_tensors
        of_strip, of_weight, of_bias = ctx.needs_input_grad[:3]
        parts: list[Tensor] = []
        returned: dict[int, Tensor] = {}
        for rank, halo in zip(ranks, came, strict=True):
            edge = _Edge(layer, halos.dim, halos.of(rank))
            rows, part, _ = _backward(
                layer,
                cut(gradient, halos.dim, layer.made, edge.made),
                edge.padded(halo),
                weight,
                edge.paddings,
                None,
                [of_strip, of_weight, False],
            )
            if of_strip:
                returned[rank] = cut(rows, halos.dim, edge.reads, halos.of(rank))
            if of_weight:
                parts.append(part)
        if of_strip:
            arrive = halos.give_back(returned.get, strip)
        to_strip, to_weight, to_bias = _backward(
            layer,
            gradient,
            strip,
            weight,
            layer.paddings,
            bias,
            [of_strip, of_weight, of_bias],
        )
        for part in parts:
            to_weight.add_(part)
        if of_strip:
            halos.add(arrive(), to_strip)
        return to_strip, to_weight, to_bias, None, None


@dataclass(frozen=True)
class _Edge:
    """The part of a convolution that one halo has.

    Attributes:
        layer: The convolution.
        dim: The dimension of the rows.
        halo: The halo's rows.
    """

    layer: Convolution
    dim: int
    halo: Rows

    @property
    def made(self) -> Rows:
        """The output rows that look at the halo."""
        return self.layer.window.reached(self.halo).within(self.layer.made)

    @property
    def reads(self) -> Rows:
        """The input rows that these look at."""
        return self.layer.window.reads(self.made)

    @property
    def paddings(self) -> list[int]:
        """The layer's, without that of the rows."""
        return [0 if at == self.dim - 2 else rows for at, rows in enumerate(self.layer.paddings)]

    def padded(self, halo: Tensor) -> Tensor:
        """Return the rows `reads`, with zeros in place of those that are no halo."""
        reads = self.reads
        around = [0, 0] * (halo.dim() - 1 - self.dim)
        return F.pad(halo, [*around, self.halo.first - reads.first, reads.stop - self.halo.stop])


def _backward(
    layer: Convolution,
    gradient: Tensor,
    rows: Tensor,
    weight: Tensor,
    paddings: Sequence[int],
    bias: list[int] | None,
    needed: list[bool],
) -> Any:
    """Return the gradients of rows, weight and bias as far as they are needed.

    Where none is, as at the edges of a first layer with a fixed kernel, nothing is computed.
    """
    if not any(needed):
        return None, None, None
    return torch.ops.aten.convolution_backward(
        gradient,
        rows,
        weight,
        bias,
        layer.strides,
        paddings,
        layer.dilations,
        False,
        [0] * len(paddings),
        layer.groups,
        needed,
    )


def as_autocast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast gives it to a convolution; differentiable."""
    device = tensor.device.type
    is_cast = torch.is_autocast_enabled(device) and tensor.is_floating_point()
    if not is_cast or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
