"""Reads JSON that was written from a dataclass back into it, with the types of its fields."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_LARGEST = 1e308


def from_json(kind: type[T], value: Any, where: str = "", needs_all: bool = False) -> T:
    """Return the dataclass `kind`, or another of these types, of parsed JSON.

    Types are strings, numbers, bools, None, literals, dataclasses, and unions, tuples and mappings
    of them.

    Args:
        kind: The type.
        value: Parsed JSON.
        where: What the value is called in errors; the type's name where none is given.
        needs_all: True if fields with a default may not be missing either.

    Raises:
        ValueError: A field is missing, unknown, of another type, or no finite number.
    """
    found: T = _typed(kind, value, where or kind.__name__, needs_all)
    return found


def _typed(kind: Any, value: Any, where: str, needs_all: bool) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind)
        optional = {
            each.name
            for each in fields(kind)
            if not (needs_all or each.default is each.default_factory is MISSING)
        }
        for key in sorted((kinds.keys() ^ value.keys()) - optional):
            state = "lacks" if key in kinds else "has an unknown key,"
            raise ValueError(f"{where} {state} `{key}`")
        of_key = {key: _typed(kinds[key], one, f"`{key}`", needs_all) for key, one in value.items()}
        return kind(**of_key)  # type: ignore[operator]  # is_dataclass takes instances, too
    if origin is Literal and value in inner:
        return value
    if origin in (Union, UnionType):
        for one in inner:
            try:
                return _typed(one, value, where, needs_all)
            except ValueError:
                continue
    if origin is tuple and isinstance(value, list):
        kinds_of = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds_of) == len(value):
            pairs = zip(kinds_of, value, strict=True)
            return tuple(_typed(one, item, where, needs_all) for one, item in pairs)
    if origin is Mapping and isinstance(value, dict):
        return {key: _typed(inner[1], one, f"`{key}`", needs_all) for key, one in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= _LARGEST:
        return float(value)
    if kind is not float and type(value) is kind:
        return value
    raise ValueError(f"{where} is {reprlib.repr(value)}, which does not fit")
