"""Measures how far from a tile's edge a network's answer depends on what lies beyond it."""

from __future__ import annotations

import torch
from torch import nn


def measured_reach(model: nn.Module, least: float) -> tuple[int, int]:
    """Predict a part of an image alone and within it; both differ as far as the padding reaches.

    Args:
        model: In double precision and `eval` mode, with `reach` and `multiple`; its weights change.
        least: Differences up to this are rounding.

    Returns:
        The pixels that differ, from the upper edge and from the lower one.
    """
    for module in model.modules():  # keep every ReLU open, so that nothing hides the padding
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.uniform_(module.weight, 0.01, 0.1)
    reach, multiple = int(getattr(model, "reach", 0) or 0), int(getattr(model, "multiple", 1))
    tile = 2 * reach // multiple * multiple + 4 * multiple
    whole = torch.rand(1, 3, 3 * tile, 3 * tile, dtype=torch.double)
    inner = slice(tile, 2 * tile)
    with torch.no_grad():
        differ = (model(whole)[..., inner, inner] - model(whole[..., inner, inner])).abs() > least
    rows = differ.flatten(0, 1).any(0)[:, tile // 2].nonzero().flatten()
    upper, lower = rows[rows < tile // 2].max() + 1, tile - rows[rows > tile // 2].min()
    return int(upper), int(lower)
