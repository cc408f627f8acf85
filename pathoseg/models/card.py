"""What using a model needs beside its weights, as a frozen card and as checked JSON."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from pathoseg import __version__
from pathoseg.errors import PathosegError
from pathoseg.models.build import ModelConfig, Scalar

Colour = tuple[int, int, int]
Channels = tuple[float, float, float]

_LARGEST_TILE = 2**16


@dataclass(frozen=True)
class Bundle:
    """The card of a trained model.

    Attributes:
        model: How to build the network.
        class_names: Names of the classes without background; `class_names[i]` has index i + 1.
        class_colours: Their colours, RGB.
        mpp: Microns per pixel that the model was trained at.
        tile: Side of its training tiles in pixels.
        overlap: Pixels that tiles share in inference.
        mean: Per channel, of pixels in 0…1; the network sees (pixel / 255 − mean) / std.
        std: Likewise.
        multiple: What the sides of a tile must be divisible by.
        stain: The stain normalisation that slides went through, in its own plain values, or None.
        training: Where the weights come from, in plain values (numbers that are not finite are
            written as null).
        pathoseg_version: Version that wrote the bundle.
        torch_version: Likewise.

    Raises:
        PathosegError: The values contradict each other or cannot be.
    """

    model: ModelConfig
    class_names: tuple[str, ...]
    class_colours: tuple[Colour, ...]
    mpp: float
    tile: int
    overlap: int
    mean: Channels
    std: Channels
    multiple: int
    stain: Mapping[str, Scalar] | None = None
    training: Mapping[str, Scalar | None] = field(default_factory=dict)
    pathoseg_version: str = __version__
    torch_version: str = str(torch.__version__)

    def __post_init__(self) -> None:
        names, colours = self.class_names, self.class_colours
        _require(
            len(names) == len(colours) == self.model.classes - 1,
            f"{len(names)} class names and {len(colours)} colours do not fit a model of "
            f"{self.model.classes} classes with background",
        )
        _require(
            all(names) and len(set(names)) == len(names),
            f"class_names {list(names)} holds an empty name or one name twice",
        )
        _require(
            all(0 <= channel <= 255 for colour in colours for channel in colour),
            "class_colours holds numbers outside 0…255",
        )
        _require(0 < self.mpp < math.inf, f"mpp {self.mpp} is no positive, finite number")
        _require(
            0 < self.multiple <= self.tile <= _LARGEST_TILE
            and self.tile % self.multiple == 0
            and 0 <= self.overlap < self.tile,
            f"tile {self.tile} with overlap {self.overlap} and multiple {self.multiple} is no "
            "possible tiling",
        )
        _require(all(map(math.isfinite, self.mean)), f"mean {self.mean} is not finite")
        _require(
            all(0 < channel < math.inf for channel in self.std), f"std {self.std} is not positive"
        )


def card_to_json(card: Bundle) -> dict[str, Any]:
    """The card as plain JSON values."""
    plain = asdict(card)
    plain["training"] = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in card.training.items()
    }
    return plain


def card_from_json(plain: dict[str, Any]) -> Bundle:
    """The card that `card_to_json` wrote; every key and type is checked.

    Raises:
        PathosegError: A key is missing, unknown, or of another type, or the card is impossible.
    """
    card: Bundle = _conform(Bundle, plain, "the card")
    return card


def parse_json(text: bytes) -> Any:
    """JSON without the NaN and Infinity that Python adds to it.

    Raises:
        ValueError: It is not JSON in UTF-8, or nested without end.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _conform(hint: Any, value: Any, where: str) -> Any:
    """`value`, parsed from JSON, as the type that `hint` names."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        for key in sorted(hints.keys() ^ value.keys()):
            state = "lacks" if key in hints else "has an unknown key,"
            raise PathosegError(f"{where} {state} `{key}`.", _MEND)
        return hint(**{key: _conform(hints[key], value[key], f"`{key}`") for key in hints})
    if origin is Literal and value in inner:
        return value
    if origin in (Union, UnionType):
        for kind in inner:
            try:
                return _conform(kind, value, where)
            except PathosegError:
                continue
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(
                _conform(kind, item, where) for kind, item in zip(kinds, value, strict=True)
            )
    if origin is Mapping and isinstance(value, dict):
        return {key: _conform(inner[1], item, f"`{key}`") for key, item in value.items()}
    if hint is float and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    if type(value) is hint:
        return value
    raise PathosegError(f"{where} is {reprlib.repr(value)}, which does not fit.", _MEND)


_MEND = "Copy the bundle again from where it was trained, or train again."


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise PathosegError(f"{problem}.", _MEND)
