"""Weights of an encoder: reading a file of any origin or a bundle, and which network they fit."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.bundle import Bundle, load_bundle, load_card
from pathoseg.models.bundle_identity import WEIGHTS, read_bundle_file
from pathoseg.models.model_options import (
    UNET_RESNETS,
    VIT_SEG,
    VIT_SIZES,
    ModelConfig,
    Scalar,
)

Tensors = dict[str, torch.Tensor]
Channels = tuple[float, float, float]

# A parameter that tells the encoder of each kind of network, whatever stands before its name.
_MARKS = {"a ResNet": "layer1.0.conv1.weight", "a vision transformer": "patch_embed.proj.weight"}
_DEEPEST = 4  # wrappers within wrappers; a file may hold itself
# Rank of the tensors whose shape tells the sizes.
_DIMENSIONS = {"cls_token": 3, "pos_embed": 3, "reg_token": 3, "patch_embed.proj.weight": 4}
# Names that hub checkpoints keep a state dict under, the one that is used for inference first.
_WRAPPERS = ("teacher", "model_ema", "state_dict", "model", "module", "backbone", "encoder")
# Of several encoders in one file, the one whose prefix has this word is meant.
_PREFERRED = "teacher"
# DINOv2's own names → timm's.
_RENAMED = {
    r"^register_tokens$": "reg_token",
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^blocks\.\d+\.(?=\d+\.)": "blocks.",  # blocks in chunks: chunk, then number of the block
}
_UNIT = re.compile(r"^(layer|blocks\.)\d+\.")
_CONFIG = "config.json"
_LARGEST_CONFIG = 2**20
_CONVERT = (
    "Convert it in its own program, by safetensors.torch.save_file(state_dict, "
    "'model.safetensors'), and name that file."
)


@dataclass(frozen=True)
class EncoderWeights:
    """The weights of an encoder, and what its file and the config beside it say.

    Attributes:
        path: Of the file.
        digest: SHA-256 of its bytes in hexadecimal.
        kind: Which encoder it is, with an article.
        tensors: In float32, by the names of torchvision or timm. Of a vision transformer,
            `pos_embed` is of the patches alone: what the file adds to the first tokens is added.
        left_over: Names in the file of what is no part of such an encoder (heads, mask tokens).
        name: Of the architecture, as the config says; else of the file.
        heads: Heads of the attention, where the config says so.
        mean: Of the pixels that the encoder was trained with, where the config says so.
        std: Likewise.
        licence: Likewise.
        card: Of the bundle that the encoder is part of; None of a file of another program.
    """

    path: Path
    digest: str
    kind: str
    tensors: Tensors
    left_over: tuple[str, ...]
    name: str
    heads: int | None = None
    mean: Channels | None = None
    std: Channels | None = None
    licence: str | None = None
    card: Bundle | None = None


def read_encoder(path: Path) -> EncoderWeights:
    """Read the weights of an encoder, and timm's `config.json` where it lies beside them.

    Args:
        path: A safetensors file, or a `.pth`, `.pt` or `.bin` of PyTorch, of which tensors alone
            are unpickled.

    Raises:
        PathosegError: It cannot be read, is cut short, needs code, or holds no encoder that is
            known; or the config cannot be read.
    """
    everything, digest = _read_tensors(path)
    kind, prefix = _find_encoder(path, everything)
    own = {
        name.removeprefix(prefix): value
        for name, value in everything.items()
        if name.startswith(prefix)
    }
    for pattern, timm in _RENAMED.items():
        own = {re.sub(pattern, timm, name): value for name, value in own.items()}
    known = {name: value for name, value in own.items() if _is_part(kind, name)}
    left = [name for name in own if name not in known]
    left += [name for name in everything if not name.startswith(prefix)]
    tensors = {
        name: value.float() if value.is_floating_point() else value for name, value in known.items()
    }
    if kind == "a vision transformer":
        _split_positions(path, tensors)
    return EncoderWeights(path, digest, kind, tensors, tuple(left), **_read_config(path))


def read_bundle_encoder(folder: Path) -> EncoderWeights:
    """Read the encoder of a bundle; LoRA weights are merged into the layers that they adapt.

    Args:
        folder: The bundle's.

    Raises:
        PathosegError: It is no whole bundle, or its network has no encoder.
    """
    card = load_card(folder)
    if not card.model.has_encoder:
        raise PathosegError(
            f"The model {card.model.name} in {folder} has no encoder to start from.",
            "Start the whole network from it with --from, or name a run of a network that has "
            "one (docs/encoders.md).",
        )
    model, _ = load_bundle(folder)
    tensors: Tensors = dict(model.get_submodule("encoder").state_dict())
    for name in [name for name in tensors if name.endswith(".lora_a")]:
        layer = name.removesuffix(".lora_a")
        down, up = tensors.pop(name), tensors.pop(f"{layer}.lora_b")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"] + up @ down
    known, licence = (card.training.get(key) for key in ("encoder", "encoder_licence"))
    return EncoderWeights(
        folder / WEIGHTS,
        hashlib.sha256(read_bundle_file(folder / WEIGHTS)).hexdigest(),
        "a ResNet" if card.model.name in UNET_RESNETS else "a vision transformer",
        tensors,
        left_over=(),
        name=known if isinstance(known, str) else card.model.name,
        mean=card.mean,
        std=card.std,
        licence=licence if isinstance(licence, str) else None,
        card=card,
    )


def fitting_options(config: ModelConfig, weights: EncoderWeights) -> Mapping[str, Scalar]:
    """Return the options of a network, those that are left out as the weights have them.

    Args:
        config: Of a network with an encoder.
        weights: For it.

    Raises:
        PathosegError: The weights are of another kind of encoder, or of one of no known size.
    """
    wanted = "a ResNet" if config.name in UNET_RESNETS else "a vision transformer"
    if weights.kind != wanted:
        names = f"{', '.join(UNET_RESNETS)}" if weights.kind == "a ResNet" else VIT_SEG
        raise PathosegError(
            f"{weights.path} holds {weights.kind}, and the encoder of {config.name} is {wanted}.",
            f"Set [model] name to one of: {names}.",
        )
    if config.name in UNET_RESNETS:
        return config.options
    tensors = weights.tensors
    dim, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    blocks = {int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")}
    size = next(
        (
            size
            for size, (wide, depth, _) in VIT_SIZES.items()
            if (wide, depth) == (dim, len(blocks))
        ),
        None,
    )
    if size is None:
        raise PathosegError(
            f"{weights.path} holds a vision transformer of {len(blocks)} blocks with tokens of "
            f"{dim} numbers, which {VIT_SEG} has no size for.",
            "Known are: "
            + ", ".join(f"{each} ({row[1]} × {row[0]})" for each, row in VIT_SIZES.items())
            + ".",
        )
    if weights.heads not in (None, VIT_SIZES[size][2]):
        raise PathosegError(
            f"{weights.path.with_name(_CONFIG)} says {weights.heads} heads of attention, and "
            f"{VIT_SEG} of size {size} has {VIT_SIZES[size][2]}.",
            "Only the sizes of docs/encoders.md are known.",
        )
    registers = tensors.get("reg_token")
    one, two = (tensors.get(f"blocks.0.mlp.fc{layer}.weight") for layer in (1, 2))
    gated = one is not None and two is not None and one.shape[0] == 2 * two.shape[1]
    found: dict[str, Scalar] = {
        "size": size,
        "patch": patch,
        "registers": 0 if registers is None else registers.shape[1],
        "mlp": "swiglu" if gated else "gelu",
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "positions": math.isqrt(tensors["pos_embed"].shape[1]),
    }
    return found | dict(config.options)


def set_encoder(encoder: nn.Module, weights: EncoderWeights) -> tuple[str, ...]:
    """Give an encoder its weights.

    Args:
        encoder: Its parameters have the names of `weights.tensors`.
        weights: For it.

    Returns:
        Names of the encoder's tensors that the file lacks; they stay as they are.

    Raises:
        PathosegError: A shape differs, or the file has other blocks; nothing is changed then.
    """
    own, given = encoder.state_dict(), weights.tensors
    for name, tensor in own.items():
        if name in given and given[name].shape != tensor.shape:
            raise PathosegError(
                f"{weights.path}: {name} has the shape {tuple(given[name].shape)}, and that of the "
                f"network is {tuple(tensor.shape)}.",
                "Leave out [model] options, which then follow from the file, or choose the network "
                "that the weights are of.",
            )
    ours = ("num_batches_tracked", ".lora_a", ".lora_b")  # which published weights need not have
    for name in sorted(own.keys() ^ given.keys()):
        if _UNIT.match(name) and not name.endswith(ours):
            where = "the network, but not in the file" if name in own else "the file alone"
            raise PathosegError(
                f"{weights.path} holds another encoder: {name} is in {where}.",
                "Choose the network that the weights are of.",
            )
    encoder.load_state_dict(own | {name: given[name] for name in given if name in own})
    return tuple(name for name in own if name not in given and not name.endswith(ours))


def _read_tensors(path: Path) -> tuple[Tensors, str]:
    """All tensors of a file by name, and its hash."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PathosegError(
            f"The encoder's weights {path} cannot be read ({error.strerror}).",
            "Give [model] encoder_weights the path of a .safetensors, .pth or .bin file.",
        ) from None
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path), digest
        except Exception as error:  # a crafted header raises more than SafetensorError
            raise PathosegError(
                f"{path} is no safetensors file ({error}).", "Copy or download it again, whole."
            ) from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it needs {needed[1]}" if needed else str(error).split("\n")[0][:200]
        raise PathosegError(
            f"{path} is no file of tensors alone, and code is not run ({reason}).", _CONVERT
        ) from None
    except Exception as error:  # a damaged archive raises whatever its parts raise
        reason = str(error).split("\n")[0][:200]
        raise PathosegError(
            f"{path} is cut short or no file of PyTorch ({type(error).__name__}: {reason}).",
            "Copy or download it again, whole.",
        ) from None
    return _unwrapped(path, loaded), digest


