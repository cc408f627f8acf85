"""A model's layers in another order of execution, as plain data: storages, gradients, ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.layer_graph import Colocation, Gradient, LayerGraph, Storage


def reordered(graph: LayerGraph, order: Sequence[int]) -> LayerGraph:
    """Return the graph whose layers run in another topological order.

    Layers read, compute and save the same; a storage lives to whichever of its readers is last
    now, and of the layers that add to one gradient the last one makes it now.

    Args:
        graph: The layers.
        order: For each new position the present one; empty keeps them. Layers that must be on one
            stage (`ties`) stay side by side.

    Raises:
        PathosegError: It is no order of these layers in which each runs after those it reads.
    """
    if not order:
        return graph
    size = len(graph.layers)
    if sorted(order) != list(range(size)):
        raise _unfit(graph, f"it does not name each of the {size} layers once")
    new = [0] * size
    for position, old in enumerate(order):
        new[old] = position
    for position, layer in enumerate(graph.layers):
        for name in layer.inputs:
            if name in graph.position and new[graph.position[name]] > new[position]:
                raise _unfit(graph, f"{layer.name} would run before {name}, which it reads")
    for tie in graph.ties:
        if any(new[at] - new[tie.first] != at - tie.first for at in range(tie.first, tie.last + 1)):
            raise _unfit(graph, f"it parts layers that belong together: {tie.reason}")
    # The caller and the backward are at `size`, what was there before at -1.
    moved = [*new, size, -1]
    gradients = _gradients(graph, moved)
    return replace(
        graph,
        layers=tuple(
            replace(graph.layers[old], gradients=tuple(gradients.get(position, ())))
            for position, old in enumerate(order)
        ),
        storages=_storages(graph, moved),
        ties=tuple(
            sorted(
                (Colocation(moved[tie.first], moved[tie.last], tie.reason) for tie in graph.ties),
                key=lambda tie: (tie.first, tie.last, tie.reason),
            )
        ),
        order=tuple(graph.numbers[old] for old in order),
    )


def _storages(graph: LayerGraph, moved: Sequence[int]) -> tuple[Storage, ...]:
    """The storages, each until its last reader in the new order."""
    size = len(graph.layers)
    last: dict[int, int] = {}
    for name in (*graph.inputs, *graph.position):
        # A view keeps the storage of its base from when it is made.
        users = [*graph.readers.get(name, ()), graph.position.get(name, -1)]
        for value in graph.made_by(name):
            if value.storage is not None:
                own = max(moved[user] for user in users)
                last[value.storage] = max(own, last.get(value.storage, -1))
    return tuple(
        replace(
            storage,
            layer=moved[storage.layer],
            until=size if storage.until == size else last.get(index, moved[storage.until]),
        )
        for index, storage in enumerate(graph.storages)
    )


def _gradients(graph: LayerGraph, moved: Sequence[int]) -> dict[int, list[Gradient]]:
    """By new position, the gradients that a layer's backward leaves to others."""
    found: dict[int, list[Gradient]] = {}
    for position, layer in enumerate(graph.layers):
        for gradient in layer.gradients:
            adding = sorted({moved[at] for at in (position, *gradient.sums)}, reverse=True)
            until = moved[gradient.until]
            if until < adding[0]:
                own = Gradient(gradient.bytes, until, tuple(at for at in adding[1:] if at >= until))
                found.setdefault(adding[0], []).append(own)
    return found


def _unfit(graph: LayerGraph, why: str) -> PathosegError:
    return PathosegError(
        f"This is no order of the layers of {graph.model}: {why}.",
        "Plan again with `pathoseg plan`, for this model, tile and configuration.",
    )
