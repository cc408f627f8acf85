"""Functions whose rows need no other rows: pointwise ones, along channels, shapes, sums, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pathoseg.parallel.shards.exchange import total
from pathoseg.parallel.shards.rows import Rows, strips
from pathoseg.parallel.shards.strip import (
    Rule,
    Strip,
    locals_of,
    strips_in,
    writes_in_place,
)

# Beyond those that torch marks as pointwise.
_POINTWISE = {
    *("hardswish", "floor_divide", "to", "float", "double", "half", "bfloat16", "long", "int"),
    *("bool", "contiguous", "detach", "cpu", "cuda", "type_as", "zeros_like", "ones_like"),
    *("full_like", "empty_like", "logsigmoid", "softsign", "tanhshrink", "requires_grad_"),
    *("rsub", "clamp_min", "clamp_max", "hardswish_", "prelu"),
}


def is_pointwise(name: str) -> bool:
    """Return True if each element of a function's result needs those at its own place alone."""
    if name in _POINTWISE:
        return True
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    packet = None if base.startswith("_") else getattr(torch.ops.aten, base, None)
    if packet is None:
        return False
    overloads = packet.overloads()
    # The first of these is the function itself; others may do less (`max` of two tensors).
    names = ("Tensor", "self", "Tensor_Tensor", "default")
    first = next((each for each in names if each in overloads), None)
    tags = () if first is None else getattr(packet, first).tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute each element; smaller tensors are stretched, whole ones cut."""
    found = strips_in(args, kwargs)
    first = max(found, key=lambda strip: strip.dim())
    if "out" in kwargs or (writes_in_place(function) and args[0] is not first):
        return NotImplemented
    if any(strip.from_right != first.from_right for strip in found):
        return NotImplemented
    if getattr(function, "__name__", "") == "prelu":
        return first.like(function(*locals_of(args), **locals_of(kwargs)))
    args, kwargs = tree_map(lambda leaf: fitted(leaf, first), (args, kwargs))
    made = function(*args, **kwargs)
    if not isinstance(made, Tensor):
        return NotImplemented
    # A whole operand of more dimensions adds its own at the left.
    return Strip(made, made.dim() - first.from_right, first.bounds, first.shards)


def _on_rows(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a new tensor of the same kind, which is no strip."""
    return function(x.local, *args, **kwargs)


def fitted(leaf: Any, like: Strip) -> Any:
    """Return this rank's rows of an operand of `like`."""
    if isinstance(leaf, Strip):
        return (leaf if leaf.bounds == like.bounds else leaf.cut_at(like.bounds)).local
    if isinstance(leaf, Tensor) and leaf.dim() >= like.from_right:
        dim = leaf.dim() - like.from_right
        if leaf.shape[dim] == like.bounds[-1]:
            return leaf.narrow(dim, like.own.first, like.own.height)
    return leaf


def _along(place: int, default: Any) -> Rule:
    """The rule of functions that mix along dimensions, the argument at `place` or `dim`."""

    def rule(function: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if not isinstance(first, Strip) or len(strips_in(args, kwargs)) > 1:
            return NotImplemented
        dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", default))
        if function is Tensor.flip and len(args) > 2:
            dims = args[1:]  # x.flip(2, 3)
        if _reaches(dims, first):
            return NotImplemented
        return each_row(function, first, args, kwargs)

    return rule


def _reaches(dims: Any, strip: Strip) -> bool:
    """True if dimensions, None being all, hold the one that is cut."""
    if dims is None:
        return True
    listed = dims if isinstance(dims, Sequence) else (dims,)
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in listed):
        return True
    return not listed or strip.strip_dim in {dim % strip.dim() for dim in listed}


