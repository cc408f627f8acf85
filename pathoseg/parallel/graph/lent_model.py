"""Restores a model's modules to their state before a traced forward."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DICTIONARIES = (dict, OrderedDict, defaultdict)  # others may refuse what these do
_TORCHS = ("_parameters", "_modules")  # attributes of modules that no forward changes


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Make a context after which modules, and what they hold beside tensors, are as before.

    A forward may cache a grid of coordinates in an attribute or a dictionary, count its calls in an
    object of the user's, or draw from a generator of its own. Objects inside of such objects are
    left alone: they may be anything, such as a writer with a thread.
    """
    before: _Before = {}
    for module in model.modules():
        before[id(module)] = (
            module,
            partial(_refill, vars(module).clear, vars(module).update, dict(vars(module))),
        )
        for name, value in vars(module).items():
            if name not in _TORCHS and "hook" not in name:
                _remember(value, before, looks_inside=True)
    try:
        yield
    finally:
        for _, put_back in before.values():
            put_back()


# By id: an object, which so stays alive, and what puts it back.
_Before = dict[int, tuple[Any, Callable[[], None]]]


def _remember(item: Any, before: _Before, *, looks_inside: bool) -> None:
    """Add an object, and those that it holds, to `before`; with attributes if it looks inside."""
    if id(item) in before or isinstance(item, _PLAIN):
        return
    if type(item) in _DICTIONARIES:
        before[id(item)] = item, partial(_refill, item.clear, item.update, item.copy())
        parts = list(item.values())
    elif type(item) in (list, set):
        add = item.extend if isinstance(item, list) else item.update
        before[id(item)] = item, partial(_refill, item.clear, add, item.copy())
        parts = list(item)
    elif isinstance(item, tuple):
        parts = list(item)
    elif dice := _dice(item):
        state, put_back = dice
        before[id(item)] = item, partial(put_back, state)
        return
    elif looks_inside and _is_users(item):
        parts, looks_inside = [vars(item)], False
    else:
        return
    for part in parts:
        _remember(part, before, looks_inside=looks_inside)


def _refill(clear: Callable[[], None], fill: Callable[[Any], None], held: Any) -> None:
    clear()
    fill(held)


def _is_users(item: Any) -> bool:
    """Return True for an object with attributes that is no module, tensor or class."""
    is_torchs = hasattr(item, "untyped_storage") or hasattr(item, "named_parameters")
    return hasattr(item, "__dict__") and not is_torchs and not isinstance(item, type | ModuleType)


def state_of(module: Any) -> dict[str, Any]:
    """Return a module's own numbers, texts, tensors and generators' states, by attribute.

    Two states are equal where the numbers and texts are, the tensors are the same ones, and the
    generators have drawn as much.
    """
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, int | float | str) and value == value:  # nan is no number to compare
            found[name] = value
        elif hasattr(value, "untyped_storage"):
            found[name] = id(value)
        elif dice := _dice(value):
            state, _ = dice
            found[name] = state.tolist() if hasattr(state, "tolist") else str(state)
    return found


def _dice(value: Any) -> tuple[Any, Callable[[Any], None]] | None:
    """The state of a generator of random numbers, and what sets it; None for what is none."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if type(value).__module__ == "torch._C" and type(value).__name__ == "Generator":
        return value.get_state(), value.set_state
    return None
