"""Reads JSON that was written from a dataclass back into it, with the types of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_LARGEST = 1e308


def from_json(kind: type[T], entries: Any) -> T:
    """Return the dataclass `kind` of parsed JSON.

    Its fields are strings, numbers, literals, dataclasses, or these or None, and tuples and
    mappings of them.

    Raises:
        ValueError: A field is missing, unknown, of another type, or no finite number.
    """
    found: T = _typed(kind, entries, kind.__name__)
    return found


def _typed(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _typed(inner[0], value, name)
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind)
        if unknown := value.keys() - kinds.keys():
            raise ValueError(f"{name} has no {min(unknown)}")
        fields = {key: _typed(kinds[key], one, key) for key, one in value.items()}
        try:
            return kind(**fields)  # type: ignore[operator]  # is_dataclass takes instances, too
        except TypeError as error:  # a field is missing
            raise ValueError(str(error)) from error
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(inner[0], one, name) for one in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _typed(inner[1], one, name) for key, one in value.items()}
    if origin is Literal and value in inner:
        return value
    if kind is float and type(value) in (int, float) and -_LARGEST <= value <= _LARGEST:
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ValueError(f"{name} is {str(value)[:80]}")
