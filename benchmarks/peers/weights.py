"""The networks that all systems run: as a factory of pathoseg, a bundle, and a TorchScript."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pathoseg.device import MEAN, STD
from pathoseg.geometry import Box, Frame
from pathoseg.models.build import build_model, tile_multiple
from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide

POINT = "weights:point"
SAMPLE = Path(__file__).resolve().parents[2] / "sample_data" / "sample_06.svs"
_SIDE, _STEPS = 256, 40


def point(in_channels: int, classes: int) -> nn.Module:
    """A 1×1 convolution that tells dark pixels from bright ones: next to no work."""
    network = nn.Conv2d(in_channels, classes, 1)
    with torch.no_grad():
        network.weight.zero_()[1] = -1.0
        assert network.bias is not None
        network.bias.zero_()[1] = -1.0
    return network


class _Whole(nn.Module):
    """Pixels of 0…255 to probabilities, the scaling included: what the peers are given."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1) * 255)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.network((pixels - self.mean) / self.std), 1)


def _train(network: nn.Module, mpp: float) -> None:
    """Some steps to tell dark places of a sample slide from bright ones: the mask of a network with
    fresh weights is noise, whose outlines take longer than the forward."""
    with open_slide(SAMPLE) as slide:
        frame = Frame.at(slide.size, slide.mpp, mpp)
        boxes = [Box(x, y, _SIDE, _SIDE) for y in (256, 768) for x in (256, 768)]
        tiles = [read_region(slide, frame, box).pixels for box in boxes]
    pixels = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float()
    around = nn.functional.avg_pool2d(pixels.mean(1, keepdim=True), 31, 1, 15)[:, 0]
    dark = (around < around.median()).long()
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (MEAN, STD))
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network((pixels - mean) / std), dark)
        torch.autograd.backward(loss)
        optimizer.step()


def write_weights(folder: Path, name: str, width: int, mpp: float, tile: int, stride: int) -> None:
    """Writes `bundle/` and `script.pt` of the same weights."""
    torch.manual_seed(0)
    is_point = name == "point"
    config = ModelConfig(
        POINT if is_point else "unet", "segment", classes=2, width=None if is_point else width
    )
    network = build_model(config, POINT if is_point else None)
    if not is_point:
        _train(network, mpp)
    network.eval()
    card = Bundle(
        model=config,
        class_names=("dark",),
        class_colours=((200, 0, 0),),
        mpp=mpp,
        tile=tile,
        overlap=tile - stride,
        mean=MEAN,
        std=STD,
        multiple=tile_multiple(network),
    )
    save_bundle(folder / "bundle", network.state_dict(), card)
    script: Any = torch.jit.trace(_Whole(network), torch.zeros(1, 3, 64, 64))  # type: ignore[no-untyped-call]  # untyped in torch
    script.save(str(folder / "script.pt"))