def _unwrapped(path: Path, loaded: Any) -> Tensors:
    """The state dict in what a checkpoint holds."""
    for _ in range(_DEEPEST):
        if not isinstance(loaded, Mapping):
            break
        inner = [loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if not inner:
            named = {str(key): each for key, each in loaded.items()}
            tensors = {key: each for key, each in named.items() if isinstance(each, torch.Tensor)}
            if tensors:
                return tensors
            break
        loaded = inner[0]
    raise PathosegError(
        f"{path} holds no tensors by name ({type(loaded).__name__}).",
        f"Save the state dict of the encoder alone. {_CONVERT}",
    )


def _find_encoder(path: Path, tensors: Tensors) -> tuple[str, str]:
    """The kind of encoder in a file, and what stands before its names."""
    found = [
        (kind, name.removesuffix(mark))
        for kind, mark in _MARKS.items()
        for name in tensors
        if name == mark or name.endswith(f".{mark}")
    ]
    preferred = [each for each in found if _PREFERRED in each[1]]
    chosen = preferred if len(found) > 1 and preferred else found
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise PathosegError(
            f"{path} holds no encoder that is known: of its {len(tensors)} tensors "
            f"(the first is {min(tensors, default='-')}) none is named as in torchvision's ResNets "
            f"({_MARKS['a ResNet']}) or timm's vision transformers "
            f"({_MARKS['a vision transformer']}).",
            "Rename the tensors to those names in the program that made them; docs/encoders.md "
            "lists what loads as it is.",
        )
    told = ", ".join(prefix or "(no prefix)" for _, prefix in chosen)
    raise PathosegError(
        f"{path} holds several encoders: {told}.",
        "Save the one that is meant in a file of its own.",
    )


def _is_part(kind: str, name: str) -> bool:
    """Return True for what belongs to an encoder, False for heads and training's own tensors."""
    if kind == "a ResNet":
        return re.match(r"(conv1|bn1|layer[1-9])\.", name) is not None
    tokens = name in ("cls_token", "reg_token", "pos_embed")
    return tokens or re.match(r"(patch_embed\.proj|blocks\.\d+|norm)\.", name) is not None


def _split_positions(path: Path, tensors: Tensors) -> None:
    """Leave `pos_embed` to the patches; what it adds to the first tokens is added to them."""
    lacking = [name for name in ("cls_token", "pos_embed") if name not in tensors]
    if lacking:
        raise PathosegError(
            f"{path} holds a vision transformer without {' and '.join(lacking)}.",
            "Only transformers with a class token and learnt positions are known.",
        )
    wide = tensors["cls_token"].shape[-1:]
    for name, dimensions in _DIMENSIONS.items():
        each = tensors.get(name)
        if each is None:
            continue
        fits = each.layout is torch.strided and each.dim() == dimensions
        if not fits or (dimensions == 3 and each.shape[-1:] != wide):
            raise PathosegError(
                f"{path}: {name} is of shape {tuple(each.shape)}, which no vision transformer of "
                "images has.",
                "docs/encoders.md lists the encoders that are known.",
            )
    positions = tensors["pos_embed"]
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    count = positions.shape[1]
    # Positions of all tokens, of class token and patches (DINOv2), or of the patches alone.
    first = [n for n in (1 + registers, 1, 0) if math.isqrt(max(0, count - n)) ** 2 == count - n]
    if not first or count <= first[0]:
        raise PathosegError(
            f"{path}: pos_embed is of {count} tokens, which are no square of patches with "
            f"{1 + registers} tokens before.",
            "Only positions of a square grid are known.",
        )
    for name, start, stop in (("cls_token", 0, 1), ("reg_token", 1, first[0])):
        if stop <= first[0] and stop > start:
            tensors[name] = tensors[name] + positions[:, start:stop]
    tensors["pos_embed"] = positions[:, first[0] :].contiguous()


def _read_config(path: Path) -> dict[str, Any]:
    """The fields of `EncoderWeights` that timm's config gives."""
    place = path.with_name(_CONFIG)
    found: dict[str, Any] = {"name": path.name}
    if not place.is_file():
        return found
    try:
        if place.stat().st_size > _LARGEST_CONFIG:
            raise ValueError("it is too large")
        config: Any = json.loads(place.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is no table")
        of_weights, arguments = (config.get(key) or {} for key in ("pretrained_cfg", "model_args"))
        if isinstance(config.get("architecture"), str):
            found["name"] = config["architecture"]
        if type(arguments.get("num_heads")) is int:
            found["heads"] = arguments["num_heads"]
        for key in ("mean", "std"):
            if key in of_weights:
                found[key] = _channels(of_weights[key])
        if min(found.get("std", (1.0,))) <= 0:
            raise ValueError("a std is not above 0")
        if isinstance(of_weights.get("license"), str):
            found["licence"] = of_weights["license"]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PathosegError(
            f"{place}, beside the encoder's weights, is no config of timm ({error}).",
            "Move it away, and set [model] mean, std and licence instead.",
        ) from None
    return found


def _channels(values: Any) -> Channels:
    one, two, three = (float(value) for value in values)
    if not all(map(math.isfinite, (one, two, three))):
        raise ValueError("a mean or std is not finite")
    return one, two, three
