"""Layers common to all networks: the norm by name, and He initialisation."""

from __future__ import annotations

import math

from torch import nn

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
    """Draws weights from N(0, 2 / fan_in) and sets biases to zero (He et al., 2015, eq. 10).

    The draw follows torch's global generator, so the caller's `torch.manual_seed` fixes it.
    A transposed convolution's fan_in is counted by torch as outputs × kernel; with a 2×2 kernel
    that halves the channels this equals N(0, 1 / inputs), right for a layer without a ReLU.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
