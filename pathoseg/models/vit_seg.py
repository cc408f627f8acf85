"""A vision transformer under timm's parameter names, with a pyramid decoder to full resolution."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from pathoseg.models.layers import Encoder, he_initialise
from pathoseg.models.model_options import Norm, ViTShape
from pathoseg.models.unet import Up, two_convolutions


class ViTSeg(nn.Module):
    """Patch tokens of four depths of a vision transformer, joined in a pyramid.

    The encoder is that of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), with the
    register tokens of Darcet et al. (2024), SwiGLU (Shazeer, 2020) and LayerScale (Touvron et al.,
    2021) where the weights have them. As in DPT (Ranftl et al., "Vision Transformers for Dense
    Prediction", 2021) tokens of a quarter, half and three quarters of the depth and of its end
    become feature maps, the shallower the finer:

        blocks ¼ ── ×4 ─────────────────────────┐ skip
        blocks ½ ── ×2 ──────────────┐ skip     │
        blocks ¾ ── ×1 ── join ─ Up ─┴── Up ────┴── bilinear to pixels ── join image ── head
        blocks 1 ── ×1 ───┘

    Sides that the patch does not divide are padded, right and below, with the mean colour.

    Args:
        classes: Channels of the logits, background included.
        shape: The encoder's.
        norm: Normalisation layer of the decoder.
    """

    def __init__(self, classes: int, shape: ViTShape, norm: Norm = "batch") -> None:
        super().__init__()
        self.encoder = VisionTransformer(shape)
        self.decoder = _Pyramid(shape, norm)
        self.head = nn.Conv2d(_FINEST, classes, 1)
        he_initialise(self.decoder)
        he_initialise(self.head)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes, h, w) of images (n, 3, h, w)."""
        logits: torch.Tensor = self.head(self.decoder(images, self.encoder(images)))
        return logits


class VisionTransformer(Encoder):
    """The encoder alone; its tokens are class, registers, patches row by row.

    Args:
        shape: Sizes of it.
    """

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        dim = shape.dim
        self.shape = shape
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.empty(1, shape.registers, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, shape.positions**2, dim))
        self.patch_embed = nn.Sequential(
            OrderedDict(proj=nn.Conv2d(3, dim, shape.patch, shape.patch))
        )
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(dim, _EPSILON)
        self.has_registers = shape.registers > 0
        first = ("cls_token", "reg_token", "pos_embed", "patch_embed.")
        self.blocks_above = dict.fromkeys(first, shape.depth) | {"norm.": 0}
        self.blocks_above |= {f"blocks.{at}.": shape.depth - 1 - at for at in range(shape.depth)}
        self._initialise()

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Tokens (n, t, dim) of images (n, 3, h, w) of any size.

        Those after a quarter, half, three quarters and all of the blocks; the last ones are normed.
        """
        height, width = images.shape[-2], images.shape[-1]
        padded = F.pad(images, (0, -width % self.shape.patch, 0, -height % self.shape.patch))
        patches = self.patch_embed(padded)
        tokens = (patches + self._positions_of(patches)).flatten(2).transpose(1, 2)
        first = [self.cls_token, self.reg_token] if self.has_registers else [self.cls_token]
        tokens = torch.cat([*(each.expand(tokens.shape[0], -1, -1) for each in first), tokens], 1)
        found = []
        for number, block in enumerate(self.blocks, 1):
            tokens = block(tokens)
            found += [tokens] * (number in self.shape.taps)
        return [*found[:-1], self.norm(found[-1])]

    def _positions_of(self, patches: torch.Tensor) -> torch.Tensor:
        """The position embeddings for the patches' grid, shape (1, dim, rows, columns).

        Resampled as by timm; on the grid of the training they are unchanged.
        """
        side = self.shape.positions
        known = self.pos_embed.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        size = (patches.shape[-2], patches.shape[-1])
        return F.interpolate(known, size=size, mode="bicubic", antialias=True)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                fan_in = module.weight[0].numel()
                std = 0.02 if isinstance(module, nn.Linear) else fan_in**-0.5
                nn.init.trunc_normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for parameter in self.parameters(recurse=False):
            nn.init.trunc_normal_(parameter, std=0.02)


_EPSILON = 1e-6
_LAYER_SCALE = 1e-5


class _Block(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.dim, _EPSILON)
        self.attn = _Attention(shape)
        self.ls1 = _LayerScale(shape.dim) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.dim, _EPSILON)
        make_mlp = _GatedMLP if shape.mlp == "swiglu" else _MLP
        self.mlp = make_mlp(shape.dim, shape.hidden)
        self.ls2 = _LayerScale(shape.dim) if shape.layer_scale else nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        total: torch.Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return total


class _Attention(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads, self.each = shape.heads, dim // shape.heads
        self.qkv = _linear(dim, 3 * dim, shape.lora)
        self.proj = _linear(dim, dim, shape.lora)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(tokens).unflatten(-1, (3, self.heads, self.each)).transpose(1, 3)
        queries, keys, values = parts.unbind(2)
        found = F.scaled_dot_product_attention(queries, keys, values)
        joined: torch.Tensor = self.proj(found.transpose(1, 2).flatten(2))
        return joined


def _linear(inputs: int, outputs: int, rank: int) -> nn.Linear:
    return _LowRank(inputs, outputs, rank) if rank else nn.Linear(inputs, outputs)


class _LowRank(nn.Linear):
    """A matrix and the product of two narrow ones beside it.

    That of Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022). It begins
    as zero.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_a = nn.Parameter(torch.empty(rank, inputs))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.normal_(self.lora_a, std=1 / rank)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + F.linear(F.linear(tokens, self.lora_a), self.lora_b)


