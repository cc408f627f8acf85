"""The state of a model that lies on several ranks: gathered whole on rank 0, loaded by each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pathoseg.parallel.comm.transport import Transport

# By name of the parameter or buffer, then what of it: "" is its value.
State = dict[str, dict[str, Any]]


def gather(state: State, transport: Transport, device: torch.device) -> State:
    """The states of all ranks together, on rank 0 and in host memory; nothing on the others.

    Args:
        state: Tensors, and values that JSON can hold; no name is on two ranks.
        transport: Joins the ranks, which all call this.
        device: Where messages lie.
    """
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
    heads = [[*place, _dtype(value), list(value.shape)] for place, value in tensors.items()]
    told = transport.gather(json.dumps([plain, heads]))
    if transport.rank:
        for value in tensors.values():  # one at a time: some may not be on the device
            transport.send(value.detach().to(device).reshape(-1), 0, 0).wait()
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
    return whole


def load_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copies values into tensors of the same names.

    Raises:
        KeyError: One is missing.
        ValueError: One has another shape.
    """
    for name, tensor in own.items():
        value = given[name]
        if value.shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(value)


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Any]
) -> None:
    """Gives an optimizer copies of what is kept for its parameters, by name."""
    whole = optimizer.state_dict()
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    # Through the optimizer's own door, which brings tensors to the parameters' devices.
    kept = {index: state[name] for index, name in enumerate(own) if name in state}
    whole["state"] = deepcopy(kept)
    optimizer.load_state_dict(whole)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
