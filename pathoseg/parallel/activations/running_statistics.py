"""Running statistics of norms: kept by microbatch, applied once a step in the global order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pathoseg.device import widest
from pathoseg.parallel.graph.layer_graph import LayerGraph

_Call = tuple[int, Any]  # position of the layer, norm


class RunningStatistics:
    """The running statistics of the norms that a stage's layers call.

    During a step each call leaves its mean and (unbiased) variance in a place of its own instead
    of the running ones: with momentum 1 and zeros to start from, torch's kernels leave there just
    what they measured. A norm that is called again has another place for that.

    Args:
        model: The model.
        graph: Its layers.
        layers: Positions of the stage's.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, layers: range) -> None:
        self._calls: list[_Call] = []
        for position in layers:
            self._calls += [(position, norm) for norm in norms_at(model, graph, position)]
        self._rounds: list[list[_Call]] = []
        self._sizes: list[int] = []
        self._again: dict[int, list[tuple[Any, Tensor, Tensor]]] = {}
        self._kept: dict[int, Tensor] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make a context for one step, in which no norm updates its running statistics."""
        self._kept = {}
        self._rounds = _rounds([call for call in self._calls if _is_tracking(call[1])])
        self._sizes = [n.num_features for norms in self._rounds for _, n in norms for _ in "mv"]
        norms = [norm for _, norm in self._rounds[0]] if self._rounds else []
        own = [(norm, dict(norm._buffers), norm.momentum) for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
            norm._buffers["num_batches_tracked"] = None
        try:
            yield
        finally:
            self._again.clear()
            for norm, buffers, momentum in own:
                norm._buffers.update(buffers)
                norm.momentum = momentum

    def lend(self) -> Tensor | None:
        """Have the norms of the next forward write their means and variances into a new row.

        Returns:
            The row, for `keep`: the means and variances (2 · features numbers a norm) of all calls;
            None where no norm tracks statistics.
        """
        if not self._rounds:
            return None
        # Not the last forward's again: autograd keeps it, though its backward does not read it.
        row: Tensor = self._rounds[0][0][1].running_mean.new_zeros(sum(self._sizes))
        places = iter(torch.split(row, self._sizes))
        self._again.clear()
        for number, calls in enumerate(self._rounds):
            for position, norm in calls:
                place = (norm, next(places), next(places))
                if number == 0:
                    _lend(*place)
                if len(self._rounds) > 1:
                    self._again.setdefault(position, []).append(place)
        return row

    @property
    def watched(self) -> Collection[int]:
        """Return the positions of the layers before which `enter` has to be called, in a step."""
        if len(self._rounds) < 2:
            return ()
        return {position for calls in self._rounds for position, _ in calls}

    def enter(self, position: int) -> None:
        """Point the norms of the layer at `position`, which runs next, to their part of the row."""
        for place in self._again.get(position, ()):
            _lend(*place)

    def keep(self, microbatch: int, row: Tensor | None) -> None:
        """Keep the row that a microbatch's forward has filled."""
        if row is not None:
            self._kept[microbatch] = row

    def apply(self, sizes: Sequence[int], sum_copies: Callable[[Tensor], None]) -> None:
        """Update the running statistics by the rows of all copies, in order of the microbatch.

        Called after `kept`, by all ranks with a copy of the stage.

        Args:
            sizes: Samples of each microbatch of the step; one of 0 samples is left out.
            sum_copies: Sums a tensor in place over the ranks with a copy of the stage.
        """
        if not self._rounds:
            return
        mean = self._rounds[0][0][1].running_mean
        rows = mean.new_zeros(len(sizes), sum(self._sizes))
        for microbatch, row in self._kept.items():
            rows[microbatch] = row
        sum_copies(rows)
        widths = [2 * sum(norm.num_features for _, norm in norms) for norms in self._rounds]
        turns = [
            (number, part)
            for row, size in zip(rows, sizes, strict=True)
            if size
            for number, part in enumerate(torch.split(row, widths))
        ]
        for number, parts in groupby(turns, lambda turn: turn[0]):
            _apply([norm for _, norm in self._rounds[number]], [part for _, part in parts])


def norms_at(model: nn.Module, graph: LayerGraph, position: int) -> list[Any]:
    """Return the norm modules with buffers that the layer at `position` calls, ordered by path."""
    paths = {name.rpartition(".")[0] for name in graph.layers[position].buffers}
    modules = (model.get_submodule(path) for path in sorted(paths))
    return [module for module in modules if isinstance(module, _NormBase)]


@contextmanager
def uncounted(norms: Iterable[Any]) -> Iterator[None]:
    """Make a context in which these norms, in training mode, update no running statistics."""
    own = [(norm, dict(norm._buffers)) for norm in norms if _is_tracking(norm)]
    for norm, _ in own:
        _lend(norm, torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var))
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)


def _is_tracking(norm: Any) -> bool:
    return bool(norm.training and norm.track_running_stats and norm.running_mean is not None)


def _rounds(calls: Sequence[_Call]) -> list[list[_Call]]:
    """The first call of each norm, the second of those with two, and so on."""
    rounds: list[list[_Call]] = []
    seen: dict[int, int] = {}
    for call in calls:
        number = seen.get(id(call[1]), 0)
        seen[id(call[1])] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(call)
    return rounds


def _lend(norm: Any, mean: Tensor, variance: Tensor) -> None:
    norm._buffers["running_mean"], norm._buffers["running_var"] = mean, variance


def _momentum(norm: Any) -> float:
    """The share of the next measurement, which is counted; as the forward of each kind has it."""
    if not isinstance(norm, _BatchNorm):
        return norm.momentum or 0.0
    count = norm.num_batches_tracked
    if count is not None:
        count += 1
    if norm.momentum is None:  # a plain average
        assert count is not None
        return 1 / float(count)
    return norm.momentum


def _apply(norms: Sequence[Any], rows: Sequence[Tensor]) -> None:
    """running = (1 - momentum) * running + momentum * measured, once for each row."""
    buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    running = torch.cat(buffers)
    widths = torch.tensor([len(buffer) for buffer in buffers], device=running.device)
    for row in rows:
        momenta = [momentum for norm in norms for momentum in [_momentum(norm)] * 2]
        share = torch.tensor(momenta, dtype=widest(running.device), device=running.device)
        share = share.repeat_interleave(widths)
        running = (1 - share).to(running.dtype) * running + share.to(running.dtype) * row
    values = torch.split(running, [len(buffer) for buffer in buffers])
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
