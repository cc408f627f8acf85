"""Running statistics of norms: kept by microbatch, applied once a step in the global order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pathoseg.device import widest
from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.layer_graph import LayerGraph

# The buffers of torch's norms.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_Call = tuple[int, Any]  # position of the layer, norm
_Place = tuple[Any, Tensor, Tensor, Tensor]  # norm; its mean, variance and count of calls
_Row = tuple[Tensor, Tensor]  # means and variances of all calls, 2 · features each; counts


class RunningStatistics:
    """The running statistics of the norms that a stage's layers call.

    During a step each call leaves its mean and (unbiased) variance in a place of its own instead
    of the running ones: with momentum 1, torch's kernels leave there just what they measured. A
    norm that is called again has another place for that. A variance of -1, with which a place
    begins, is left where an opaque block skips its norm, as stochastic depth does.

    Args:
        model: The model.
        graph: Its layers.
        layers: Positions of the stage's.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, layers: range) -> None:
        self._model = model
        self._calls: list[_Call] = []
        for position in layers:
            self._calls += [(position, norm) for norm in norms_at(model, graph, position)]
        # A layer that calls a norm inside may skip it, or call it again: in the backward, too, as
        # torch's checkpoint does.
        paths = {position: graph.layers[position].module for position, _ in self._calls}
        own = {position: model.get_submodule(path) for position, path in paths.items()}
        self._is_called_inside = any(norm is not own[position] for position, norm in self._calls)
        self._rounds: list[list[_Call]] = []
        self._sizes: list[int] = []
        self._again: dict[int, list[_Place]] = {}
        self._kept: dict[int, _Row] = {}

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
        try:
            yield
        finally:
            self._again.clear()
            for norm, buffers, momentum in own:
                norm._buffers.update(buffers)
                norm.momentum = momentum

    def lend(self) -> _Row | None:
        """Have the norms of the next forward write their means and variances into a new row.

        Returns:
            The row, for `keep`: the means and variances (2 · features numbers a norm) of all calls,
            and how often each norm was called for it; None where no norm tracks statistics.
        """
        if not self._rounds:
            return None
        # Not the last forward's again: autograd keeps it, though its backward does not read it.
        # Counts lie apart, as they are written into between norms.
        mean = self._rounds[0][0][1].running_mean
        row: _Row = mean.new_full((sum(self._sizes),), -1), mean.new_zeros(len(self._sizes) // 2)
        # Each place has a version of its own: instance norms write into theirs as autograd sees,
        # while batch norms have saved theirs.
        places = iter([part.data for part in torch.split(row[0], self._sizes)])
        counts = iter(row[1])
        self._again.clear()
        for number, calls in enumerate(self._rounds):
            for position, norm in calls:
                place = (norm, next(places), next(places), next(counts))
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

    def keep(self, microbatch: int, row: _Row | None) -> None:
        """Keep the row that a microbatch's forward has filled."""
        if row is not None:
            self._kept[microbatch] = row

    def discard(self) -> None:
        """Have norms that the next backward may run again write into a row that nobody keeps."""
        if self._is_called_inside:
            self.lend()

    def apply(self, sizes: Sequence[int], sum_copies: Callable[[Tensor], None]) -> None:
        """Update the running statistics by the rows of all copies, in order of the microbatch.

        Called after `kept`, by all ranks with a copy of the stage.

        Args:
            sizes: Samples of each microbatch of the step; one of 0 samples is left out.
            sum_copies: Sums a tensor in place over the ranks with a copy of the stage.

        Raises:
            PathosegError: An opaque block has called a norm more than once.
        """
        if not self._rounds:
            return
        counted = len(self._sizes) // 2
        mean = self._rounds[0][0][1].running_mean
        rows = mean.new_zeros(len(sizes), sum(self._sizes) + counted)
        for microbatch, row in self._kept.items():
            rows[microbatch] = torch.cat(row)
        sum_copies(rows)
        skipped = torch.zeros(len(sizes), counted, dtype=torch.bool)
        if self._is_called_inside:  # elsewhere each is called once; not to ask saves a wait
            # Batch norms count their calls, instance norms do not.
            variances = [*accumulate(self._sizes, initial=0)][1::2]  # where each begins
            skipped, repeated = torch.stack([rows[:, variances] < 0, rows[:, -counted:] > 1]).cpu()
            if repeated.any():
                calls = [norm for norms in self._rounds for _, norm in norms]
                raise self._refused(calls[int(repeated.any(0).nonzero()[0])])
        norms_of = [[norm for _, norm in calls] for calls in self._rounds]
        widths = [2 * sum(norm.num_features for norm in norms) for norms in norms_of]
        turns = [
            (number, part, without.tolist())
            for row, skips, size in zip(rows[:, :-counted], skipped, sizes, strict=True)
            if size
            for number, (part, without) in enumerate(
                zip(row.split(widths), skips.split([*map(len, norms_of)]), strict=True)
            )
        ]
        for number, parts in groupby(turns, lambda turn: turn[0]):
            _apply(norms_of[number], [(part, without) for _, part, without in parts])

    def _refused(self, norm: Any) -> PathosegError:
        [path] = [name for name, module in self._model.named_modules() if module is norm]
        return PathosegError(
            f"A layer of the model calls {path} more than once, so its stage can have no copies "
            "and not run twice.",
            "Choose an order with one replica and no recomputation, such as 1f1b.",
        )


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
        mean = norm.running_mean
        _lend(norm, torch.zeros_like(mean), torch.zeros_like(mean), mean.new_zeros(()))
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


def _lend(norm: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    norm._buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=count)


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


def _apply(norms: Sequence[Any], rows: Sequence[tuple[Tensor, Sequence[bool]]]) -> None:
    """running = (1 - momentum) * running + momentum * measured, once for each row.

    Beside each row stands, by norm, whether it was skipped.
    """
    buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    running = torch.cat(buffers)
    widths = torch.tensor([len(buffer) for buffer in buffers], device=running.device)
    shares: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}  # of what is kept, of the row
    for row, skipped in rows:
        momenta = tuple(
            0.0 if is_skipped else _momentum(norm)
            for norm, is_skipped in zip(norms, skipped, strict=True)
        )
        if momenta not in shares:  # most norms have one momentum for all rows
            share = torch.tensor(
                [momentum for momentum in momenta for _ in "mv"],
                dtype=widest(running.device),
                device=running.device,
            ).repeat_interleave(widths)
            shares[momenta] = (1 - share).to(running.dtype), share.to(running.dtype)
        kept, new = shares[momenta]
        running = kept * running + new * row
    values = torch.split(running, [len(buffer) for buffer in buffers])
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
