"""What a whole stage holds, moves and does again under a retention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from pathoseg.parallel.graph.activation_policy import SMALL, Retention
from pathoseg.parallel.retention.stage_liveness import SavedStorage, StageFacts
from pathoseg.parallel.retention.walk import walk
from pathoseg.parallel.schedule.costs import Saved


@dataclass(frozen=True, slots=True)
class Retained:
    """What comes of a retention, for one microbatch.

    Attributes:
        kept: Bytes on the device between the forward and the backward, without what was received.
        recomputed: Bytes that are made again.
        again: Seconds that this takes.
        forward_peak: Most bytes in the forward, without the windows.
        backward_peak: Likewise in the backward.
        tensors: What is offloaded, by name of the layer.
    """

    kept: int
    recomputed: int
    again: float
    forward_peak: int
    backward_peak: int
    tensors: Mapping[str, Saved]

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def offloaded(self) -> int:
        """Bytes in host memory."""
        return sum(saved.bytes for saved in self.tensors.values())


def retain(facts: StageFacts, retention: Retention) -> Retained:
    """Walks through a stage's forward and backward under a retention."""
    away, again = set(retention.offloaded), set(retention.recomputed)
    more = set(retention.twice)
    dropped: set[int] = set()
    twice: set[int] = set()
    copied: dict[str, list[int]] = {}
    for index, saved in facts.saved.items():
        name = facts.graph.layers[saved.maker].name
        if name in again:
            dropped.add(index)
        elif name in more:
            twice.add(index)
        elif name in away and saved.bytes >= SMALL:
            copied.setdefault(name, []).append(index)
    offloaded = {index for indices in copied.values() for index in indices}
    walked = walk(facts, facts.layers, facts.saved, dropped, offloaded, twice)
    ends = dict(zip(facts.layers, accumulate(facts.forward.values()), strict=True))
    tensors = {
        name: Saved(
            sum(facts.sizes[index] for index in indices),
            max(ends[_finished(facts.saved[index])] for index in indices),
            min(walked.needed[index] for index in indices),
        )
        for name, indices in copied.items()
    }
    return Retained(
        sum(
            s.bytes for index, s in facts.saved.items() if index not in dropped | offloaded | twice
        ),
        walked.again,
        walked.seconds,
        walked.forward_peak,
        walked.backward_peak,
        tensors,
    )


def _finished(saved: SavedStorage) -> int:
    """Position of the layer after which nothing is written into it."""
    return max((saved.maker, *saved.writers))
