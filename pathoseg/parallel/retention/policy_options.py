"""The activation policies of a block and what each costs, by simulating its recomputation."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Literal, NamedTuple, get_args

import numpy as np

from pathoseg.parallel.graph.activation_policy import SMALL, ActivationPolicy
from pathoseg.parallel.retention.stage_liveness import (
    Block,
    BlockRun,
    SavedStorage,
    StageFacts,
    Unit,
)
from pathoseg.parallel.schedule.costs import Link, Saved


@dataclass
class RecomputeCost:
    """The memory and the recomputation of some layers, beyond what earlier layers keep.

    Attributes:
        forward_peak: Most bytes in their forward, what is kept included.
        backward_peak: Likewise in their backward.
        seconds: Of the forwards that run again.
        recomputed: Bytes that are recomputed and stay until their own backward.
        needed: By offloaded storage, the seconds after the backward's start when it is needed.
        demands: Saved storages of earlier layers that the recomputation reads.
    """

    forward_peak: int = 0
    backward_peak: int = 0
    seconds: float = 0.0
    recomputed: int = 0
    needed: dict[int, float] = field(default_factory=dict)
    demands: set[int] = field(default_factory=set)


def simulate_recomputation(
    facts: StageFacts,
    layers: range,
    own: Collection[int],
    dropped: Collection[int],
    offloaded: Collection[int],
    twice: Collection[int] = (),
) -> RecomputeCost:
    """Simulate the forward and backward of some layers of a stage under an activation policy.

    Storages that are neither dropped nor offloaded are kept to the end of the first saver's
    backward. A dropped one is made again when the backward first needs it, with all that this
    takes: layers run in the order of the forward from what is at hand. What they make and other
    backwards need stays until these have used it, the rest goes as soon as it has been read. An
    offloaded one is on the device from its first use in the backward to its last.

    Args:
        facts: The stage.
        layers: The layers: all of the stage, or some consecutive ones.
        own: The saved storages that count; others are taken to be on the device at no cost.
        dropped: Those of them that are recomputed.
        offloaded: Those of them that are in host memory.
        twice: Those of them that are recomputed twice: once in passing, freed as soon as the
            recomputed layers behind have read them, and again for their own backward.
    """
    simulation = _RecomputeSimulation(
        facts, layers, own=own, once=dropped, twice=twice, offloaded=offloaded
    )
    simulation.forward()
    simulation.backward()
    return simulation.cost


class _RecomputeRun(NamedTuple):
    """A layer that runs again: in passing for layers behind it alone, or for its own backward."""

    layer: int
    passing: bool


class _RecomputeSimulation:
    """Replays a forward and a backward of some layers and counts the bytes that are live."""

    def __init__(
        self,
        facts: StageFacts,
        layers: range,
        *,
        own: Collection[int],
        once: Collection[int],
        twice: Collection[int],
        offloaded: Collection[int],
    ) -> None:
        self._facts, self._layers, self.cost = facts, layers, RecomputeCost()
        self._own, self._twice, self._offloaded = own, twice, offloaded
        self._dropped = {*once, *twice}
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
        facts, cost = self._facts, self.cost
        held = 0
        freed: dict[int, int] = {}
        for index in self._own:  # what earlier layers made
            if facts.makers[index] < self._layers.start:
                held += facts.sizes[index]
                if not self._is_kept(index):
                    end = facts.alive[index]
                    freed[end] = freed.get(end, 0) + facts.sizes[index]
        for at in self._layers:
            cost.forward_peak = max(cost.forward_peak, held + facts.forward_peak[at])
            for index in facts.makes[at]:
                size, end = facts.sizes[index], facts.alive[index]
                is_kept = index in facts.saved and self._is_kept(index)
                if is_kept or end > at:
                    held += size
                if end > at and not is_kept:
                    freed[end] = freed.get(end, 0) + size
            held -= freed.get(at, 0)
        cost.forward_peak = max(cost.forward_peak, held)

    def backward(self) -> None:
        facts, cost = self._facts, self.cost
        for at in reversed(self._layers):
            needed = [index for index in facts.saves[at] if index in self._own]
            missing = [i for i in needed if i in self._dropped and i not in self._made]
            if missing:
                self._make_again(missing, at)
            for index in needed:
                if index in self._offloaded:
                    self._fetch(index)
            peak = self._held + facts.passed[at] + facts.backward_peak[at]
            cost.backward_peak = max(cost.backward_peak, peak)
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
        self.cost.needed.setdefault(index, self._clock)
        if index not in self._back:
            self._back.add(index)
            self._held += self._facts.sizes[index]

    def _make_again(self, missing: list[int], at: int) -> None:
        """Run the layers that the missing storages take, while the backward is at a layer."""
        facts, cost = self._facts, self.cost
        runs = self._runs_of(missing, at)
        last_reads = self._last_reads(runs)
        leaving: dict[_RecomputeRun, list[int]] = {}
        temporary = 0
        for run in sorted(runs):
            layer, passing = run
            peak = self._held + temporary + facts.passed[at] + facts.forward_peak[layer]
            cost.backward_peak = max(cost.backward_peak, peak)
            cost.seconds += facts.forward[layer]
            self._clock += facts.forward[layer]
            for index in facts.makes[layer]:
                size = facts.sizes[index]
                if self._stays(index, at, passing):
                    self._made.add(index)
                    self._held += size
                    cost.recomputed += size
                elif (index, passing) in last_reads:
                    temporary += size
                    leaving.setdefault(last_reads[index, passing], []).append(size)
            temporary -= sum(leaving.pop(run, ()))

    def _runs_of(self, missing: list[int], at: int) -> set[_RecomputeRun]:
        """Return the runs that missing storages take; fetch what these read in host memory."""
        facts = self._facts
        runs: set[_RecomputeRun] = set()
        asked = [(index, self._in_passing(index, False)) for index in missing]
        while asked:
            index, passing = asked.pop()
            saved = facts.saved.get(index)
            layers = facts.makers[index], *(saved.writers if saved else ())
            new = {_RecomputeRun(layer, passing) for layer in layers} - runs
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
        return runs

    def _last_reads(self, runs: set[_RecomputeRun]) -> dict[tuple[int, bool], _RecomputeRun]:
        """Return, by storage that one of the runs makes and whether in passing, its last reader."""
        found: dict[tuple[int, bool], _RecomputeRun] = {}
        for run in sorted(runs):
            for read in self._facts.reads[run.layer]:
                how = self._in_passing(read, run.passing)
                if (self._facts.makers[read], how) in runs:
                    found[read, how] = run
        return found

    def _in_passing(self, index: int, passing: bool) -> bool:
        """Return True if the recomputation of a storage is transient (its result is freed before
        the layer's own backward)."""
        return passing or (index in self._dropped and index not in self._twice)

    def _stays(self, index: int, at: int, passing: bool) -> bool:
        """Return True if a recomputed storage is needed by later backwards."""
        return (
            index in self._dropped
            and passing != (index in self._twice)
            and index not in self._made
            and self._facts.saved[index].first <= at
        )

    def _at_hand(self, index: int, at: int, passing: bool) -> bool:
        if index not in self._own:
            if self._facts.makers[index] not in self._layers and index in self._facts.saved:
                self.cost.demands.add(index)
                return True
            return False
        if index in self._dropped:
            return index in self._made and not (passing and index in self._twice)
        return self._facts.saved[index].first <= at


@dataclass(frozen=True, slots=True)
class Retained:
    """The memory, copies and recomputation of a stage under an activation policy, a microbatch.

    Attributes:
        kept: Bytes on the device between the forward and the backward, without what was received.
        recomputed: Bytes that are recomputed.
        recompute_seconds: Seconds that this takes.
        forward_peak: Most bytes in the forward, without the windows.
        backward_peak: Likewise in the backward.
        tensors: What is offloaded, by name of the layer.
    """

    kept: int
    recomputed: int
    recompute_seconds: float
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


def retain(facts: StageFacts, policy: ActivationPolicy) -> Retained:
    """Return what a stage holds and runs again under an activation policy."""
    away, again = set(policy.offloaded), set(policy.recomputed)
    more = set(policy.twice)
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
    cost = simulate_recomputation(facts, facts.layers, facts.saved, dropped, offloaded, twice)
    ends = dict(zip(facts.layers, accumulate(facts.forward.values()), strict=True))
    tensors = {
        name: Saved(
            sum(facts.sizes[index] for index in indices),
            max(ends[_finished(facts.saved[index])] for index in indices),
            min(cost.needed[index] for index in indices),
        )
        for name, indices in copied.items()
    }
    return Retained(
        sum(
            s.bytes for index, s in facts.saved.items() if index not in dropped | offloaded | twice
        ),
        cost.recomputed,
        cost.seconds,
        cost.forward_peak,
        cost.backward_peak,
        tensors,
    )


def _finished(saved: SavedStorage) -> int:
    """Position of the layer after which nothing is written into it."""
    return max((saved.maker, *saved.writers))


Way = Literal["keep", "offload", "recompute", "twice"]

# Of a block with more units than these, those of one kind are treated alike.
MOST_UNITS = 6
# A layer whose storages are a smaller share of its block's is not worth a choice.
_NOTHING = 0.002
# At which options of joined blocks are compared: a second of copies, in seconds of computing, and
# a byte of the peak, which equal blocks share, in bytes that each keeps.
_PRICES = (0.0, 0.1, 0.5, 1.0, 1e9)
_PEAK = 0.1


@dataclass(frozen=True, slots=True)
class AllowedPolicies:
    """The policies that the user allows: offload, recompute, or both."""

    offload: bool = True
    recompute: bool = True


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """A way for each unit of one block, or of several equal ones, and what comes of it.

    Attributes:
        blocks: How many blocks it is for.
        offloaded: Layers, by their distance from the first block's first, before it if negative.
        recomputed: Likewise.
        twice: Likewise.
        kept: Bytes that stay on the device.
        copies: Seconds that the copies take, each way.
        recompute_seconds: Seconds of the forwards that run again.
        peak: Most bytes in the backward, beyond what earlier blocks keep.
        largest: Most bytes of one layer that are copied.
        demands: Saved storages of earlier layers that the recomputation reads; their own block has
            to have them at hand.
        away: Storages of the block that are offloaded or recomputed.
        deep: Of `away`, those whose recomputation also needs another recomputed or unsaved storage.
    """

    blocks: int
    offloaded: tuple[int, ...]
    recomputed: tuple[int, ...]
    twice: tuple[int, ...]
    kept: int
    copies: float
    recompute_seconds: float
    peak: int
    largest: int
    demands: frozenset[int]
    away: frozenset[int]
    deep: frozenset[int]


def options_of(
    facts: StageFacts, run: BlockRun, host: Link, ways: AllowedPolicies, few: bool = False
) -> list[PolicyOption]:
    """Return the Pareto front of the policy options of a run's blocks.

    Several blocks are taken together where all between them is recomputed.

    Args:
        facts: The stage.
        run: Equal blocks.
        host: What a copy takes.
        ways: What is allowed.
        few: True leaves out options between useful ones, as of joined blocks.
    """
    block = run.blocks[0]
    choices = _joint(facts, block, ways, host) if block.parts else _choices(facts, block, ways)
    found = [_option(facts, [block], chosen, host) for chosen in choices]
    found = [
        each
        for each in found
        if all(facts.saved[i].last < block.layers.start for i in each.demands)
    ]
    if ways.recompute:
        for count in _lengths(len(run.blocks)):
            blocks = run.blocks[:count]
            for given in ("keep", "offload") if ways.offload else ("keep",):
                for chosen in _together(blocks, given):
                    found.append(_option(facts, blocks, chosen, host))
    stop = block.layers.stop
    shared = {i for unit in block.units for i in unit.storages if facts.alive[i] >= stop}
    return _best(found, shared, few)


def _lengths(most: int) -> Iterator[int]:
    """2 to 8, then what grows by a quarter, and all."""
    length = 2
    while length < most:
        yield length
        length = max(length + 1, length * 5 // 4)
    if most > 1:
        yield most


def _together(blocks: Sequence[Block], given: Way) -> Iterator[dict[int, Way]]:
    """Ways for blocks of which all is recomputed but what the first is given: from there to the
    end at once; or in passing first, so that what each block is given is there, and then each."""
    units = [unit for block in blocks for unit in block.units]
    first = blocks[0].layers.start
    for inner in ("recompute", "twice"):
        chosen: dict[int, Way] = {
            unit.maker: "recompute" if unit.maker >= first else given for unit in units
        }
        if inner == "twice":
            for block in blocks[:-1]:
                own = (unit.maker for unit in block.units if unit.maker >= block.layers.start)
                chosen |= dict.fromkeys(own, "twice")
        yield chosen


def _joint(
    facts: StageFacts, block: Block, ways: AllowedPolicies, host: Link
) -> Iterator[dict[int, Way]]:
    """Ways for a block that was joined: the useful ones of each part with those of the others."""
    first = block.layers.start
    ahead: list[dict[int, Way]] = [{}]
    units: tuple[Unit, ...] = ()
    for part in block.parts:
        layers, units = range(first, part.layers.stop), (*units, *part.units)
        own = _useful_of(facts, Block(layers, part.units), _choices(facts, part, ways), host)
        joined = ({**earlier, **chosen} for earlier, chosen in product(ahead, own))
        ahead = _useful_of(facts, Block(layers, units), joined, host)
    yield from ahead


def _useful_of(
    facts: StageFacts, block: Block, choices: Iterator[dict[int, Way]], host: Link
) -> list[dict[int, Way]]:
    known = {_option(facts, [block], chosen, host): chosen for chosen in choices}
    return [known[each] for each in _useful([*known])]


def _useful(options: Sequence[PolicyOption]) -> list[PolicyOption]:
    """Return the options of one block that are best at some price of memory and of copies.

    Of many equal blocks some take one of these and some another: nothing in between is missed.
    """
    most = max(each.kept for each in options) or 1
    slowest = max(max(each.recompute_seconds, each.copies) for each in options) or 1.0
    found: dict[int, None] = {}
    for memory in (2.0**power / most * slowest for power in range(-10, 4)):
        for copies in _PRICES:
            costs = [
                each.recompute_seconds
                + each.copies * copies
                + (each.kept + _PEAK * each.peak) * memory
                for each in options
            ]
            found[min(range(len(options)), key=costs.__getitem__)] = None
    found[min(range(len(options)), key=lambda at: options[at].peak)] = None
    return [options[at] for at in sorted(found)]


def _choices(facts: StageFacts, block: Block, ways: AllowedPolicies) -> Iterator[dict[int, Way]]:
    """Every way for every unit, or for every kind of unit where there are many."""
    sizes = {unit.maker: sum(facts.sizes[index] for index in unit.storages) for unit in block.units}
    least = _NOTHING * sum(sizes.values())
    bundles: dict[object, list[Unit]] = {}
    worth = [unit for unit in block.units if sizes[unit.maker] > least]
    for unit in worth:
        given = unit.maker < block.layers.start
        kind = facts.graph.layers[unit.maker].kind
        bundles.setdefault(unit.maker if len(worth) <= MOST_UNITS else (given, kind), []).append(
            unit
        )
    largest = sorted(bundles.values(), key=lambda units: -sum(sizes[u.maker] for u in units))
    joined = [*largest[: MOST_UNITS - 1], [u for units in largest[MOST_UNITS - 1 :] for u in units]]
    joined = [units for units in joined if units]
    options = []
    for units in joined:
        some: list[Way] = ["keep"]
        if ways.offload and any(facts.sizes[i] >= SMALL for unit in units for i in unit.storages):
            some.append("offload")
        if ways.recompute and units[0].maker >= block.layers.start:
            some.append("recompute")
        options.append(some)
    for each in product(*options):
        yield {
            unit.maker: way
            for units, way in zip(joined, each, strict=True)
            for unit in units
            if way == "keep" or way == "offload" or unit.maker >= block.layers.start
        }


def _option(
    facts: StageFacts, blocks: Sequence[Block], chosen: Mapping[int, Way], host: Link
) -> PolicyOption:
    first = blocks[0].layers.start
    units = [unit for block in blocks for unit in block.units]
    own = {index for unit in units for index in unit.storages}
    by_way: dict[Way, set[int]] = {way: set() for way in get_args(Way)}
    for unit in units:
        way = chosen.get(unit.maker, "keep")
        for index in unit.storages:
            small = facts.sizes[index] < SMALL
            by_way["keep" if way == "offload" and small else way].add(index)
    once, twice, copied = by_way["recompute"], by_way["twice"], by_way["offload"]
    dropped = once | twice
    cost = simulate_recomputation(
        facts, range(first, blocks[-1].layers.stop), own, once, copied, twice
    )
    sizes = [facts.sizes[index] for index in copied]
    return PolicyOption(
        len(blocks),
        tuple(u.maker - first for u in units if not copied.isdisjoint(u.storages)),
        tuple(u.maker - first for u in units if chosen.get(u.maker) == "recompute"),
        tuple(u.maker - first for u in units if chosen.get(u.maker) == "twice"),
        sum(facts.sizes[index] for index in by_way["keep"]),
        len(sizes) * host.alpha + sum(sizes) * host.beta,
        cost.seconds,
        cost.backward_peak,
        max(
            (
                sum(facts.sizes[index] for index in unit.storages if index in copied)
                for unit in units
            ),
            default=0,
        ),
        frozenset(cost.demands),
        frozenset(dropped | copied),
        frozenset(index for index in dropped if _is_deep(facts, index, dropped)),
    )


def _is_deep(facts: StageFacts, index: int, dropped: set[int]) -> bool:
    """Return True if recomputing a storage needs more than its own layers."""
    saved = facts.saved[index]
    for layer in (saved.maker, *saved.writers):
        for read in facts.reads[layer]:
            if read in dropped and facts.makers[read] != saved.maker:
                return True
            if read not in facts.saved:
                return True
    return False


def _best(
    options: Sequence[PolicyOption], shared: Collection[int], few: bool
) -> list[PolicyOption]:
    """Return the Pareto front (time, memory) of the options with equal demands and exports.

    If `few`, only the useful ones of it.
    """
    groups: dict[Hashable, list[PolicyOption]] = {}
    for each in options:
        gone, deep = (frozenset(some.intersection(shared)) for some in (each.away, each.deep))
        groups.setdefault((each.blocks, each.demands, gone, deep), []).append(each)
    kept: list[PolicyOption] = []
    for group in groups.values():
        costs = np.array(
            [(p.kept, p.copies, p.recompute_seconds, p.peak, p.largest) for p in group]
        )
        best: list[int] = []
        for index in np.lexsort(costs.T[::-1]):
            if not best or not (costs[best] <= costs[index]).all(1).any():
                best.append(int(index))
        front = [group[index] for index in best]
        kept += _useful(front) if few else front
    return kept
