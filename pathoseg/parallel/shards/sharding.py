"""Runs a model's layers on one strip of its rows: what a stage of several ranks asks of this room.

The life of a strip, of a stage on two ranks:

    whole input ─┬─ cut ──> rows [0, 4)  ─ conv ─┬─ norm ─┬─ relu ─ … ─┬─ loss ─ + ──> L
                 │                          halo │   sums │            │        │ sums
                 └─ cut ──> rows [4, 8)  ─ conv ─┴─ norm ─┴─ relu ─ … ─┴─ loss ─ + ──> L
    backward        <── parts of dL/dx are exchanged where rows were, and sums where sums were

Parameters are whole on each rank; their gradients are parts, whose sum over the ranks is that of
the whole tile. The loss, which all ranks know, counts 1 / ranks on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.segment import Call, Step
from pathoseg.parallel.shards.elementwise import elementwise_rules, is_pointwise, pointwise
from pathoseg.parallel.shards.exchange import Team
from pathoseg.parallel.shards.norms import norm_rules
from pathoseg.parallel.shards.rows import Rows, Split
from pathoseg.parallel.shards.strip import Rule, Strip, locals_of, whole
from pathoseg.parallel.shards.window_rules import window_rules


class Rules:
    """The rules by which functions run on strips; pointwise ones are those that torch marks so."""

    def __init__(self) -> None:
        self._known: dict[str, Rule | None] = {
            **elementwise_rules(),
            **window_rules(),
            **norm_rules(),
        }

    def find(self, name: str) -> Rule | None:
        """Return the rule of the function of this name, or None."""
        if name not in self._known:
            self._known[name] = pointwise if is_pointwise(name) else None
        return self._known[name]


class RowCopies:
    """The rows of strips that were copied where the model may have a view of them.

    A write into either of them would be in both: it shows in their version counters.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[_Memory, _Memory]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, rows: Tensor, copy: Tensor) -> None:
        if copy is not rows:
            self._pairs.append((_Memory(rows), _Memory(copy)))

    def check(self, count: int | None = None) -> None:
        """Refuse writes that are missing in memory which is still used.

        Args:
            count: The number of pairs to check, of the oldest; None is all.

        Raises:
            PathosegError: One of two was written into, and the other one is still there.
        """
        count = len(self._pairs) if count is None else count
        kept = []
        for rows, copy in self._pairs[:count]:
            for one, other in ((rows, copy), (copy, rows)):
                if one.is_written() and other.is_used():
                    raise PathosegError(
                        "The model writes in place into a part of a tile that is cut into strips, "
                        "or into what a part of it was taken from.",
                        "Write it without the in-place form, or train without [parallel] shards.",
                    )
            if rows.is_used() and copy.is_used():
                kept.append((rows, copy))
        self._pairs[:count] = kept


