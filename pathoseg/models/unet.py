"""The U-Net of Ronneberger et al. (2015), padded so that a tile's mask is as large as the tile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn

from pathoseg.geometry import Box
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
        self.encoder = nn.ModuleList([two_convolutions(3, width, norm)])
        self.decoder = nn.ModuleList()
        for above, below in pairwise(channels):
            self.encoder.append(two_convolutions(above, below, norm, pool=True))
            self.decoder.insert(0, Up(below, above, norm, skip=above))
        self.head = nn.Conv2d(width, classes, 1)
        self.multiple = 2**depth
        self.reach = padding_reach(depth, depth) if norm == "batch" else None
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

    def logits_inside(self, images: torch.Tensor, inside: Box) -> torch.Tensor:
        """Logits of a part of the images alone, the same as `forward` gives it.

        Decoders compute no more than that part needs: two pixels around it at each resolution, one
        for each of the block's convolutions. Without them, zeros padded there would be felt.

        Args:
            images: Shape (n, 3, h, w).
            inside: Lies in the images.
        """
        features, skips = images, []
        for block in self.encoder:
            features = block(features)
            skips.append(features)
        skips.pop()
        logits: torch.Tensor = self.head(decode_inside(self.decoder, features, skips, inside))
        return logits


def decode_inside(
    blocks: Iterable[nn.Module],
    features: torch.Tensor,
    skips: list[torch.Tensor],
    inside: Box,
) -> torch.Tensor:
    """A part of what a decoder makes, from no more of its inputs than that part needs.

    Args:
        blocks: `Up`, the lowest first.
        features: Those of the bottom, as large as the encoder made them.
        skips: Those of the levels above it, the uppermost first; they are taken out.
        inside: The part, in pixels of the uppermost level.
    """
    needed, part = list[Box](), inside
    for skip in skips:
        left, top = (max(0, at - 2) // 2 * 2 for at in (part.x, part.y))
        right = min(skip.shape[3], -(-(part.right + 2) // 2) * 2)
        bottom = min(skip.shape[2], -(-(part.bottom + 2) // 2) * 2)
        needed.append(Box(left, top, right - left, bottom - top))
        part = Box(left // 2, top // 2, (right - left) // 2, (bottom - top) // 2)
    here = Box(0, 0, features.shape[3], features.shape[2])
    for block, box in zip(blocks, reversed(needed), strict=True):
        below = Box(box.x // 2, box.y // 2, box.width // 2, box.height // 2)
        skip = _cut(skips.pop(), box, 0, 0)
        features, here = block(_cut(features, below, here.x, here.y), skip), box
    return _cut(features, inside, here.x, here.y)


def _cut(features: torch.Tensor, box: Box, x: int, y: int) -> torch.Tensor:
    """The part of a box, where features begin at (x, y)."""
    return features[..., box.y - y : box.bottom - y, box.x - x : box.right - x]


class Up(nn.Module):
    """Doubles the resolution, joins the skip, convolves.

    Args:
        below: Channels at half the resolution.
        here: Channels that go out.
        norm: Normalisation layer.
        skip: Channels of the skip.
    """

    def __init__(self, below: int, here: int, norm: Norm, skip: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(below, here, 2, stride=2)
        self.convolve = two_convolutions(skip + here, here, norm)

    def forward(self, below: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([skip, self.up(below)], 1)
        convolved: torch.Tensor = self.convolve(joined)
        return convolved


def two_convolutions(inputs: int, outputs: int, norm: Norm, pool: bool = False) -> nn.Sequential:
    """Two 3×3 convolutions, each before its norm and ReLU; behind a 2×2 pooling if asked for."""
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


def padding_reach(depth: int, ups: int) -> int:
    """Return how far zero padding is felt inwards, in pixels of the level that is reached.

    It is one pixel for each 3×3 convolution, two a block.

    Args:
        depth: Number of poolings.
        ups: Number of blocks of the decoder behind them.
    """
    reach = 2
    for _ in range(depth):
        reach = -(-reach // 2) + 2
    for _ in range(ups):
        reach = 2 * reach + 2
    return reach
