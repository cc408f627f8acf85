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


class _Decoder(nn.Module):
    """From the deepest value up, level by level, with the encoder's values beside it."""

    def __init__(self, widths: list[int], leaving: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(3 * size, size), _conv(size, size)) for size in widths[-2::-1]
        )
        self.head = nn.Conv2d(widths[0], leaving, 1)

    def forward(self, skips: list[Tensor]) -> Tensor:
        value = skips[-1]
        for block, skip in zip(self.blocks, skips[-2::-1], strict=True):
            value = block(torch.cat([F.interpolate(value, scale_factor=2.0), skip], 1))
        made: Tensor = self.head(value)
        return made


class ThreeDecoders(nn.Module):
    """One encoder and three decoders, each with the skips: HoVer-Net's shape (Graham et al., 2019).

    Args:
        width: Channels of the first level.
        classes: Channels of the first decoder's output; the others have 2.
    """

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(_conv(entering, leaving), _conv(leaving, leaving))
            for entering, leaving in zip([3, *widths], widths, strict=False)
        )
        self.decoders = nn.ModuleList(_Decoder(widths, leaving) for leaving in (classes, 2, 2))

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            images = block(F.max_pool2d(images, 2) if level else images)
            skips.append(images)
        return torch.cat([decoder(skips) for decoder in self.decoders], 1)


class _Exchange(nn.Module):
    """One branch's next value: the sum of all branches, at its resolution and width."""

    def __init__(self, widths: list[int], target: int) -> None:
        super().__init__()
        self.target = target
        self.mixes = nn.ModuleList(
            nn.Identity() if source == target else nn.Conv2d(width, widths[target], 1)
            for source, width in enumerate(widths)
        )

    def forward(self, values: list[Tensor]) -> Tensor:
        total = values[self.target]
        for source, mix in enumerate(self.mixes):
            if source != self.target:
                total = total + _resized(mix(values[source]), source - self.target)
        return F.relu(total)


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
        self.rounds = nn.ModuleList(_Round(widths) for _ in range(exchanges))
        self.head = nn.Conv2d(sum(widths), classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        values = [enter(stem) for enter in self.enter]
        for each in self.rounds:
            values = each(values)
        sized = [_resized(value, level) for level, value in enumerate(values)]
        logits: Tensor = self.head(torch.cat(sized, 1))
        return logits


class _Round(nn.Module):
    """Each branch by itself, then all read all."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(size, size), _conv(size, size)) for size in widths
        )
        self.exchanges = nn.ModuleList(_Exchange(widths, target) for target in range(len(widths)))

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        made = [block(value) for block, value in zip(self.blocks, values, strict=True)]
        return [exchange(made) for exchange in self.exchanges]


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
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class _FeedForward(nn.Module):
    """Some of the channels of a feed-forward layer, and their part of the output's product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, hidden, False), nn.Linear(hidden, width, False)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.down(F.gelu(self.up(self.norm(tokens))))
        return made


class _Sum(nn.Module):
    """The tokens and what each branch makes of them, added up."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, tokens: Tensor) -> Tensor:
        total = tokens
        for made in [branch(tokens) for branch in self.branches]:
            total = total + made
        return total


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
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    _Sum([_Heads(width, 2, size) for _ in range(branches)]),
                    _Sum([_FeedForward(width, 4 * width // branches) for _ in range(branches)]),
                )
                for _ in range(blocks)
            )
        )
        self.head = nn.ConvTranspose2d(width, classes, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        grid = self.embed(images)
        tokens = grid.flatten(2).transpose(1, 2)
        tokens = self.blocks(tokens)
        logits: Tensor = self.head(tokens.transpose(1, 2).unflatten(2, grid.shape[-2:]))
        return logits
