"""AmoebaNet-D (Real et al., "Regularized Evolution for Image Classifier Architecture", 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

_Operation = Callable[[int, int], nn.Module]


class Convs(nn.Sequential):
    """ReLU, convolution and norm for each kernel, between several on a quarter of the channels.

    The stride is taken by the sides of kernels that are larger than 1, of a lone 1×1 by itself.
    """

    def __init__(
        self, inputs: int, outputs: int, kernels: Sequence[tuple[int, int]], stride: int = 1
    ) -> None:
        inner = max(1, outputs // 4)
        sizes = [inputs, *[inner] * (len(kernels) - 1), outputs]
        layers: list[nn.Module] = []
        for index, (high, wide) in enumerate(kernels):
            alone = len(kernels) == 1
            strides = stride if high > 1 or alone else 1, stride if wide > 1 or alone else 1
            layers += [
                nn.ReLU(),
                nn.Conv2d(
                    sizes[index],
                    sizes[index + 1],
                    (high, wide),
                    stride=strides,
                    padding=(high // 2, wide // 2),
                    bias=False,
                ),
                nn.BatchNorm2d(sizes[index + 1]),
            ]
        super().__init__(*layers)


class HalveAndShift(nn.Module):
    """Halves the resolution by two 1×1 convolutions, one of them a pixel further."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.here = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.there = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = F.relu(features)
        shifted = F.pad(features, (0, 1, 0, 1))[:, :, 1:, 1:]
        normed: torch.Tensor = self.norm(torch.cat([self.here(features), self.there(shifted)], 1))
        return normed


def _convs(*kernels: tuple[int, int]) -> _Operation:
    return lambda channels, stride: Convs(channels, channels, kernels, stride)


def _skip(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else HalveAndShift(channels, channels)


def _small_max(_: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _max(_: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, 1)


def _mean(_: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


_POINT = _convs((1, 1))
_SQUARE = _convs((1, 1), (3, 3), (1, 1))
_LONG = _convs((1, 1), (1, 7), (7, 1), (1, 1))
# The cells: which earlier state (0 and 1 are the inputs) goes through which operation; two of
# these make a further state. Then the states that the output is made of.
_NORMAL = (
    ((1, _POINT), (1, _max)),
    ((1, _skip), (0, _LONG)),
    ((0, _POINT), (0, _LONG)),
    ((2, _max), (2, _skip)),
    ((1, _mean), (5, _POINT)),
)
_NORMAL_OUTPUT = (0, 3, 4, 6)
_REDUCTION = (
    ((0, _small_max), (0, _max)),
    ((2, _skip), (1, _SQUARE)),
    ((2, _LONG), (2, _max)),
    ((3, _skip), (1, _small_max)),
    ((2, _mean), (3, _POINT)),
)
_REDUCTION_OUTPUT = (4, 5, 6)


class Cell(nn.Module):
    """Five sums of two operations each.

    Args:
        before: Channels of the cell's input before the last.
        last: Channels of its last input.
        channels: Channels of each state.
        halve: Whether it halves the resolution.
        halved: Whether the cell before it did, so that its inputs differ in resolution.
    """

    def __init__(self, before: int, last: int, channels: int, halve: bool, halved: bool) -> None:
        super().__init__()
        pairs = _REDUCTION if halve else _NORMAL
        self._output = _REDUCTION_OUTPUT if halve else _NORMAL_OUTPUT
        self._sources = [source for pair in pairs for source, _ in pair]
        self.fit_last = Convs(last, channels, [(1, 1)])
        self.fit_before = (
            HalveAndShift(before, channels) if halved else Convs(before, channels, [(1, 1)])
        )
        self.operations = nn.ModuleList(
            make(channels, 2 if halve and source < 2 else 1)
            for pair in pairs
            for source, make in pair
        )
        self.channels = channels * len(self._output)

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        states = [self.fit_last(last), self.fit_before(before)]
        for index in range(0, len(self._sources), 2):
            one, two = (
                self.operations[step](states[self._sources[step]]) for step in (index, index + 1)
            )
            states.append(one + two)
        return torch.cat([states[index] for index in self._output], 1)


class AmoebaNetD(nn.Module):
    """A stem that halves twice more, then three runs of normal cells between two reductions.

    Args:
        classes: Number of logits.
        cells: Normal cells, a multiple of 3: 6 or 18 as published.
        filters: Channels of each state in the first normal cells, a multiple of 4: 208, 256, 416…
            as published (Huang et al., "GPipe", 2019, table 1).
    """

    def __init__(self, classes: int = 2, cells: int = 18, filters: int = 256) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        run = [False] * (cells // 3)
        before, last, halved, made = channels, channels, False, []
        for halve in (True, True, *run, True, *run, True, *run):
            channels *= 2 if halve else 1
            made.append(Cell(before, last, channels, halve, halved))
            before, last, halved = last, made[-1].channels, halve
        self.cells = nn.ModuleList(made)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits: torch.Tensor = self.head(last)
        return logits
