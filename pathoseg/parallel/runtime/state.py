"""The parameters and state of a model on several ranks: what each holds, gathered and loaded."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.schedule.schedule import Placement


class RankParameters:
    """The parameters and buffers that one rank holds of a model.

    What no layer uses belongs to stage 0.

    Args:
        model: The whole model.
        graph: Its layers.
        partition: Its stages.
        placement: The ranks of the stages, groups written out.
        rank: This rank.

    Attributes:
        parameters: All parameters of the model by name.
        own: Names of the parameters and buffers on this rank, in the model's order.
        told: Those of `own` that this rank tells others of: the lowest rank with the first stage
            that uses them does.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        partition: Partition,
        placement: Placement,
        rank: int,
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self._stages: dict[str, set[int]] = {}
        self._first: dict[str, int] = {}  # the first layer that uses it
        for stage in range(partition.stages):
            for position in partition.layers(stage):
                layer = graph.layers[position]
                for name in (*layer.parameters, *layer.buffers):
                    self._stages.setdefault(name, set()).add(stage)
                    self._first.setdefault(name, position)
        self._model = model
        # Each key of the state dict, shared parameters' several ones too, and its one name here.
        names = {id(tensor): name for name, tensor in self._tensors()}
        self.keys = {
            key: names[id(tensor)]
            for key, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in names
        }
        held = {stage for home in placement.homes for stage, at in enumerate(home) if at == rank}
        every = [(name, self._stages.get(name, {0})) for name, _ in self._tensors()]
        self.own = [name for name, stages in every if stages & held]
        self.told = [name for name, stages in every if placement.holders(min(stages))[0] == rank]

    def of(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage uses, in the model's order."""
        return [self.parameters[name] for name in self._names(stage)]

    def trained(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage that require gradients, in the order of the backward.

        A gradient is complete after the first layer that uses its parameter; those that no layer
        uses come last.
        """
        names = sorted(self._names(stage), key=lambda name: -self._first.get(name, -1))
        return [self.parameters[name] for name in names if self.parameters[name].requires_grad]

    def _names(self, stage: int) -> list[str]:
        return [name for name in self.parameters if stage in self._stages.get(name, {0})]

    def settle(self, device: torch.device) -> None:
        """Move this rank's parameters and buffers to its device, all others to the `meta` device.

        A parameter that two modules share stays shared.
        """
        own = set(self.own)
        held = {id(tensor) for name, tensor in self._tensors() if name in own}
        # With the old tensors, so that none of their identities is given to another.
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        target = device if id(tensor) in held else torch.device("meta")
                        moved[id(tensor)] = tensor, _moved(tensor, target)
                    slots[name] = moved[id(tensor)][1]  # type: ignore[assignment]  # of its kind
        self.parameters = dict(self._model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by their names in the model."""
        own = set(self.own)
        return {name: tensor for name, tensor in self._tensors() if name in own}

    def digest(self) -> str:
        """Return a checksum of the whole model: names, dtypes, shapes, values; before `settle`."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(data.numpy().data)
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, tensor.requires_grad)
    return moved


# By name of the parameter or buffer, then what of it: "" is its value.
State = dict[str, dict[str, Any]]


def gather(state: State, transport: Transport, device: torch.device) -> State:
    """Join the states of all ranks on rank 0; all ranks call it.

    The others return once rank 0 has it all: they may end then, without harm to it.

    Args:
        state: Tensors, and values that JSON can hold; no name is on two ranks.
        transport: Joins the ranks.
        device: The device of tensors in messages.

    Returns:
        On rank 0 the whole state, in host memory; an empty dict on the others.

    Raises:
        PathosegError: A rank is lost.
    """
    plain, tensors = _sorted(state)
    heads = _heads(tensors)
    told = transport.gather(json.dumps([plain, heads]))
    received = torch.zeros(1, dtype=torch.uint8)
    if transport.rank:
        for value in tensors.values():  # one at a time: some may not be on the device
            transport.send(value.detach().to(device).reshape(-1), 0, 0).wait()
        transport.receive(received, 0, 0).wait()  # a send is done ahead of its arrival
        return {}
    whole: State = {name: {**values} for name, values in plain.items()}
    for (name, key), value in tensors.items():
        whole[name][key] = value.detach().cpu().clone()
    for rank, text in enumerate(told[1:], 1):
        others, theirs = json.loads(text)
        whole |= others
        for name, key, dtype, shape in theirs:
            into = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            transport.receive(into.view(-1), rank, 0).wait()
            whole[name][key] = into.cpu()
    # A rank that hears it may end at once; that it is gone is of no matter to this call.
    with suppress(PathosegError):
        for pending in [transport.send(received, rank, 0) for rank in range(1, transport.ranks)]:
            pending.wait()
    return whole


def packed(state: State) -> bytes:
    """Return a state as bytes: of JSON and tensors, without pickles."""
    plain, tensors = _sorted(state)
    head = json.dumps([plain, _heads(tensors)]).encode()
    values = [value.detach().cpu().contiguous() for value in tensors.values()]
    data = [each.reshape(-1).view(torch.uint8).numpy().data for each in values]
    return b"".join([len(head).to_bytes(8, "little"), head, *data])


def unpacked(data: bytes) -> State:
    """Return the state that `packed` made these bytes of, in host memory."""
    start = 8 + int.from_bytes(data[:8], "little")
    state, heads = json.loads(data[8:start])
    whole: State = state
    every = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, key, dtype, shape in heads:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        # A copy, as a place among other bytes may suit no number.
        whole[name][key] = every[start : start + size].clone().view(kind).view(shape)
        start += size
    return whole


_Tensors = Mapping[tuple[str, str], Tensor]  # by name and key


def _sorted(state: State) -> tuple[State, _Tensors]:
    """Split a state into the values that JSON can hold and the tensors, by name and key."""
    tensors = {
        (name, key): value
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    plain = {
        name: {key: value for key, value in values.items() if (name, key) not in tensors}
        for name, values in state.items()
    }
    return plain, tensors


def _heads(tensors: _Tensors) -> list[list[Any]]:
    """Name, key, dtype and shape of each tensor."""
    return [[*place, _dtype(value), list(value.shape)] for place, value in tensors.items()]


def load_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy the values of `given` into the tensors of the same names in `own`, in place.

    Raises:
        KeyError: A name is missing in `given`.
        ValueError: A tensor has another shape.
    """
    for name, tensor in own.items():
        value = given[name]
        if value.shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(value)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
