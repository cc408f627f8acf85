"""The cut of layers into blocks for torch.compile, and the error of a block that fails."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.compiled_blocks import find_blocks
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced


class _Wired(nn.Module):
    """Additions of earlier values, two each; the caller gets the last and some more.

    Args:
        reads: By layer, the two values that it adds: the input is 0, a layer's its number.
        returned: Layers whose values are returned beside the last.
    """

    def __init__(self, reads: list[tuple[int, int]], returned: set[int]) -> None:
        super().__init__()
        self.reads, self.returned = reads, sorted(returned | {len(reads)})

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        values = [images]
        for one, two in self.reads:
            values.append(values[one] + values[two])
        return tuple(values[at] for at in self.returned)


@st.composite
def _networks(draw: st.DrawFn) -> tuple[_Wired, list[set[int]]]:
    count = draw(st.integers(2, 9))
    reads = [
        (draw(st.integers(max(0, at - 2), at)), draw(st.integers(0, at))) for at in range(count)
    ]
    returned = draw(st.sets(st.integers(1, count), max_size=2))
    apart = st.sets(st.integers(0, count - 1), min_size=1, max_size=2)
    return _Wired(reads, returned), [set(), draw(apart)]


@settings(max_examples=40)  # with all ranges of layers of each
@given(_networks())
def test_blocks_are_the_longest_of_which_one_value_is_read(
    network: tuple[_Wired, list[set[int]]],
) -> None:
    model, apart = network
    graph = Traced(model, torch.empty(2)).graph
    size = len(graph.layers)
    for alone in apart:
        for begin, end in combinations(range(size + 1), 2):
            _are_longest_blocks(graph, range(begin, end), alone)


def _are_longest_blocks(graph: LayerGraph, layers: range, apart: set[int]) -> None:
    def is_block(block: range) -> bool:
        inner = {graph.layers[position].name for position in block[:-1]}
        outside = [layer.inputs for at, layer in enumerate(graph.layers) if at not in block] + [
            graph.outputs
        ]
        free = not apart & {*block}
        return free and not any(inner & {*names} for names in outside)

    found = find_blocks(graph, layers, apart)
    free = layers.start
    for block in found:
        assert layers.start <= free <= block.start < block.stop <= layers.stop
        assert len(block) > 1
        assert is_block(block)
        longer = [range(block.start, stop) for stop in range(block.stop + 1, layers.stop + 1)]
        assert not any(map(is_block, longer))
        free = block.stop
    covered = {position for block in found for position in block}
    for begin in {*layers} - covered:
        assert not any(is_block(range(begin, end)) for end in range(begin + 2, layers.stop + 1))


class _Affine(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images * 2 + 1


@pytest.mark.slow
@pytest.mark.process
# What torch warns itself of where it imports its compiler.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_block_without_a_compiler_says_what_to_do() -> None:
    from torch._inductor import config

    segment = Traced(_Affine(), torch.ones(3)).compiled_segment(range(2), ())
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(PathosegError, match=r"layers from mul to add .*C\+\+ compiler") as error,
    ):
        segment({"images": torch.ones(3)})
    assert "a C++ compiler" in error.value.hint
