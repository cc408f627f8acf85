"""Networks with branches that do not read each other: the cases of sub-graph parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv(entering: int, leaving: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(entering, leaving, 3, stride, 1, bias=False),
        nn.BatchNorm2d(leaving),
        nn.ReLU(),
    )


class ThreeDecoders(nn.Module):
    """One encoder and three decoders, each with the skips: HoVer-Net's shape (Graham et al., 2019).

    Args:
        width: Channels of the first level.
        classes: Channels of the last decoder's output; the others have 2.
    """

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(_conv(entering, leaving), _conv(leaving, leaving))
            for entering, leaving in zip([3, *widths], widths, strict=False)
        )
        self.decoders = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(_conv(3 * size, size), _conv(size, size)) for size in widths[1::-1]
            )
            for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, out, 1) for out in (classes, 2, 2))

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            images = block(F.max_pool2d(images, 2) if level else images)
            skips.append(images)
        made = []
        for blocks, head in zip(self.decoders, self.heads, strict=True):
            value = skips[-1]
            for block, skip in zip(blocks, skips[-2::-1], strict=True):
                value = block(torch.cat([F.interpolate(value, scale_factor=2.0), skip], 1))
            made.append(head(value))
        return torch.cat(made, 1)


class FourResolutions(nn.Module):
    """Branches at 1, 1/2, 1/4… of the resolution that read each other: HRNet (Wang et al., 2020).

    Channels double as the resolution halves, so that branches cost about the same.

    Args:
        width: Channels at full resolution.
        branches: How many.
        exchanges: How often all branches read each other.
        classes: Channels of the output.
    """

    def __init__(
        self, width: int = 8, branches: int = 4, exchanges: int = 2, classes: int = 3
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(branches)]
        self.stem = _conv(3, width)
        self.enter = nn.ModuleList(
            _conv(width, size, 2**level) for level, size in enumerate(widths)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Sequential(_conv(size, size), _conv(size, size)) for size in widths)
            for _ in range(exchanges)
        )
        self.fuse = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(
                    nn.Identity() if source == target else nn.Conv2d(a, b, 1)
                    for source, a in enumerate(widths)
                )
                for target, b in enumerate(widths)
            )
            for _ in range(exchanges)
        )
        self.head = nn.Conv2d(sum(widths), classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        values = [enter(stem) for enter in self.enter]
        for blocks, fuse in zip(self.blocks, self.fuse, strict=True):
            made = [block(value) for block, value in zip(blocks, values, strict=True)]
            values = []
            for target, mixes in enumerate(fuse):
                total = made[target]
                for source, mix in enumerate(mixes):
                    if source != target:
                        total = total + _resized(mix(made[source]), source - target)
                values.append(F.relu(total))
        sized = [_resized(value, level) for level, value in enumerate(values)]
        return self.head(torch.cat(sized, 1))


def _resized(value: Tensor, levels: int) -> Tensor:
    if levels > 0:
        return F.interpolate(value, scale_factor=float(2**levels))
    return F.avg_pool2d(value, 2**-levels) if levels else value


class _Heads(nn.Module):
    """Some of the heads of an attention layer, and their part of the output's product."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.query, self.key, self.value = (nn.Linear(width, heads * size, False) for _ in range(3))
        self.out = nn.Linear(heads * size, width, False)
        self.heads, self.size = heads, size

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        query, key, value = (
            each(normed).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    """Some of the channels of a feed-forward layer, and their part of the output's product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, hidden, False), nn.Linear(hidden, width, False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(tokens))))


class SplitTransformer(nn.Module):
    """A T5-like encoder whose blocks are split into branches, which add up: SUPER's own case.

    Attention is split by heads and the feed-forward by channels (Jain et al., 2021).

    Args:
        width: Channels of a token.
        blocks: How many.
        branches: Of each attention and of each feed-forward layer.
        patch: Side of a token in pixels.
        classes: Channels of the output.
    """

    def __init__(
        self, width: int = 16, blocks: int = 2, branches: int = 2, patch: int = 4, classes: int = 3
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        size = width // (2 * branches)
        self.attention = nn.ModuleList(
            nn.ModuleList(_Heads(width, 2, size) for _ in range(branches)) for _ in range(blocks)
        )
        self.forwards = nn.ModuleList(
            nn.ModuleList(_FeedForward(width, 4 * width // branches) for _ in range(branches))
            for _ in range(blocks)
        )
        self.head = nn.ConvTranspose2d(width, classes, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        grid = self.embed(images)
        tokens = grid.flatten(2).transpose(1, 2)
        for attention, forwards in zip(self.attention, self.forwards, strict=True):
            for branches in (attention, forwards):
                made = [branch(tokens) for branch in branches]
                for each in made:
                    tokens = tokens + each
        return self.head(tokens.transpose(1, 2).unflatten(2, grid.shape[-2:]))
