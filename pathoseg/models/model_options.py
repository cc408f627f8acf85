"""Options of a network and its loss as plain values, without a heavy import."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pathoseg.errors import PathosegError

Task = Literal["segment", "classify", "objects"]
Norm = Literal["batch", "group", "instance"]
Scalar = bool | int | float | str

MOST_CLASSES = 255  # an index mask has 256 values, of which 255 means ignored
HOOKNET = "hooknet"
UNET_WIDTHS = {"unet": 32, "unet64": 64, HOOKNET: 32}
_UNET_DEPTH, _RESNET_WIDTH = 4, 16
_RESNET_DEPTHS = range(11, 1002, 9)
UNET_RESNETS = {"unet_resnet18": 18, "unet_resnet34": 34, "unet_resnet50": 50}
VIT_SEG = "vit_seg"
_KNOWN = (
    "unet, unet64, hooknet, unet_resnet18, unet_resnet34, unet_resnet50, vit_seg, resnet110_v2, "
    "resnet1001_v2 (any depth 9n + 2 up to 1001), module:factory"
)


# Size of a vision transformer → dim, depth, heads. "H2" is UNI 2's, between H and g.
VIT_SIZES = {
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
    "H2": (1536, 24, 24),
    "g": (1536, 40, 24),
}
_VIT_PATCHES = (8, 14, 16)


@dataclass(frozen=True)
class ViTShape:
    """The sizes of a vision transformer.

    Attributes:
        dim: Numbers in a token.
        depth: Blocks; 4 or more.
        heads: Of the attention; they divide `dim`.
        patch: Side of a patch in pixels.
        registers: Tokens beside the class token and the patches.
        mlp: "gelu", or "swiglu" of two thirds of its width with a gate.
        layer_scale: Whether each branch of a block is scaled by channel.
        positions: Patches along the square grid whose positions were learnt.
        lora: Rank of the additions to the matrices of attention; 0 makes none.
    """

    dim: int
    depth: int
    heads: int
    patch: int = 14
    registers: int = 0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    layer_scale: bool = True
    positions: int = 16
    lora: int = 0

    @property
    def hidden(self) -> int:
        """Width of the hidden layer; a gated one is rounded up to 8, as DINOv2's."""
        return -(-(8 * self.dim // 3) // 8) * 8 if self.mlp == "swiglu" else 4 * self.dim

    @property
    def smallest_side(self) -> int:
        """Return the least side of a tile: above one patch, as norms need several features."""
        return self.patch + 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of the blocks, from 1, whose tokens the decoder reads."""
        return tuple(self.depth * quarter // 4 for quarter in (1, 2, 3, 4))


def vit_shape(options: Mapping[str, Scalar]) -> ViTShape:
    """The sizes that the options of `vit_seg` state; what is left out follows from the size.

    Raises:
        PathosegError: An option is unknown, or a value that it does not take.
    """
    known: dict[str, Any] = {"size": "S", "patch": 14, "registers": 0, "layer_scale": True}
    known |= options
    known.setdefault("mlp", "swiglu" if known["size"] in ("H", "H2", "g") else "gelu")
    if known["patch"] in _VIT_PATCHES:
        known.setdefault("positions", 224 // known["patch"])
    takes: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "size": (", ".join(VIT_SIZES), lambda value: value in VIT_SIZES),
        "patch": ("8, 14 or 16", lambda value: value in _VIT_PATCHES),
        "registers": ("0 to 64", lambda value: type(value) is int and 0 <= value <= 64),
        "mlp": ("gelu or swiglu", lambda value: value in ("gelu", "swiglu")),
        "layer_scale": ("true or false", lambda value: isinstance(value, bool)),
        "positions": ("1 to 256", lambda value: type(value) is int and 1 <= value <= 256),
        "lora": ("0 to 256", lambda value: type(value) is int and 0 <= value <= 256),
    }
    for key, value in known.items():
        if key not in takes:
            raise PathosegError(
                f"The model {VIT_SEG} has no option {key!r}.", f"It has {', '.join(takes)}."
            )
        told, fits = takes[key]
        if not fits(value):
            raise PathosegError(
                f"The model {VIT_SEG} cannot have {key} {value!r}.", f"It is {told}."
            )
    dim, depth, heads = VIT_SIZES[known.pop("size")]
    return ViTShape(dim, depth, heads, **known)


@dataclass(frozen=True)
class ModelConfig:
    """The plain values from which a network is built, without its weights.

    Attributes:
        name: `unet`, `unet64`, `hooknet`, `unet_resnet18` (34, 50), `vit_seg`, `resnet<9n+2>_v2`,
            or `module:factory` for the user's own code.
        task: "segment" answers every pixel, "classify" every tile (`resnet…_v2` and factories),
            "objects" every pixel and how far inside its object it lies (all but `resnet…_v2`).
        classes: Number of classes, background included; 255 means ignored, so at most 255.
        width: Channels of the first block; None means what the name implies (ResNets: 16).
        depth: Poolings of a U-Net; None means 4.
        norm: Normalisation layer; of networks with an encoder, that of the decoder.
        options: Keyword arguments of a factory; of `vit_seg`, what `vit_shape` takes.

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
        if not (
            self.is_factory
            or self.has_encoder
            or self.name in UNET_WIDTHS
            or resnet_depth(self.name)
        ):
            raise PathosegError(f"There is no model {self.name!r}.", _nearest(self.name))
        self._check_size("classes", self.classes, MOST_CLASSES, smallest=2)
        self._check_size("width", self.width, 1024)
        self._check_size("depth", self.depth, 8)
        if (self.name in UNET_WIDTHS or self.has_encoder) and self.task == "classify":
            self._refuse("cannot classify tiles", "Choose resnet110_v2, or task `segment`.")
        if resnet_depth(self.name) and self.task == "objects":
            self._refuse("cannot separate objects", "Choose unet, or task `segment`.")
        if self.name not in UNET_WIDTHS and self.depth is not None:
            self._refuse("takes no depth", "Leave it out: it follows from the name.")
        if self.name == HOOKNET and self.sizes["depth"] < 2:
            self._refuse(
                "cannot have depth 1",
                "Choose 2 to 8: its context, four times as coarse, joins two poolings deeper.",
            )
        if self.has_encoder and self.width is not None:
            self._refuse("takes no width", "Leave it out: it follows from the encoder.")
        if self.is_factory and (self.width is not None or self.norm != "batch"):
            self._refuse("takes no width or norm", "Give them among its options.")
        if self.name == VIT_SEG:
            vit_shape(self.options)  # refuses what cannot be
        elif not self.is_factory and self.options:
            self._refuse(
                "takes no options", "Leave them out; they are for module:factory and vit_seg."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Width and (of a U-Net) depth, as the name implies them where they are left out."""
        if self.name in UNET_WIDTHS:
            width = self.width or UNET_WIDTHS[self.name]
            return {"width": width, "depth": self.depth or _UNET_DEPTH}
        if self.is_factory or self.has_encoder:
            return {}
        return {"width": self.width or _RESNET_WIDTH}

    @property
    def channels(self) -> int:
        """Channels of the answer: a logit of each class, and the height of `objects`."""
        return self.classes + (self.task == "objects")

    @property
    def tile_sides(self) -> tuple[int, int] | None:
        """Divisor and least of a tile's sides; None where a factory's network says them."""
        if self.is_factory:
            return None
        if self.name == VIT_SEG:
            return 1, vit_shape(self.options).smallest_side
        multiple = 32 if self.has_encoder else 4
        if self.name in UNET_WIDTHS:
            coarser = 4 if self.name == HOOKNET else 1  # pixels of its context
            multiple = coarser * 2 ** self.sizes["depth"]
        return multiple, 2 * multiple

    @property
    def is_factory(self) -> bool:
        """Return True if the network comes from the user's own code."""
        return ":" in self.name

    @property
    def has_encoder(self) -> bool:
        """Return True if the network has an encoder that published weights fit."""
        return self.name in UNET_RESNETS or self.name == VIT_SEG

    def _check_size(self, key: str, value: int | None, largest: int, smallest: int = 1) -> None:
        if value is not None and not smallest <= value <= largest:
            self._refuse(
                f"cannot have {key} {value}", f"Choose a number from {smallest} to {largest}."
            )

    def _refuse(self, what: str, hint: str) -> None:
        raise PathosegError(f"The model {self.name} {what}.", hint)


def check_side(side: int, multiple: int, smallest: int) -> None:
    """Refuse a tile that a network cannot train on.

    Args:
        side: Of the tile.
        multiple: What it must be divisible by.
        smallest: The smallest side: of a single deepest feature no norm can take statistics.

    Raises:
        PathosegError: It is another.
    """
    if side % multiple or side < smallest:
        least = -(-smallest // multiple) * multiple
        below = max(least, side // multiple * multiple)
        raise PathosegError(
            f"Tiles of {side} px do not fit this model, which needs "
            + (f"multiples of {multiple} px, " if multiple > 1 else "")
            + f"{smallest} at least.",
            f"Choose {below} or {below + multiple} px.",
        )


def resnet_depth(name: str) -> int:
    """The depth that a ResNet's name states, 0 where the name is none."""
    match = re.fullmatch(r"resnet(\d{2,4})_v2", name)
    depth = int(match[1]) if match else 0
    return depth if depth in _RESNET_DEPTHS else 0


def _nearest(name: str) -> str:
    match = re.fullmatch(r"resnet(\d{1,4})_v2", name)
    names = [
        *UNET_WIDTHS,
        *UNET_RESNETS,
        VIT_SEG,
        *(f"resnet{depth}_v2" for depth in _RESNET_DEPTHS),
    ]
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
        context: Weight of the same loss on the labels of all that a network sees around its tile,
            where it tells their classes, too (`hooknet`).
    """

    cross_entropy: float = 1.0
    dice: float | None = None
    focal: float = 0.0
    focal_gamma: float = 2.0
    class_weights: tuple[float, ...] | None = None
    height: float = 0.5
    context: float = 1.0
