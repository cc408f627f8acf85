"""Liveness of the storages of a stage, and its division into independent blocks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pathoseg.parallel.graph.layer_graph import LayerGraph

# Where a stage has more runs of equal blocks, blocks are joined that repeat so often in turn.
_MANY, _OFTEN = 16, 4


@dataclass(frozen=True)
class SavedStorage:
    """A storage that a stage makes and saves.

    Attributes:
        bytes: Its size.
        maker: Position of the layer that makes it.
        writers: Positions of the layers that write into it later.
        first: Position of the first layer that saves it, whose backward is the last to use it.
        last: Position of the last layer that saves it, whose backward needs it first.
    """

    bytes: int
    maker: int
    writers: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class StageFacts:
    """All that decides what an activation policy of a stage costs.

    The mappings are by position of a layer, or by index of a storage, of the stage.

    Attributes:
        graph: The model.
        layers: The stage's positions.
        saved: The storages that it makes and saves.
        sizes: Bytes of all storages that it makes.
        makers: Position of the layer that makes each of them.
        alive: Position of the last layer whose forward reads each of them; the stage's end where
            another stage does.
        makes: The storages that each layer makes.
        reads: The storages that each layer reads, of those made in the stage.
        saves: The storages that each layer saves, of those made in the stage.
        forward_peak: Bytes that each layer's forward takes, workspace included.
        backward_peak: Likewise its backward.
        passed: Bytes of gradients that are there when each layer's backward begins, those of the
            stage's outputs included.
        forward: Seconds of each layer's forward.
        backward: Likewise its backward.
    """

    graph: LayerGraph
    layers: range
    saved: Mapping[int, SavedStorage]
    sizes: Mapping[int, int]
    makers: Mapping[int, int]
    alive: Mapping[int, int]
    makes: Mapping[int, tuple[int, ...]]
    reads: Mapping[int, tuple[int, ...]]
    saves: Mapping[int, tuple[int, ...]]
    forward_peak: Mapping[int, int]
    backward_peak: Mapping[int, int]
    passed: Mapping[int, int]
    forward: Mapping[int, float]
    backward: Mapping[int, float]


def stage_facts(
    graph: LayerGraph,
    layers: range,
    peaks: tuple[Sequence[int], Sequence[int], Sequence[int]],
    times: tuple[Sequence[float], Sequence[float]],
) -> StageFacts:
    """The facts of a stage.

    Args:
        graph: The model.
        layers: The stage's positions.
        peaks: By position in the model, `forward_peak`, `backward_peak` and `passed`.
        times: By position in the model, seconds of forward and backward.
    """
    sizes: dict[int, int] = {}
    makers: dict[int, int] = {}
    makes: dict[int, list[int]] = {at: [] for at in layers}
    for index, storage in enumerate(graph.storages):
        if storage.layer in layers and storage.bytes:
            sizes[index], makers[index] = storage.bytes, storage.layer
            makes[storage.layer].append(index)
    reads: dict[int, tuple[int, ...]] = {}
    saves: dict[int, tuple[int, ...]] = {}
    writers: dict[int, list[int]] = {index: [] for index in sizes}
    savers: dict[int, list[int]] = {index: [] for index in sizes}
    alive = dict(makers)
    for at in layers:
        layer = graph.layers[at]
        found = {value.storage for name in layer.inputs for value in graph.made_by(name)}
        reads[at] = tuple(sorted(index for index in found if index in sizes))
        saves[at] = tuple(index for index in layer.saved if index in sizes)
        for index in saves[at]:
            savers[index].append(at)
        last = min(graph.readers.get(layer.name, (at,))[-1], layers.stop)
        for value in layer.outputs:
            if value.storage is None or value.storage not in sizes:
                continue
            alive[value.storage] = max(alive[value.storage], last)
            if makers[value.storage] < at and not layer.is_free:
                writers[value.storage].append(at)
    saved = {
        index: SavedStorage(sizes[index], makers[index], tuple(writers[index]), users[0], users[-1])
        for index, users in savers.items()
        if users
    }
    forward_peak, backward_peak, passed = ({at: of[at] for at in layers} for of in peaks)
    forward, backward = ({at: of[at] for at in layers} for of in times)
    return StageFacts(
        graph,
        layers,
        saved=saved,
        sizes=sizes,
        makers=makers,
        alive=alive,
        makes={at: tuple(made) for at, made in makes.items()},
        reads=reads,
        saves=saves,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        passed=passed,
        forward=forward,
        backward=backward,
    )


@dataclass(frozen=True)
class Unit:
    """The saved storages of one layer: what an activation policy decides on.

    Attributes:
        maker: Position of the layer.
        storages: Their indices.
        first: Position of the first layer that saves one.
        last: Position of the last layer that does.
    """

    maker: int
    storages: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Block:
    """Consecutive layers, and the units that they save; all that save a unit are in one block.

    Attributes:
        layers: Positions.
        units: By maker; those made in earlier blocks come first.
        parts: The blocks that were joined to this one, if any.
    """

    layers: range
    units: tuple[Unit, ...]
    parts: tuple[Block, ...] = ()


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks, one after the other: the same layers, sizes and times."""

    blocks: tuple[Block, ...]


def units_of(facts: StageFacts) -> list[Unit]:
    """All units of a stage, by maker."""
    made: dict[int, list[int]] = {}
    for index, saved in facts.saved.items():
        made.setdefault(saved.maker, []).append(index)
    return [
        Unit(
            maker,
            tuple(storages),
            min(facts.saved[index].first for index in storages),
            max(facts.saved[index].last for index in storages),
        )
        for maker, storages in sorted(made.items())
    ]


