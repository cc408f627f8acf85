"""A small network of two inputs: a tile, and a field four times as wide at four times its pixel."""

from __future__ import annotations

import torch
from torch import nn


class TwoFields(nn.Module):
    """Adds what a convolution makes of the tile and what one makes of the field's middle."""

    multiple = 8

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(3, classes, 3, padding=1)
        self.far = nn.Conv2d(3, classes, 1)

    def inputs_at(self, mpp: float, tile: int) -> dict[str, tuple[float, int]]:
        return {"image": (mpp, tile), "context": (4 * mpp, tile)}

    def forward(self, image: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        start, end = (context.shape[-1] * eighths // 8 for eighths in (3, 5))
        middle = self.far(context)[..., start:end, start:end]
        logits: torch.Tensor = self.near(image) + nn.functional.interpolate(middle, scale_factor=4)
        return logits


def make(in_channels: int, classes: int) -> nn.Module:
    assert in_channels == 3
    return TwoFields(classes)
