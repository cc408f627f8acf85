"""AlexNet on one device (Krizhevsky, "One weird trick for parallelizing CNNs", 2014)."""

from __future__ import annotations

from torch import nn

from benchmarks.networks.layers import scaled


def alexnet(classes: int = 2, width: float = 1.0) -> nn.Sequential:
    """Five convolutions and three linear layers; for 224 px."""
    c1, c2, c3, c4, hidden = (scaled(channels, width) for channels in (64, 192, 384, 256, 4096))
    features = nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c1, c2, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c4, c4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
    )
    head = nn.Sequential(
        nn.Dropout(),
        nn.Linear(c4 * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), head)
