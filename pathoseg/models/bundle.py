"""A trained model as a folder: weights by parameter name, and a card of what using them needs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE, ModelInput
from pathoseg.models.build import build_model, check_inputs, declared_inputs, tile_multiple
from pathoseg.models.bundle_identity import CARD, COPY_AGAIN, WEIGHTS, read_bundle_file
from pathoseg.models.model_options import ModelConfig, Scalar
from pathoseg.platform_support import composed, sync_folder
from pathoseg.typed_json import from_json
from pathoseg.version import __version__

Colour = tuple[int, int, int]
Channels = tuple[float, float, float]

_LARGEST_TILE = 2**16
# In the names and texts of licences, such as CC-BY-NC-4.0.
_NON_COMMERCIAL = re.compile(
    r"(?i)(?<![a-z])nc(?![a-z])|non.?commercial|not for commercial|research.only|academic"
)


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
        tiling: How inference tiles a slide where the network's reach is known: by "windows" that
            join to one pass, or with "blended" training tiles, as versions did that wrote none.
        context: What the network sees beside the tile, around its centre; mostly nothing.
        stain: The stain normalisation that slides went through, in its own plain values, or None.
        training: Where the weights come from, in plain values (numbers that are not finite are
            written as null); `slide_mpps` lists the resolutions of the slides trained on.
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
    tiling: Literal["windows", "blended"] = "windows"
    context: tuple[ModelInput, ...] = ()
    stain: Mapping[str, Scalar] | None = None
    training: Mapping[str, Scalar | tuple[float, ...] | tuple[str, ...] | None] = field(
        default_factory=dict
    )
    pathoseg_version: str = __version__
    torch_version: str = str(torch.__version__)

    def __post_init__(self) -> None:
        # As those of annotations are read.
        object.__setattr__(self, "class_names", tuple(map(composed, self.class_names)))
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
        check_inputs(self.inputs, self.mpp, self.tile, self.multiple)
        _require(all(map(math.isfinite, self.mean)), f"mean {self.mean} is not finite")
        _require(
            all(0 < channel < math.inf for channel in self.std), f"std {self.std} is not positive"
        )

    @property
    def inputs(self) -> tuple[ModelInput, ...]:
        """All that the network sees: the tile, named `image`, and its context."""
        return (ModelInput(IMAGE, self.mpp, self.tile), *self.context)

    def licence_warning(self) -> str | None:
        """Return a warning where the encoder's licence forbids commercial use, None for nothing."""
        licence = self.training.get("encoder_licence")
        if not isinstance(licence, str) or not _NON_COMMERCIAL.search(licence):
            return None
        return f"the model's encoder has the licence {licence}: not for commercial use"

    def unseen_resolution(self, mpp: float) -> str | None:
        """Return a warning for a slide of `mpp` microns per level-0 pixel, None for nothing.

        A model knows the resolutions of the slides it was trained on and what is up to 1.2 times
        coarser or finer than one of them. Models of which they are not recorded know all.
        """
        recorded = self.training.get("slide_mpps")
        values = recorded if isinstance(recorded, tuple) else ()
        known = [value for value in values if not isinstance(value, str)]
        if not known or not all(0 < seen < math.inf for seen in known):
            return None
        nearest = min(known, key=lambda seen: max(mpp / seen, seen / mpp))
        ratio = max(mpp / nearest, nearest / mpp)
        if ratio <= 1.2 * (1 + 1e-9):
            return None
        return (
            f"its resolution, {mpp:.4g} µm per pixel, is {ratio:.2g} times "
            f"{'coarser' if mpp > nearest else 'finer'} than the nearest that the model was "
            f"trained on ({nearest:.4g} µm)"
        )


def card_to_json(card: Bundle) -> dict[str, Any]:
    """The card as plain JSON values; `inputs` stands for `context`, with the tile first."""
    plain = asdict(card)
    del plain["context"]
    plain["inputs"] = [asdict(each) for each in card.inputs]
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
    rest = dict(plain)
    listed = rest.pop("inputs", None)
    try:
        inputs = from_json(tuple[ModelInput, ...], listed, "`inputs`", needs_all=True)
        context = [asdict(each) for each in inputs[1:]]
        card = from_json(Bundle, {"context": context, **rest}, "the card", needs_all=True)
    except ValueError as error:
        raise PathosegError(f"{error}.", _CARD_HINT) from None
    _require(card.inputs == inputs, "`inputs` does not begin with the tile")
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


