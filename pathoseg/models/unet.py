"""The U-Net of Ronneberger et al. (2015), padded so that a tile's mask is as large as the tile."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import nn

from pathoseg.models.layers import he_initialise, norm_layer
from pathoseg.models.model_options import Norm


class UNet(nn.Module):
    """Encoder, decoder and a skip between them at each resolution.

    It differs from "U-Net: Convolutional Networks for Biomedical Image Segmentation" in its zero
    padding and in the norm after every 3×3 convolution. `encoder[depth]` is the bottom; upsampling
    is a 2×2 transposed convolution, which, unlike bilinear resizing, looks into no neighbouring
    cell: tiles cut at multiples of `multiple` see the cells of the whole slide.

    Args:
        classes: Channels of the logits, background included.
        width: Channels of `encoder[0]`; each pooling doubles them.
        depth: Number of poolings.
        norm: Normalisation layer.

    Attributes:
        multiple: A tile's sides must be divisible by it: 2^depth.
        reach: Pixels from a tile's edge beyond which its logits are those of a larger tile (the
            zeros padded there no longer count), or None where the norm looks at the whole tile.
    """

    def __init__(self, classes: int, width: int = 32, depth: int = 4, norm: Norm = "batch") -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        self.encoder = nn.ModuleList([_block(3, width, norm)])
        self.decoder = nn.ModuleList()
        for above, below in pairwise(channels):
            self.encoder.append(_block(above, below, norm, pool=True))
            self.decoder.insert(0, _Up(below, above, norm))
        self.head = nn.Conv2d(width, classes, 1)
        self.multiple = 2**depth
        self.reach = _reach(depth) if norm == "batch" else None
        he_initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes, h, w) of images (n, 3, h, w)."""
        features, skips = images, []
        for block in self.encoder:
            features = block(features)
            skips.append(features)
        skips.pop()
        for block in self.decoder:
            features = block(features, skips.pop())
        logits: torch.Tensor = self.head(features)
        return logits


class _Up(nn.Module):
    """Doubles the resolution, joins the skip, convolves."""

    def __init__(self, below: int, here: int, norm: Norm) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(below, here, 2, stride=2)
        self.convolve = _block(2 * here, here, norm)

    def forward(self, below: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([skip, self.up(below)], 1)
        convolved: torch.Tensor = self.convolve(joined)
        return convolved


def _block(inputs: int, outputs: int, norm: Norm, pool: bool = False) -> nn.Sequential:
    layers = OrderedDict[str, nn.Module](pool=nn.MaxPool2d(2)) if pool else OrderedDict()
    # In-place ReLU is safe: no norm needs its own output for its backward.
    layers.update(
        conv1=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm1=norm_layer(norm, outputs),
        relu1=nn.ReLU(inplace=True),
        conv2=nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        norm2=norm_layer(norm, outputs),
        relu2=nn.ReLU(inplace=True),
    )
    return nn.Sequential(layers)


def _reach(depth: int) -> int:
    """Return how far zero padding is felt inwards, in pixels: one for each 3×3 convolution."""
    reach = 2
    for _ in range(depth):
        reach = -(-reach // 2) + 2
    for _ in range(depth):
        reach = 2 * reach + 2
    return reach