def runs_of(facts: StageFacts, most: int) -> list[BlockRun]:
    """The stage as runs of equal blocks, in order.

    A block ends where no unit is saved on both sides and all that crosses is saved; of such places
    where fewest values cross, and among these the last with at most so many units.

    Args:
        facts: The stage.
        most: Units of a block, where the stage can be cut so finely.
    """
    units = units_of(facts)
    blocks = _blocks(facts, units, _ends(facts, units), most)
    runs = _grouped(facts, blocks)
    return runs if len(runs) <= _MANY else _grouped(facts, _joined(facts, blocks))


def _grouped(facts: StageFacts, blocks: Sequence[Block]) -> list[BlockRun]:
    known = [(block, _signature(facts, block)) for block in blocks]
    return [
        BlockRun(tuple(block for block, _ in group))
        for _, group in groupby(known, key=lambda item: item[1])
    ]


def _joined(facts: StageFacts, blocks: list[Block]) -> list[Block]:
    """Join the blocks of each period, as in a transformer's layer, that repeats often enough."""
    shapes = [_signature(facts, block, moved=True) for block in blocks]
    for period in range(2, len(blocks) // _OFTEN + 1):
        equal = [one == other for one, other in zip(shapes, shapes[period:], strict=False)]
        start, length = _longest(equal)
        if length + period < _OFTEN * period:
            continue
        # Of the places at which a period may begin, the one whose periods are most alike.
        found = []
        for first in range(start, start + period):
            stop = first + (start + length + period - first) // period * period
            joined = [_join(blocks[at : at + period]) for at in range(first, stop, period)]
            found.append((len(_grouped(facts, joined)), first, stop, joined))
        alike, first, stop, joined = min(found, key=lambda each: each[:2])
        if alike * _OFTEN <= len(joined):
            return [*_joined(facts, blocks[:first]), *joined, *_joined(facts, blocks[stop:])]
    return blocks


def _longest(equal: Sequence[bool]) -> tuple[int, int]:
    """Return the start and the length of the longest stretch of True."""
    best, start = (0, 0), 0
    for at, each in enumerate([*equal, False]):
        if not each:
            best = max(best, (at - start, -start))
            start = at + 1
    return -best[1], best[0]


def _join(blocks: Sequence[Block]) -> Block:
    units = sorted((unit for block in blocks for unit in block.units), key=lambda unit: unit.maker)
    layers = range(blocks[0].layers.start, blocks[-1].layers.stop)
    return Block(layers, tuple(units), tuple(blocks))


def _ends(facts: StageFacts, units: Sequence[Unit]) -> dict[int, int]:
    """By position at which a block may end, how many values cross it."""
    first, stop = facts.layers.start, facts.layers.stop
    crossing = np.zeros(stop - first + 2, np.int64)
    closed = np.zeros(stop - first + 2, np.int64)
    for index, maker in facts.makers.items():
        saved = facts.saved.get(index)
        end = max(facts.alive[index], saved.last if saved else maker)
        crossing[maker + 1 - first : end + 1 - first] += 1
        if saved is None:
            closed[maker + 1 - first : facts.alive[index] + 1 - first] += 1
        else:
            closed[maker + 1 - first : max((maker, *saved.writers)) + 1 - first] += 1
    for unit in units:
        closed[unit.first + 1 - first : unit.last + 1 - first] += 1
    inner = range(first + 1, stop)
    ends = {at: int(crossing[at - first]) for at in inner if not closed[at - first]}
    return {**ends, stop: 0}


def _blocks(
    facts: StageFacts, units: Sequence[Unit], ends: dict[int, int], most: int
) -> list[Block]:
    blocks: list[Block] = []
    waiting = sorted(units, key=lambda unit: unit.last)
    start, stop = facts.layers.start, facts.layers.stop
    places = sorted(ends)
    while start < stop:
        ahead = [place for place in places if place > start]
        best = ahead[0]
        for place in ahead:
            if sum(unit.last < place for unit in waiting[: most + 1]) > most:
                break
            if ends[place] <= ends[best]:
                best = place
        own = [unit for unit in waiting if unit.last < best]
        waiting = waiting[len(own) :]
        blocks.append(Block(range(start, best), tuple(sorted(own, key=lambda unit: unit.maker))))
        places = ahead
        start = best
    return blocks


def _signature(facts: StageFacts, block: Block, moved: bool = False) -> Hashable:
    """Return a key that is equal for blocks on which every policy costs the same.

    If moved, also for blocks that read other storages, made as far ahead of them.
    """
    first, stop = block.layers.start, block.layers.stop
    own = {index for unit in block.units for index in unit.storages}

    def name(index: int) -> Hashable:
        maker = facts.makers[index]
        if index not in own and maker < first:
            return ("other", maker - first) if moved else ("other", index)
        return maker - first, facts.makes[maker].index(index), facts.sizes[index]

    # Read by later blocks, but theirs to save: the next block's inputs.
    later = tuple(
        (name(index), facts.alive[index] - first) if moved else (index, facts.alive[index])
        for index in sorted(own)
        if facts.alive[index] >= stop
    )
    layers = tuple(
        (
            tuple((name(index), facts.alive[index] - first) for index in facts.makes[at]),
            tuple(name(index) for index in facts.reads[at]),
            tuple(name(index) for index in facts.saves[at]),
            facts.forward_peak[at],
            facts.backward_peak[at],
            facts.passed[at],
            facts.forward[at],
            facts.backward[at],
        )
        for at in block.layers
    )
    return layers, later
