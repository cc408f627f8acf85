"""From a model's name and sizes to the network, and what a network asks of its tiles."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pathoseg.device import answer, training_layout
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE, ModelInput
from pathoseg.models.hooknet import HookNet
from pathoseg.models.model_options import (
    HOOKNET,
    UNET_RESNETS,
    UNET_WIDTHS,
    VIT_SEG,
    ModelConfig,
    check_side,
    resnet_depth,
    vit_shape,
)
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.models.unet_resnet import RESNETS, ResNetUNet
from pathoseg.models.vit_seg import ViTSeg


def build_model(config: ModelConfig, factory: str | None = None) -> nn.Module:
    """The network with fresh weights, drawn after the caller's `torch.manual_seed`.

    Args:
        config: What to build.
        factory: The `module:factory` that the user named. Code of that name is imported only when
            it equals `config.name`: a bundle alone makes nothing run. It is called as
            `factory(in_channels=3, classes=n, **options)`, n being `config.channels`.

    Returns:
        A module whose forward takes images (n, 3, h, w) to logits (n, channels, h, w), or to
        (n, channels) where the task is "classify". One of several inputs (`declared_inputs`) takes
        each by name.

    Raises:
        PathosegError: The factory was not named by the user, fails, or gives another shape.
    """
    if factory is not None and factory != config.name:
        raise PathosegError(
            f"The model is {config.name}, not {factory}.", f"Name {config.name} instead."
        )
    if config.is_factory:
        return _call_factory(config, factory)
    if config.name in UNET_RESNETS:
        return ResNetUNet(config.channels, *RESNETS[UNET_RESNETS[config.name]], config.norm)
    if config.name == VIT_SEG:
        return ViTSeg(config.channels, vit_shape(config.options), config.norm)
    width = config.sizes["width"]
    if config.name in UNET_WIDTHS:
        network = HookNet if config.name == HOOKNET else UNet
        return network(config.channels, width, config.sizes["depth"], config.norm)
    return ResNetV2(config.classes, config.task, resnet_depth(config.name), width, config.norm)


def lay_out(model: nn.Module, config: ModelConfig, kind: str) -> torch.memory_format:
    """Lay a network's weights out for training, in place, and return the layout of its input.

    A factory's network keeps the layout that it came with.

    Args:
        model: The network.
        config: Its options.
        kind: Type of the device that trains it, see `training_layout`.
    """
    if config.is_factory:
        return torch.contiguous_format
    layout = training_layout(kind)
    model.to(memory_format=layout)  # type: ignore[call-overload]  # not in its stub
    return layout


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


def declared_inputs(model: nn.Module, mpp: float, tile: int) -> tuple[ModelInput, ...]:
    """Return the inputs of a network: those of its method `inputs_at`, else the tile alone.

    `inputs_at(mpp, tile)` returns {"image": (mpp, tile), name: (microns per pixel, side)…}.

    Args:
        model: The network.
        mpp: Microns per pixel of the tile.
        tile: Its side in pixels.

    Raises:
        PathosegError: The method fails, or its inputs cannot be read around one centre.
    """
    method: Any = getattr(model, "inputs_at", None)
    if method is None:
        return (ModelInput(IMAGE, mpp, tile),)
    try:
        inputs = tuple(
            ModelInput(str(name), float(own_mpp), int(size))
            for name, (own_mpp, size) in method(mpp, tile).items()
        )
    except PathosegError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise PathosegError(
            f"{type(model).__name__}.inputs_at({mpp:g}, {tile}) fails ({type(error).__name__}: "
            f"{error}).",
            'Return a dict such as {"image": (mpp, tile), "context": (4 * mpp, tile)}.',
        ) from error
    check_inputs(inputs, mpp, tile, tile_multiple(model))
    return inputs


def labelled_input(model: nn.Module, inputs: Sequence[ModelInput]) -> str | None:
    """Return the name of the input beside the tile on whose labels a network is trained, too.

    It is the attribute `labelled_input`. In training such a network returns two tensors: the answer
    for the tile, and one of the same shape for the pixels of this input, which are as many.

    Args:
        model: The network.
        inputs: From `declared_inputs`: the tile, and others.

    Raises:
        PathosegError: It names no such input.
    """
    name: str | None = getattr(model, "labelled_input", None)
    tile, *others = inputs
    fitting = [each.name for each in others if each.size == tile.size]
    if name is not None and name not in fitting:
        raise PathosegError(
            f"{type(model).__name__}.labelled_input is {name!r}.",
            "Name an input beside the tile that has as many pixels: "
            f"{', '.join(fitting) or 'there is none'}.",
        )
    return name


def check_inputs(inputs: Sequence[ModelInput], mpp: float, tile: int, multiple: int) -> None:
    """Refuse inputs that cannot be read pixel for pixel around the centre of every tile.

    Args:
        inputs: Of a network.
        mpp: Microns per pixel of its tiles.
        tile: Their side in pixels.
        multiple: What the network divides by; tiles lie at multiples of it.

    Raises:
        PathosegError: The first is not the tile, two have one name, or a size or resolution does
            not fit.
    """
    names = [each.name for each in inputs]
    if not inputs or inputs[0] != ModelInput(IMAGE, mpp, tile) or len(set(names)) < len(names):
        raise PathosegError(
            f"The inputs {', '.join(names) or '(none)'} do not begin with the tile, `{IMAGE}` of "
            f"{tile} px at {mpp:g} µm per pixel, or two have one name.",
            f"Give `{IMAGE}` first, with the resolution and side of the tile.",
        )
    for each in inputs[1:]:
        ratio = each.ratio(mpp)
        if ratio < 1 or abs(each.mpp - ratio * mpp) > 1e-9 * each.mpp:
            raise PathosegError(
                f"The input `{each.name}` has {each.mpp:g} µm per pixel, no whole multiple of the "
                f"tile's {mpp:g}.",
                "Give it the pixel size of the tile, or 2, 3, 4… times that.",
            )
        if each.size % multiple or multiple % ratio or (tile - ratio * each.size) % (2 * ratio):
            raise PathosegError(
                f"The input `{each.name}` of {each.size} px, each {ratio} times as wide as those "
                f"of the tile of {tile} px, does not fit a model that needs multiples of "
                f"{multiple} px: the centres would not meet.",
                f"Set the model's attribute `multiple` to a multiple of {2 * ratio}, and give "
                "each input and the tile a side that it divides.",
            )


def edge_reach(model: nn.Module) -> int | None:
    """Pixels from a tile's edge beyond which a larger tile would give the same logits.

    None where there is no such distance (group or instance norm) or the model does not say
    (attribute `reach`).

    Raises:
        PathosegError: `reach` is no whole number from 0.
    """
    reach: Any = getattr(model, "reach", None)
    return None if reach is None else _pixels(model, "reach", reach)


def context_reach(model: nn.Module) -> Mapping[str, int]:
    """Pixels around a tile's field, of other inputs, beyond which larger ones give the same logits.

    They are counted in pixels of each input, by name. One that the model does not name (attribute
    `context_reach`) has no such distance.

    Raises:
        PathosegError: One is no whole number from 0.
    """
    named: Any = getattr(model, "context_reach", {})
    return {str(name): _pixels(model, "context_reach", each) for name, each in named.items()}


def _pixels(model: nn.Module, attribute: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PathosegError(
            f"{type(model).__name__}.{attribute} is {value!r}.",
            "Set it to a whole number of pixels (docs/own-models.md), or call it otherwise.",
        )
    return value


def check_tile(model: nn.Module, tile: int) -> None:
    """Refuse a tile side that the model cannot train on.

    Raises:
        PathosegError: As `check_side`.
    """
    multiple = tile_multiple(model)
    shape = model.encoder.shape if isinstance(model, ViTSeg) else None
    check_side(tile, multiple, shape.smallest_side if shape else 2 * multiple)


def _call_factory(config: ModelConfig, factory: str | None) -> nn.Module:
    if factory is None:
        raise PathosegError(
            f"The model is made by the code {config.name}, which runs only if you ask for it.",
            f"If you trust that code, add --factory {config.name}, to `train` --model "
            f"{config.name}; in Python as `factory`, for `train` as `name` in the options of "
            "`model`.",
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
        model = make(in_channels=3, classes=config.channels, **config.options)
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
    """Run one small black tile through a model that is not ours and look at the shape."""
    multiple = tile_multiple(model)
    side = multiple * max(2, -(-64 // multiple))
    channels = config.channels
    wanted = (1, channels) if config.task == "classify" else (1, channels, side, side)
    was_training = model.training
    try:
        with torch.no_grad():
            inputs = declared_inputs(model, 1.0, side)
            blank = {each.name: torch.zeros(1, 3, each.size, each.size) for each in inputs}
            logits = answer(model.eval(), blank if len(blank) > 1 else blank[IMAGE])
    except PathosegError:
        raise
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
            f"A model of the task {config.task} returns logits of that shape.",
        )
