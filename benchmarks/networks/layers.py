"""Parts that classic networks share: convolution with norm and ReLU, branches, scaled widths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ConvNormReLU(nn.Sequential):
    """Convolution without bias, batch norm, ReLU in place."""

    def __init__(self, inputs: int, outputs: int, kernel: Any, eps: float = 1e-5, **options: Any):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, bias=False, **options),
            nn.BatchNorm2d(outputs, eps=eps),
            nn.ReLU(inplace=True),
        )


class Branches(nn.ModuleList):
    """Runs each branch on the same input and joins their channels."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(features) for branch in self], 1)


def scaled(channels: int, width: float) -> int:
    """A layer's channels, `width` times as many as published, at least one."""
    return max(1, round(channels * width))
