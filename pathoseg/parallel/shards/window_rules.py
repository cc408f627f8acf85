"""Layers that look at neighbouring rows: convolutions, poolings, interpolation (`rows`, (2))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pathoseg.parallel.shards.exchange import Halos, rebuilt, total
from pathoseg.parallel.shards.rows import Rows, SlidingWindow, check_halos, checked, strips
from pathoseg.parallel.shards.strip import Rule, Strip, strips_in
from pathoseg.parallel.shards.strip_convolution import Convolution, StripConvolution, as_autocast


def _each(value: Any, count: int) -> list[int]:
    """A setting of `count` dimensions, which may be given once for all."""
    if isinstance(value, Sequence):
        return list(value) if len(value) == count else [*value] * count
    return [value] * count


def _axis(x: Strip, count: int) -> int:
    """The number of the rows among the last `count` dimensions; negative where they are none."""
    return x.strip_dim - (x.dim() - count)


class _Reach:
    """The rows that a layer (`what`) makes of `x` on each rank, and the input rows they take."""

    def __init__(self, x: Strip, what: str, height: int, reads: Callable[[Rows], Rows]) -> None:
        self._x, self._what, rank = x, what, x.shards.team.rank
        self.bounds = checked(x.shards.team.split.of(height), what)
        self.reads = tuple(map(reads, strips(self.bounds)))
        self.makes, self.read = strips(self.bounds)[rank], self.reads[rank]

    def check(self) -> None:
        check_halos(self._x.bounds, self.reads, self._what.capitalize())

    def rows(self, fill: float = 0.0) -> Tensor:
        """Return the input rows that this rank's output needs."""
        self.check()
        return self._x.reading(self.reads, fill)

    def rebuilt(self, rows: Tensor) -> AbstractContextManager[None]:
        return rebuilt(rows, self._x.local, self._x.strip_dim, self.read, self._x.own)


