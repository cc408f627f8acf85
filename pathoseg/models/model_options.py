"""Options of a network and its loss as plain values, without a heavy import."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pathoseg.errors import PathosegError

Task = Literal["segment", "classify", "objects"]
Norm = Literal["batch", "group", "instance"]
Scalar = bool | int | float | str

MOST_CLASSES = 255  # an index mask has 256 values, of which 255 means ignored
UNET_WIDTHS = {"unet": 32, "unet64": 64}
_UNET_DEPTH, _RESNET_WIDTH = 4, 16
_RESNET_DEPTHS = range(11, 1002, 9)
_KNOWN = "unet, unet64, resnet110_v2, resnet1001_v2 (any depth 9n + 2 up to 1001), module:factory"


@dataclass(frozen=True)
class ModelConfig:
    """The plain values from which a network is built, without its weights.

    Attributes:
        name: `unet`, `unet64`, `resnet<9n+2>_v2`, or `module:factory` for the user's own code.
        task: "segment" answers every pixel, "classify" every tile (ResNets and factories),
            "objects" every pixel and how far inside its object it lies (U-Nets and factories).
        classes: Number of classes, background included; 255 means ignored, so at most 255.
        width: Channels of the first block; None means what the name implies (ResNets: 16).
        depth: Poolings of a U-Net; None means 4.
        norm: Normalisation layer.
        options: Keyword arguments of a factory.

    Raises:
        PathosegError: The name is unknown, a size is out of range, or a value has no meaning for
            this model.
    """

    name: str
    task: Task
    classes: int
    width: int | None = None
    depth: int | None = None
    norm: Norm = "batch"
    options: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.is_factory or self.name in UNET_WIDTHS or resnet_depth(self.name)):
            raise PathosegError(f"There is no model {self.name!r}.", _nearest(self.name))
        self._check_size("classes", self.classes, MOST_CLASSES, smallest=2)
        self._check_size("width", self.width, 1024)
        self._check_size("depth", self.depth, 8)
        if self.name in UNET_WIDTHS and self.task == "classify":
            self._refuse("cannot classify tiles", "Choose resnet110_v2, or task `segment`.")
        if resnet_depth(self.name) and self.task == "objects":
            self._refuse("cannot separate objects", "Choose unet, or task `segment`.")
        if self.name not in UNET_WIDTHS and self.depth is not None:
            self._refuse("takes no depth", "Leave it out: a ResNet's depth stands in its name.")
        if self.is_factory and (self.width is not None or self.norm != "batch"):
            self._refuse("takes no width or norm", "Give them among its options.")
        if not self.is_factory and self.options:
            self._refuse("takes no options", "Leave them out; they are for module:factory.")

    @property
    def sizes(self) -> dict[str, int]:
        """Width and (of a U-Net) depth, as the name implies them where they are left out."""
        if self.name in UNET_WIDTHS:
            width = self.width or UNET_WIDTHS[self.name]
            return {"width": width, "depth": self.depth or _UNET_DEPTH}
        return {} if self.is_factory else {"width": self.width or _RESNET_WIDTH}

    @property
    def channels(self) -> int:
        """Channels of the answer: a logit of each class, and the height of `objects`."""
        return self.classes + (self.task == "objects")

    @property
    def is_factory(self) -> bool:
        """Return True if the network comes from the user's own code."""
        return ":" in self.name

    def _check_size(self, key: str, value: int | None, largest: int, smallest: int = 1) -> None:
        if value is not None and not smallest <= value <= largest:
            self._refuse(
                f"cannot have {key} {value}", f"Choose a number from {smallest} to {largest}."
            )

    def _refuse(self, what: str, hint: str) -> None:
        raise PathosegError(f"The model {self.name} {what}.", hint)


def resnet_depth(name: str) -> int:
    """The depth that a ResNet's name states, 0 where the name is none."""
    match = re.fullmatch(r"resnet(\d{2,4})_v2", name)
    depth = int(match[1]) if match else 0
    return depth if depth in _RESNET_DEPTHS else 0


def _nearest(name: str) -> str:
    match = re.fullmatch(r"resnet(\d{1,4})_v2", name)
    names = [*UNET_WIDTHS, *(f"resnet{depth}_v2" for depth in _RESNET_DEPTHS)]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.85)
    if match:
        depth = min(_RESNET_DEPTHS, key=lambda depth: abs(depth - int(match[1])))
        near = [f"resnet{depth}_v2"]
    return (f"Did you mean {near[0]}? " if near else "") + f"Known are: {_KNOWN}."


@dataclass(frozen=True)
class LossConfig:
    """Weights of the parts of the loss.

    Attributes:
        cross_entropy: Weight of the cross-entropy.
        dice: Weight of the soft Dice; None means 1 for pixels and 0 for tile labels, which have
            no area.
        focal: Weight of the focal loss.
        focal_gamma: How strongly the focal loss discounts what is classified well already.
        class_weights: Weight of each class, background first, in cross-entropy and focal loss;
            None means 1.
        height: Weight of the error of the height where objects are separated.
    """

    cross_entropy: float = 1.0
    dice: float | None = None
    focal: float = 0.0
    focal_gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None
    height: float = 0.5
