"""Who makes, writes, saves and reads the storages of a stage, and the bytes and seconds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pathoseg.parallel.graph.layer_graph import LayerGraph


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
    """All that decides what a retention of a stage's layers costs.

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
    return StageFacts(
        graph,
        layers,
        {
            index: SavedStorage(
                sizes[index], makers[index], tuple(writers[index]), users[0], users[-1]
            )
            for index, users in savers.items()
            if users
        },
        sizes,
        makers,
        alive,
        {at: tuple(made) for at, made in makes.items()},
        reads,
        saves,
        *({at: values[at] for at in layers} for values in peaks),
        *({at: values[at] for at in layers} for values in times),
    )
