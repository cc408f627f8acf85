"""How long each storage lives: to its last reader, or through the backward of who saved it."""

from __future__ import annotations

from dataclasses import dataclass

from pathoseg.parallel.graph.layer_graph import LayerGraph


@dataclass(frozen=True, slots=True)
class Life:
    """A storage: its size, its last reader, and the first layer that saves it.

    One that is saved has the model's end as its last reader, one that is not as its saver.
    """

    bytes: int
    end: int
    saved: int


def lifetimes(graph: LayerGraph) -> list[list[Life]]:
    """For each layer, the storages that it makes and that outlive its forward."""
    size = len(graph.layers)
    end: dict[int, int] = {}
    saved: dict[int, int] = {}
    for position, layer in enumerate(graph.layers):
        for storage in layer.saved:
            saved.setdefault(storage, position)
            end[storage] = size
        last_reader = graph.readers.get(layer.name, (position,))[-1]
        for value in layer.outputs:
            if value.storage is not None:
                end[value.storage] = max(end.get(value.storage, 0), last_reader)
    lives: list[list[Life]] = [[] for _ in range(size)]
    for storage, last in end.items():
        made = graph.storages[storage]
        if made.layer >= 0:
            lives[made.layer].append(Life(made.bytes, last, saved.get(storage, size)))
    return lives
