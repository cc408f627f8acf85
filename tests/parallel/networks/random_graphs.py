"""Small layer graphs of any shape, by hypothesis: skips, several outputs, views, ties."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pathoseg.parallel.graph.layer_graph import (
    Colocation,
    Gradient,
    Layer,
    LayerGraph,
    Parameter,
    Storage,
    Value,
    Work,
)

_SIZES = st.integers(0, 40)


@st.composite
def layer_graphs(draw: st.DrawFn, most: int = 8, ties: bool = True) -> LayerGraph:
    """Each layer reads one to three earlier ones (or the input); some are outputs."""
    count = draw(st.integers(1, most))
    names = [f"layer{index}" for index in range(count)]
    storages, layers = [Storage(draw(_SIZES), -1, count)], []
    for index, name in enumerate(names):
        earlier = ["image", *names[:index]]
        inputs = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3, unique=True))
        storages.append(Storage(draw(_SIZES), index, index))
        value = Value(
            (storages[-1].bytes,), "uint8", storages[-1].bytes, index + 1, draw(st.booleans())
        )
        saved = draw(st.sets(st.integers(0, index + 1), max_size=3))
        freed = [
            Gradient(draw(_SIZES), until, tuple(sorted(sums, reverse=True)))
            for until in draw(st.lists(st.integers(-1, index - 1), max_size=2))
            for sums in [
                draw(st.sets(st.integers(max(until, 0), index - 1), max_size=2)) if index else ()
            ]
        ]
        layers.append(
            Layer(
                name,
                "any",
                {},
                (f"block{index // 3}", name),
                tuple(inputs),
                (value,),
                True,
                (f"{name}.weight",),
                (),
                Work(draw(_SIZES), peak=value.bytes + draw(_SIZES)),
                Work(draw(_SIZES), peak=draw(_SIZES)),
                tuple(sorted(saved)),
                tuple(freed),
            )
        )
    read = {name for layer in layers for name in layer.inputs}
    unread = [name for name in names if name not in read]
    more = draw(st.lists(st.sampled_from(names), max_size=2))
    outputs = tuple(dict.fromkeys([*unread, *more]))
    for index, storage in enumerate(storages[1:]):
        reads = [place for place, layer in enumerate(layers) if names[index] in layer.inputs]
        saved = any(index + 1 in layer.saved for layer in layers)
        until = count if saved or names[index] in outputs else max(reads)
        storages[index + 1] = replace(storage, until=until)
    tied = draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=2)) if ties else []
    return LayerGraph(
        "Random",
        {"image": Value((), "uint8", storages[0].bytes, 0, False)},
        tuple(layers),
        outputs,
        tuple(storages),
        {f"{name}.weight": Parameter(draw(_SIZES), draw(st.booleans())) for name in names},
        {},
        {f"block{index}": "Block" for index in range(count)},
        tuple(Colocation(min(pair), max(pair), "drawn") for pair in tied if pair[0] != pair[1]),
    )
