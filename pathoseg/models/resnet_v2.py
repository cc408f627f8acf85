"""ResNet-v2 for large images: pre-activation bottlenecks of depth 9n + 2, for pixels or tiles."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from pathoseg.models.layers import he_initialise, norm_layer
from pathoseg.models.model_options import Norm, Task


class ResNetV2(nn.Module):
    """Three groups of n bottleneck units; the second and third halve the resolution.

    The units are those of He et al., "Identity Mappings in Deep Residual Networks" (2016), the
    widths those that Keras' CIFAR example gave them and that GEMS trained: 16 in the stem, then
    (inner, outer) 16-64, 64-128, 128-256. The paper's own 16-64, 32-128, 64-256 are narrower:
    10 M parameters at depth 1001 against 30 M here.

    To segment, the features of stride 4 are classified and the logits upsampled bilinearly; to
    classify, they are averaged over the tile.

    Args:
        classes: Number of logits, background included.
        task: "segment" for one answer a pixel, "classify" for one a tile.
        depth: 9n + 2 (checked by `ModelConfig`).
        width: Channels of the stem; all others are multiples of it.
        norm: Normalisation layer.

    Attributes:
        multiple: A tile's sides must be divisible by it: 4.
        reach: As `UNet.reach`; None for a classifier too.
    """

    def __init__(
        self,
        classes: int,
        task: Task = "segment",
        depth: int = 110,
        width: int = 16,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        units = (depth - 2) // 9
        self.stem = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(3, width, 3, padding=1, bias=False),
                norm=norm_layer(norm, width),
                relu=nn.ReLU(inplace=True),
            )
        )
        self.groups = nn.Sequential(
            _group(width, width, 4 * width, units, norm, first=True),
            _group(4 * width, 4 * width, 8 * width, units, norm),
            _group(8 * width, 8 * width, 16 * width, units, norm),
        )
        self.norm = norm_layer(norm, 16 * width)
        self.relu = nn.ReLU(inplace=True)
        make_head = _pixel_head if task == "segment" else _tile_head
        self.head = make_head(16 * width, classes)
        self.multiple = 4
        self.reach = _reach(units) if norm == "batch" and task == "segment" else None
        he_initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes, h, w), or (n, classes) of a classifier, of images (n, 3, h, w)."""
        features = self.groups(self.stem(images))
        logits: torch.Tensor = self.head(self.relu(self.norm(features)))
        return logits


class _Unit(nn.Module):
    """A bottleneck: 1×1, 3×3, 1×1 convolutions, each after its norm and ReLU, added to the input.

    Args:
        inputs: Channels that come in.
        inner: Channels of the 3×3 convolution.
        outputs: Channels that go out; a 1×1 convolution fits the shortcut where they differ.
        stride: Of the first convolution and the shortcut.
        norm: Normalisation layer.
        activated: The input is normed and rectified already (the stem's output).
    """

    def __init__(
        self, inputs: int, inner: int, outputs: int, stride: int, norm: Norm, activated: bool
    ) -> None:
        super().__init__()
        layers = OrderedDict[str, nn.Module]()
        if not activated:
            layers["norm1"] = norm_layer(norm, inputs)
            layers["relu1"] = nn.ReLU(inplace=True)
        layers["conv1"] = nn.Conv2d(inputs, inner, 1, stride=stride, bias=False)
        layers["norm2"] = norm_layer(norm, inner)
        layers["relu2"] = nn.ReLU(inplace=True)
        layers["conv2"] = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        layers["norm3"] = norm_layer(norm, inner)
        layers["relu3"] = nn.ReLU(inplace=True)
        layers["conv3"] = nn.Conv2d(inner, outputs, 1, bias=False)
        self.residual = nn.Sequential(layers)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.shortcut(features) + self.residual(features)
        return total


def _group(
    inputs: int, inner: int, outputs: int, units: int, norm: Norm, first: bool = False
) -> nn.Sequential:
    head = _Unit(inputs, inner, outputs, 1 if first else 2, norm, activated=first)
    rest = [_Unit(outputs, inner, outputs, 1, norm, activated=False) for _ in range(units - 1)]
    return nn.Sequential(head, *rest)


def _pixel_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, classes, 1),
            up=nn.Upsample(scale_factor=4, mode="bilinear"),
        )
    )


def _tile_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(channels, classes),
        )
    )


def _reach(units: int) -> int:
    """Return how far zero padding is felt inwards, in pixels: one for each 3×3 convolution."""
    reach = 1 + units
    for _ in range(2):
        reach = -(-reach // 2) + units
    # Bilinear upsampling mixes in the next cell for half of a cell's four pixels.
    return 4 * reach + 2
