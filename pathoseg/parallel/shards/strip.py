"""A rank's rows of a tensor, which torch's functions and modules take for the whole tensor.

A model's own modules run on strips: torch hands each function that meets a `Strip` to
`Strip.__torch_function__`, which looks up how that function is computed strip by strip. Autograd
records what is done to the rows, so nothing in the model has to know of strips.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pathoseg.errors import PathosegError
from pathoseg.parallel.shards.exchange import Team, extended
from pathoseg.parallel.shards.rows import Rows, strips

# Computes a function of strips, or returns NotImplemented where these arguments need whole tensors.
# Its parameters are called as torch's.
Rule = Callable[..., Any]


class Shards(Protocol):
    """The place in which strips live: the ranks, and how functions are computed on them."""

    team: Team

    def rule(self, name: str) -> Rule | None:
        """Return how the function of this name is computed; None where there is no rule."""

    def gathers(self, what: str) -> None:
        """Note that a function of the layer under way has no rule, and takes whole tensors."""

    def copied(self, rows: Tensor, copy: Tensor) -> None:
        """Note that `copy` has rows of a strip that may be a view of them in the model."""


class Strip:
    """The rows of one rank of a tensor that is cut over a team.

    Args:
        local: The rows.
        dim: Their dimension, from 0.
        bounds: First row of each rank's strip, and the height at the end.
        shards: Where it lives.
    """

    def __init__(self, local: Tensor, dim: int, bounds: Sequence[int], shards: Shards) -> None:
        self.local, self.strip_dim, self.bounds = local, dim, tuple(bounds)
        self.shards = shards

    @property
    def own(self) -> Rows:
        """The rows that this rank has."""
        rank = self.shards.team.rank
        return Rows(self.bounds[rank], self.bounds[rank + 1])

    @property
    def from_right(self) -> int:
        """The number of the cut dimension, counted from the last one, which is 1."""
        return self.local.dim() - self.strip_dim

    def like(self, local: Tensor, bounds: Sequence[int] | None = None) -> Strip:
        """Return a strip cut in the same dimension, of the same bounds unless others are given."""
        return Strip(local, self.strip_dim, self.bounds if bounds is None else bounds, self.shards)

    def cut_at(self, bounds: Sequence[int]) -> Strip:
        """Return the same tensor, cut elsewhere; differentiable."""
        return self.like(self.reading(strips(bounds)), bounds)

    def reading(self, reads: Sequence[Rows], fill: float = 0.0) -> Tensor:
        """Return the rows that this rank is to read of all; differentiable (`extended`)."""
        return extended(self.shards.team, self.local, self.strip_dim, self.bounds, reads, fill)

    def whole(self) -> Tensor:
        """Return the whole tensor, on each rank; differentiable."""
        made = self.reading([Rows(0, self.bounds[-1])] * self.shards.team.shards)
        self.shards.copied(self.local, made)
        return made

    # What a tensor tells of itself.

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.local.shape)
        sizes[self.strip_dim] = self.bounds[-1]
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.local.dim()

    ndim = property(dim)
    ndimension = dim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self.local, name)
        found = getattr(Tensor, name)  # an AttributeError as of any tensor
        if callable(found):
            return lambda *args, **kwargs: _call(found, (self, *args), kwargs)
        return _call(found.__get__, (self,), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


_SAME = {"dtype", "device", "requires_grad", "layout", "is_complex", "is_sparse"}


def strips_in(*arguments: Any) -> list[Strip]:
    """Return all strips among nested arguments."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Strip)]


def locals_of(arguments: Any) -> Any:
    """Return nested arguments with this rank's rows in place of strips."""
    return tree_map(lambda leaf: leaf.local if isinstance(leaf, Strip) else leaf, arguments)


def name_of(function: Any) -> str:
    """Return the name by which a function's rule is known: `add` for `Tensor.__iadd__` as well."""
    name = getattr(function, "__name__", type(function).__name__)
    return _OPERATORS.get(name, name)


def writes_in_place(function: Any) -> bool:
    """Return True if a function changes its first argument."""
    name = getattr(function, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and"))}


_NUMPYS = {"axis": "dim", "keepdims": "keepdim"}  # names that torch takes as well


def _call(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute a function of strips by its rule; without one, on whole tensors."""
    kwargs = {_NUMPYS.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    first = strips_in(args, kwargs)[0]
    shards, name = first.shards, name_of(function)
    rule, made = shards.rule(name), NotImplemented
    if rule is not None and _takes(rule, function, *args, **kwargs):
        made = rule(function, *args, **kwargs)
    if made is NotImplemented:
        if writes_in_place(function):
            raise PathosegError(
                f"{name} writes into a tile that is cut into strips, in a way that needs all rows.",
                "Write it without the in-place form, or train without [parallel] shards.",
            )
        shards.gathers(name)
        args, kwargs = whole((args, kwargs))
        made = function(*args, **kwargs)
    return made


def whole(values: Any) -> Any:
    """Return nested values with whole tensors in place of strips; all ranks of a tile call it."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Strip) else leaf, values)


_signature = cache(inspect.signature)


def _takes(rule: Rule, *args: Any, **kwargs: Any) -> bool:
    """Return True if a rule has these parameters.

    `torch.batch_norm` has others than `F.batch_norm`, of the same name.
    """
    try:
        _signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


# Python's operators on strips, by the function of torch whose rule they follow.
_OPERATORS = {
    **{
        f"__{prefix}{name}__": torch_name
        for name, torch_name in {
            "add": "add",
            "mul": "mul",
            "and": "bitwise_and",
            "or": "bitwise_or",
            "xor": "bitwise_xor",
        }.items()
        for prefix in ("", "r", "i")
    },
    **{f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "pow")},
    "__sub__": "sub",
    "__isub__": "sub",
    "__rsub__": "rsub",
    "__invert__": "bitwise_not",
    "__truediv__": "div",
    "__itruediv__": "div",
    "__rtruediv__": "div",
    "__rpow__": "pow",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__mod__": "remainder",
    "__rmod__": "remainder",
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pos__": "positive",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
}


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def run(self: Strip, *others: Any) -> Any:
        return _call(function, (self, *others), {})

    return run


for _name in _OPERATORS:  # Python looks these up on the class
    setattr(Strip, _name, _operator(_name))
Strip.__hash__ = object.__hash__  # type: ignore[method-assign]  # as tensors have it
del _name
