"""The start of a run from an earlier model: it is read, and gives options and weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pathoseg.config import Config
from pathoseg.errors import PathosegError, first_names
from pathoseg.models.bundle import Bundle, load_bundle, read_tensors
from pathoseg.models.bundle_identity import bundle_id
from pathoseg.models.model_options import ModelConfig, Scalar
from pathoseg.models.transfer import class_dimensions, transfer, transfer_fitting
from pathoseg.platform_support import composed, follow_pointer, relative_path
from pathoseg.progress import say
from pathoseg.training.run_folder import SPLITS, bundle_of
from pathoseg.training.splits import TABLE, Member, read_rows

SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class EarlierModel:
    """The weights of an earlier model, from which a training starts.

    Attributes:
        place: The bundle's folder, or the file of another program.
        identity: Tells these weights from all others: `bundle_id`, or a hash of the file.
        state: Parameters and buffers by name.
        card: The bundle's; None of another program's file.
        renamed: `[annotations] rename` of its run; empty where that is not known.
    """

    place: Path
    identity: str
    state: Mapping[str, torch.Tensor]
    card: Bundle | None
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, Scalar | tuple[str, ...] | None]:
        """Return the provenance that the new bundle records."""
        told: dict[str, Scalar | tuple[str, ...] | None] = {
            "from": str(self.place),
            "from_id": self.identity,
        }
        if self.card is not None:
            told |= {"from_model": self.card.model.name, "from_classes": self.card.class_names}
            told |= {
                key: value
                for key, value in self.card.training.items()
                if key.startswith("encoder") and isinstance(value, str | None)
            }
        return told


def read_earlier(name: str, factory: str | None) -> EarlierModel:
    """Read what `--from` names: a run, a bundle, or a .safetensors file of another program.

    Args:
        name: Its path.
        factory: The `module:factory` that the user named, see `build_model`.

    Raises:
        PathosegError: There is no such model, or it is cut short or of another format.
    """
    # The run behind a link such as runs/latest, which will name another one.
    place = relative_path(follow_pointer(Path(os.path.realpath(name))), Path())
    if place.is_file():
        if place.suffix != SAFETENSORS:
            raise PathosegError(
                f"{name} is no run, bundle or {SAFETENSORS} file.",
                "Weights of other formats are not unpickled: save them as safetensors in the "
                "program that made them.",
            )
        tensors, digest = read_tensors(place)
        return EarlierModel(place, digest[:16], tensors, None)
    bundle = bundle_of(place, "--from")
    identity = bundle_id(bundle)
    model, card = load_bundle(bundle, factory)
    return EarlierModel(bundle, identity, model.state_dict(), card)


def take_options(
    config: Config, given: Mapping[str, Mapping[str, Any]], earlier: EarlierModel
) -> Config:
    """Return the options with what the earlier model decides: network, resolution and stain.

    Args:
        config: The run's.
        given: What the user stated of it, by table and key (`given_options`).
        earlier: A file of another program decides nothing.

    Raises:
        PathosegError: The task is another, or a size, the norm or the resolution that is stated.
    """
    card = earlier.card
    if card is None:
        return config
    ours, theirs = config.model, card.model
    sizes = theirs.sizes  # with those that its name implies: a `unet` of width 32 states none
    checked: dict[str, tuple[object, object]] = {
        "model.name": (ours.name, theirs.name),
        "model.width": (ours.width, sizes.get("width")),
        "model.depth": (ours.depth, sizes.get("depth")),
        "model.norm": (ours.norm, theirs.norm),
        "model.mean": (ours.mean, card.mean),
        "model.std": (ours.std, card.std),
        "tiles.mpp": (config.tiles.mpp, card.mpp),
    }
    stated = {f"{table}.{key}" for table, values in given.items() for key in values}
    wrong = {key: pair for key, pair in checked.items() if key in stated and pair[0] != pair[1]}
    if ours.task != theirs.task:
        raise PathosegError(
            f"This run has the task {ours.task}, and the model in {earlier.place} was trained for "
            f"{theirs.task}.",
            f'Set [model] task = "{theirs.task}", or train without --from.',
        )
    if wrong:
        said = "; ".join(
            f"{key} is {one}, and {other} there" for key, (one, other) in wrong.items()
        )
        raise PathosegError(
            f"The options do not fit the model in {earlier.place}: {said}.",
            "Leave them out to take those of the earlier model, or train without --from.",
        )
    taken = {key: getattr(theirs, key) for key in ("name", "task", "width", "depth", "norm")}
    taken |= {"mean": card.mean, "std": card.std}
    if "model.options" not in stated:
        taken["options"] = theirs.options
    cut: dict[str, Any] = {"mpp": card.mpp}
    if "tiles.stain" not in stated and card.stain is not None:
        cut["stain"] = card.stain["method"]
    return replace(config, model=replace(ours, **taken), tiles=replace(config.tiles, **cut))


def set_weights(
    model: nn.Module,
    config: ModelConfig,
    factory: str | None,
    classes: Sequence[str],
    earlier: EarlierModel,
) -> None:
    """Give a fresh network the weights of the earlier model, and say what is taken.

    Of a bundle, everything: classes are matched by name. Of another program's file, what fits.

    Args:
        model: What `build_model(config, factory)` gave.
        config: The network with its classes.
        factory: As for `build_model`.
        classes: Names without background, in order.
        earlier: The weights.

    Raises:
        PathosegError: They are of another architecture, or nothing of a file fits.
    """
    if earlier.card is None:
        try:
            left = transfer_fitting(model, earlier.state)
        except PathosegError as error:
            raise PathosegError(f"{earlier.place}: {error.problem}", error.hint) from None
        total = len(model.state_dict())
        told = f" Drawn at random: {first_names(left)}." if left else ""
        say(f"From {earlier.place}: {total - len(left)} of the network's {total} tensors.{told}")
        return
    theirs = earlier.card.class_names
    matches = [0, *(theirs.index(name) + 1 if name in theirs else None for name in classes)]
    channels = earlier.card.model.channels
    matches += range(len(theirs) + 1, channels)  # what is no class's: the height of objects
    same = tuple(classes) == theirs
    try:
        # With the same classes all is taken, whatever it is in the network that counts them.
        counted = {} if same else class_dimensions(model, config, factory)
        # Low-rank additions may be new; they begin as nothing.
        added = {name: own for name, own in model.state_dict().items() if ".lora_" in name}
        transfer(model, {**added, **earlier.state}, channels, matches, counted)
    except PathosegError as error:
        raise PathosegError(f"{earlier.place}: {error.problem}", error.hint) from None
    card = earlier.card
    said = f"{card.model.name}, {card.mpp:g} µm per pixel, trained on tiles of {card.tile} px"
    say(f"From {earlier.place} ({said}).")
    new = [name for name in classes if name not in theirs]
    if new:
        say(f"Classes that the earlier model does not know: {', '.join(new)}.")
        for name, known in earlier.renamed.items():
            if name in new:
                say(
                    f'Take care: the earlier run took "{name}" for "{known}" '
                    "([annotations] rename), and this one does not."
                )
    gone = [name for name in theirs if name not in classes]
    if gone:
        say(f"Classes of the earlier model that are given up: {', '.join(gone)} ([data] classes).")


def warn_of_seen(earlier: EarlierModel, members: Mapping[str, Member]) -> None:
    """Say which held-out slides the earlier model was trained on: their figures are too good."""
    table = earlier.place.parent / SPLITS
    if not table.is_file():
        return
    rows = read_rows(table, is_recorded=True)
    trained = {composed(name) for name, row in rows.items() if row.get("split") == "train"}
    held_out = (member.slide for member in members.values() if member.split != "train")
    seen = [name for name in held_out if composed(name) in trained]
    if seen:
        say(
            f"The earlier model was trained on slides that are held out now ({first_names(seen)}): "
            f"figures on them are too good. {TABLE} can hold out others."
        )
