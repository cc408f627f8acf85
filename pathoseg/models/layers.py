"""Layers of all networks: the norm by name, He initialisation, norms folded for inference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Self

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from pathoseg.models.model_options import Norm

# Wu & He (2018) find 2 to 32 groups within half a percent of each other.
_GROUPS = 8


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The norm that follows a convolution of `channels` outputs; all kinds scale and shift.

    Group norm has 8 groups, or the largest divisor of 8 that divides the channels (Wu & He,
    "Group Normalization", 2018).
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "instance":
        return nn.InstanceNorm2d(channels, affine=True)
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)


def he_initialise(model: nn.Module) -> None:
    """Draw weights from N(0, 2 / fan_in) and set biases to zero (He et al., 2015, eq. 10).

    The draw follows torch's global generator, so the caller's `torch.manual_seed` fixes it. On the
    meta device, where a bundle's network waits for its weights, nothing is drawn.
    A transposed convolution's fan_in is counted by torch as outputs × kernel; with a 2×2 kernel
    that halves the channels this equals N(0, 1 / inputs), right for a layer without a ReLU.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            if module.weight.is_meta:  # torch would import its compiler for it: seconds
                continue
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Encoder(nn.Module):
    """A part of a network that published weights fit, and that may be held as they are.

    Attributes:
        blocks_above: By the beginning of a parameter's name, how many blocks lie between it and
            the encoder's end.
    """

    blocks_above: Mapping[str, int]
    _is_frozen = False

    def freeze(self) -> None:
        """Train nothing of it from now on; norms keep their statistics and apply them."""
        self.requires_grad_(False)
        self._is_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode; a frozen encoder stays in eval mode."""
        return super().train(mode and not self._is_frozen)


def fold_norms(model: nn.Module) -> None:
    """Fold each batch norm that directly follows a convolution into it, in place.

    In eval mode both are linear, so the answers are the same to rounding, in less time and memory
    (Jacob et al., 2018, section 3.2).

    Args:
        model: One of ours, in eval mode: what an `nn.Sequential` holds is called in turn alone.
    """
    for parent in model.modules():
        if not isinstance(parent, nn.Sequential):
            continue
        for (name, convolution), (norm_name, norm) in pairwise(list(parent.named_children())):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, fuse_conv_bn_eval(convolution, norm))
                setattr(parent, norm_name, nn.Identity())
