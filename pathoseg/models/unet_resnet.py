"""A U-Net whose encoder is a ResNet-18, -34 or -50, under torchvision's parameter names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from pathoseg.models.layers import Encoder, he_initialise
from pathoseg.models.model_options import Norm
from pathoseg.models.unet import Up

# Depth → units in each of the four groups, and whether a unit is a bottleneck.
RESNETS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True)}

_WIDTH = 64  # channels of the stem
_DECODER = 16  # channels of the decoder at full resolution; each level below has twice as many


class ResNetUNet(nn.Module):
    """Features of a ResNet at strides 2 to 32, joined by the decoder of the U-Net.

    The encoder is that of He et al., "Deep Residual Learning for Image Recognition" (2016), with
    the stride of a bottleneck in its 3×3 convolution, as torchvision has it. The last decoder
    block joins the image itself: the encoder has nothing at full resolution.

    Args:
        classes: Channels of the logits, background included.
        units: Residual units in each group.
        bottleneck: Whether a unit is a bottleneck of three convolutions, or has two.
        norm: Normalisation layer of the decoder; the encoder's own is batch norm.
        width: Channels of the stem.

    Attributes:
        multiple: A tile's sides must be divisible by it: 32 for four groups.
        reach: As `UNet.reach`.
    """

    def __init__(
        self,
        classes: int,
        units: Sequence[int],
        bottleneck: bool,
        norm: Norm = "batch",
        width: int = _WIDTH,
    ) -> None:
        super().__init__()
        self.encoder = ResNetEncoder(units, bottleneck, width)
        channels = [3, *self.encoder.channels]  # of strides 1, 2, 4…
        widths = [_DECODER * 2**level for level in range(len(channels) - 1)] + [channels[-1]]
        self.decoder = nn.ModuleList()
        for level, (here, below) in enumerate(pairwise(widths)):
            self.decoder.insert(0, Up(below, here, norm, skip=channels[level]))
        self.head = nn.Conv2d(_DECODER, classes, 1)
        self.multiple = 2 ** (len(units) + 1)
        self.reach = _reach(units, bottleneck) if norm == "batch" else None
        he_initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes, h, w) of images (n, 3, h, w)."""
        skips = [images, *self.encoder(images)]
        features = skips.pop()
        for block in self.decoder:
            features = block(features, skips.pop())
        logits: torch.Tensor = self.head(features)
        return logits


class ResNetEncoder(Encoder):
    """The convolutions of a ResNet.

    Args:
        units: As of `ResNetUNet`.
        bottleneck: As of `ResNetUNet`.
        width: As of `ResNetUNet`.

    Attributes:
        channels: Of the features at strides 2, 4, 8….
    """

    def __init__(self, units: Sequence[int], bottleneck: bool, width: int = _WIDTH) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.channels = [width]
        self.groups = len(units)
        inputs = width
        for level, count in enumerate(units):
            inner = width * 2**level
            outputs = 4 * inner if bottleneck else inner
            strides = [1 if level == 0 else 2] + [1] * (count - 1)
            group = nn.Sequential()
            for stride in strides:
                group.append(_Unit(inputs, inner, outputs, stride, bottleneck))
                inputs = outputs
            self.add_module(f"layer{level + 1}", group)
            self.channels.append(outputs)
        above = len(units)
        self.blocks_above = {"conv1.": above, "bn1.": above}
        self.blocks_above |= {f"layer{level}.": above - level for level in range(1, above + 1)}

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Features at strides 2, 4, 8… of images (n, 3, h, w)."""
        features = self.relu(self.bn1(self.conv1(images)))
        found = [features]
        features = self.maxpool(features)
        for level in range(1, self.groups + 1):
            features = self.get_submodule(f"layer{level}")(features)
            found.append(features)
        return found


class _Unit(nn.Module):
    """A residual unit: two 3×3 convolutions, or 1×1, 3×3, 1×1; the 3×3 one that is first strides.

    Args:
        inputs: Channels that come in.
        inner: Channels of the 3×3 convolutions.
        outputs: Channels that go out.
        stride: Of the unit.
        bottleneck: Three convolutions, not two.
    """

    def __init__(
        self, inputs: int, inner: int, outputs: int, stride: int, bottleneck: bool
    ) -> None:
        super().__init__()
        self.bottleneck = bottleneck
        if bottleneck:
            self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(inner)
            self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(inner)
            self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(outputs)
        else:
            self.conv1 = nn.Conv2d(inputs, inner, 3, stride=stride, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(inner)
            self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                OrderedDict(
                    [
                        ("0", nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)),
                        ("1", nn.BatchNorm2d(outputs)),
                    ]
                )
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.bn1(self.conv1(features)))
        inner = self.bn2(self.conv2(inner))
        if self.bottleneck:
            inner = self.bn3(self.conv3(self.relu(inner)))
        total: torch.Tensor = self.relu(inner + self.downsample(features))
        return total


def _reach(units: Sequence[int], bottleneck: bool) -> int:
    """Return how far zero padding is felt inwards, in pixels.

    Of features disturbed up to r from an edge, a 3×3 convolution disturbs r + 1; one of stride 2
    leaves r / 2 and a half, rounded up. The stem's 7×7 convolution is felt 2 cells inwards.
    """
    each = 1 if bottleneck else 2
    reach = -(-(2 + 1) // 2)  # the stem, then the pooling
    for level, count in enumerate(units):
        if level > 0:  # the first 3×3 convolution strides
            reach = -(-(reach + 1) // 2) - 1
        reach += each * count
    for _ in range(len(units) + 1):
        reach = 2 * reach + 2
    return reach
