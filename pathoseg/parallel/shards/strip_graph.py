"""The layers of one strip of a tile as plain data, read without its other ranks and without memory.

The model's layers run on a fake strip by the rules of this room, as on a rank with a neighbour on
each side: what they save (the halos), hold for a moment (rows that are joined) and send is what
a rank saves, holds and sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pathoseg.parallel.comm.transport import Pending
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.segment import Step
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.shards.rows import Split, strips
from pathoseg.parallel.shards.sharding import Sharding
from pathoseg.parallel.shards.strip import locals_of


@dataclass(frozen=True)
class StripGraph:
    """The layers of the strip that takes most memory.

    Attributes:
        rank: The rank that has it.
        graph: The layers, with the shapes of the strip.
        gathered: By layer, the function that takes whole tiles on each rank.
        heard: By layer, the bytes that its forward is told by other ranks, which stay where layers
            run once more.
    """

    rank: int
    graph: LayerGraph
    gathered: dict[str, str]
    heard: dict[str, int]


def strip_graph(traced: Traced, shards: int) -> StripGraph:
    """Read the layers of a model as they run on one strip of a tile.

    Args:
        traced: The model, with whole tiles.
        shards: The strips of a tile.

    Raises:
        PathosegError: A strip is smaller than a halo, or a layer has fewer rows than strips.
    """
    first = next(iter(traced.graph.inputs.values())).shape
    bounds = strips(Split.even(first[-2], shards).bounds)
    # The largest, of several one with two neighbours.
    rank = max(range(shards), key=lambda at: (bounds[at].height, 0 < at < shards - 1))
    nowhere = Nowhere(rank, shards)
    sharding, heard = Sharding(nowhere, traced.graph), dict[str, int]()

    def place(name: str, tensor: Tensor) -> Any:
        shape = list(tensor.shape)
        is_image = len(shape) > 3 and shape[-2] >= shards
        if is_image or (len(shape) > 2 and shape[-2] == first[-2]):  # all else is whole (`Fit`)
            shape[-2] = sharding.rows(shape[-2]).height
        local = tensor.new_empty(shape)
        return sharding.received(name, local.requires_grad_(tensor.requires_grad))

    def run(position: int, step: Step, values: Mapping[str, Any]) -> Any:
        before = nowhere.heard
        made = sharding.run(position, step, values)
        heard[step.name] = nowhere.heard - before
        return made

    graph = traced.measured(place, run, locals_of)
    return StripGraph(rank, graph, sharding.gathered, heard)


class _Done:
    """A message to nowhere, which ends at once: implements Pending."""

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


class Nowhere:
    """The transport of a rank whose neighbours are not there: implements Transport.

    Attributes:
        heard: The bytes that they would have told it.
    """

    reads = frozenset[str]()

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.heard = 0

    def prepare(self, peers: Collection[int], groups: Collection[tuple[int, ...]]) -> None: ...

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        return _Done()

    def receive(self, into: Tensor, source: int, tag: int) -> Pending:
        self.heard += into.nbytes
        return _Done()

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        self.heard += tensor.nbytes
        return _Done()

    def gather(self, text: str) -> list[str]:
        return [text] * self.ranks

    def barrier(self) -> None: ...

    def abort(self, reason: str, fits: int | None = None) -> None: ...

    def close(self) -> None: ...
