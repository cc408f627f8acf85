"""Norms over all strips of a tile, and dropout with the random numbers of the whole tile.

Each rank norms its own rows by torch's kernel, which tells their mean and spread; the table of all
ranks' gives those of the whole tile by the rule for joining variances (Chan, Golub & LeVeque,
1979), so that nothing is lost where the mean is large; then the rows are scaled and shifted to
these in place. The backward needs two sums over the same elements (Ioffe & Szegedy, 2015):

    dL/dx = w / σ · (dy - mean(dy) - x̂ · mean(dy · x̂))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pathoseg.parallel.shards.exchange import Team, memory_format
from pathoseg.parallel.shards.strip import Rule, Strip


class _Norm(torch.autograd.Function):
    """Normalise rows by the statistics of all ranks' rows.

    Statistics are those of a table (samples, groups, channels of a group), summed over the
    dimension that the norm looks over: samples for batch norm, channels for group norm.

    Args of `forward`:
        x: This rank's rows, (samples, channels, …).
        weight: (channels,) or None.
        bias: Likewise.
        team: The ranks.
        share: This rank's part of all rows.
        groups: Channel groups; 0 for batch norm.
        epsilon: Is added to variances.

    Returns:
        The normed rows; the mean and (biased) variance of each channel, or (sample, group), which
        have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        team: Team,
        share: float,
        groups: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        samples, channels = x.shape[:2]
        order = memory_format(x)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        # Rows normed by their own mean and spread, of each sample and channel; put right below.
        made, mean, inverse = torch.native_group_norm(
            wide.contiguous(memory_format=order),
            None,
            None,
            samples,
            channels,
            x.shape[2:].numel(),
            channels,
            epsilon,
        )
        own, inverse = mean.double(), inverse.double()
        spread = (inverse**-2 - epsilon).clamp_(min=0)
        # By rank: how much of the whole, mean, variance.
        table = team.table(torch.stack([torch.full_like(own, share), own, spread]))
        shares, means, spreads = (_grouped(each, groups) for each in table.unbind(1))
        dims = (0, 3) if groups else (0, 1)
        count = shares.sum(dims, keepdim=True)
        whole = (shares * means).sum(dims, keepdim=True) / count
        parts = shares * (spreads + (means - whole) ** 2)
        variance = parts.sum(dims, keepdim=True) / count
        mean, variance = (
            each.expand(1, *means.shape[1:]).reshape(-1) if groups else each.view(-1)
            for each in (whole, variance)
        )
        scale = (variance + epsilon).rsqrt().view(-1, channels)
        if weight is not None:
            scale *= weight
        shift = (own - mean.view(-1, channels)) * scale
        if bias is not None:
            shift += bias
        shape = [samples, channels, *[1] * (x.dim() - 2)]
        made.mul_((scale / inverse).view(shape).to(made)).add_(shift.view(shape).to(made))
        made = made.to(x.dtype).contiguous(memory_format=order)
        mean, variance = mean.to(wide.dtype), variance.to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.facts = team, share, groups, epsilon, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return made, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        team, share, groups, epsilon, has_bias = ctx.facts
        flat, given = _flat(x, groups), _flat(gradients[0], groups)
        scale = _per_channel(weight, x, groups)
        # The sums alone: the kernel's gradient would take a temporary of its size.
        _, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
            given, flat, scale, mean, variance, None, None, False, epsilon, [False, True, True]
        )
        sums = torch.stack([of_shift, of_scale])  # Σ dy and Σ dy · x̂, by channel, of these rows
        weighted = sums if scale is None else sums * scale
        # The number of elements that one statistic is taken over, on all ranks together.
        count = flat.numel() / flat.shape[1] / share
        totals = team.total(weighted.double())
        if groups:
            table = totals.view(2, x.shape[0], groups, -1)
            count *= table.shape[3]
            totals = table.sum(3, keepdim=True).expand_as(table).reshape(2, -1)
        inverse = (variance.double() + epsilon).rsqrt()
        of_mean, of_x = totals[0] * inverse / count, totals[1] * inverse**2 / count
        factor = inverse if scale is None else inverse * scale
        shape = [1, -1, *[1] * (flat.dim() - 2)]
        by_given, by_x, constant = (
            each.view(shape).to(given) for each in (factor, of_x, of_mean - of_x * mean)
        )
        rows = (given * by_given).addcmul_(flat, by_x, value=-1.0).sub_(constant)
        of_scale, of_shift = (
            each.view(x.shape[0], -1).sum(0) if groups else each for each in (of_scale, of_shift)
        )
        return (
            rows.view_as(x) if groups else rows,
            None if weight is None else of_scale.to(weight.dtype),
            of_shift if has_bias else None,
            *[None] * 4,
        )


