"""Cuts a model's layers into stages: balanced exactly, evenly by count, or where the user says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.memory_size import memory_text
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition, StageEdge
from pathoseg.parallel.planning.memory_model import Distinct, MemoryModel

Balance = Literal["compute", "memory"] | Sequence[float]

# By first and by stop (both indices of places to cut), something of the stage between them.
_Matrix = NDArray[np.float64]
# The matrix of each stage.
_Matrices = Callable[[int], _Matrix]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that a stage may need.

    Attributes:
        cap: Bytes that a rank has; None is no limit.
        in_flight: By stage, the microbatches between their forward and backward; empty is one.
        recompute: Of these microbatches, the stages keep what they received, and the activations
            of one.
    """

    cap: int | None = None
    in_flight: tuple[int, ...] = ()
    recompute: bool = False


def balance(
    graph: LayerGraph,
    stages: int,
    by: Balance = "compute",
    limit: MemoryLimit | None = None,
    byte_cost: float = 0.0,
) -> Partition:
    """Cut a graph as `Cutter.balance` does; for one that is cut once."""
    return Cutter(graph).balance(stages, by, limit, byte_cost)


class Cutter:
    """Cuts one graph, any number of times; what its stages need is computed once.

    Args:
        graph: The model's layers.
        model: Computes what stages need; None takes AdamW and no workspace.
        most: Where there are more places to cut, only those count across which no more is sent
            than across their neighbours; where these are too many, every second, third… of them.
            None: all count.
    """

    def __init__(
        self, graph: LayerGraph, model: MemoryModel | None = None, most: int | None = None
    ) -> None:
        self._graph = graph
        self._model = model
        self._cuts = places(graph)
        if most is not None and len(self._cuts) > most:
            self._cuts = _narrowest(graph, self._cuts, most)

    @property
    def places(self) -> Sequence[int]:
        """The positions at which a stage may begin, ascending, and the number of layers."""
        return self._cuts

    @property
    def most_stages(self) -> int:
        """The largest number of stages into which the graph can be cut."""
        return len(self._cuts) - 1

    def balance(
        self,
        stages: int,
        by: Balance = "compute",
        limit: MemoryLimit | None = None,
        byte_cost: float = 0.0,
    ) -> Partition:
        """Cut so that the most loaded stage is least loaded; among such cuts, send least.

        A stage is an interval of the layers in their order of execution, in which activations die
        and layers write in place. The cut is exact: dynamic programming over all intervals.

        Args:
            stages: Number of stages.
            by: A stage's load: `compute`, the FLOPs of forward and backward; `memory`, its peak;
                or the sum of a weight of each layer, such as its time.
            limit: The memory that a stage may need.
            byte_cost: Load for each byte that a stage receives from others; unused by memory.

        Raises:
            PathosegError: The model cannot be cut so, or a weight is no number from 0.
        """
        self.check(stages)
        limit = limit or MemoryLimit()
        peaks = self._peaks(limit)
        loads = peaks if by == "memory" else self._loads(_weights(self._graph, by), byte_cost)

        def allowed(stage: int) -> _Matrix:
            if limit.cap is None:
                return loads(stage)
            return _only(loads(stage), peaks(stage) <= limit.cap)

        worst, _ = _shortest(allowed, stages, np.maximum)
        if worst[-1] == np.inf:
            raise self._too_small(stages, limit)
        _, path = _shortest(
            lambda stage: _only(self._messages, allowed(stage) <= worst[-1]), stages, np.add
        )
        taken = [float(loads(stage)[ends]) for stage, ends in enumerate(pairwise(path))]
        return cut(self._graph, [self._cuts[index] for index in path], taken)

    def least_caps(self, stages: int, limit: MemoryLimit | None = None) -> list[float]:
        """For 1, 2… `stages` stages, the smallest cap that allows a cut, whatever time it takes.

        Args:
            stages: The most stages.
            limit: What is in flight; its own cap does not count.

        Raises:
            PathosegError: The model cannot be cut into so many stages.
        """
        self.check(stages)
        return _shortest(self._peaks(limit or MemoryLimit()), stages, np.maximum)[0]

    def check(self, stages: int) -> None:
        """Check that the model can be cut into `stages` stages.

        Raises:
            PathosegError: It cannot.
        """
        if not 1 <= stages <= self.most_stages:
            ties = self._graph.ties
            longest = max(ties, key=lambda tie: tie.last - tie.first, default=None)
            reason = f" (one part has to stay together: {longest.reason})" if longest else ""
            raise PathosegError(
                f"{self._graph.model} cannot be cut into {stages} stages.",
                f"Choose 1 to {self.most_stages} stages{reason}.",
            )

    def _loads(self, weights: Sequence[float], byte_cost: float) -> _Matrices:
        """The weight of each interval, the same for every stage."""
        before = np.concatenate([[0.0], np.cumsum(weights)])[self._cuts]
        loads = before[None, :] - before[:, None] + byte_cost * self._messages
        loads[np.tril_indices(len(self._cuts))] = np.inf
        return lambda stage: loads

    @cached_property
    def _messages(self) -> _Matrix:
        """Bytes that a stage receives from others, each value once."""
        graph, cuts = self._graph, self._cuts
        size = len(graph.layers)
        received = Distinct(size)
        found = np.zeros((len(cuts), len(cuts)))
        row = {position: index for index, position in enumerate(cuts)}
        for name in graph.outputs:
            if name in graph.position:
                received.use(name, size, graph.bytes_of(name))
        for position in reversed(range(size)):
            layer = graph.layers[position]
            received.forget(layer.name, graph.bytes_of(layer.name))
            for name in layer.inputs:
                if name in graph.position:
                    received.use(name, position, graph.bytes_of(name))
            if position in row:
                found[row[position]] = received.bytes[cuts]
        return found

    @cached_property
    def _needs(self) -> tuple[_Matrix, _Matrix, _Matrix]:
        """The peak of each interval, what a further microbatch adds, and what of it is received."""
        cuts = self._cuts
        once, more, received = np.full((3, len(cuts), len(cuts)), np.inf)
        for row in (self._model or MemoryModel(self._graph)).rows(cuts[:-1]):
            index = cuts.index(row.first)
            stops = cuts[index + 1 :]
            once[index, index + 1 :] = row.peaks(1)[stops]
            more[index, index + 1 :] = row.peaks(2)[stops] - row.peaks(1)[stops]
            *_, messages, _, _, _ = row.fields
            received[index, index + 1 :] = messages[stops]
        return once, more, received

    def _peaks(self, limit: MemoryLimit) -> _Matrices:
        """By stage, the peak of each interval."""

        def peaks(stage: int) -> _Matrix:
            once, more, received = self._needs
            in_flight = limit.in_flight[stage] if limit.in_flight else 1
            further = received if limit.recompute else more
            return once if in_flight == 1 else once + (in_flight - 1) * further

        return peaks

    def _too_small(self, stages: int, limit: MemoryLimit) -> PathosegError:
        """The cap allows no cut: says why and which cap would."""
        assert limit.cap is not None
        peaks = self._peaks(limit)
        smallest = np.min([np.diagonal(peaks(stage), 1) for stage in range(stages)], 0)
        worst = int(smallest.argmax())
        rank = f"the {memory_text(limit.cap)} of a rank"
        if smallest[worst] > limit.cap:
            name, needs = self._graph.layers[self._cuts[worst]].name, memory_text(smallest[worst])
            return PathosegError(
                f"{name}, which cannot be cut further, needs {needs}, more than {rank}.",
                "Make the tile or the microbatch smaller, or use ranks with more memory.",
            )
        least = memory_text(self.least_caps(stages, limit)[-1])
        model = self._graph.model
        return PathosegError(
            f"No cut of {model} into {stages} stages fits {rank}."
            if stages > 1
            else f"Whole, {model} needs {least}, more than {rank}.",
            f"Use more stages, or ranks with {least}, or fewer microbatches in flight.",
        )


