"""One operator's call: its name, its work, and its arguments that are no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pathoseg.parallel.graph.layer_graph import Attribute


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ran.

    Attributes:
        name: The ATen operator's name; an in-place one's is that of the other.
        flops: See `Work.flops`.
        read: Bytes of the tensors among its arguments.
        written: Bytes of the tensors that it returns.
        attributes: See `Layer.attributes`.
    """

    name: str
    flops: int
    read: int
    written: int
    attributes: Mapping[str, Attribute]


def describe(
    operator: Any,
    arguments: Sequence[tuple[str, Any]],
    read: Sequence[Any],
    written: Sequence[Any],
    flops: int,
) -> Kernel | None:
    """The kernel that a call runs; None where it only makes a view or reserves memory.

    Args:
        operator: The `OpOverload` that was called.
        arguments: Names of its arguments, and what was given.
        read: The tensors among these.
        written: The tensors that it returned.
        flops: Floating-point operations of its convolution or matrix product.
    """
    name: str = operator._overloadpacket.__name__
    if operator.is_view or "empty" in name or not written:
        return None
    return Kernel(
        name.rstrip("_"), flops, _bytes(read), _bytes(written), dict(_attributes(arguments))
    )


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _attributes(arguments: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Attribute]]:
    first = "input"
    for name, value in arguments:
        if hasattr(value, "untyped_storage"):
            if first or name == "weight":
                yield first or name, tuple(value.shape)
            if (
                first
                and not value.is_contiguous()
                and value.nbytes != value.untyped_storage().nbytes()
            ):
                yield "has_gaps", True
            first = ""
        elif _is_plain(value):
            yield name, tuple(value) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
