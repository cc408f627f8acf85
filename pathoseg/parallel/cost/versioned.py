"""Reads plain data back from versioned JSON, and says what is wrong with a text that is none."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pathoseg.errors import PathosegError

Data = TypeVar("Data")


def read_versioned(
    text: str | bytes, kind: type[Data], what: str, version: int, name: str, mend: str
) -> Data:
    """The inverse of writing `{"format": version, **asdict(data)}`.

    Args:
        text: The JSON.
        kind: A dataclass.
        what: What a user calls it.
        version: The format that is read.
        name: What errors call this one.
        mend: What the user can do about all of them.

    Raises:
        PathosegError: It is no JSON, of another format, or a value does not fit.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PathosegError(f"{name} is no {what} ({error}).", mend) from error
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != version:
        raise PathosegError(
            f"{name} is a {what} of format {found!r}, this pathoseg reads {version}.", mend
        )
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PathosegError(f"{name}: {where}: {first['msg']}.", mend) from error
