"""Takes a network's weights from an earlier one: all that fits, and the head class by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model
from pathoseg.models.model_options import MOST_CLASSES, ModelConfig

State = Mapping[str, torch.Tensor]


def class_dimensions(
    model: nn.Module, config: ModelConfig, factory: str | None
) -> dict[str, tuple[int, ...]]:
    """Find the tensors that depend on the number of classes, wherever the heads of a network are.

    A second network with one class more (one less where there can be no more) is built and its
    shapes are compared: a dimension that counts the classes differs by that one.

    Args:
        model: What `build_model(config, factory)` gave.
        config: As for `build_model`.
        factory: As for `build_model`.

    Returns:
        Name of each such parameter and buffer → the dimensions that count the channels of the
        answer; none where its shape follows the classes in another way.

    Raises:
        PathosegError: The factory cannot make another number of classes, or names its tensors by
            class.
    """
    more = 1 if config.classes < MOST_CLASSES else -1
    # Networks of pathoseg need no memory for their shapes; other code may not build without data.
    with nullcontext() if config.is_factory else torch.device("meta"):
        twin = build_model(replace(config, classes=config.classes + more), factory).state_dict()
    ours, others = config.channels, config.channels + more
    state = model.state_dict()
    if state.keys() != twin.keys():
        names = sorted(state.keys() ^ twin.keys())
        raise PathosegError(
            f"{config.name} has tensors that exist only for some numbers of classes ({names[0]}), "
            "so classes cannot be matched by name.",
            "Train with the classes of the earlier model, in its order ([data] classes).",
        )
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        sizes = list(zip(tensor.shape, twin[name].shape, strict=False))
        differing = tuple(at for at, (one, other) in enumerate(sizes) if one != other)
        if tensor.shape != twin[name].shape:
            whole = all(sizes[at] == (ours, others) for at in differing)
            found[name] = differing if whole and tensor.ndim == twin[name].ndim else ()
    return found


def transfer(
    model: nn.Module,
    state: State,
    channels: int,
    matches: Sequence[int | None],
    dimensions: Mapping[str, tuple[int, ...]],
) -> None:
    """Set all weights and buffers from those of an earlier model of the same architecture.

    Args:
        model: Its own weights stay only where a class is new.
        state: Parameters and buffers of the earlier model, by name.
        channels: Of the earlier model's answer.
        matches: For each channel of `model`, its index in the earlier model; None for a new class.
        dimensions: What `class_dimensions` found.

    Raises:
        PathosegError: `state` is of another architecture; nothing is changed then.
    """
    new = model.state_dict()
    if new.keys() != state.keys():
        name = sorted(new.keys() ^ state.keys())[0]
        where = "the network" if name in new else "the earlier model"
        raise PathosegError(f"The tensor {name} exists in {where} alone.", _OTHER)
    kept = [(at, match) for at, match in enumerate(matches) if match is not None]
    for name, tensor in new.items():
        earlier, counted = state[name], dimensions.get(name, ())
        if name in dimensions and not counted:
            continue
        expected = [channels if at in counted else size for at, size in enumerate(tensor.shape)]
        if list(earlier.shape) != expected:
            raise PathosegError(
                f"The tensor {name} would have the shape {tuple(expected)}, but has "
                f"{tuple(earlier.shape)} in the earlier model.",
                _OTHER,
            )
        new[name] = _copy_classes(tensor, earlier, kept, counted) if counted else earlier
    model.load_state_dict(new)


_OTHER = "Train with the network of the earlier model, or without --from."


def _copy_classes(
    tensor: torch.Tensor,
    earlier: torch.Tensor,
    kept: Sequence[tuple[int, int]],
    dimensions: tuple[int, ...],
) -> torch.Tensor:
    """Return `tensor` with the entries of the classes in `kept` (here, there) from `earlier`."""
    here, there = (torch.tensor(side) for side in zip(*kept, strict=True))
    part = earlier
    for at in dimensions:
        part = part.index_select(at, there)
    own = [here if at in dimensions else torch.arange(n) for at, n in enumerate(tensor.shape)]
    mixed = tensor.clone()
    mixed[torch.meshgrid(*own, indexing="ij")] = part.to(tensor.dtype)
    return mixed


def transfer_fitting(model: nn.Module, state: State) -> list[str]:
    """Set those weights and buffers that have the name, shape and kind of numbers in `state`.

    Returns:
        Names of the others, which stay as they are.

    Raises:
        PathosegError: Not one parameter fits; nothing is changed then.
    """
    new = model.state_dict()
    fitting = {
        name: state[name]
        for name, tensor in new.items()
        if name in state
        and state[name].shape == tensor.shape
        and state[name].is_floating_point() == tensor.is_floating_point()
    }
    parameters = [name for name, _ in model.named_parameters()]
    if not any(name in fitting for name in parameters):
        named = [name for name in parameters if name in state]
        if named:
            shapes = f"{tuple(state[named[0]].shape)}, here {tuple(new[named[0]].shape)}"
            told = f"{len(named)} names match, but no shape does ({named[0]}: {shapes})"
        else:
            told = f"the network has {parameters[0]}, the file {sorted(state)[0] if state else '-'}"
        raise PathosegError(
            f"None of its {len(state)} tensors fits the network: {told}.",
            "Rename the tensors to those of the network, and give the network their sizes.",
        )
    model.load_state_dict(new | fitting)
    return [name for name in new if name not in fitting]
