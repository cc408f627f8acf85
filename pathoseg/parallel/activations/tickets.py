"""What a copy between device and host is called, and when it was made."""

from __future__ import annotations

from typing import Any, NamedTuple

from pathoseg.parallel.activations.streams import Lane


class Label(NamedTuple):
    """Whose bytes are copied: those that a layer of a stage made for a microbatch, or, with no
    microbatch, what the stage itself has parked of a kind (`Park`)."""

    stage: int
    microbatch: int | None
    layer: str


class Copied(NamedTuple):
    """One copy: its direction, and the marks (`Streams.mark`) of its begin and end."""

    lane: Lane
    label: Label
    bytes: int
    begin: Any
    end: Any
