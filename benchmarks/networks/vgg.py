"""VGG19 (Simonyan and Zisserman, 2015, table 1, column E)."""

from __future__ import annotations

from torch import nn

from benchmarks.networks.layers import scaled

_STAGES = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))


def vgg19(classes: int = 2, width: float = 1.0) -> nn.Sequential:
    """3×3 convolutions with bias, a pooling after each stage, three linear layers; for 224 px."""
    layers: list[nn.Module] = []
    channels = 3
    for convolutions, outputs in _STAGES:
        outputs = scaled(outputs, width)
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    hidden = scaled(4096, width)
    head = nn.Sequential(
        nn.Linear(channels * 7 * 7, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Flatten(), head)