class _MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.fc2(self.act(self.fc1(tokens)))
        return made


class _GatedMLP(nn.Module):
    """SwiGLU; `fc1` holds the gate and what it lets through in one matrix."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden)
        self.act = nn.SiLU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, values = self.fc1(tokens).chunk(2, -1)
        made: torch.Tensor = self.fc2(self.act(gate) * values)
        return made


class _LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), _LAYER_SCALE))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.gamma


_WIDEST = 256  # channels of the decoder on the grid of patches
_FINEST = 32  # channels at full resolution


class _Pyramid(nn.Module):
    """From four depths of tokens to features of each pixel."""

    def __init__(self, shape: ViTShape, norm: Norm) -> None:
        super().__init__()
        dim, wide = shape.dim, min(_WIDEST, shape.dim)
        self.prefix, self.patch = 1 + shape.registers, shape.patch
        # The last tokens come normed.
        self.norms = nn.ModuleList(nn.LayerNorm(dim, _EPSILON) for _ in range(3))
        self.finest = nn.Sequential(
            nn.ConvTranspose2d(dim, wide // 2, 2, stride=2),
            nn.GELU(),
            nn.ConvTranspose2d(wide // 2, wide // 4, 2, stride=2),
        )
        self.fine = nn.ConvTranspose2d(dim, wide // 2, 2, stride=2)
        self.coarse = nn.Conv2d(dim, wide, 1)
        self.coarsest = nn.Conv2d(dim, wide, 1)
        self.join = two_convolutions(2 * wide, wide, norm)
        self.up1 = Up(wide, wide // 2, norm, skip=wide // 2)
        self.up2 = Up(wide // 2, wide // 4, norm, skip=wide // 4)
        self.narrow = nn.Conv2d(wide // 4, _FINEST, 1)
        self.to_pixels = nn.Upsample(scale_factor=shape.patch / 4, mode="bilinear")
        self.detail = two_convolutions(_FINEST + 3, _FINEST, norm)

    def forward(self, images: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
        """Features (n, 32, h, w) of images (n, 3, h, w) and their tokens."""
        normed = [norm(each) for norm, each in zip(self.norms, tokens[:3], strict=True)]
        # Sizes are taken from the images, which all stages have, so that none is sent.
        height, width = images.shape[-2], images.shape[-1]
        rows, columns = (height - 1) // self.patch + 1, (width - 1) // self.patch + 1
        # Without gaps between samples, so that layers sum in one order wherever the model is cut.
        maps = [
            each[:, self.prefix :].transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
            for each in (*normed, tokens[3])
        ]
        features = torch.cat([self.coarse(maps[2]), self.coarsest(maps[3])], 1)
        features = self.up1(self.join(features), self.fine(maps[1]))
        features = self.up2(features, self.finest(maps[0]))
        features = self.to_pixels(self.narrow(features))
        features = features[..., :height, :width]
        made: torch.Tensor = self.detail(torch.cat([features, images], 1))
        return made
