"""ResNet-50 (He et al., "Deep Residual Learning", 2016), strides in the 3×3 convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.networks.layers import ConvNormReLU, scaled


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions added to the input, then ReLU."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.reduce = ConvNormReLU(inputs, inner, 1)
        self.convolve = ConvNormReLU(inner, inner, 3, stride=stride, padding=1)
        self.expand = nn.Sequential(
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = self.expand(self.convolve(self.reduce(features)))
        total += self.shortcut(features)
        relu: torch.Tensor = self.relu(total)
        return relu


def resnet50(
    classes: int = 2, width: float = 1.0, blocks: Sequence[int] = (3, 4, 6, 3)
) -> nn.Sequential:
    """Stem, four groups of bottlenecks, mean, linear."""
    channels = scaled(64, width)
    parts: list[nn.Module] = [
        ConvNormReLU(3, channels, 7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, 1),
    ]
    for group, count in enumerate(blocks):
        inner = scaled(64 * 2**group, width)
        units = []
        for unit in range(count):
            units.append(Bottleneck(channels, inner, 2 if group and not unit else 1))
            channels = 4 * inner
        parts.append(nn.Sequential(*units))
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