def _flat(x: Tensor, groups: int) -> Tensor:
    """Rows as (1, samples · channels, pixels) where each sample counts for itself."""
    return x.reshape(1, x.shape[0] * x.shape[1], -1) if groups else x


def _per_channel(tensor: Tensor | None, x: Tensor, groups: int) -> Tensor | None:
    return tensor if tensor is None or not groups else tensor.repeat(x.shape[0])


def _grouped(table: Tensor, groups: int) -> Tensor:
    """Reshape (ranks, samples, channels) to (ranks, samples, groups, channels / groups).

    Return the table unchanged without groups, as for batch norm.
    """
    return table.view(*table.shape[:2], groups, -1) if groups else table


def _normed(x: Strip, weight: Any, bias: Any, groups: int, epsilon: float) -> tuple[Any, ...]:
    share = x.own.height / x.bounds[-1]
    return _Norm.apply(  # type: ignore[no-untyped-call, no-any-return]  # torch's
        x.local, weight, bias, x.shards.team, share, groups, epsilon
    )


def _batch_norm(
    function: Any,
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(x, Strip) or x.strip_dim < 2:
        return NotImplemented
    if not training:
        return x.like(
            function(x.local, running_mean, running_var, weight, bias, False, momentum, eps)
        )
    made, mean, variance = _normed(x, weight, bias, 0, eps)
    if running_mean is not None:
        count = x.numel() / x.shape[1]
        _update(running_mean, mean, momentum)
        _update(running_var, variance * (count / (count - 1)), momentum)
    return x.like(made)


def _instance_norm(
    function: Any,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(x, Strip) or x.strip_dim < 2:
        return NotImplemented
    if not use_input_stats:
        return x.like(
            function(x.local, running_mean, running_var, weight, bias, False, momentum, eps)
        )
    samples, channels = x.shape[:2]
    made, mean, variance = _normed(x, weight, bias, channels, eps)
    if running_mean is not None:
        count = x.numel() / (samples * channels)
        _update(running_mean, mean.view(samples, channels).mean(0), momentum)
        unbiased = variance * (count / (count - 1))
        _update(running_var, unbiased.view(samples, channels).mean(0), momentum)
    return x.like(made)


def _group_norm(
    function: Any, x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if not isinstance(x, Strip) or x.strip_dim < 2:
        return NotImplemented
    return x.like(_normed(x, weight, bias, num_groups, eps)[0])


def _update(running: Tensor, measured: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.mul_(1 - momentum).add_(measured.to(running), alpha=momentum)


def _dropout(
    function: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop what the whole tile would drop: its factors are drawn in full, and cut."""
    if not isinstance(x, Strip):
        return NotImplemented
    if not training:
        return x
    channels_last = x.dim() == 4 and x.local.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    ones = torch.ones(x.shape, dtype=x.dtype, device=x.device).contiguous(memory_format=order)
    factors = F.dropout(ones, p, training).narrow(x.strip_dim, x.own.first, x.own.height).clone()
    return x.like(x.local.mul_(factors) if inplace else x.local * factors)


def _dropout_of_channels(
    function: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Draw one number a channel, which is the same whatever the rows."""
    if not isinstance(x, Strip) or x.strip_dim < 2:
        return NotImplemented
    return x.like(function(x.local, p, training, inplace))


def _random(
    function: Any, x: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Draw for the whole tile, of which the other ranks' rows are zeros here."""
    if not isinstance(x, Strip) or inplace:
        return NotImplemented
    if not training:
        return x
    behind = [0, 0] * (x.from_right - 1)
    rows = F.pad(x.local, [*behind, x.own.first, x.bounds[-1] - x.own.stop])
    made = function(rows, p, training).narrow(x.strip_dim, x.own.first, x.own.height)
    return x.like(made)


def norm_rules() -> dict[str, Rule]:
    """Return the rules of this file by the functions' names."""
    return {
        "batch_norm": _batch_norm,
        "instance_norm": _instance_norm,
        "group_norm": _group_norm,
        "dropout": _dropout,
        "alpha_dropout": _random,
        **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _dropout_of_channels),
        "feature_alpha_dropout": _dropout_of_channels,
    }