_CARD_HINT = "Copy the bundle again from where it was trained, or train again."


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise PathosegError(f"{problem}.", _CARD_HINT)


_SCHEMA = 1
_LARGEST_CARD = 2**20


def save_bundle(folder: Path, state: Mapping[str, Any], card: Bundle) -> None:
    """Write or replace the bundle in `folder`; killed at any moment, one whole bundle is there.

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


def load_card(folder: Path) -> Bundle:
    """The card of a bundle, without its weights.

    Raises:
        PathosegError: There is none, or it is of another version or impossible.
    """
    return _read_card(folder / CARD)[0]


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
            f"{folder / WEIGHTS} holds another model than {folder / CARD} says: {wrong}.",
            COPY_AGAIN,
        )
    if tile_multiple(model) != card.multiple:
        raise PathosegError(
            f"{folder / CARD}: multiple is {card.multiple}, but the model {card.model.name} "
            f"needs {tile_multiple(model)}.",
            COPY_AGAIN,
        )
    declared = declared_inputs(model, card.mpp, card.tile)
    if declared != card.inputs:
        raise PathosegError(
            f"{folder / CARD} names the inputs {_told(card.inputs)}, but the model "
            f"{card.model.name} has {_told(declared)}.",
            "Use the code of the model that the bundle was trained with, or train again.",
        )
    if not card.model.is_factory:
        model.to_empty(device="cpu")  # only now: a wrong card costs no memory, and no random number
    model.load_state_dict(tensors)
    return model.eval(), card


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Read a safetensors file of another program; nothing in it is unpickled.

    Returns:
        Its tensors by name, and the SHA-256 of its bytes in hexadecimal.

    Raises:
        PathosegError: It cannot be read, or is cut short or of another format.
    """
    data = read_bundle_file(path)
    hint = (
        "Nothing is unpickled: convert a checkpoint of PyTorch in its own program, by "
        "safetensors.torch.save_file(state_dict, 'weights.safetensors')."
    )
    return _parse_tensors(path, data, hint), hashlib.sha256(data).hexdigest()


def _told(inputs: tuple[ModelInput, ...]) -> str:
    return ", ".join(f"{each.name} ({each.size} px at {each.mpp:g} µm)" for each in inputs)


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
    """Return the name of a weights file before it is renamed into place."""
    return f"weights-{digest[:16]}.safetensors"


def _replace_in_turn(contents: dict[Path, bytes]) -> None:
    """Replace files one after the other, once all of them are on the disk under other names."""
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
    sync_folder(target.parent)


def _read_card(path: Path) -> tuple[Bundle, str]:
    """The card and the hash of the weights that belong to it."""
    text = read_bundle_file(path)
    try:
        if len(text) > _LARGEST_CARD:
            raise ValueError(f"it is larger than {_LARGEST_CARD} bytes")
        document: Any = parse_json(text)
    except ValueError as error:
        raise PathosegError(f"{path} is no JSON of a model ({error}).", COPY_AGAIN) from None
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != _SCHEMA:
        raise PathosegError(
            f"{path} has schema version {schema!r}; this pathoseg reads {_SCHEMA}.",
            "Use the version of pathoseg that wrote it, or train again.",
        )
    digest = document.pop("weights_sha256", None)
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise PathosegError(f"{path} states no hash of its weights (weights_sha256).", COPY_AGAIN)
    document.setdefault("tiling", "blended")
    if "inputs" not in document and "mpp" in document and "tile" in document:
        only = {"name": IMAGE, "mpp": document["mpp"], "size": document["tile"]}
        document["inputs"] = [only]  # the versions that wrote none knew the tile alone
    try:
        return card_from_json(document), digest
    except PathosegError as wrong:
        raise PathosegError(f"{path}: {wrong.problem}", wrong.hint) from None


def _read_weights(folder: Path, digest: str) -> dict[str, torch.Tensor]:
    unfinished = folder / _hashed_name(digest)
    path = unfinished if unfinished.exists() else folder / WEIGHTS
    data = read_bundle_file(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise PathosegError(
            f"{path} is cut short, or not the file that {CARD} was written with.", COPY_AGAIN
        )
    return _parse_tensors(path, data, COPY_AGAIN)


def _parse_tensors(path: Path, data: bytes, hint: str) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # a crafted header raises more than SafetensorError
        raise PathosegError(f"{path} is no safetensors file ({error}).", hint) from error


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