def even(graph: LayerGraph, stages: int) -> Partition:
    """Cut naively: stages of equally many layers (views and sizes aside), whatever they cost.

    Raises:
        PathosegError: The model cannot be cut into so many stages.
    """
    Cutter(graph).check(stages)
    cuts = places(graph)
    count = np.concatenate([[0], np.cumsum([not layer.is_free for layer in graph.layers])])
    path = [0]
    for stage in range(1, stages):
        wanted = count[-1] * stage / stages
        free = range(path[-1] + 1, len(cuts) - stages + stage)
        path.append(min(free, key=lambda index: abs(count[cuts[index]] - wanted)))
    bounds = [*(cuts[index] for index in path), len(graph.layers)]
    return cut(graph, bounds, np.diff(count[bounds]).tolist())


def cut(graph: LayerGraph, bounds: Sequence[int], loads: Sequence[float] = ()) -> Partition:
    """Make the partition with given bounds: the edges between its stages, and their inputs.

    Args:
        graph: The layers.
        bounds: Position of each stage's first layer, ascending from 0, and the number of layers.
        loads: Load of each stage, to be kept in the partition.
    """
    stage_of = [
        stage for stage in range(len(bounds) - 1) for _ in range(*bounds[stage : stage + 2])
    ]
    last = len(bounds) - 2
    stage_of.append(last)  # the model's result reads what it returns
    edges = []
    for position, layer in enumerate(graph.layers):
        readers = graph.readers.get(layer.name, ())
        for target in {stage_of[reader] for reader in readers} - {stage_of[position]}:
            size, back = graph.bytes_of(layer.name), graph.gradient_bytes(layer.name)
            edges.append(StageEdge(layer.name, stage_of[position], target, size, back > 0))
    inputs: list[list[str]] = [[] for _ in range(last + 1)]
    for name in graph.inputs:
        for stage in {stage_of[reader] for reader in graph.readers.get(name, ())}:
            inputs[stage].append(name)
    return Partition(
        tuple(bounds),
        tuple(sorted(edges, key=lambda edge: (edge.source, edge.target))),
        tuple(map(tuple, inputs)),
        tuple(loads),
    )


