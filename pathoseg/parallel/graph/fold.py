"""Folds a layer graph to its modules: what runs inside one becomes one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pathoseg.parallel.graph.layer_graph import (
    Colocation,
    Gradient,
    Layer,
    LayerGraph,
    Life,
    Work,
    lifetimes,
    unsendable,
)


def fold(graph: LayerGraph, depth: int) -> LayerGraph:
    """Return the graph with each call of a module at `depth` as one layer.

    Depth 1 are the model's own children (module level), depth 2 their children (block level, in
    most networks), and so on until nothing folds. Layers that run outside of such modules stay.
    So does the memory of stages, within some percent where folds pass on several values. The graph
    is in the model's own order (`order` is empty): in another one a module may be left and come
    back to, and would become two layers of one name.
    """
    groups = folded_layers(graph, depth)
    folding = _Folding(
        graph,
        {position: index for index, group in enumerate(groups) for position in group},
        {
            graph.layers[position].name: _call(graph.layers[position], depth)
            or graph.layers[position].name
            for position in range(len(graph.layers))
        },
        lifetimes(graph),
    )
    folded = replace(
        graph,
        layers=tuple(folding.layer(group, depth) for group in groups),
        outputs=tuple(dict.fromkeys(folding.name.get(name, name) for name in graph.outputs)),
        storages=tuple(
            replace(
                storage,
                layer=folding.index.get(storage.layer, -1),
                until=folding.index.get(storage.until, len(groups)),
            )
            for storage in graph.storages
        ),
        ties=(),
    )
    ties = {
        Colocation(folding.index[tie.first], folding.index[tie.last], tie.reason)
        for tie in graph.ties
    }
    kept = [tie for tie in {*ties, *unsendable(folded)} if tie.first < tie.last]
    return replace(folded, ties=tuple(sorted(kept, key=lambda tie: (tie.first, tie.last))))


def folded_layers(graph: LayerGraph, depth: int) -> list[list[int]]:
    """Group the layers of a graph as `fold(graph, depth)` does.

    Returns:
        For each folded layer, the positions in `graph` of the layers that it holds, ascending.
    """
    runs = groupby(
        range(len(graph.layers)),
        lambda position: _call(graph.layers[position], depth) or str(position),
    )
    return [list(run) for _, run in runs]


def _call(layer: Layer, depth: int) -> str:
    """The call of a module at `depth` that a layer runs in; empty where there is none."""
    return layer.scope[depth - 1] if len(layer.scope) >= depth else ""


@dataclass(frozen=True)
class _Folding:
    """The folded position of each layer by position, its folded name by name, lives by layer."""

    graph: LayerGraph
    index: dict[int, int]
    name: dict[str, str]
    lives: list[list[Life]]

    def layer(self, group: Sequence[int], depth: int) -> Layer:
        """The layers at these positions as one."""
        graph, own = self.graph, [self.graph.layers[position] for position in group]
        name = self.name[own[0].name]
        if len(own) == 1:
            inputs = tuple(dict.fromkeys(self.name.get(source, source) for source in own[0].inputs))
            return replace(own[0], name=name, inputs=inputs, gradients=self._gradients(group))
        stop = group[-1] + 1
        sent = [layer for layer in own if graph.readers.get(layer.name, (0,))[-1] >= stop]
        read = (self.name.get(source, source) for layer in own for source in layer.inputs)
        return Layer(
            name,
            graph.modules[name.partition("@")[0]],
            {},
            own[0].scope[:depth],
            tuple(dict.fromkeys(source for source in read if source != name)),
            tuple(value for layer in sent for value in layer.outputs),
            len(sent) == 1 and sent[0].sendable,
            tuple(dict.fromkeys(name for layer in own for name in layer.parameters)),
            tuple(dict.fromkeys(name for layer in own for name in layer.buffers)),
            replace(_sum([layer.forward for layer in own]), peak=self._forward_peak(group)),
            replace(_sum([layer.backward for layer in own]), peak=self._backward_peak(group)),
            tuple(dict.fromkeys(storage for layer in own for storage in layer.saved)),
            self._gradients(group),
        )

    def _gradients(self, group: Sequence[int]) -> tuple[Gradient, ...]:
        """Return the gradients that the backward of a group leaves to earlier groups."""
        here = self.index[group[0]]
        left = []
        for position in group:
            for gradient in self.graph.layers[position].gradients:
                sums = dict.fromkeys(self.index[place] for place in gradient.sums)
                until = self.index.get(gradient.until, -1)
                if until != here:
                    others = tuple(place for place in sums if place != here)
                    left.append(Gradient(gradient.bytes, until, others))
        return tuple(left)

    def _forward_peak(self, group: Sequence[int]) -> int:
        """Return the peak bytes of a group's forward beyond what is held when it begins."""
        peak = 0
        lives: list[Life] = []
        for position in group:
            alive = sum(life.bytes for life in lives if life.end >= position)
            peak = max(peak, alive + self.graph.layers[position].forward.peak)
            lives += self.lives[position]
        return peak

    def _backward_peak(self, group: Sequence[int]) -> int:
        """Return the peak bytes of a group's backward beyond what is held when it begins.

        What its layers free counts against it.
        """
        layers, stop = self.graph.layers, group[-1] + 1
        made = [(at, gradient) for at in group for gradient in layers[at].gradients]
        freed = [
            (gradient.until, gradient.bytes)
            for layer in layers[stop:]
            for gradient in layer.gradients
        ]
        freed += [(life.saved, life.bytes) for lives in self.lives[:stop] for life in lives]
        freed = [(at, nbytes) for at, nbytes in freed if group[0] <= at < stop]
        return max(
            layers[now].backward.peak
            + sum(gradient.bytes for at, gradient in made if gradient.until <= now < at)
            - sum(nbytes for at, nbytes in freed if at > now)
            for now in group
        )


def _sum(works: Sequence[Work]) -> Work:
    return Work(
        sum(work.flops for work in works),
        sum(work.read for work in works),
        sum(work.written for work in works),
    )
