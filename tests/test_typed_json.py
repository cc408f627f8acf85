"""JSON becomes the dataclass it was written from, or is refused by the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from pathoseg.typed_json import from_json


@dataclass(frozen=True)
class Inner:
    size: float


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    colour: tuple[int, int, int]
    inner: tuple[Inner, ...] = ()
    best: Inner | None = None
    options: Mapping[str, int | str | None] | None = None


WHOLE = Outer("a", (1, 2, 3), (Inner(0.5), Inner(2.0)), Inner(1.0), {"x": 1, "y": "1", "z": None})


@pytest.mark.parametrize("needs_all", [False, True])
def test_what_was_written_reads_back(needs_all: bool) -> None:
    written = json.loads(json.dumps(asdict(WHOLE)))
    assert from_json(Outer, written, needs_all=needs_all) == WHOLE


def test_defaults_stand_for_what_is_missing_unless_all_is_needed() -> None:
    written = {"kind": "b", "colour": [1, 2, 3]}
    assert from_json(Outer, written) == Outer("b", (1, 2, 3))
    with pytest.raises(ValueError, match="the card lacks `best`"):
        from_json(Outer, written, "the card", needs_all=True)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": "c"}, "`kind` is 'c', which does not fit"),
        ({"colour": [1, 2]}, r"`colour` is \[1, 2\]"),
        ({"colour": [1, 2, True]}, "`colour` is True"),
        ({"inner": [{"size": float("nan")}]}, "`size` is nan"),
        ({"inner": [{"size": 10**400}]}, "`size` is 1000"),
        ({"inner": [{}]}, "`inner` lacks `size`"),
        ({"options": {"x": 0.5}}, "`options` is {'x': 0.5}"),
        ({"color": 1}, "Outer has an unknown key, `color`"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        from_json(Outer, {**json.loads(json.dumps(asdict(WHOLE))), **change})
    with pytest.raises(ValueError, match=r"Outer is \[\]"):
        from_json(Outer, [])
