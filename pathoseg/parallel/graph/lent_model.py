"""Gives a model back as it was lent, whatever its forward keeps in its modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Make a context after which modules have the attributes of before: a forward may cache some,
    such as a grid of coordinates, in an attribute, a buffer that was None, a dictionary or a list.
    """
    before = [
        (module, dict(vars(module)), dict(module._buffers), _holders(module))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers, holders in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, items in holders.items():
                holder = attributes[name]
                holder.clear()
                (holder.extend if isinstance(holder, list) else holder.update)(items)


def _holders(module: Any) -> dict[str, Any]:
    kinds = (dict, list, set)
    return {
        name: copy(value)
        for name, value in vars(module).items()
        if type(value) in kinds and not name.startswith("_")
    }


def state_of(module: Any) -> dict[str, Any]:
    """Return a module's own numbers and texts, and its own generators' states, by attribute."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, int | float | str) and value == value:  # nan is no number to compare
            found[name] = value
        elif isinstance(value, np.random.Generator):
            found[name] = str(value.bit_generator.state)
        elif isinstance(value, random.Random):
            found[name] = value.getstate()
        elif type(value).__module__ == "torch._C" and type(value).__name__ == "Generator":
            found[name] = value.get_state().tolist()
    return found
