"""A trained model as a folder: weights by parameter name, and a card of what using them needs."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model, tile_multiple
from pathoseg.models.card import Bundle, card_from_json, card_to_json, parse_json

__all__ = ["Bundle", "bundle_id", "load_bundle", "save_bundle"]

WEIGHTS = "weights.safetensors"
CARD = "model.json"

_SCHEMA = 1
_LARGEST_CARD = 2**20
_MEND = "Copy the whole folder again from where it was trained, or train again."


def save_bundle(folder: Path, state: Mapping[str, Any], card: Bundle) -> None:
    """Writes or replaces the bundle in `folder`; killed at any moment, one whole bundle is there.

    The card holds the hash of its weights. New weights are first written under a name made of
    their hash; renaming the new card over the old one is the moment of change, and only then do
    the weights take their final name. `load_bundle` accepts either name.

    Args:
        folder: Made where it is missing.
        state: The model's state dict: parameters and buffers, each under each of its names.
        card: What using the model needs.

    Raises:
        PathosegError: The folder cannot be written, or the model's state is not all tensors.
    """
    data = safetensors.torch.save(_tensors(state))
    digest = hashlib.sha256(data).hexdigest()
    document = {"schema": _SCHEMA, "weights_sha256": digest, **card_to_json(card)}
    text = json.dumps(document, indent=2, allow_nan=False)
    new_weights = folder / _hashed_name(digest)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace_in_turn({new_weights: data, folder / CARD: text.encode()})
        _rename(new_weights, folder / WEIGHTS)
        for leftover in folder.glob("weights-*"):
            leftover.unlink()
    except OSError as error:
        raise PathosegError(
            f"{folder} cannot be written ({error.strerror}).",
            "Free space there, or choose another --out.",
        ) from error


def bundle_id(folder: Path) -> str:
    """What tells a bundle from all others: a hash of its card, which holds that of its weights.

    Raises:
        PathosegError: The card is missing.
    """
    return hashlib.sha256(_read(folder / CARD)).hexdigest()[:16]


def load_bundle(folder: Path, factory: str | None = None) -> tuple[nn.Module, Bundle]:
    """The model of a bundle on the CPU, in eval mode, and its card. Runs no code of the bundle.

    Args:
        folder: What `save_bundle` wrote.
        factory: The `module:factory` that the user named, see `build_model`.

    Raises:
        PathosegError: A file is missing, cut short, or of another version; the card is
            impossible; or the weights are those of another model.
    """
    card, digest = _read_card(folder / CARD)
    tensors = _read_weights(folder, digest)
    with nullcontext() if card.model.is_factory else torch.device("meta"):
        model = build_model(card.model, factory)
    wrong = _first_difference(model, tensors)
    if wrong:
        raise PathosegError(
            f"{folder / WEIGHTS} holds another model than {folder / CARD} says: {wrong}.", _MEND
        )
    if tile_multiple(model) != card.multiple:
        raise PathosegError(
            f"{folder / CARD}: multiple is {card.multiple}, but the model {card.model.name} "
            f"needs {tile_multiple(model)}.",
            _MEND,
        )
    if not card.model.is_factory:
        model.to_empty(device="cpu")  # only now: a wrong card costs no memory, and no random number
    model.load_state_dict(tensors)
    return model.eval(), card


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers; tied ones share no memory in the copy, as the file asks."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise PathosegError(
                f"The model's state `{name}` is {type(value).__name__}, which no bundle holds.",
                "Keep it in a buffer (register_buffer) instead.",
            )
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _hashed_name(digest: str) -> str:
    """Where weights wait for their final name."""
    return f"weights-{digest[:16]}.safetensors"


def _replace_in_turn(contents: dict[Path, bytes]) -> None:
    """Replaces files one after the other, once all of them are on the disk under other names."""
    drafts = {target: target.with_name(f"{target.name}.part") for target in contents}
    try:
        for target, draft in drafts.items():
            with draft.open("wb") as file:
                file.write(contents[target])
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
        raise
    for target, draft in drafts.items():
        _rename(draft, target)


def _rename(source: Path, target: Path) -> None:
    source.replace(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PathosegError(
            f"{path} is missing, so {path.parent} is no whole model bundle.",
            f"Give a folder with {CARD} and {WEIGHTS}, as a finished run has in `model/`.",
        ) from None
    except OSError as error:
        raise PathosegError(f"{path} cannot be read ({error.strerror}).", _MEND) from error


def _read_card(path: Path) -> tuple[Bundle, str]:
    """The card and the hash of the weights that belong to it."""
    text = _read(path)
    try:
        if len(text) > _LARGEST_CARD:
            raise ValueError(f"it is larger than {_LARGEST_CARD} bytes")
        document: Any = parse_json(text)
    except ValueError as error:
        raise PathosegError(f"{path} is no JSON of a model ({error}).", _MEND) from None
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != _SCHEMA:
        raise PathosegError(
            f"{path} has schema version {schema!r}; this pathoseg reads {_SCHEMA}.",
            "Use the version of pathoseg that wrote it, or train again.",
        )
    digest = document.pop("weights_sha256", None)
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise PathosegError(f"{path} states no hash of its weights (weights_sha256).", _MEND)
    try:
        return card_from_json(document), digest
    except PathosegError as wrong:
        raise PathosegError(f"{path}: {wrong.problem}", wrong.mend) from None


def _read_weights(folder: Path, digest: str) -> dict[str, torch.Tensor]:
    unfinished = folder / _hashed_name(digest)
    path = unfinished if unfinished.exists() else folder / WEIGHTS
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise PathosegError(
            f"{path} is cut short, or not the file that {CARD} was written with.", _MEND
        )
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # a crafted header raises more than SafetensorError
        raise PathosegError(f"{path} is no safetensors file ({error}).", _MEND) from error


def _first_difference(model: nn.Module, tensors: dict[str, torch.Tensor]) -> str:
    """The first name, shape or type in which `tensors` are not the model's; "" without one."""
    state = model.state_dict()
    for name in sorted(state.keys() ^ tensors.keys()):
        return f"{name} is {'missing' if name in state else 'unknown'}"
    for name, tensor in state.items():
        found = tensors[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            return f"{name} is {found.dtype} {tuple(found.shape)}"
    return ""
