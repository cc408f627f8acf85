"""The weights that a run begins with: drawn, an encoder's, or those of an earlier model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.device import MEAN, STD
from pathoseg.errors import PathosegError, first_names
from pathoseg.models.build import build_model
from pathoseg.models.bundle import load_bundle
from pathoseg.models.encoder_weights import (
    EncoderWeights,
    fitting_options,
    read_bundle_encoder,
    read_encoder,
    set_encoder,
)
from pathoseg.platform_support import follow_pointer, relative_path
from pathoseg.progress import say
from pathoseg.training.earlier_model import EarlierModel, set_weights
from pathoseg.training.run_folder import START, bundle_of


def factory_of(config: Config) -> str | None:
    """The user's own code, which naming it in the command or the configuration permits."""
    return config.model.name if ":" in config.model.name else None


def takes_weights(config: Config) -> bool:
    """Return True if a run begins with weights of a file, of which it keeps a bundle."""
    return config.train.start_from is not None or config.model.encoder_weights is not None


def take_encoder(config: Config) -> tuple[EncoderWeights, Config]:
    """Read the encoder's weights that the configuration names.

    Returns:
        The weights; and the options with what they decide and the user left out: the network's
        own, mean and standard deviation, licence.

    Raises:
        PathosegError: They cannot be read or do not fit the network, or nothing states the licence
            of a file.
    """
    wanted = config.model
    assert wanted.encoder_weights is not None
    if config.train.start_from is not None:
        raise PathosegError(
            f"[model] encoder_weights and --from {config.train.start_from} both say what the "
            "encoder starts from.",
            "Leave one of them out: an earlier model has its encoder with it.",
        )
    place = follow_pointer(Path(os.path.realpath(wanted.encoder_weights)))
    if place.is_dir():
        run = relative_path(place, Path())
        weights = read_bundle_encoder(bundle_of(run, "[model] encoder_weights"))
    else:
        weights = read_encoder(Path(wanted.encoder_weights))
    licence = wanted.licence or weights.licence
    if licence is None and weights.card is None:  # a model of one's own may have none
        raise PathosegError(
            f"Nothing states the licence of {weights.path}.",
            'Give it, as in [model] licence = "Apache-2.0"; the model that you train records it.',
        )
    model = replace(
        wanted,
        options=fitting_options(wanted.with_classes(2), weights),
        mean=wanted.mean or weights.mean,
        std=wanted.std or weights.std,
        licence=licence,
    )
    return weights, replace(config, model=model)


def first_network(
    run: Path,
    config: Config,
    classes: ClassTable,
    source: EarlierModel | EncoderWeights | None,
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Build the network with the weights that the run begins with.

    Args:
        run: Its folder; of one that goes on, it has a bundle of the weights that it began with.
        config: The options.
        classes: The classes to learn.
        source: Whose weights a new run takes, if anyone's.

    Returns:
        The network, and what the bundle says of where its weights are from; that is empty where
        they are drawn.

    Raises:
        PathosegError: The weights do not fit.
    """
    sizes, factory = config.model.with_classes(len(classes)), factory_of(config)
    torch.manual_seed(config.seed)
    if source is None and takes_weights(config):
        # Of its own, so that the run goes on whatever became of the file or the earlier model.
        model, card = load_bundle(run / START, factory)
        if card.class_names != classes.names:
            raise PathosegError(
                f"{run} began with the classes {', '.join(card.class_names)}, and the annotations "
                f"have {', '.join(classes.names)} now.",
                f"To learn these, start a new run with --from {run}.",
            )
        return model.train(), card.training
    model = build_model(sizes, factory)
    if isinstance(source, EncoderWeights):
        return model, _set_encoder(model, config, source)
    if source is None:
        return model, {}
    set_weights(model, sizes, factory, classes.names, source)
    return model, source.record


def _set_encoder(model: nn.Module, config: Config, weights: EncoderWeights) -> Mapping[str, Any]:
    """Set the encoder's weights and say what is taken; return the record of the bundle."""
    missing = set_encoder(model.get_submodule("encoder"), weights)
    licence = "" if config.model.licence is None else f" ({config.model.licence})"
    told = [f"Encoder {weights.name}{licence} from {weights.path}:"]
    told.append(f"{len(weights.tensors)} tensors.")
    if weights.card is not None and weights.card.mpp != config.tiles.mpp:
        told.append(
            f"It was trained at {weights.card.mpp:g} µm per pixel, and sees "
            f"{config.tiles.mpp:g} µm now."
        )
    if missing:
        told.append(f"Not in the file, so drawn at random: {first_names(missing)}.")
    if weights.left_over:
        told.append(f"In the file alone: {first_names(weights.left_over)}.")
    if config.model.mean is None or config.model.std is None:
        told.append(f"It is given pixels by ImageNet's mean {MEAN} and standard deviation {STD}.")
    say(" ".join(told))
    return {
        "encoder": weights.name,
        "encoder_file": str(weights.path),
        "encoder_sha256": weights.digest,
        "encoder_licence": config.model.licence,
    }
