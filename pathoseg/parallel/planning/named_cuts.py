"""Cuts a model's layers into stages where the user says."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.planning.partition import cut, places


def custom(graph: LayerGraph, names: Sequence[str]) -> Partition:
    """Cuts before each named layer, or before the first layer of each named module.

    Raises:
        PathosegError: A name is none, or a cut there would part what has to be together.
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
