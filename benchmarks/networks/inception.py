"""Inception-v3 with its auxiliary classifier (Szegedy et al., "Rethinking Inception", 2016)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.networks.layers import Branches, ConvNormReLU, scaled


class InceptionV3(nn.Module):
    """For 299 px; in training it returns the logits and the auxiliary ones.

    Args:
        classes: Number of logits.
        width: Factor on all channels, a multiple of 1/8.
    """

    def __init__(self, classes: int = 2, width: float = 1.0) -> None:
        super().__init__()
        self._width = width
        conv = self._conv
        self.stem = nn.Sequential(
            conv(3, 32, 3, stride=2),
            conv(32, 32, 3),
            conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            conv(64, 80, 1),
            conv(80, 192, 3),
            nn.MaxPool2d(3, 2),
        )
        self.grid35 = nn.Sequential(
            *(self._wide(*sizes) for sizes in ((192, 32), (256, 64), (288, 64))),
            Branches(
                [
                    conv(288, 384, 3, stride=2),
                    nn.Sequential(
                        conv(288, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, stride=2)
                    ),
                    nn.MaxPool2d(3, 2),
                ]
            ),
        )
        self.grid17 = nn.Sequential(*(self._seven(inner) for inner in (128, 160, 160, 192)))
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3),
            conv(768, 128, 1),
            conv(128, 768, 5),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(scaled(768, width), classes),
        )
        self.grid8 = nn.Sequential(
            Branches(
                [
                    nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, stride=2)),
                    nn.Sequential(
                        conv(768, 192, 1),
                        *self._one_by_seven(192, 192),
                        conv(192, 192, 3, stride=2),
                    ),
                    nn.MaxPool2d(3, 2),
                ]
            ),
            self._last(1280),
            self._last(2048),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(scaled(2048, width), classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        features = self.grid17(self.grid35(self.stem(images)))
        auxiliary = self.auxiliary(features) if self.training else None
        logits: torch.Tensor = self.head(self.grid8(features))
        return logits if auxiliary is None else (logits, auxiliary)

    def _conv(self, inputs: int, outputs: int, kernel: Any, **options: Any) -> nn.Module:
        if inputs != 3:
            inputs = scaled(inputs, self._width)
        return ConvNormReLU(inputs, scaled(outputs, self._width), kernel, eps=1e-3, **options)

    def _one_by_seven(self, inputs: int, outputs: int) -> list[nn.Module]:
        return [
            self._conv(inputs, inputs, (1, 7), padding=(0, 3)),
            self._conv(inputs, outputs, (7, 1), padding=(3, 0)),
        ]

    def _wide(self, inputs: int, pooled: int) -> nn.Module:
        """Figure 5 of the paper, with a 5×5 branch."""
        conv = self._conv
        return Branches(
            [
                conv(inputs, 64, 1),
                nn.Sequential(conv(inputs, 48, 1), conv(48, 64, 5, padding=2)),
                nn.Sequential(
                    conv(inputs, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, padding=1)
                ),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, pooled, 1)),
            ]
        )

    def _seven(self, inner: int) -> nn.Module:
        """Figure 6: 7×7 convolutions as 1×7 and 7×1."""
        conv = self._conv
        return Branches(
            [
                conv(768, 192, 1),
                nn.Sequential(conv(768, inner, 1), *self._one_by_seven(inner, 192)),
                nn.Sequential(
                    conv(768, inner, 1),
                    conv(inner, inner, (7, 1), padding=(3, 0)),
                    *self._one_by_seven(inner, inner),
                    conv(inner, 192, (1, 7), padding=(0, 3)),
                ),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(768, 192, 1)),
            ]
        )

    def _last(self, inputs: int) -> nn.Module:
        """Figure 7: 3×3 convolutions as 1×3 beside 3×1."""
        conv = self._conv

        def split(channels: int) -> nn.Module:
            across = conv(channels, 384, (1, 3), padding=(0, 1))
            return Branches([across, conv(channels, 384, (3, 1), padding=(1, 0))])

        return Branches(
            [
                conv(inputs, 320, 1),
                nn.Sequential(conv(inputs, 384, 1), split(384)),
                nn.Sequential(conv(inputs, 448, 1), conv(448, 384, 3, padding=1), split(384)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, 192, 1)),
            ]
        )
