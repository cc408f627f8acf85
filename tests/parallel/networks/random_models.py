"""Models of any structure, by hypothesis: branches, long skips, views, writes in place, ties."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import nn

_CHANNELS = 8

# What a step makes of two earlier values, both (n, 8), and of one of three layers.
_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]] = {
    "layer": lambda one, two, layer: layer(one),
    "relu": lambda one, two, layer: one.relu(),
    "relu_": lambda one, two, layer: one.relu_(),
    "tanh": lambda one, two, layer: torch.tanh(one),
    "add": lambda one, two, layer: one + two,
    "iadd": lambda one, two, layer: one.add_(two),
    "multiply": lambda one, two, layer: one * two,
    "joined": lambda one, two, layer: torch.cat([one, two], 1)[:, 4:12],
    "split": lambda one, two, layer: torch.cat(one.chunk(2, 1)[::-1], 1),
    "reshaped": lambda one, two, layer: one.view(-1, 2, 4).flatten(1),
    "resized": lambda one, two, layer: one.mean(1, keepdim=True).expand(one.shape[0], two.size(1)),
    "detached": lambda one, two, layer: one.detach() * 2,
    "normed": lambda one, two, layer: torch.layer_norm(one, [one.shape[-1]]),
}
_OF_TWO = ("add", "iadd", "multiply", "joined", "resized")


class RandomModel(nn.Module):
    """Runs a program of (operation, source, source, layer); returns what no step reads.

    Layers 0 and 1 are the same module: using both ties the steps.
    """

    def __init__(self, program: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        shared = nn.Linear(_CHANNELS, _CHANNELS)
        self.layers = nn.ModuleList([shared, shared, nn.Linear(_CHANNELS, _CHANNELS)])
        self.first = nn.Linear(_CHANNELS, _CHANNELS)
        self.program = program

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [self.first(rows)]
        unread = {0}
        for operation, *sources, layer in self.program:
            places = [source % len(values) for source in sources]
            read = [values[place] for place in places]
            unread -= set(places if operation in _OF_TWO else places[:1])
            unread.add(len(values))
            values.append(_OPERATIONS[operation](*read, self.layers[layer]))
        return tuple(values[place] for place in sorted(unread))


def random_models(detaching: bool = True, plain: bool = False) -> st.SearchStrategy[RandomModel]:
    """Models of up to ten steps; some cannot be trained (they write into what autograd saved).

    Plain ones neither write in place, nor repeat values without a copy, nor normalise.
    """
    numbers = st.integers(0, 20)
    odd = {*("detached",) * (not detaching), *("iadd", "relu_", "resized", "normed") * plain}
    step = st.tuples(
        st.sampled_from([name for name in _OPERATIONS if name not in odd]),
        numbers,
        numbers,
        st.integers(0, 2),
    )
    return st.builds(RandomModel, st.lists(step, min_size=1, max_size=10))
