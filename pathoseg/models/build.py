"""From a model's name and sizes to the network, and what a network asks of its tiles."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.model_options import UNET_WIDTHS, ModelConfig, resnet_depth
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet


def build_model(config: ModelConfig, factory: str | None = None) -> nn.Module:
    """The network with fresh weights, drawn after the caller's `torch.manual_seed`.

    Args:
        config: What to build.
        factory: The `module:factory` that the user named. Code of that name is imported only when
            it equals `config.name`: a bundle alone makes nothing run. It is called as
            `factory(in_channels=3, classes=n, **options)`.

    Returns:
        A module whose forward takes images (n, 3, h, w) to logits (n, classes, h, w), or to
        (n, classes) where the task is "classify".

    Raises:
        PathosegError: The factory was not named by the user, fails, or gives another shape.
    """
    if factory is not None and factory != config.name:
        raise PathosegError(
            f"The model is {config.name}, not {factory}.", f"Name {config.name} instead."
        )
    if config.is_factory:
        return _call_factory(config, factory)
    width = config.sizes["width"]
    if config.name in UNET_WIDTHS:
        return UNet(config.classes, width, config.sizes["depth"], config.norm)
    return ResNetV2(config.classes, config.task, resnet_depth(config.name), width, config.norm)


def tile_multiple(model: nn.Module) -> int:
    """Return the divisor of a tile's sides: the model's attribute `multiple`, else 1.

    Raises:
        PathosegError: `multiple` is no positive whole number.
    """
    multiple: Any = getattr(model, "multiple", 1)
    if not isinstance(multiple, int) or multiple < 1:
        raise PathosegError(
            f"{type(model).__name__}.multiple is {multiple!r}.",
            "Set it to the whole number that tile sides must be divisible by.",
        )
    return multiple


def edge_reach(model: nn.Module) -> int | None:
    """Pixels from a tile's edge beyond which a larger tile would give the same logits.

    None where there is no such distance (group or instance norm) or the model does not say
    (attribute `reach`).
    """
    reach: Any = getattr(model, "reach", None)
    return reach if isinstance(reach, int) else None


def check_tile(model: nn.Module, tile: int) -> None:
    """Refuses a tile side that the model cannot train on.

    Raises:
        PathosegError: It is not divisible by the model's multiple, or the deepest features would
            be a single pixel, of which no norm can take statistics.
    """
    multiple = tile_multiple(model)
    if tile % multiple or tile < 2 * multiple:
        below = max(2, tile // multiple) * multiple
        raise PathosegError(
            f"Tiles of {tile} px do not fit this model, which needs multiples of {multiple} px, "
            f"{2 * multiple} at least.",
            f"Choose {below} or {below + multiple} px.",
        )


def _call_factory(config: ModelConfig, factory: str | None) -> nn.Module:
    if factory is None:
        raise PathosegError(
            f"The model is made by the code {config.name}, which runs only if you ask for it.",
            f"If you trust that code, name {config.name} on the command line.",
        )
    module, _, attribute = config.name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's code raises while it is imported
        raise PathosegError(
            f"{config.name} cannot be imported ({type(error).__name__}: {error}).",
            "Check the name, and that its folder is installed or on PYTHONPATH.",
        ) from error
    try:
        model = make(in_channels=3, classes=config.classes, **config.options)
    except Exception as error:  # as above
        raise PathosegError(
            f"{config.name} failed ({type(error).__name__}: {error}).",
            "It is called as factory(in_channels=3, classes=…, **options).",
        ) from error
    if not isinstance(model, nn.Module):
        raise PathosegError(
            f"{config.name} returned {type(model).__name__}.", "Return a torch.nn.Module."
        )
    _check_logits(model, config)
    return model


def _check_logits(model: nn.Module, config: ModelConfig) -> None:
    """Runs one small black tile through a model that is not ours and looks at the shape."""
    multiple = tile_multiple(model)
    side = multiple * max(2, -(-64 // multiple))
    wanted = (1, config.classes, side, side) if config.task == "segment" else (1, config.classes)
    was_training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, 3, side, side))
    except Exception as error:  # as above
        raise PathosegError(
            f"{config.name} fails on a tile of {side} px ({type(error).__name__}: {error}).",
            "Mend it, or set the model's attribute `multiple` to what tile sides must divide by.",
        ) from error
    model.train(was_training)
    if not isinstance(logits, torch.Tensor) or logits.shape != wanted:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise PathosegError(
            f"{config.name} gives {shape} for one tile of {side} px, not {wanted}.",
            f"To {config.task}, return logits of that shape.",
        )
