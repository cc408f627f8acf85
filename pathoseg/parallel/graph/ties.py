"""What no cut may part: writers in place, sharers of weights, makers of what cannot be sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pathoseg.parallel.graph.layer_graph import LayerGraph, Tie


def find_ties(
    graph: LayerGraph, writes: Collection[tuple[int, int]], stateful: Collection[str]
) -> tuple[Tie, ...]:
    """The ties of a graph, by first layer.

    Args:
        graph: The layers, still without ties.
        writes: Which layer (by position) writes in place into which storage.
        stateful: Names of buffers that layers change or may change.
    """
    ties = {*_writers(graph, writes), *_sharers(graph, stateful), *unsendable(graph)}
    return tuple(sorted(ties, key=lambda tie: (tie.first, tie.last, tie.reason)))


def _writers(graph: LayerGraph, writes: Collection[tuple[int, int]]) -> Iterator[Tie]:
    """A layer that writes belongs to the maker: a received copy would leave other views as they
    were, and autograd allows no write into a leaf."""
    for writer, storage in writes:
        maker = graph.storages[storage].layer
        first, last = maker, writer
        if maker < 0:
            # Each stage is given the model's inputs afresh, so all readers have to be together.
            names = [name for name, value in graph.inputs.items() if value.storage == storage]
            readers = [position for name in names for position in graph.readers[name]]
            first, last = min(readers), min(max(*readers, writer), len(graph.layers) - 1)
        if first < last:
            target = graph.layers[maker].name if maker >= 0 else "the input"
            reason = f"{graph.layers[writer].name} writes in place into {target}"
            yield Tie(first, last, reason)


def _sharers(graph: LayerGraph, stateful: Collection[str]) -> Iterator[Tie]:
    """Copies of a trained weight, or of a running statistic, would drift apart."""
    found: dict[str, list[int]] = {}
    for position, layer in enumerate(graph.layers):
        trained = [name for name in layer.parameters if graph.parameters[name].trained]
        for name in (*trained, *(name for name in layer.buffers if name in stateful)):
            found.setdefault(name, []).append(position)
    for name, positions in found.items():
        if positions[0] < positions[-1]:
            yield Tie(positions[0], positions[-1], f"all use {name}")


def unsendable(graph: LayerGraph) -> Iterator[Tie]:
    """A layer that makes several values, or none that fits a message, belongs to its readers."""
    for position, layer in enumerate(graph.layers):
        readers = [reader for reader in graph.readers.get(layer.name, ()) if reader > position]
        if readers and not layer.sendable:
            last = min(readers[-1], len(graph.layers) - 1)
            if last > position:
                yield Tie(position, last, f"{layer.name} makes no single tensor to send")
