"""How long each storage lives: to its last reader, or through the backward of who saved it."""

from __future__ import annotations

from dataclasses import dataclass

from pathoseg.parallel.graph.layer_graph import LayerGraph


@dataclass(frozen=True, slots=True)
class Life:
    """A storage: its size, the last layer whose forward needs it, and the first that saves it.

    Where none saves it, that is the number of layers.
    """

    bytes: int
    end: int
    saved: int


def lifetimes(graph: LayerGraph) -> list[list[Life]]:
    """For each layer, the storages that it makes and that outlive its forward."""
    size = len(graph.layers)
    saved: dict[int, int] = {}
    for position, layer in enumerate(graph.layers):
        for storage in layer.saved:
            saved.setdefault(storage, position)
    lives: list[list[Life]] = [[] for _ in range(size)]
    for index, made in enumerate(graph.storages):
        if made.until > made.layer >= 0:
            lives[made.layer].append(Life(made.bytes, made.until, saved.get(index, size)))
    return lives