def each_row(function: Any, first: Strip, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute a function that leaves the rows as they are, wherever it puts their dimension.

    Where that is shows in the shapes of whole tensors without values.
    """
    args, kwargs = tree_map(
        lambda leaf: leaf.cut_at(first.bounds) if isinstance(leaf, Strip) else leaf,
        (args, dict(kwargs)),
    )
    shapes, named = tree_map(_shape_alone, (args, kwargs))
    whole = function(*shapes, **named)
    made = function(*locals_of(args), **locals_of(kwargs))

    def wrap(part: Any, shape: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        sizes = zip(part.shape, shape.shape, strict=True)
        differing = [dim for dim, (own, all_rows) in enumerate(sizes) if own != all_rows]
        [dim] = differing
        return Strip(part, dim, first.bounds, first.shards)

    if isinstance(made, Tensor):
        return wrap(made, whole)
    parts = [wrap(part, shape) for part, shape in zip(made, whole, strict=True)]
    return tuple(parts) if type(made) in (tuple, list) else type(made)(parts)


def _shape_alone(leaf: Any) -> Any:
    if isinstance(leaf, Strip | Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf


def _only_with(check: Callable[..., bool]) -> Rule:
    """The rule of functions that are computed row by row where their arguments pass a check."""

    def rule(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], Strip) or not check(*args, **kwargs):
            return NotImplemented
        return each_row(function, args[0], args, kwargs)

    return rule


def _reduction(reduce: Callable[..., Tensor], join: Callable[[Strip, Tensor], Tensor]) -> Rule:
    """The rule of a reduction; over the rows, `join` makes the result of this rank's part."""

    def rule(
        function: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        if not isinstance(x, Strip):
            return NotImplemented
        kwargs = {} if dtype is None else {"dtype": dtype}
        if not _reaches(dim, x):
            return each_row(function, x, (x, dim, keepdim), kwargs)
        is_whole = dim is None or (isinstance(dim, Sequence) and not dim)
        return join(x, reduce(x.local, *(() if is_whole else (dim, keepdim)), **kwargs))

    return rule


_sum = _reduction(torch.sum, lambda x, part: total(x.shards.team, part))
_mean = _reduction(
    torch.mean, lambda x, part: total(x.shards.team, part * (x.own.height / x.bounds[-1]))
)
_any = _reduction(torch.any, lambda x, part: x.shards.team.total(part.long()) > 0)
_all = _reduction(
    torch.all, lambda x, part: x.shards.team.total(part.long()) == x.shards.team.shards
)


def _reshape(function: Any, x: Any, *sizes: Any, **kwargs: Any) -> Any:
    """View, reshape: rows stay together with what lies behind them in memory.

    (n, c, h, w) -> (n, c, h·w) cuts the last dimension at multiples of w; where the rows would be
    taken apart, as in (n, c·h·w), the tensor is gathered.
    """
    if not isinstance(x, Strip) or kwargs or not sizes or isinstance(sizes[0], torch.dtype):
        return NotImplemented
    wanted = list(sizes[0]) if isinstance(sizes[0], Sequence) else list(sizes)
    if -1 in wanted:
        known = -math.prod(wanted)
        wanted[wanted.index(-1)] = x.numel() // known if known else 0
    return _shaped(x, wanted)


def _flatten(function: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(x, Strip):
        return NotImplemented
    first, last = start_dim % x.dim(), end_dim % x.dim()
    sizes = [*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]]
    return _shaped(x, sizes)


def _unflatten(function: Any, x: Any, dim: int, sizes: Sequence[int]) -> Any:
    if not isinstance(x, Strip):
        return NotImplemented
    at, parts = dim % x.dim(), list(sizes)
    if -1 in parts:
        parts[parts.index(-1)] = x.shape[at] // -math.prod(parts)
    return _shaped(x, [*x.shape[:at], *parts, *x.shape[at + 1 :]])


def _shaped(x: Strip, sizes: Sequence[int]) -> Any:
    before, behind = math.prod(x.shape[: x.strip_dim]), math.prod(x.shape[x.strip_dim + 1 :])
    products = [1, *accumulate(sizes, lambda one, two: one * two)]
    for dim, size in enumerate(sizes):
        if products[dim] != before or size == 1:
            continue
        inner = math.prod(sizes[dim + 1 :])
        if size * inner != x.bounds[-1] * behind:
            break
        if any(bound * behind % inner for bound in x.bounds):
            break
        bounds = tuple(bound * behind // inner for bound in x.bounds)
        rank = x.shards.team.rank
        local = [*sizes]
        local[dim] = bounds[rank + 1] - bounds[rank]
        return Strip(x.local.reshape(local), dim, bounds, x.shards)
    return NotImplemented


def _cat(function: Any, tensors: Any, dim: int = 0) -> Any:
    """Join tensors along another dimension than the rows; those cut elsewhere are cut alike."""
    first = next(each for each in tensors if isinstance(each, Strip))
    for each in tensors:
        if isinstance(each, Strip):
            if each.strip_dim != first.strip_dim or each.bounds[-1] != first.bounds[-1]:
                return NotImplemented
        elif each.dim() != first.dim():
            return NotImplemented
    if dim % first.dim() == first.strip_dim:
        return NotImplemented
    return first.like(torch.cat([fitted(each, first) for each in tensors], dim))


def _stack(function: Any, tensors: Any, dim: int = 0) -> Any:
    first = next(each for each in tensors if isinstance(each, Strip))
    for each in tensors:
        if not isinstance(each, Strip) or each.strip_dim != first.strip_dim:
            return NotImplemented
    at = dim % (first.dim() + 1)
    made = torch.stack([fitted(each, first) for each in tensors], at)
    return Strip(made, first.strip_dim + (at <= first.strip_dim), first.bounds, first.shards)


def _getitem(function: Any, x: Any, index: Any) -> Any:
    """Select by whole numbers, slices, None and `...`; of the rows, a slice without gaps."""
    listed = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, Strip) or not all(_is_plain(each) for each in listed):
        return NotImplemented
    if Ellipsis in listed:
        at = listed.index(Ellipsis)
        taken = sum(each is not None for each in listed) - 1
        listed[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim, place = -1, -1
    for at, each in enumerate(listed):
        dim += each is not None
        if dim == x.strip_dim and each is not None:
            place = at
    if place >= 0 and listed[place] != slice(None):
        if not isinstance(listed[place], slice) or listed[place].step not in (None, 1):
            return NotImplemented
        first, stop, _ = listed[place].indices(x.bounds[-1])
        listed[place] = slice(None)
        x = _part(x, first, stop)
        if x is NotImplemented:
            return x
    return each_row(function, x, (x, tuple(listed)), {})


def _is_plain(index: Any) -> bool:
    return index is None or index is Ellipsis or isinstance(index, int | slice)


def _part(x: Strip, first: int, stop: int) -> Any:
    """Rows `first` to before `stop` of a tensor, of which each rank gets its share."""
    if stop - first < x.shards.team.shards:
        return NotImplemented
    bounds = x.shards.team.split.of(stop - first)
    reads = [Rows(first + one.first, first + one.stop) for one in strips(bounds)]
    if any(one.height < 1 for one in reads):
        return NotImplemented
    made = x.reading(reads)
    x.shards.copied(x.local, made)
    return x.like(made, bounds)


def _narrow(function: Any, x: Any, dim: int, start: int, length: int) -> Any:
    if not isinstance(x, Strip) or not isinstance(start, int):
        return NotImplemented
    if dim % x.dim() != x.strip_dim:
        return each_row(function, x, (x, dim, start, length), {})
    start %= x.bounds[-1]
    return _part(x, start, start + length)


def _pad(
    function: Any, x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    """Pad by a constant, or crop; reflections of other dimensions than the rows."""
    if not isinstance(x, Strip):
        return NotImplemented
    place = 2 * (x.from_right - 1)
    above, below = (*pad[place : place + 2], 0, 0)[:2]
    if mode != "constant":
        if above or below:
            return NotImplemented
        return each_row(function, x, (x, pad, mode, value), {})
    if above or below:
        height = x.bounds[-1] + above + below
        bounds = x.shards.team.split.of(height)
        reads = [Rows(one.first - above, one.stop - above) for one in strips(bounds)]
        if height < 1 or any(one.height < 1 for one in reads):
            return NotImplemented
        x = x.like(x.reading(reads, value or 0.0), bounds)
        pad = [*pad]
        pad[place : place + 2] = [0, 0]
    return x.like(F.pad(x.local, pad, mode, value)) if any(pad) else x


def _loss(elementwise: bool) -> Rule:
    """The rule of loss functions: their elements by row; then their sum or mean over all rows."""

    def rule(function: Any, *args: Any, **kwargs: Any) -> Any:
        found = strips_in(args, kwargs)
        reduction = kwargs.get("reduction", "mean")
        if not isinstance(args[0], Strip) or len(args) > 2 + (not elementwise):
            return NotImplemented
        if not elementwise:
            # Classes are in dimension 1, which targets of indices lack.
            first, target = args[0], args[1] if len(args) > 1 else kwargs.get("target")
            if not isinstance(target, Strip) and isinstance(target, Tensor):
                local = fitted(target, first)
                if local is not target:
                    dim = target.dim() - first.from_right
                    target = Strip(local, dim, first.bounds, first.shards)
            if reduction != "none" or not isinstance(target, Strip) or len(args) > 3:
                return NotImplemented
            if first.strip_dim < 2 or target.from_right != first.from_right:
                return NotImplemented
            kwargs.pop("target", None)
            return each_row(function, first, (first, target, *args[2:]), kwargs)
        if any(one.from_right != found[0].from_right for one in found):
            return NotImplemented
        each = pointwise(function, *args, **{**kwargs, "reduction": "none"})
        if each is NotImplemented or reduction == "none":
            return each
        # Others are divided by the number of elements. Torch 2.13 hands on no weight of `l1_loss`.
        weight = kwargs.get("weight") if function in (F.mse_loss, F.l1_loss) else None
        if reduction == "mean" and weight is not None:
            return _sum(torch.sum, each) / weight.sum()
        return _sum(torch.sum, each) if reduction == "sum" else _mean(torch.mean, each)

    return rule


def _trailing(x: Strip, normalized_shape: Sequence[int], *_: Any, **__: Any) -> bool:
    """True if the rows are none of the last dimensions, which a layer norm looks over."""
    return x.from_right > len(normalized_shape)


def elementwise_rules() -> dict[str, Rule]:
    """Return the rules of this file by the functions' names, those of pointwise ones aside."""
    along: dict[str, tuple[int, Any]] = {
        **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "logsumexp"), (1, None)),
        **dict.fromkeys(("argmax", "argmin", "amax", "amin", "flip", "unbind"), (1, None)),
        **dict.fromkeys(("sort", "glu", "var", "std", "prod"), (1, None)),
        **dict.fromkeys(("split", "chunk", "norm", "roll", "topk", "repeat_interleave"), (2, None)),
        **dict.fromkeys(("select", "index_select", "cumprod", "max", "min"), (1, None)),
        "normalize": (2, 1),
    }
    losses = ("smooth_l1_loss", "l1_loss", "mse_loss", "huber_loss", "binary_cross_entropy")
    rules: dict[str, Rule] = {name: _along(*where) for name, where in along.items()}
    rules |= dict.fromkeys((*losses, "binary_cross_entropy_with_logits"), _loss(elementwise=True))
    rules |= dict.fromkeys(("nll_loss", "cross_entropy"), _loss(elementwise=False))
    rules |= dict.fromkeys(("reshape", "view"), _reshape)
    rules |= dict.fromkeys(("layer_norm", "rms_norm"), _only_with(_trailing))
    anywhere = _only_with(lambda *_, **__: True)
    rules |= dict.fromkeys(("permute", "transpose", "movedim", "swapaxes", "unsqueeze"), anywhere)
    return {
        **rules,
        **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _on_rows),
        "squeeze": anywhere,
        "sum": _sum,
        "mean": _mean,
        "any": _any,
        "all": _all,
        "flatten": _flatten,
        "unflatten": _unflatten,
        "stack": _stack,
        "cat": _cat,
        "concat": _cat,
        "getitem": _getitem,
        "narrow": _narrow,
        "pad": _pad,
        "linear": _only_with(lambda x, *_, **__: x.from_right > 1),
        "one_hot": _only_with(lambda x, num_classes=-1: num_classes > 0),
    }
