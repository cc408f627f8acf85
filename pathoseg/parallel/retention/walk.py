"""Walks through the forward and backward of layers of which some storages are not kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pathoseg.parallel.retention.stage_liveness import StageFacts


@dataclass
class Walked:
    """What layers hold and do again, beyond what earlier ones keep.

    Attributes:
        forward_peak: Most bytes in their forward, what is kept included.
        backward_peak: Likewise in their backward.
        seconds: Of the forwards that run again.
        again: How many bytes are made again.
        needed: By offloaded storage, the seconds after the backward's start when it is needed.
        demands: Storages that layers read which run again, and that are others' to keep.
        last: Position of the layer in whose backward each of these is needed first.
    """

    forward_peak: int = 0
    backward_peak: int = 0
    seconds: float = 0.0
    again: int = 0
    needed: dict[int, float] = field(default_factory=dict)
    demands: dict[int, int] = field(default_factory=dict)


def walk(
    facts: StageFacts,
    layers: range,
    own: Collection[int],
    dropped: Collection[int],
    offloaded: Collection[int],
    twice: Collection[int] = (),
) -> Walked:
    """Runs layers of a stage on paper.

    Storages that are neither dropped nor offloaded are kept to the end of the first saver's
    backward. A dropped one is made again when the backward first needs it, with all that this
    takes: layers run in the order of the forward from what is at hand. What they make and other
    backwards need stays until these have used it, the rest goes as soon as it has been read. An
    offloaded one is on the device from its first use in the backward to its last.

    Args:
        facts: The stage.
        layers: The layers to walk through: all, or some consecutive ones.
        own: The saved storages that count; others are taken to be at hand, and for nothing.
        dropped: Those of them that are recomputed.
        offloaded: Those of them that are in host memory.
        twice: Those that are dropped and, where recomputed ones behind them need them, made in
            passing: they go when these have read them, and are made again for their own backward.
    """
    state = _State(facts, layers, own, dropped, offloaded, twice)
    state.forward()
    state.backward()
    return state.found


class _State:
    """The state of layers on paper."""

    def __init__(self, facts: StageFacts, layers: range, *stored: Collection[int]) -> None:
        self._facts, self._layers, self.found = facts, layers, Walked()
        self._own, once, self._offloaded, self._twice = stored
        self._dropped = {*once, *self._twice}
        self._made: set[int] = set()  # dropped storages that are there again
        self._back: set[int] = set()  # offloaded ones that are in use
        self._held = 0
        self._ending: dict[int, list[int]] = {}
        for index in self._own:
            saved = facts.saved[index]
            self._ending.setdefault(saved.first, []).append(index)
            if self._is_kept(index):
                self._held += saved.bytes
        self._clock = 0.0

    def forward(self) -> None:
        facts, found = self._facts, self.found
        held = 0
        freed: dict[int, int] = {}
        for index in self._own:  # what earlier layers made
            if facts.makers[index] < self._layers.start:
                held += facts.sizes[index]
                if not self._is_kept(index):
                    end = facts.alive[index]
                    freed[end] = freed.get(end, 0) + facts.sizes[index]
        for at in self._layers:
            found.forward_peak = max(found.forward_peak, held + facts.forward_peak[at])
            for index in facts.makes[at]:
                size, end = facts.sizes[index], facts.alive[index]
                is_kept = index in facts.saved and self._is_kept(index)
                if is_kept or end > at:
                    held += size
                if end > at and not is_kept:
                    freed[end] = freed.get(end, 0) + size
            held -= freed.get(at, 0)
        found.forward_peak = max(found.forward_peak, held)

    def backward(self) -> None:
        facts, found = self._facts, self.found
        for at in reversed(self._layers):
            needed = [index for index in facts.saves[at] if index in self._own]
            missing = [i for i in needed if i in self._dropped and i not in self._made]
            if missing:
                self._make_again(missing, at)
            for index in needed:
                if index in self._offloaded:
                    self._fetch(index)
            peak = self._held + facts.passed[at] + facts.backward_peak[at]
            found.backward_peak = max(found.backward_peak, peak)
            self._clock += facts.backward[at]
            for index in self._ending.get(at, ()):
                self._release(index)

    def _is_kept(self, index: int) -> bool:
        return index not in self._dropped and index not in self._offloaded

    def _release(self, index: int) -> None:
        if index in self._dropped:
            is_there = index in self._made
            self._made.discard(index)
        elif index in self._offloaded:
            is_there = index in self._back
            self._back.discard(index)
        else:
            is_there = True
        if is_there:
            self._held -= self._facts.sizes[index]

    def _fetch(self, index: int) -> None:
        self.found.needed.setdefault(index, self._clock)
        if index not in self._back:
            self._back.add(index)
            self._held += self._facts.sizes[index]

    def _make_again(self, missing: list[int], at: int) -> None:
        """Runs the layers that the missing storages take, while the backward is at a layer."""
        facts, found = self._facts, self.found
        runs: set[tuple[int, bool]] = set()  # positions, and whether in passing
        asked = [(index, self._in_passing(index, False)) for index in missing]
        while asked:
            index, passing = asked.pop()
            saved = facts.saved.get(index)
            layers = facts.makers[index], *(saved.writers if saved else ())
            new = {(layer, passing) for layer in layers} - runs
            runs |= new
            for layer, _ in new:
                for read in facts.reads[layer]:
                    how = self._in_passing(read, passing)
                    if (facts.makers[read], how) in runs:
                        continue
                    if self._at_hand(read, at, how):
                        if read in self._offloaded:
                            self._fetch(read)
                    else:
                        asked.append((read, how))
        order = sorted(runs)
        gone: dict[tuple[int, bool], tuple[int, bool]] = {}
        for run in order:
            for read in facts.reads[run[0]]:
                how = self._in_passing(read, run[1])
                if (facts.makers[read], how) in runs:
                    gone[read, how] = run
        leaving: dict[tuple[int, bool], list[int]] = {}
        temporary = 0
        for run in order:
            layer, passing = run
            peak = self._held + temporary + facts.passed[at] + facts.forward_peak[layer]
            found.backward_peak = max(found.backward_peak, peak)
            found.seconds += facts.forward[layer]
            self._clock += facts.forward[layer]
            for index in facts.makes[layer]:
                size = facts.sizes[index]
                if self._stays(index, at, passing):
                    self._made.add(index)
                    self._held += size
                    found.again += size
                elif (index, passing) in gone:
                    temporary += size
                    leaving.setdefault(gone[index, passing], []).append(size)
            temporary -= sum(leaving.pop(run, ()))

    def _in_passing(self, index: int, passing: bool) -> bool:
        """Whether the run that makes a storage is one in passing, where such a one asks for it."""
        return passing or (index in self._dropped and index not in self._twice)

    def _stays(self, index: int, at: int, passing: bool) -> bool:
        """Whether a storage that is made again is needed by backwards to come."""
        return (
            index in self._dropped
            and passing != (index in self._twice)
            and index not in self._made
            and self._facts.saved[index].first <= at
        )

    def _at_hand(self, index: int, at: int, passing: bool) -> bool:
        if index not in self._own:
            if self._facts.makers[index] not in self._layers and index in self._facts.saved:
                self.found.demands.setdefault(index, at)
                return True
            return False
        if index in self._dropped:
            return index in self._made and not (passing and index in self._twice)
        return self._facts.saved[index].first <= at
