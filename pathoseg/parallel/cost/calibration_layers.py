"""The layers that a device is calibrated with: drawn at random from what networks are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pathoseg.device import training_layout
from pathoseg.parallel.graph.traced import Traced

# Of each kind, however small the scale.
_FEWEST = 10
# Numbers in the largest tensor, and multiply-adds of the dearest layer.
_MOST_NUMBERS = 2**24
_MOST_PRODUCTS = 1e9

# Of fewer channels-last channels a pointwise convolution with a stride writes beyond its memory in
# the backward of a batch (torch 2.13 on a CPU with AVX2).
_FEWEST_STRIDED = 8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A small module that is timed for its last layer.

    Other layers come before it where gradients of inputs would be copied or inputs written into, or
    where it reads parts of a tensor. Images and kernels lie in memory as in training.
    """

    module: nn.Module
    shapes: tuple[Shape, ...]

    def example(self, layout: torch.memory_format) -> tuple[torch.Tensor, ...]:
        """Make the module's inputs as meta tensors that require gradients."""
        empty = (laid_out(torch.empty(shape, device="meta"), layout) for shape in self.shapes)
        return tuple(tensor.requires_grad_() for tensor in empty)

    def traced(self, device: torch.device) -> Traced:
        """Bring the module to a device, and trace it with its inputs."""
        layout = training_layout(device.type)
        self.module.to(device, memory_format=layout)  # type: ignore[call-overload]  # not in its stub
        return Traced(self.module, self.example(layout))