def places(graph: LayerGraph) -> list[int]:
    """Return the positions at which a stage may begin, ascending, and the number of layers."""
    size = len(graph.layers)
    inside = np.zeros(size + 1, np.int64)
    for tie in graph.ties:
        inside[tie.first + 1 : tie.last + 1] = 1
    return [position for position in range(size + 1) if not inside[position]]


def _narrowest(graph: LayerGraph, cuts: Sequence[int], most: int) -> list[int]:
    """The ends, and of the cuts between them those that send no more than either neighbour (of
    equal ones, the last), evenly thinned out to about so many."""
    crossing = np.zeros(len(graph.layers) + 1)
    for position, layer in enumerate(graph.layers):
        last = graph.readers.get(layer.name, (position,))[-1]
        crossing[position + 1 : last + 1] += graph.bytes_of(layer.name)
    sent = crossing[cuts]
    kept = [
        cuts[index]
        for index in range(1, len(cuts) - 1)
        if sent[index - 1] >= sent[index] < sent[index + 1]
    ]
    return [0, *kept[:: -(-len(kept) // most) or 1], cuts[-1]]


def _weights(graph: LayerGraph, by: Balance) -> list[float]:
    if by == "compute":
        return [float(layer.forward.flops + layer.backward.flops) for layer in graph.layers]
    weights = [float(weight) for weight in by]
    if len(weights) != len(graph.layers) or not all(0 <= w < np.inf for w in weights):
        raise PathosegError(
            f"{len(weights)} weights cannot balance {len(graph.layers)} layers of {graph.model}.",
            "Give each layer one number, 0 or more.",
        )
    return weights


def _only(matrix: _Matrix, where: NDArray[np.bool_]) -> _Matrix:
    """The matrix, infinite elsewhere."""
    chosen: _Matrix = np.where(where, matrix, np.inf)
    return chosen


def _shortest(
    costs: _Matrices, stages: int, join: Callable[[_Matrix, _Matrix], _Matrix]
) -> tuple[list[float], list[int]]:
    """The least joined cost of paths through 1, 2… `stages` intervals; the last path's indices."""
    best = costs(0)[0]
    choices, least = [], [float(best[-1])]
    for stage in range(1, stages):
        joined = join(best[:, None], costs(stage))
        choices.append(joined.argmin(0))
        best = joined.min(0)
        least.append(float(best[-1]))
    path = [len(best) - 1]
    for choice in reversed(choices):
        path.append(int(choice[path[-1]]))
    return least, [0, *reversed(path)]


def custom(graph: LayerGraph, names: Sequence[str]) -> Partition:
    """Cut before each named layer, or before the first layer of each named module.

    Raises:
        PathosegError: A name is unknown, or a cut there would part layers that belong together.
    """
    starts = {_position(graph, name): name for name in names}
    for start, name in starts.items():
        for tie in graph.ties:
            if tie.first < start <= tie.last:
                layers = graph.layers
                raise PathosegError(
                    f"A cut before {name} would part {layers[tie.first].name} from "
                    f"{layers[tie.last].name}: {tie.reason}.",
                    f"Cut {_around(graph, start)}.",
                )
    if len(starts) < len(names) or 0 in starts:
        raise PathosegError(
            f"The cuts {', '.join(names)} leave a stage without layers.",
            "Name each place once; the first stage begins by itself.",
        )
    return cut(graph, [0, *sorted(starts), len(graph.layers)])


def _position(graph: LayerGraph, name: str) -> int:
    """Position of a layer, or of a module's first one."""
    if name in graph.position:
        return graph.position[name]
    for position, layer in enumerate(graph.layers):
        if any(call == name or call.startswith(f"{name}.") for call in layer.scope):
            return position
    known = dict.fromkeys(item for layer in graph.layers for item in (*layer.scope, layer.name))
    near = difflib.get_close_matches(name, known, n=1)
    raise PathosegError(
        f"{graph.model} has no layer or module {name!r} to cut before.",
        f"Did you mean {near[0]}?" if near else "`pathoseg plan --draw` shows all names.",
    )


def _around(graph: LayerGraph, position: int) -> str:
    """The allowed cuts around a position, in words."""
    cuts = places(graph)[1:-1]
    earlier = [graph.layers[place].name for place in cuts if place < position][-1:]
    later = [graph.layers[place].name for place in cuts if place > position][:1]
    return f"before {' or before '.join([*earlier, *later])}" if cuts else "nowhere in this model"
