"""Small layer graphs made of series and parallels, by hypothesis, with a time for each layer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pathoseg.parallel.cost.cost_model import LayerTime
from pathoseg.parallel.graph.layer_graph import (
    Layer,
    LayerGraph,
    Parameter,
    Storage,
    Value,
    Work,
)


@dataclass
class Shape:
    """The layers of a graph so far: what each reads, and how long it takes."""

    reads: list[list[int]]
    times: list[int]

    def add(self, reads: list[int], time: int) -> int:
        self.reads.append(reads)
        self.times.append(time)
        return len(self.reads) - 1


@st.composite
def series_parallel(draw: st.DrawFn, depth: int = 3) -> tuple[LayerGraph, list[int]]:
    """A graph of 1 to about 30 layers, and the time of each layer's forward."""
    shape = Shape([], [])

    def grow(source: int | None, depth: int) -> int:
        """Build behind a layer; the last layer of what was built."""
        kind = draw(st.sampled_from(["piece", "series", "parallel"])) if depth else "piece"
        if kind == "piece":
            return shape.add([] if source is None else [source], draw(st.integers(0, 5)))
        if kind == "series":
            for _ in range(draw(st.integers(1, 3))):
                source = grow(source, depth - 1)
            assert source is not None
            return source
        ends = [grow(source, depth - 1) for _ in range(draw(st.integers(2, 3)))]
        return shape.add(ends, draw(st.integers(0, 2)))

    grow(None, depth)
    return graph_of(shape.reads, [draw(st.integers(0, 9)) for _ in shape.reads]), shape.times


def graph_of(reads: list[list[int]], sizes: list[int]) -> LayerGraph:
    """The graph of layers that read these earlier ones (the input, where they read none)."""
    count = len(reads)
    names = [f"layer{index}" for index in range(count)]
    readers = [[at for at, own in enumerate(reads) if index in own] for index in range(count)]
    outputs = [name for name, own in zip(names, readers, strict=True) if not own]
    storages = [Storage(1, -1, count)]
    storages += [
        Storage(size, index, count if not own else max(own))
        for index, (size, own) in enumerate(zip(sizes, readers, strict=True))
    ]
    layers = [
        Layer(
            name,
            "any",
            {},
            (name,),
            tuple(names[at] for at in own) or ("image",),
            (Value((size,), "uint8", size, index + 1, True),),
            True,
            (f"{name}.weight",),
            (),
            Work(written=1, peak=size),
            Work(written=1),
            (),
            (),
        )
        for index, (name, own, size) in enumerate(zip(names, reads, sizes, strict=True))
    ]
    return LayerGraph(
        "Random",
        {"image": Value((1,), "uint8", 1, 0, False)},
        tuple(layers),
        tuple(outputs),
        tuple(storages),
        {f"{name}.weight": Parameter(1, True) for name in names},
        {},
        dict.fromkeys(names, "Layer"),
    )


@dataclass(frozen=True)
class Given:
    """Times that stand in a list; a backward takes twice a forward.

    Attributes:
        seconds: By position of a layer in the model, which its name ends with.
    """

    seconds: tuple[int, ...]
    note: str = "given"

    def time(self, layer: Layer) -> LayerTime:
        forward = self.seconds[int(layer.name.removeprefix("layer"))]
        return LayerTime(forward, 2 * forward)
