"""The ways in which a block's saved storages can be had in its backward, and what each costs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from pathoseg.parallel.graph.activation_policy import SMALL
from pathoseg.parallel.retention.blocks import Block, Run, Unit
from pathoseg.parallel.retention.stage_liveness import StageFacts
from pathoseg.parallel.retention.walk import walk
from pathoseg.parallel.schedule.costs import Link

Way = Literal["keep", "offload", "recompute", "twice"]

# Of a block with more units than these, those of one kind are treated alike.
MOST_UNITS = 6
# A layer whose storages are a smaller share of its block's is not worth a choice.
_NOTHING = 0.002


@dataclass(frozen=True, slots=True)
class Ways:
    """Which layers' storages may be offloaded, and which recomputed."""

    offload: bool = True
    recompute: bool = True


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way for each unit of one block, or of several equal ones, and what comes of it.

    Attributes:
        blocks: How many blocks it is for.
        offloaded: Layers, by their distance from the first block's first, before it if negative.
        recomputed: Likewise.
        twice: Likewise.
        kept: Bytes that stay on the device.
        copies: Seconds that the copies take, each way.
        again: Seconds of the forwards that run again.
        peak: Most bytes in the backward, beyond what earlier blocks keep.
        largest: Most bytes of one layer that are copied.
        demands: Storages of other blocks that have to be at hand.
        away: Storages of it that are not on the device when the backward begins.
        deep: Those of them that take another of it to be made again.
    """

    blocks: int
    offloaded: tuple[int, ...]
    recomputed: tuple[int, ...]
    twice: tuple[int, ...]
    kept: int
    copies: float
    again: float
    peak: int
    largest: int
    demands: frozenset[int]
    away: frozenset[int]
    deep: frozenset[int]


def patterns_of(facts: StageFacts, run: Run, host: Link, ways: Ways) -> list[Pattern]:
    """Of all patterns of a run's blocks those that no other beats in everything.

    Several blocks are taken together where all between them is recomputed.

    Args:
        facts: The stage.
        run: Equal blocks.
        host: What a copy takes.
        ways: What is allowed.
    """
    block = run.blocks[0]
    found = [_pattern(facts, [block], chosen, host) for chosen in _choices(facts, block, ways)]
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
                    found.append(_pattern(facts, blocks, chosen, host))
    stop = block.layers.stop
    shared = {i for unit in block.units for i in unit.storages if facts.alive[i] >= stop}
    return _best(found, shared)


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


def _choices(facts: StageFacts, block: Block, ways: Ways) -> Iterator[dict[int, Way]]:
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


def _pattern(
    facts: StageFacts, blocks: Sequence[Block], chosen: Mapping[int, Way], host: Link
) -> Pattern:
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
    walked = walk(facts, range(first, blocks[-1].layers.stop), own, once, copied, twice)
    sizes = [facts.sizes[index] for index in copied]
    return Pattern(
        len(blocks),
        tuple(u.maker - first for u in units if chosen.get(u.maker) == "offload"),
        tuple(u.maker - first for u in units if chosen.get(u.maker) == "recompute"),
        tuple(u.maker - first for u in units if chosen.get(u.maker) == "twice"),
        sum(facts.sizes[index] for index in by_way["keep"]),
        len(sizes) * host.alpha + sum(sizes) * host.beta,
        walked.seconds,
        walked.backward_peak,
        max(
            (
                sum(facts.sizes[index] for index in unit.storages if index in copied)
                for unit in units
            ),
            default=0,
        ),
        frozenset(walked.demands),
        frozenset(dropped | copied),
        frozenset(index for index in dropped if _is_deep(facts, index, dropped)),
    )


def _is_deep(facts: StageFacts, index: int, dropped: set[int]) -> bool:
    """Whether more than a storage's own layers have to run again to make it."""
    saved = facts.saved[index]
    for layer in (saved.maker, *saved.writers):
        for read in facts.reads[layer]:
            if read in dropped and facts.makers[read] != saved.maker:
                return True
            if read not in facts.saved:
                return True
    return False


def _best(patterns: Sequence[Pattern], shared: Collection[int]) -> list[Pattern]:
    """Those that none beats of those that ask the same of others and leave them the same."""
    groups: dict[Hashable, list[Pattern]] = {}
    for each in patterns:
        gone, deep = (frozenset(some.intersection(shared)) for some in (each.away, each.deep))
        groups.setdefault((each.blocks, each.demands, gone, deep), []).append(each)
    kept: list[Pattern] = []
    for group in groups.values():
        costs = np.array([(p.kept, p.copies, p.again, p.peak, p.largest) for p in group])
        best: list[int] = []
        for index in np.lexsort(costs.T[::-1]):
            if not best or not (costs[best] <= costs[index]).all(1).any():
                best.append(int(index))
        kept += [group[index] for index in best]
    return kept
