"""One action of a rank, its text, and the rule of what must precede it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pathoseg.errors import PathosegError


class Kind(StrEnum):
    """The kind of an action; the value is its word in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "RECOMPUTE"  # forward once more, for what was not kept
    SEND = "SEND"  # starts a message; the rank goes on
    RECV = "RECV"  # waits for a message
    OFFLOAD = "OFFLOAD"  # lets go of a saved tensor, which is on its way to the host
    PREFETCH = "PREFETCH"  # lets it come back
    REDUCE = "REDUCE"  # adds this copy's gradients to the sum over all copies of the stage
    WAIT_REDUCE = "WAIT_REDUCE"  # waits for that sum
    STEP = "STEP"  # the optimizer's step of this copy


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE})


class Edge(NamedTuple):
    """A tensor that one stage makes and a later one consumes; its gradient flows back along it.

    Attributes:
        source: The producing stage.
        target: The consuming stage, above `source`.
        tensor: Number of the tensor between these two stages, from 0.
    """

    source: int
    target: int
    tensor: int = 0

    def __str__(self) -> str:
        return f"{self.source}>{self.target}" + (f".{self.tensor}" if self.tensor else "")

    @classmethod
    def parse(cls, text: str) -> Edge:
        """Parse the text of an edge, `0>1` or `0>1.2`.

        Raises:
            PathosegError: The text is no edge.
        """
        match = re.fullmatch(_EDGE, text, re.ASCII)
        if match is None:
            raise PathosegError(f"{text!r} is no edge.", "Write it as 0>1, or 0>1.2 for tensor 2.")
        return cls(int(match["source"]), int(match["target"]), int(match["slot"] or 0))


def chain(stages: int) -> tuple[Edge, ...]:
    """Return the edges of `stages` stages in a row, each feeding the next alone."""
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def numbered(ends: Iterable[tuple[int, int]]) -> tuple[Edge, ...]:
    """Make the edges of tensors; those between one pair of stages are numbered in turn.

    Args:
        ends: For each tensor, the stage that makes it and the stage that reads it.
    """
    count: Counter[tuple[int, int]] = Counter()
    edges = []
    for pair in ends:
        edges.append(Edge(*pair, count[pair]))
        count[pair] += 1
    return tuple(edges)


_EDGE = r"(?P<source>\d+)>(?P<target>\d+)(?:\.(?P<slot>\d+))?"
_ACTION = re.compile(
    rf"(?P<replica>\d+):(?P<stage>\d+)(?P<kind>[A-Z_]+)(?P<microbatch>\d+)?"
    rf"(?:\({_EDGE}\)|\[(?P<tensor>[^\s\[\]]+)\]|#(?P<bucket>\d+))?",
    re.ASCII,
)


class Action(NamedTuple):
    """One thing that a rank does. No two actions of a schedule are equal.

    Attributes:
        kind: Forward, backward, send….
        replica: Number of the model's copy.
        stage: Number of the stage.
        microbatch: Its number in the whole step; None for REDUCE, WAIT_REDUCE and STEP.
        edge: The edge of a SEND or RECV. At the edge's source a SEND carries the activation and a
            RECV the gradient; at its target the other way round.
        tensor: The name of the saved tensor of an OFFLOAD or PREFETCH (no blanks or brackets).
        bucket: The part of the stage's gradients that a REDUCE or WAIT_REDUCE is about.
    """

    kind: Kind
    replica: int
    stage: int
    microbatch: int | None = None
    edge: Edge | None = None
    tensor: str | None = None
    bucket: int | None = None

    def __str__(self) -> str:
        text = f"{self.replica}:{self.stage}{self.kind.value}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.edge is not None:
            text += f"({self.edge})"
        if self.tensor is not None:
            text += f"[{self.tensor}]"
        if self.bucket is not None:
            text += f"#{self.bucket}"
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text of an action: `0:2F5` is replica 0, stage 2, forward of microbatch 5.

        Raises:
            PathosegError: The text is no action, or lacks what its kind needs.
        """
        match = _ACTION.fullmatch(text)
        if match is None or match["kind"] not in _FIELDS:
            raise PathosegError(f"{text!r} is no action.", "Write it as 0:2F5 or 0:2SEND5(2>3).")

        def number(name: str) -> int | None:
            return None if match[name] is None else int(match[name])

        edge = None
        if match["source"] is not None:
            edge = Edge(int(match["source"]), int(match["target"]), number("slot") or 0)
        action = cls(
            Kind(match["kind"]),
            int(match["replica"]),
            int(match["stage"]),
            number("microbatch"),
            edge,
            match["tensor"],
            number("bucket"),
        )
        missing = action.misfit()
        if missing is not None:
            raise PathosegError(f"{text!r} is no action: {missing}.", "Correct the order file.")
        return action

    def misfit(self) -> str | None:
        """Return the first fault of this action for its kind, as text, or None."""
        needed = _FIELDS[self.kind]
        for name in ("microbatch", "edge", "tensor", "bucket"):
            if (getattr(self, name) is not None) != (name in needed):
                return f"{self.kind} {'needs a' if name in needed else 'has no'} {name}"
        if self.edge is not None and self.stage not in self.edge[:2]:
            return f"edge {self.edge} does not touch stage {self.stage}"
        return None


_FIELDS = {
    Kind.FORWARD: {"microbatch"},
    Kind.BACKWARD: {"microbatch"},
    Kind.RECOMPUTE: {"microbatch"},
    Kind.SEND: {"microbatch", "edge"},
    Kind.RECV: {"microbatch", "edge"},
    Kind.OFFLOAD: {"microbatch", "tensor"},
    Kind.PREFETCH: {"microbatch", "tensor"},
    Kind.REDUCE: {"bucket"},
    Kind.WAIT_REDUCE: {"bucket"},
    Kind.STEP: set(),
}

Visit = tuple[int, int, int]  # replica, stage, microbatch


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts of a schedule that the rule of precedence needs beyond the action itself.

    Attributes:
        inputs: By stage, the edges that end there.
        outputs: By stage, the edges that start there.
        messages: The (replica, edge) whose tensors travel by SEND and RECV. Empty for an order
            of F and B alone, where every tensor is simply there once it is made.
        microbatches: By replica, the microbatches that it runs.
        recomputed: The visits that have a RECOMPUTE.
        prefetched: The PREFETCHes of each visit that has some.
        buckets: By stage, how many buckets of gradients are summed over its copies, or 0.
    """

    inputs: tuple[tuple[Edge, ...], ...]
    outputs: tuple[tuple[Edge, ...], ...]
    messages: Set[tuple[int, Edge]]
    microbatches: tuple[tuple[int, ...], ...]
    recomputed: Set[Visit]
    prefetched: Mapping[Visit, tuple[Action, ...]]
    buckets: tuple[int, ...]


