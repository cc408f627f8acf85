"""Blocks of consecutive layers, each compiled by torch.compile into fused kernels.

    layers   conv  norm  relu  conv  norm  relu  dropout  conv  norm  add
    blocks  [---------------------------------]          [-------------]
                                            |    apart: runs by itself
                                            `--  the one value that layers outside read

A layer stands apart if something is done around it that compiled code would not see: it draws
random numbers, which are seeded ahead of it; its saved tensors leave for the host; its norm writes
statistics elsewhere in each call. Inside a block the values between layers may never exist. What
torch.compile makes nothing of (a layer that asks for a tensor's value) runs as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pathoseg.parallel.graph.fx_tracer import Block, attribute
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.segment import Step


def find_blocks(graph: LayerGraph, layers: range, apart: Collection[int]) -> list[range]:
    """Cut layers into the longest blocks of which only the last layer's value is read outside.

    Args:
        graph: The model's layers.
        layers: Positions of those to cut.
        apart: Positions that are in no block.

    Returns:
        The blocks of two layers or more, in order.
    """
    last = [graph.readers.get(layer.name, (-1,))[-1] for layer in graph.layers]
    blocks = []
    begin = layers.start
    while begin < layers.stop:
        end = block_end = begin + 1
        furthest = last[begin]  # reader of a value inside [begin, end)
        while begin not in apart and end < layers.stop and end not in apart:
            end += 1
            if furthest < end:
                block_end = end
            furthest = max(furthest, last[end - 1])
        if block_end - begin > 1:
            blocks.append(range(begin, block_end))
        begin = block_end
    return blocks


def compiled_step(root: Any, nodes: Sequence[Any]) -> Step:
    """Return a step that runs the layers of a block in place of its last layer.

    Args:
        root: The module that was traced.
        nodes: The block's fx nodes, in order.
    """
    block = Block(root, nodes)
    read = [source.meta["layer"] for source in block.sources if source.op != "get_attr"]

    def run(values: Mapping[str, Any]) -> Any:
        return block(
            *(
                attribute(root, source) if source.op == "get_attr" else values[source.meta["layer"]]
                for source in block.sources
            )
        )

    return Step(nodes[-1].meta["layer"], tuple(read), run)