class _Memory:
    """The memory of a tensor, which this does not hold, and the writes into it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # untyped in torch
        self._witness = tensor.detach()
        # The version counter stays, the memory goes.
        self._witness.data = self._witness.new_empty(0)
        self._version = self._witness._version

    def is_written(self) -> bool:
        return self._witness._version != self._version

    def is_used(self) -> bool:
        return not self._storage.expired()  # type: ignore[no-untyped-call]  # untyped in torch


class Sharding:
    """A model whose tiles are cut into even strips of rows, on one of the ranks that share them.

    Args:
        transport: Joins the ranks that share a tile, and carries nothing else.
        graph: The model's layers, with the shapes of whole tiles.

    Attributes:
        team: The ranks.
        gathered: By layer, the function that took whole tensors on each rank.
    """

    def __init__(self, transport: Transport, graph: LayerGraph) -> None:
        first = next(iter(graph.inputs.values())).shape
        self.team = Team(transport, Split.even(first[-2], transport.ranks))
        self.rule = Rules().find
        self.gathered: dict[str, str] = {}
        self._copies = RowCopies()
        self.copied = self._copies.add
        self._graph, self._layer = graph, ""
        self._opaque = {
            layer.name for layer in graph.layers if layer.kind == graph.modules.get(layer.module)
        }

    def rows(self, height: int) -> Rows:
        """Return this rank's rows of a tensor of this height."""
        bounds = self.team.split.of(height)
        return Rows(bounds[self.team.rank], bounds[self.team.rank + 1])

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of an image, or of labels (…, height, width)."""
        rows = self.rows(tensor.shape[-2])
        return tensor.narrow(-2, rows.first, rows.height)

    def strip(self, local: Tensor, height: int) -> Strip:
        """Return this rank's rows (…, rows, width) as the tensor of this height."""
        return Strip(local, local.dim() - 2, self.team.split.of(height), self)

    def received(self, name: str, local: Tensor) -> Any:
        """Return the value of a layer or input that came as this rank's rows, or whole."""
        [value, *_] = self._graph.made_by(name)
        sizes = enumerate(zip(value.shape, local.shape, strict=True))
        cut = [dim for dim, (whole, own) in sizes if dim and whole != own]
        if not cut:
            return local
        return Strip(local, cut[0], self.team.split.of(value.shape[cut[0]]), self)

    def sent(self, value: Any) -> Tensor:
        """Return what `received` reads: rows, or the whole tensor where rows are cut oddly."""
        self._copies.check()
        if not isinstance(value, Strip):
            return value  # type: ignore[no-any-return]  # a tensor, the same on all ranks
        if value.strip_dim and value.bounds == self.team.split.of(value.bounds[-1]):
            return value.local
        return value.whole()

    def run(self, position: int, step: Step, values: Mapping[str, Any]) -> Any:
        """Run one layer on strips; an opaque one, whose reach is unknown, on whole tensors.

        Args:
            position: Not used; the callers of a segment's `run` give it.
            step: The layer.
            values: What has been made so far, by name: strips or tensors.

        Returns:
            What the layer makes; strips where it was cut.
        """
        self._layer = step.name
        self._copies.check()
        earlier = len(self._copies)
        if step.name in self._opaque:
            given = {name: values[name] for name in step.inputs}
            if any(isinstance(leaf, Strip) for leaf in tree_leaves(given)):
                self.gathers("opaque block")
                values = whole(given)
        made = step.run(values)
        # The opaque layer's own arguments may be read by no other.
        self._copies.check(earlier)
        return made

    def recorded(self, record: Call) -> Call:
        """Return how layers run whose saved tensors may be dropped and made again.

        A layer that runs once more finds what it heard of other ranks in its forward, and sends
        nothing.

        Args:
            record: Runs a layer, as for `Segment`, on this rank's rows in place of strips.
        """

        def run(position: int, step: Step, values: Mapping[str, Any]) -> Any:
            given = {name: values[name] for name in step.inputs}
            cuts = {name: _cuts(value) for name, value in given.items()}
            heard: list[Any] = []
            cuts_made: list[_Cut | None] = []

            def layer(rows: Mapping[str, Any]) -> Any:
                strips = {name: self._placed(rows[name], own) for name, own in cuts.items()}
                with self.team.hearing(heard):
                    made = self.run(position, step, strips)
                cuts_made[:] = _cuts(made)
                return locals_of(made)

            made = record(position, Step(step.name, step.inputs, layer), locals_of(given))
            return self._placed(made, cuts_made)

        return run

    def _placed(self, rows: Any, cuts: Sequence[_Cut | None]) -> Any:
        """Return nested values with strips in place of the rows that were cut so (`_cuts`)."""
        leaves, spec = tree_flatten(rows)
        placed = [
            leaf if cut is None else Strip(leaf, *cut, self)
            for leaf, cut in zip(leaves, cuts, strict=True)
        ]
        return tree_unflatten(placed, spec)

    def returned(self, values: Any) -> Any:
        """Return what the model returns, tensors that were gathered on the way cut again.

        A tensor (…, rows, width) with as many rows as the model's input is cut as that is.
        """
        self._copies.check()
        height = self.team.split.height

        def cut(leaf: Any) -> Any:
            is_whole = isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[-2] == height
            return self.strip(self.cut(leaf), height) if is_whole else leaf

        return tree_map(cut, values)

    def targets(self, targets: Any) -> Any:
        """Return the loss function's second argument with rows of this rank as strips.

        A tensor (…, rows, width) with as many rows as this rank has of the model's input is cut.
        """
        self._layer = "the loss"
        height = self.team.split.height
        own = self.rows(height).height

        def cut(leaf: Any) -> Any:
            is_cut = isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[-2] == own
            return self.strip(leaf, height) if is_cut else leaf

        return tree_map(cut, targets)

    def check_loss(self, returned: Any, losses: Tensor) -> None:
        """Refuse a loss without a gradient: a custom autograd function knows no strips.

        Raises:
            PathosegError: What the model returned has a gradient, and the losses have none.
        """
        if not losses.requires_grad and any(
            isinstance(leaf, Strip) and leaf.requires_grad for leaf in tree_leaves(returned)
        ):
            raise PathosegError(
                "The loss of a tile that is cut into strips has no gradient: it is computed by a "
                "custom autograd function.",
                "Write it with torch's functions, or train without [parallel] shards.",
            )

    def gathers(self, what: str) -> None:
        self.gathered.setdefault(self._layer, what)


_Cut = tuple[int, tuple[int, ...]]  # the dimension and the bounds of a strip


def _cuts(values: Any) -> list[_Cut | None]:
    """Return the dimension and bounds of each strip among nested values; None for other leaves."""
    return [
        (leaf.strip_dim, leaf.bounds) if isinstance(leaf, Strip) else None
        for leaf in tree_leaves(values)
    ]
