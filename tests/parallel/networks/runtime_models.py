"""Tiny models that the runtime is judged by, with their losses and seeded samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.branched import FourResolutions, SplitTransformer, ThreeDecoders
from pathoseg.config import TrainConfig
from pathoseg.models.hooknet import HookNet
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig, ViTShape
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.models.unet_resnet import ResNetUNet
from pathoseg.models.vit_seg import ViTSeg
from pathoseg.training.encoder_training import prepare_encoder

CLASSES = 3
SIDE = 16


class Branches(nn.Module):
    """Parallel branches, values that many layers read, sizes, a norm used twice, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 5, padding=2, bias=False)
        self.deep = nn.Sequential(
            nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.norm = nn.BatchNorm2d(4, momentum=0.2)
        self.average = nn.BatchNorm2d(4, momentum=None)
        self.mix = nn.Conv2d(8, 4, 1, bias=False)
        self.aside = nn.Conv2d(4, CLASSES, 1)
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        stem = self.stem(image)
        wide = self.norm(self.wide(F.relu(stem)))
        wide = torch.tanh(self.norm(torch.tanh(wide)))
        deep = F.interpolate(self.deep(stem), size=stem.shape[-2:]).sigmoid()
        aside = self.aside(stem)
        mixed = self.average(self.mix(torch.cat([wide, deep], 1))) + stem
        return self.head(torch.sigmoid(mixed) + image.mean(1, keepdim=True)), aside


class Dropping(nn.Module):
    """Dropout of several kinds, beside layers that draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Dropout(0.4),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.Dropout2d(0.3),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.AlphaDropout(0.2),
            nn.Conv2d(6, CLASSES, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = F.dropout(self.body(images), 0.1, self.training)
        return logits


class TwoHeads(nn.Module):
    """Two branches with dropout and norms on a stem; nothing is read more than twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 6, 3, padding=1),
                nn.BatchNorm2d(6),
                nn.Dropout(0.3),
                nn.Conv2d(6, 6, 3, padding=1),
                nn.Tanh(),
                nn.Conv2d(6, CLASSES, 1),
            )
            for _ in range(2)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        stem = self.stem(images)
        return tuple(head(stem) for head in self.heads)


@dataclass(frozen=True)
class RuntimeModel:
    """A model and what it is judged with.

    Attributes:
        make: Builds it.
        input: The name of its input.
        further: The names of those beside it, which get its samples mirrored.
        keeps_order: Whether gradients are summed in one process's order wherever it is cut.
    """

    make: Callable[[], nn.Module]
    input: str = "images"
    keeps_order: bool = True
    further: tuple[str, ...] = ()

    def inputs(self, images: Tensor) -> dict[str, Tensor]:
        """Name the inputs of a microbatch."""
        return {self.input: images, **{name: images.flip(3) for name in self.further}}


def _frozen(model: nn.Module) -> nn.Module:
    """A network whose encoder trains low-rank additions alone, where it has them."""
    prepare_encoder(model, TrainConfig(encoder="lora"))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):  # zeros would leave nothing but their gradients to compare
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {
    "unet": RuntimeModel(lambda: UNet(CLASSES, width=4, depth=2)),
    "unet-group-norm": RuntimeModel(lambda: UNet(CLASSES, width=4, depth=2, norm="group")),
    "resnet-v2": RuntimeModel(lambda: ResNetV2(CLASSES, depth=20, width=2)),
    "branches": RuntimeModel(Branches, "image", keeps_order=False),
    "dropout": RuntimeModel(Dropping),
    "unet-resnet": RuntimeModel(lambda: ResNetUNet(CLASSES, (1, 1), bottleneck=True, width=4)),
    # Sides that no patch divides are padded.
    "vit": RuntimeModel(lambda: ViTSeg(CLASSES, ViTShape(8, 4, 2, registers=1, mlp="swiglu"))),
    # Stages without anything to train.
    "frozen": RuntimeModel(lambda: _frozen(ResNetUNet(CLASSES, (1, 1), bottleneck=True, width=4))),
    "low-rank": RuntimeModel(lambda: _frozen(ViTSeg(CLASSES, ViTShape(8, 4, 2, lora=2)))),
    # Two inputs, of which each ends in a branch of its own.
    "hooknet": RuntimeModel(
        lambda: HookNet(CLASSES, width=4, depth=2), "image", further=("context",)
    ),
    # Separates objects: its last channel is their height (`pathoseg.models.losses`).
    "objects": RuntimeModel(lambda: UNet(CLASSES + 1, width=4, depth=2)),
}


# Networks whose branches run side by side, for plans that are made of branches. Values that three
# layers or more read are summed in another order where these are on several ranks.
BRANCHED_MODELS = {
    "branches": MODELS["branches"],
    "three-decoders": RuntimeModel(lambda: ThreeDecoders(4, CLASSES), keeps_order=False),
    "resolutions": RuntimeModel(lambda: FourResolutions(4, 3, 2, CLASSES), keeps_order=False),
    "split-transformer": RuntimeModel(lambda: SplitTransformer(16, 2, 2, 4), keeps_order=False),
    "two-heads": RuntimeModel(TwoHeads),
}

# As deep as the networks that strips are for.
DEEP = {"resnet110-v2": RuntimeModel(lambda: ResNetV2(CLASSES, depth=110, width=8))}

ALL_MODELS = MODELS | BRANCHED_MODELS | DEEP

_OBJECT_LOSS = build_loss(LossConfig(), "objects")


def per_sample_loss(returned: Any, targets: Tensor) -> Tensor:
    """Cross-entropy, averaged over a sample's pixels; later outputs count less.

    Where objects are separated it is the product's own loss, and of some pixels the height is not
    known.
    """
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if outputs[0].shape[1] == CLASSES + 1:
        heights = torch.where(targets == 0, -1, 3 * targets)
        return _OBJECT_LOSS(outputs[0], torch.stack([targets, heights], dim=1))
    total = torch.zeros(())
    for weight, logits in zip((1.0, 0.4), outputs, strict=False):
        entropy = F.cross_entropy(logits, targets, reduction="none").flatten(1).mean(1)
        total = total + weight * entropy
    return total


def samples(step: int, microbatch: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Images and targets of one microbatch, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    images = torch.randn(size, 3, SIDE, SIDE, generator=generator)
    targets = torch.randint(0, CLASSES, (size, SIDE, SIDE), generator=generator)
    return images.to(dtype), targets
