"""Leaving a long computation before its end: a question between two layers, there and back.

A step of large tiles takes a minute on a CPU, of which a layer takes a second or two:

    forward    conv ? norm ? relu ? conv ? …            ? asks, and raises if the work is given up
    backward   conv ? norm ? relu ? conv ? … ─┘

A forward hook of each module that holds no other asks ahead of the next one, and leaves a hook at
the node of autograd by which the backward comes back to this place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

IsGivenUp = Callable[[], bool]  # True from some moment on
# Called ahead of the first change that a step makes for good; from then on it is not given up.
Commit = Callable[[], None]


class GivenUpError(Exception):
    """A step or a prediction was left before its end, as it was asked to: nothing of it counts."""


def never() -> bool:
    """Answer for work that nobody gives up."""
    return False


def at_any_time() -> None:
    """Commit a step that nobody but its own thread would leave."""


@contextmanager
def asking(model: nn.Module, device: torch.device, is_given_up: IsGivenUp) -> Iterator[None]:
    """Make a context in which `model` asks between its layers, in forward and backward.

    On a GPU it does not: a GPU is handed its work ahead of time, and is not faster to stop between
    two layers than between two microbatches.

    Args:
        model: Its modules are called, as those of a graph of layers are.
        device: Where it computes.
        is_given_up: The question; called by the thread that computes.

    Raises:
        GivenUpError: The answer was True, in the context or in the backward of a forward in it.
    """
    if device.type != "cpu" or is_given_up is never:
        yield
        return

    def ask(*_: object) -> None:
        if is_given_up():
            raise GivenUpError

    def after(_module: nn.Module, _inputs: object, made: Any) -> None:
        ask()
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.grad_fn.register_prehook(ask)

    with ExitStack() as stack:
        for module in model.modules():
            is_compiled = isinstance(module, torch.jit.ScriptModule)  # takes no hooks
            if next(module.children(), None) is None and not is_compiled:
                stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def buffers_kept(
    buffers: Mapping[str, torch.Tensor],
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Make a context that, where it is given up, leaves a model's buffers as they were before.

    They are all that a forward in training mode changes of a model: running statistics of norms.

    Args:
        buffers: By name.

    Yields:
        Copies of them as they were before, which stay so.
    """
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        yield before
    except GivenUpError:
        put_back(buffers, before)
        raise


def put_back(buffers: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> None:
    """Set buffers to what they were `before`, both by name."""
    with torch.no_grad():
        for name, value in before.items():
            buffers[name].copy_(value)