def predecessors(action: Action, setting: Setting) -> list[Action]:
    """Return the actions, on this rank or another, that must be done before `action` may start.

    The validator, the simulator and the synthesiser follow this rule; the executor runs the lists
    that the validator has accepted. `one_f_one_b.one_way` alone states again what F and B wait for.

    Args:
        action: One of the schedule's.
        setting: The facts of the schedule (`Schedule.setting`).
    """
    kind, replica, stage, microbatch, edge, tensor, bucket = action
    if kind is Kind.FORWARD:
        return [
            Action(Kind.RECV, replica, stage, microbatch, entering)
            if (replica, entering) in setting.messages
            else Action(kind, replica, entering[0], microbatch)
            for entering in setting.inputs[stage]
        ]
    if kind is Kind.BACKWARD:
        assert microbatch is not None
        visit = (replica, stage, microbatch)
        found = [
            Action(Kind.RECV, replica, stage, microbatch, leaving)
            if (replica, leaving) in setting.messages
            else Action(kind, replica, leaving[1], microbatch)
            for leaving in setting.outputs[stage]
        ]
        if visit in setting.recomputed:
            found.append(Action(Kind.RECOMPUTE, replica, stage, microbatch))
        else:
            found.append(Action(Kind.FORWARD, replica, stage, microbatch))
        found.extend(setting.prefetched.get(visit, ()))
        return found
    if kind is Kind.RECOMPUTE:
        return [Action(Kind.FORWARD, replica, stage, microbatch)]
    if kind is Kind.SEND:
        assert edge is not None
        made = Kind.FORWARD if stage == edge.source else Kind.BACKWARD
        return [Action(made, replica, stage, microbatch)]
    if kind is Kind.RECV:
        assert edge is not None
        sender = edge.target if stage == edge.source else edge.source
        return [Action(Kind.SEND, replica, sender, microbatch, edge)]
    if kind is Kind.OFFLOAD:
        assert microbatch is not None
        again = (replica, stage, microbatch) in setting.recomputed
        return [Action(Kind.RECOMPUTE if again else Kind.FORWARD, replica, stage, microbatch)]
    if kind is Kind.PREFETCH:
        return [Action(Kind.OFFLOAD, replica, stage, microbatch, None, tensor)]
    if kind is Kind.WAIT_REDUCE:
        copies = range(len(setting.microbatches))
        return [Action(Kind.REDUCE, copy, stage, None, None, None, bucket) for copy in copies]
    if kind is Kind.STEP and setting.buckets[stage]:
        return [
            Action(Kind.WAIT_REDUCE, replica, stage, None, None, None, summed)
            for summed in range(setting.buckets[stage])
        ]
    # REDUCE, and the STEP of a stage that has a single copy
    return [Action(Kind.BACKWARD, replica, stage, each) for each in setting.microbatches[replica]]
