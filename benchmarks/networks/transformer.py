"""A pre-norm transformer block, its attention in plain functions (Vaswani et al., 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each added to its input.

    Args:
        channels: Width of a token.
        heads: Attention heads.
        dropout: Share of values dropped, in both parts.
    """

    def __init__(self, channels: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.queries_keys_values = nn.Linear(channels, 3 * channels)
        self.mix = nn.Linear(channels, channels)
        self.perceptron = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, channels = tokens.shape
        joined = self.queries_keys_values(self.norm1(tokens))
        split = joined.view(batch, length, 3, self.heads, channels // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        mixed = self.mix(attended.transpose(1, 2).reshape(batch, length, channels))
        tokens = tokens + F.dropout(mixed, self.dropout, self.training)
        return tokens + F.dropout(self.perceptron(self.norm2(tokens)), self.dropout, self.training)


def transformer(channels: int = 256, heads: int = 8, blocks: int = 4) -> nn.Sequential:
    """Blocks on tokens (n, length, channels)."""
    return nn.Sequential(*(TransformerBlock(channels, heads) for _ in range(blocks)))