def _convolution(
    function: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    count = weight.dim() - 2
    if not isinstance(x, Strip) or strips_in(weight, bias) or (axis := _axis(x, count)) < 0:
        return NotImplemented
    # Ahead of either way below, as another rank may go the other: they exchange one dtype.
    x = x.like(as_autocast(x.local))
    strides, dilations = _each(stride, count), _each(dilation, count)
    spans = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    if padding == "same":
        befores = [span // 2 for span in spans]
        afters = [span - before for span, before in zip(spans, befores, strict=True)]
    else:
        befores = afters = _each(0 if padding == "valid" else padding, count)
    window = SlidingWindow(weight.shape[2 + axis], strides[axis], befores[axis], dilations[axis])
    height = window.height(x.bounds[-1], afters[axis])
    reach = _Reach(x, "a convolution", height, window.reads)
    layer = Convolution(function, strides, befores, dilations, groups, window, reach.makes)
    is_batch, is_even = x.dim() == count + 2, befores == afters
    if is_batch and is_even and [*reach.reads] != strips(x.bounds) and layer.runs_on(x.own):
        reach.check()
        halos = Halos(x.shards.team, x.strip_dim, x.bounds, reach.reads)
        given = (None if each is None else as_autocast(each) for each in (weight, bias))
        made = StripConvolution.apply(x.local, *given, halos, layer)  # type: ignore[no-untyped-call]  # torch's
        return x.like(made, reach.bounds)
    rows = reach.rows()
    befores = [0 if at == axis else before for at, before in enumerate(befores)]
    uneven = [0 if at == axis else afters[at] - befores[at] for at in range(count)]
    if any(uneven):
        rows = F.pad(rows, [one for more in reversed(uneven) for one in (0, more)])
    with reach.rebuilt(rows):
        made = function(rows, weight, bias, strides, befores, dilations, groups)
    return x.like(made, reach.bounds)


def _transposed(
    function: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    count = weight.dim() - 2
    if not isinstance(x, Strip) or strips_in(weight, bias) or (axis := _axis(x, count)) < 0:
        return NotImplemented
    strides, dilations = _each(stride, count), _each(dilation, count)
    paddings, more = _each(padding, count), _each(output_padding, count)
    window = SlidingWindow(weight.shape[2 + axis], strides[axis], paddings[axis], dilations[axis])
    height = window.spread(x.bounds[-1], more[axis])
    reach = _Reach(x, "a transposed convolution", height, window.reads_transposed)
    rows = reach.rows()
    paddings[axis] = more[axis] = 0
    with reach.rebuilt(rows):
        made = function(rows, weight, bias, strides, paddings, more, groups, dilations)
    first = reach.makes.first - window.reached_from(reach.read.first)
    if first or made.shape[x.strip_dim] != reach.makes.height:
        made = made.narrow(x.strip_dim, first, reach.makes.height)
    return x.like(made, reach.bounds)


def _max_pool(count: int) -> Rule:
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]

    def rule(
        function: Any,
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if not isinstance(x, Strip) or return_indices or (axis := _axis(x, count)) < 0:
            return NotImplemented
        kernels, dilations = _each(kernel_size, count), _each(dilation, count)
        strides = _each(stride, count) if stride else kernels
        paddings = _each(padding, count)
        window = SlidingWindow(kernels[axis], strides[axis], paddings[axis], dilations[axis])
        height = window.height(x.bounds[-1], paddings[axis], ceil_mode)
        reach = _Reach(x, "a max pooling", height, window.reads)
        rows = reach.rows(fill=-float("inf"))
        paddings[axis] = 0
        with reach.rebuilt(rows):
            made = pool(rows, kernels, strides, paddings, dilations, ceil_mode)
        return x.like(made, reach.bounds)

    return rule


def _average_pool(count: int) -> Rule:
    def rule(
        function: Any,
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if not isinstance(x, Strip) or (axis := _axis(x, count)) < 0:
            return NotImplemented
        kernels = _each(kernel_size, count)
        strides, paddings = _each(stride, count) if stride else kernels, _each(padding, count)
        window = SlidingWindow(kernels[axis], strides[axis], paddings[axis])
        whole = x.bounds[-1]
        height = window.height(whole, paddings[axis], ceil_mode)
        reach = _Reach(x, "an average pooling", height, window.reads)
        rows = reach.rows()
        edge = paddings[axis] if count_include_pad else 0
        counted = Rows(-edge, whole + edge)
        paddings[axis] = 0
        with reach.rebuilt(rows):
            if divisor_override is None:
                made = function(rows, kernels, strides, paddings, ceil_mode, count_include_pad)
            else:
                made = function(
                    rows, kernels, strides, paddings, ceil_mode, count_include_pad, divisor_override
                )
        each = (window.reads(Rows(at, at + 1)) for at in range(*reach.makes))
        seen = [read.within(counted).height for read in each]
        if divisor_override is None and any(rows_seen != kernels[axis] for rows_seen in seen):
            share = made.new_tensor([kernels[axis] / rows_seen for rows_seen in seen])
            made = made * share.view(-1, *[1] * (x.from_right - 1))
        return x.like(made, reach.bounds)

    return rule


def _global_average(count: int) -> Rule:
    def rule(function: Any, x: Any, output_size: Any) -> Any:
        """The mean over all rows; poolings to several rows are gathered."""
        if not isinstance(x, Strip) or (axis := _axis(x, count)) < 0:
            return NotImplemented
        sizes = _each(output_size, count)
        if sizes[axis] != 1:
            return NotImplemented
        part = function(x.local, sizes) * (x.own.height / x.bounds[-1])
        return total(x.shards.team, part)

    return rule


def _interpolate(
    function: Any,
    x: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Rows first, each the weighted sum of one or two; then the other dimensions by torch."""
    is_linear = mode in ("linear", "bilinear", "trilinear")
    if not isinstance(x, Strip) or antialias or not (is_linear or mode.startswith("nearest")):
        return NotImplemented
    count = x.dim() - 2
    axis = _axis(x, count)
    if axis < 0:
        return NotImplemented
    whole, scale = x.bounds[-1], None
    if size is not None:
        sizes = _each(size, count)
    else:
        scales = (
            list(scale_factor) if isinstance(scale_factor, Sequence) else [scale_factor] * count
        )
        shape = x.shape[2:]
        sizes = [int(rows * by) for rows, by in zip(shape, scales, strict=True)]
        scale = None if recompute_scale_factor else scales[axis]
        if scale not in (None, 1) and sizes[axis] == whole:
            return NotImplemented  # torch's kernels differ in whether they copy such rows
    exact = np.float64 if x.dtype is torch.float64 else np.float32
    above, below, share = _taps(mode, whole, sizes[axis], scale, bool(align_corners), exact)

    def reads(made: Rows) -> Rows:
        return Rows(int(above[made.first]), int(below[made.stop - 1]) + 1)

    reach = _Reach(x, "an interpolation", sizes[axis], reads)
    rows, place = reach.rows(), slice(*reach.makes)

    def taken(which: NDArray[np.int64]) -> Tensor:
        at = torch.from_numpy(which[place] - reach.read.first)
        return rows.index_select(x.strip_dim, at.to(rows.device))

    made = taken(above)
    if is_linear:
        part = torch.from_numpy(share[place]).to(rows).view(-1, *[1] * (x.from_right - 1))
        made = torch.lerp(made, taken(below), part)
    sizes[axis] = reach.makes.height
    if scale is not None:  # the other dimensions keep their own factor, also where none is larger
        factors = [1.0 if at == axis else by for at, by in enumerate(scales)]
        if factors != [1.0] * count:
            made = F.interpolate(made, None, tuple(factors), mode, align_corners, False)
    elif sizes != list(made.shape[2:]):
        made = F.interpolate(made, tuple(sizes), None, mode, align_corners)
    return x.like(made, reach.bounds)


def _taps(
    mode: str, rows: int, made: int, scale: float | None, corners: bool, dtype: type[np.floating]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.floating]]:
    """By output row: the input rows above and below it, and the share of the lower, as torch's
    kernels find them (`area_pixel_compute_source_index`). Known without torch, so that halos of
    tensors without memory are known too."""
    at = np.arange(made, dtype=dtype)
    step = dtype(rows / max(1, made) if scale is None else 1 / scale)
    if mode in ("nearest", "nearest-exact"):
        middle = dtype(0.5 if mode == "nearest-exact" else 0)
        above = np.floor((at + middle) * step).astype(np.int64).clip(max=rows - 1)
        return above, above, np.zeros(made, dtype)
    if corners:
        source = at * dtype((rows - 1) / (made - 1) if made > 1 else 0.0)
    else:
        source = (step * (at + dtype(0.5)) - dtype(0.5)).clip(min=0)
    above = np.floor(source).astype(np.int64).clip(max=rows - 1)
    return above, (above + 1).clip(max=rows - 1), source - above.astype(dtype)


def _pixel_shuffle(function: Any, x: Any, upscale_factor: int) -> Any:
    if not isinstance(x, Strip) or x.from_right != 2:
        return NotImplemented
    bounds = [upscale_factor * bound for bound in x.bounds]
    return x.like(function(x.local, upscale_factor), bounds)


def window_rules() -> dict[str, Rule]:
    """Return the rules of this file by the functions' names."""
    rules: dict[str, Rule] = {"interpolate": _interpolate, "pixel_shuffle": _pixel_shuffle}
    for count in (1, 2, 3):
        rules[f"conv{count}d"] = _convolution
        rules[f"conv_transpose{count}d"] = _transposed
        rules[f"max_pool{count}d"] = rules[f"_max_pool{count}d"] = _max_pool(count)
        rules[f"avg_pool{count}d"] = _average_pool(count)
        rules[f"adaptive_avg_pool{count}d"] = _global_average(count)
    return rules
