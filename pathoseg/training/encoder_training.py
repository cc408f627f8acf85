"""The training of an encoder: tuned at a rate of its own, frozen, or by low-rank additions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from pathoseg.config import Config, TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.models.layers import Encoder
from pathoseg.models.model_options import VIT_SEG

_RANK = 8  # of low-rank additions where none is stated, as Hu et al. (2022) find enough


def with_low_rank(config: Config) -> Config:
    """Return the options with low-rank additions in the network where the training asks for them.

    Raises:
        PathosegError: The network has none.
    """
    if config.train.encoder != "lora":
        return config
    if config.model.name != VIT_SEG:
        raise PathosegError(
            f'[train] encoder = "lora" asks for attention, and {config.model.name} has none.',
            'Choose [model] name = "vit_seg", or encoder = "frozen" or "tuned".',
        )
    options = {"lora": _RANK, **config.model.options}
    if not options["lora"]:
        raise PathosegError(
            '[train] encoder = "lora" needs low-rank additions; [model] options has lora = 0.',
            "Choose a rank from 1 to 256, or leave it out.",
        )
    return replace(config, model=replace(config.model, options=options))


def prepare_encoder(model: nn.Module, config: TrainConfig) -> None:
    """Freeze what the training is to leave alone.

    Raises:
        PathosegError: The network has no encoder, and the options are for one.
    """
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, Encoder):
        if (config.encoder, config.encoder_lr, config.layer_decay) != ("tuned", 1.0, 1.0):
            raise PathosegError(
                f"[train] encoder, encoder_lr and layer_decay are for networks with an encoder, "
                f"and {type(model).__name__} has none.",
                "Leave them out, or choose unet_resnet50 or vit_seg.",
            )
    elif config.encoder != "tuned":
        encoder.freeze()
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(config.encoder == "lora" and ".lora_" in name)


def rate_factors(model: nn.Module, config: TrainConfig) -> Mapping[str, float]:
    """The learning rate of each of an encoder's parameters, by name, over the decoder's.

    Layer-wise decay is that of Clark et al., "ELECTRA" (2020).
    """
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, Encoder):
        return {}
    return {
        f"encoder.{name}": config.encoder_lr * config.layer_decay**above
        for start, above in encoder.blocks_above.items()
        for name, _ in encoder.named_parameters()
        if name.startswith(start)
    }
