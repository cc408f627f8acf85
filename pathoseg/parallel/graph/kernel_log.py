"""Compares what a model computes with what its layers compute, kernel by kernel.

A model that is read symbolically may be read wrongly without an error: it branches on what only
real tensors have, or counts its calls in a dictionary. So the model and its layers both run on fake
tensors, twice where a second call may differ, and each kernel is logged with the origin of every
tensor that it takes:

    the model                                  its layers
    0  convolution(input, "0.weight", …)       0  convolution(input, "0.weight", …)
    1  add_(made by 0, 1)                      1  add(made by 0, 1)      the first that differs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from pathoseg.parallel.graph.memory_profile import tensors_in, written_names

_CONSTANT = "constant"  # made in this run, from nothing that the model is given or has learnt
_FOUND = "found"  # made before the run
_NUMBERS = (bool, int, str, type(None))
_PRINTED = ("float", "complex", "dtype", "device", "layout", "memory_format")


class KernelLog:
    """The kernels of one or more forwards in a row.

    Kernels that compute constants are left out: layers take what was computed while they were read.

    Args:
        origins: Names of the model's inputs, parameters and buffers, with the tensors.
        owner: Says whose kernel runs.

    Attributes:
        owners: By kernel, what `owner` said.
    """

    def __init__(self, origins: Iterable[tuple[str, Any]], owner: Callable[[], Any]) -> None:
        self.owners: list[Any] = []
        self._owner = owner
        self._kernels: list[tuple[Any, ...]] = []
        self._paused = False
        self._origins: WeakKeyDictionary[Any, str | int] = WeakKeyDictionary()
        for name, tensor in origins:
            self._origins.setdefault(tensor.untyped_storage(), f"of the model: {name}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make a context whose kernels are neither the model's nor the layers'."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def ran(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, draws: bool
    ) -> None:
        """Log a kernel.

        Args:
            operator: An operator of torch.
            args: Its arguments.
            kwargs: Its arguments by name.
            made: What it returned.
            draws: Whether it draws random numbers.
        """
        if self._paused:
            return
        names = [argument.name for argument in operator._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = written_names(operator)
        into = [
            tensor.untyped_storage() for name in written for tensor in tensors_in(given.get(name))
        ]
        read = [tensor.untyped_storage() for tensor in tensors_in(tuple(given.values()))]
        origins = {self._origins.get(storage, _FOUND) for storage in read}
        is_constant = origins <= {_CONSTANT, _FOUND} and not draws
        if is_constant and all(storage in self._origins for storage in into):
            origin: str | int = _CONSTANT
        else:
            origin = len(self._kernels)
            told = ((name, self._told(value, name in written)) for name, value in given.items())
            self._kernels.append((str(operator), *told))
            self.owners.append(self._owner())
            for storage in into:
                self._origins[storage] = origin
        for tensor in tensors_in(made):
            if (storage := tensor.untyped_storage()) not in read:
                self._origins.setdefault(storage, origin)

    def difference(self, other: KernelLog) -> int | None:
        """Return the number of the first kernel that differs; None where all are the same."""
        pairs = enumerate(zip_longest(self._kernels, other._kernels))
        return next((number for number, (one, two) in pairs if one != two), None)

    def _told(self, item: Any, is_written: bool) -> Any:
        """An argument as plain data."""
        if hasattr(item, "untyped_storage"):
            origin = self._origins.get(item.untyped_storage(), _FOUND)
            if origin == _FOUND and not is_written:
                origin = _CONSTANT
            return origin, tuple(item.shape), item.storage_offset()
        if isinstance(item, tuple | list):
            return tuple(self._told(part, is_written) for part in item)
        if isinstance(item, _NUMBERS):
            return item
        return repr(item) if type(item).__name__ in _PRINTED else type(item).__name__