def laid_out(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """Return a tensor in this layout if it holds images."""
    return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor


class Call(nn.Module):
    """A module that calls a function on its inputs."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._function(*inputs)


def draw_cases(scale: float = 1.0, seed: int = 0) -> list[Case]:
    """Draw layers of each kind at random sizes, for calibration.

    Args:
        scale: Factor of the usual number of layers.
        seed: The same seed draws the same layers.
    """
    draw = _Draw(np.random.default_rng(seed))
    return [make(draw) for make, count in _KINDS for _ in range(max(_FEWEST, round(scale * count)))]


def reference_networks() -> list[Case]:
    """Return stacks of layers as they stand in networks, to compare with the same layers alone."""

    def block(inputs: int, outputs: int, kernel: int = 3, groups: int = 0) -> list[nn.Module]:
        norm = nn.GroupNorm(groups, outputs) if groups else nn.BatchNorm2d(outputs)
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        return [conv, norm, nn.ReLU(inplace=True)]

    def plain(width: int, groups: int = 0) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for level in range(4):
            for _ in range(2):
                layers += block(channels, width << level, 3, groups)
                channels = width << level
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers)

    def narrowing(width: int) -> nn.Module:
        layers = block(3, 4 * width, 7)
        for _ in range(6):
            layers += block(4 * width, width, 1) + block(width, width) + block(width, 4 * width, 1)
        return nn.Sequential(*layers, nn.Upsample(scale_factor=2, mode="bilinear"))

    return [
        Case(plain(16), ((2, 3, 192, 192),)),
        Case(plain(48), ((1, 3, 128, 128),)),
        Case(plain(24, groups=8), ((1, 3, 256, 256),)),
        Case(narrowing(24), ((1, 3, 128, 128),)),
        Case(narrowing(64), ((2, 3, 48, 48),)),
    ]


class _Draw:
    """Draws sizes by their logarithms."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def pick(self, *values: int) -> int:
        return int(self._rng.choice(values))

    def size(self, low: float, high: float) -> int:
        return round(float(np.exp(self._rng.uniform(np.log(low), np.log(high)))))

    def channels(self, high: int = 1024) -> int:
        """Mostly a multiple of 8, sometimes any number, sometimes the 3 of an image."""
        drawn = self._rng.random()
        if drawn < 0.06:
            return 3
        size = self.size(8, high)
        return size if drawn < 0.15 else 8 * max(1, round(size / 8))

    def images(self, channels: int) -> Shape:
        """Draw a shape of images (n, channels, height, width)."""
        batch = self.pick(1, 1, 2, 2, 4, 8)
        side = self.size(6, min(512.0, max(8.0, (_MOST_NUMBERS / channels / batch) ** 0.5)))
        return batch, channels, side, side

    def tokens(self) -> Shape:
        """Draw a shape of tokens (n, length, channels)."""
        batch, channels, side, _ = self.images(self.channels())
        return batch, side**2, channels

    def images_or_tokens(self) -> Shape:
        return (self.images(self.channels()), self.tokens())[self.pick(0, 1)]


def _convolution(draw: _Draw) -> Case:
    while True:
        inputs, outputs = draw.channels(), draw.channels()
        shape = draw.images(max(inputs, outputs))
        side = draw.pick(1, 1, 1, 3, 3, 3, 3, 3, 5, 7)
        kernel = (side, side) if draw.pick(0, 1, 1, 1, 1) else (1, side)
        stride = draw.pick(1, 1, 1, 2)
        groups = 1
        match draw.pick(*range(14)):
            case 0:
                outputs = groups = inputs
            case 1:
                groups = draw.pick(2, 4, 8)
                inputs, outputs = (groups * max(1, size // groups) for size in (inputs, outputs))
        if stride > 1 and kernel == (1, 1) and inputs < _FEWEST_STRIDED:
            continue
        products = shape[0] * (shape[2] / stride) ** 2 * inputs * outputs / groups
        if products * kernel[0] * kernel[1] > _MOST_PRODUCTS:
            continue
        padding = (kernel[0] // 2, kernel[1] // 2)
        bias = bool(draw.pick(0, 0, 1))
        module = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=bias)
        return Case(module, ((shape[0], inputs, *shape[2:]),))


def _transposed(draw: _Draw) -> Case:
    while True:
        inputs, outputs = draw.channels(512), draw.channels(512)
        batch, _, side, _ = draw.images(4 * max(inputs, outputs))
        kernel = draw.pick(2, 2, 3, 4)
        if batch * side**2 * inputs * outputs * kernel**2 <= _MOST_PRODUCTS:
            module = nn.ConvTranspose2d(inputs, outputs, kernel, 2, padding=(kernel - 1) // 2)
            return Case(module, ((batch, inputs, side, side),))


def _batch_norm(draw: _Draw) -> Case:
    shape = draw.images(draw.channels())
    return Case(nn.BatchNorm2d(shape[1]), (shape,))


def _group_norm(draw: _Draw) -> Case:
    groups = draw.pick(1, 4, 8, 8, 16, 32)
    shape = draw.images(groups * draw.size(1, 512 / groups))
    return Case(nn.GroupNorm(groups, shape[1]), (shape,))


def _layer_norm(draw: _Draw) -> Case:
    shape = draw.tokens()
    return Case(nn.LayerNorm(shape[2]), (shape,))


def _attention(draw: _Draw) -> Case:
    while True:
        batch, heads, size = draw.pick(1, 1, 2, 4), draw.size(1, 24), draw.pick(32, 64, 64, 80, 128)
        length = draw.size(16, 4096)
        if 2 * batch * heads * length**2 * size <= _MOST_PRODUCTS:
            return Case(_Attention(heads), ((batch, length, 3 * heads * size),))


class _Attention(nn.Module):
    """Attention whose queries, keys and values are parts of one tensor."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self._heads = heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        size = width // (3 * self._heads)
        parts = tokens.view(batch, length, 3, self._heads, size).transpose(1, 3)
        queries, keys, values = parts.unbind(2)
        return F.scaled_dot_product_attention(queries, keys, values)


def _scale(draw: _Draw) -> Case:
    shape = draw.tokens()
    return Case(_Scale(shape[2]), (shape,))


class _Scale(nn.Module):
    """A trained factor for each channel of tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._factors = nn.Parameter(torch.ones(channels))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self._factors


def _gate(draw: _Draw) -> Case:
    shape = draw.tokens()
    return Case(Call(lambda one, other: one.neg() * other.neg()), (shape, shape))


def _relu(draw: _Draw) -> Case:
    in_place = nn.Sequential(nn.Sigmoid(), nn.ReLU(inplace=True))
    return Case((nn.ReLU(), in_place)[draw.pick(0, 1)], (draw.images(draw.channels()),))


def _gelu(draw: _Draw) -> Case:
    return Case(nn.GELU(), (draw.images_or_tokens(),))


def _silu(draw: _Draw) -> Case:
    return Case(nn.SiLU(), (draw.images_or_tokens(),))


def _sigmoid(draw: _Draw) -> Case:
    return Case(nn.Sigmoid(), (draw.images(draw.channels()),))


def _maximum(draw: _Draw) -> Case:
    kernel = draw.pick(2, 2, 3)
    return Case(
        nn.MaxPool2d(kernel, draw.pick(2, 2, 1), kernel // 3), (draw.images(draw.channels()),)
    )


def _average(draw: _Draw) -> Case:
    kernel = draw.pick(2, 3, 3)
    pool = nn.AvgPool2d(kernel, draw.pick(1, 2), kernel // 3)
    return Case(pool, (draw.images(draw.channels()),))


def _mean(draw: _Draw) -> Case:
    return Case(nn.AdaptiveAvgPool2d(1), (draw.images(draw.channels()),))


def _nearest(draw: _Draw) -> Case:
    batch, channels, side, _ = draw.images(draw.channels())
    return Case(nn.Upsample(scale_factor=2), ((batch, channels, side // 2, side // 2),))


def _bilinear(draw: _Draw) -> Case:
    batch, channels, side, _ = draw.images(draw.channels())
    # By a quarter of a patch of 14 px, too.
    factor = (2.0, 2.0, 3.5, 4.0)[draw.pick(0, 1, 2, 3)]
    module = nn.Upsample(scale_factor=factor, mode="bilinear")
    below = max(3, round(side / factor))
    return Case(module, ((batch, channels, below, below),))


def _cat(draw: _Draw) -> Case:
    batch, channels, *sides = draw.images(2 * draw.channels(512))
    part = draw.size(1, channels - 1)
    shapes = tuple((batch, size, *sides) for size in (part, channels - part))
    return Case(Call(lambda one, other: torch.cat([one.neg(), other.neg()], 1)), shapes)


def _add(draw: _Draw) -> Case:
    shape = draw.images(draw.channels())
    return Case(Call(lambda one, other: one.neg() + other.neg()), (shape, shape))


def _linear(draw: _Draw) -> Case:
    while True:
        inputs, outputs, rows = draw.size(8, 8192), draw.size(2, 8192), draw.size(1, 4096)
        if (
            inputs * outputs <= _MOST_NUMBERS
            and rows * max(inputs, outputs) <= _MOST_NUMBERS
            and rows * inputs * outputs <= _MOST_PRODUCTS
        ):
            return Case(nn.Linear(inputs, outputs), ((rows, inputs),))


def _token_linear(draw: _Draw) -> Case:
    """A matrix of a transformer, from or to a multiple of its width."""
    while True:
        narrow, factor = 64 * draw.size(2, 24), draw.pick(1, 1, 3, 4)
        inputs, outputs = (narrow, factor * narrow)[:: draw.pick(1, -1)]
        batch, length = draw.pick(1, 1, 2, 4), draw.size(16, 4096)
        if batch * length * inputs * outputs <= _MOST_PRODUCTS:
            return Case(nn.Linear(inputs, outputs), ((batch, length, inputs),))


def _patches(draw: _Draw) -> Case:
    """The convolution that makes tokens of patches."""
    patch, side = draw.pick(4, 8, 14, 16), draw.size(4, 64)
    module = nn.Conv2d(3, 64 * draw.size(2, 20), patch, patch)
    return Case(module, ((draw.pick(1, 1, 2), 3, patch * side, patch * side),))


def _dropout(draw: _Draw) -> Case:
    return Case(nn.Dropout(), (draw.images(draw.channels()),))


# Each kind's maker, and how many a calibration takes.
_KINDS: tuple[tuple[Callable[[_Draw], Case], int], ...] = (
    (_convolution, 440),
    (_transposed, 40),
    (_batch_norm, 36),
    (_group_norm, 30),
    (_layer_norm, 24),
    (_relu, 40),
    (_gelu, 16),
    (_silu, 16),
    (_sigmoid, 16),
    (_maximum, 30),
    (_average, 24),
    (_mean, 20),
    (_nearest, 24),
    (_bilinear, 24),
    (_cat, 24),
    (_add, 30),
    (_dropout, 16),
    (_linear, 60),
    (_token_linear, 40),
    (_attention, 40),
    (_scale, 16),
    (_gate, 16),
    (_patches, 12),
)
