"""The differentiable exchange of rows between the ranks of a tile, and sums over them.

The loss is the sum of what each rank computes of it, so the gradient of what a rank was sent is
its own part of the whole: it goes back to the owner, who adds up all parts.

    rank 0 owns rows 0-3     forward  0 1 2 3 ─── 3 ──> 3'4 5 6 7      rank 1 owns rows 4-7
                             backward 0 1 2 3 <── dL/d3' ── ...        and reads row 3 too
                                            +                          (its copy is 3')

What every rank has alike (a global pooling, a loss) follows the same rule: each rank's gradient of
it is a part, and parts add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.shards.rows import Rows, Split, strips

_TAG = 0  # of all halos: a pair of ranks sends them in the order in which layers run
Arrival = Callable[[], dict[int, Tensor]]


class Team:
    """The ranks that share each tile.

    Args:
        transport: Joins them, and carries nothing else.
        split: The strips of the model's input.

    Attributes:
        rank: This rank among them.
        shards: How many they are.
        split: As given.
        waiting: Makes the context in which it waits for others, who may need what it holds.
    """

    def __init__(self, transport: Transport, split: Split) -> None:
        if split.shards != transport.ranks:
            raise PathosegError(
                f"{split.shards} strips are for as many ranks, not {transport.ranks}.",
                f"Start {split.shards} ranks for each tile.",
            )
        self.rank, self.shards, self.split = transport.rank, transport.ranks, split
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._transport = transport
        self._heard: list[Any] | None = None
        self._again: Iterator[Any] | None = None

    @contextmanager
    def hearing(self, heard: list[Any]) -> Iterator[None]:
        """Make a context for layers that may run once more, and then send nothing.

        On a second run the messages of the first are replayed from `heard`; an inner context
        records what is replayed, for a third run.

        Args:
            heard: Empty the first time, when it gains what the layers hear of other ranks; layers
                that run again hear the same of it.
        """
        before = self._again, self._heard
        if heard:
            self._again = iter(heard)
        else:
            self._heard = heard
        try:
            yield
        finally:
            self._again, self._heard = before

    def prepare(self) -> None:
        """Name the messages and sums of the ranks, as for `Transport`."""
        self._transport.prepare(
            [rank for rank in range(self.shards) if rank != self.rank], [tuple(range(self.shards))]
        )

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, equal to the bit on all; not differentiable."""
        summed = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._sum(summed)

    def table(self, own: Tensor) -> Tensor:
        """Return what all ranks hand in, stacked by rank; not differentiable."""
        rows = own.new_zeros(self.shards, *own.shape)
        rows[self.rank] = own.detach()
        return self._sum(rows)

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._again is not None:
            tensor = next(self._again).clone()
        else:
            with self.waiting():
                self._transport.sum(tensor, tuple(range(self.shards))).wait()
        if self._heard is not None:
            self._heard.append(tensor.clone())  # the layer may write into what it is given
        return tensor

    def swap(
        self, give: Callable[[int], Tensor | None], room: Callable[[int], Tensor | None]
    ) -> Arrival:
        """Begin to send a tensor to each rank that gets one, and to receive from each that sends.

        Ranks begin their swaps in the same order, and each waits for one before the next.

        Args:
            give: Returns what a rank gets, or None; it must not change before the wait.
            room: Returns a contiguous tensor for what a rank sends, or None.

        Returns:
            A function that waits for the messages and returns what came, by ascending rank.
        """
        if self._again is not None:
            known = next(self._again)  # what came in the forward
            if self._heard is not None:
                self._heard.append(known)
            return lambda: known
        others = [rank for rank in range(self.shards) if rank != self.rank]
        came = {rank: into for rank in others if (into := room(rank)) is not None}
        pending = [self._transport.receive(into, rank, _TAG) for rank, into in came.items()]
        for rank in others:
            sent = give(rank)
            if sent is not None:
                pending.append(self._transport.send(sent.contiguous(), rank, _TAG))
        heard = self._heard

        def arrive() -> dict[int, Tensor]:
            with self.waiting():
                for each in pending:
                    each.wait()
            if heard is not None:
                heard.append(came)
            return came

        return arrive


def total(team: Team, part: Tensor) -> Tensor:
    """Return the sum of the ranks' parts, on each rank; differentiable."""
    whole: Tensor = _Total.apply(part, team)  # type: ignore[no-untyped-call]  # torch's
    return whole


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.total(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.team.total(gradients[0]), None


@dataclass(frozen=True)
class Halos:
    """The rows that each rank reads of a tensor of which it owns a strip.

    Attributes:
        team: The ranks.
        dim: The dimension of the rows.
        bounds: First row of each rank's strip, and the height at the end.
        reads: The rows that each rank needs; some may lie beyond the tensor.
    """

    team: Team
    dim: int
    bounds: tuple[int, ...]
    reads: tuple[Rows, ...]

    @property
    def own(self) -> Rows:
        """The rows of this rank's strip."""
        return strips(self.bounds)[self.team.rank]

    @property
    def wanted(self) -> Rows:
        """The rows that this rank needs."""
        return self.reads[self.team.rank]

    @property
    def real(self) -> Rows:
        """The rows of `wanted` that lie within the tensor."""
        return self.wanted.within(Rows(0, self.bounds[-1]))

    def of(self, rank: int) -> Rows:
        """Return the rows that this rank needs of another's strip; of no count where none."""
        return strips(self.bounds)[rank].within(self.real)

    def lent(self, rank: int) -> Rows:
        """Return the rows that another rank needs of this one's strip; of no count where none."""
        return self.own.within(self.reads[rank].within(Rows(0, self.bounds[-1])))

    def fetch(self, strip: Tensor) -> Arrival:
        """Begin to lend rows of this rank's strip, and to receive the rows `of` each other rank."""

        def give(rank: int) -> Tensor | None:
            part = self.lent(rank)
            return cut(strip, self.dim, self.own, part) if part.height else None

        return self.team.swap(give, lambda rank: _empty(strip, self.dim, self.of(rank).height))

    def give_back(self, give: Callable[[int], Tensor | None], like: Tensor) -> Arrival:
        """Begin to return the gradients of rows to their owners, and to receive one's own.

        Args:
            give: Returns the gradient of the rows `of` a rank, None where there are none.
            like: Some rows of the same tensor, or of its gradient.
        """
        return self.team.swap(give, lambda rank: _empty(like, self.dim, self.lent(rank).height))

    def add(self, came: Mapping[int, Tensor], gradient: Tensor) -> None:
        """Add to the gradient of this rank's strip what `give_back` brought."""
        for rank, part in came.items():
            cut(gradient, self.dim, self.own, self.lent(rank)).add_(part)


def extended(
    team: Team,
    strip: Tensor,
    dim: int,
    bounds: Sequence[int],
    reads: Sequence[Rows],
    fill: float = 0.0,
) -> Tensor:
    """Return the rows that this rank reads of a tensor of which it owns a strip; differentiable.

    Every exchange of rows is this one: a halo, strips that are cut elsewhere, a whole tensor.

    Args:
        team: The ranks.
        strip: This rank's rows.
        dim: Dimension of the rows.
        bounds: First row of each rank's strip, and the height at the end.
        reads: By rank, the rows that it needs; they may reach beyond the tensor.
        fill: Value of the rows beyond the tensor.

    Returns:
        The rows `reads[team.rank]`; `strip` itself where every rank needs just its own.
    """
    if list(reads) == strips(bounds):
        return strip
    rows: Tensor = Extended.apply(  # type: ignore[no-untyped-call]  # torch's
        strip, team, dim, tuple(bounds), tuple(reads), fill
    )
    return rows


class Extended(torch.autograd.Function):
    """`extended` as a function of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        strip: Tensor,
        team: Team,
        dim: int,
        bounds: tuple[int, ...],
        reads: tuple[Rows, ...],
        fill: float,
    ) -> Tensor:
        ctx.halos = halos = Halos(team, dim, bounds, reads)
        own, wanted = halos.own, halos.wanted
        came = halos.fetch(strip)()
        pieces = []
        for rank in range(team.shards):
            if rank == team.rank and (mine := own.within(halos.real)).height:
                pieces.append(cut(strip, dim, own, mine))
            elif rank in came and halos.of(rank).height:
                pieces.append(came[rank].contiguous(memory_format=memory_format(strip)))
        above, below = (
            min(wanted.stop, 0) - wanted.first,
            wanted.stop - max(bounds[-1], wanted.first),
        )
        for rows_missing, at in ((above, 0), (below, len(pieces) + 1)):
            if rows_missing > 0:
                shape = _shape(strip, dim, rows_missing)
                filled = strip.new_full(shape, fill).contiguous(memory_format=memory_format(strip))
                pieces.insert(at, filled)
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        halos: Halos = ctx.halos
        dim, own, wanted = halos.dim, halos.own, halos.wanted

        def give(rank: int) -> Tensor | None:
            part = halos.of(rank)
            return cut(gradient, dim, wanted, part) if part.height else None

        came = halos.give_back(give, gradient)()
        mine = own.within(halos.real)
        if mine == own:
            summed = cut(gradient, dim, wanted, own).clone()
        else:
            shape = _shape(gradient, dim, own.height)
            summed = gradient.new_zeros(shape)
            if mine.height:
                cut(summed, dim, own, mine).copy_(cut(gradient, dim, wanted, mine))
        halos.add(came, summed)
        return summed, None, None, None, None, None


def cut(tensor: Tensor, dim: int, has: Rows, wanted: Rows) -> Tensor:
    """The rows `wanted` of a tensor with the rows `has`, as a view."""
    return tensor.narrow(dim, wanted.first - has.first, wanted.height)


def _shape(like: Tensor, dim: int, rows: int) -> list[int]:
    return [rows if at == dim else size for at, size in enumerate(like.shape)]


def _empty(like: Tensor, dim: int, rows: int) -> Tensor | None:
    return like.new_empty(_shape(like, dim, rows)) if rows else None


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the order in which a tensor's elements lie."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


@contextmanager
def rebuilt(rows: Tensor, strip: Tensor, dim: int, has: Rows, own: Rows) -> Iterator[None]:
    """Make a context in which a layer that saves `rows` for its backward saves only the halos.

    The strip's own rows are there already, saved by the layer before or after it: the backward
    joins them again. Nothing is sent for it.

    Args:
        rows: What `extended` returned for `strip`.
        strip: The rank's own rows.
        dim: Their dimension.
        has: The rows of `rows`.
        own: The rows of `strip`.
    """
    mine = own.within(has)
    is_padded = _shape(rows, dim, own.height) != [*strip.shape]  # in another dimension
    if rows is strip or not mine.height or is_padded:
        yield
        return
    # Autograd holds `pack` to the backward, which must hold neither the rows nor the strip.
    kept, version, storage = [strip.detach()], strip._version, rows.untyped_storage()._cdata
    shape, offset = rows.shape, rows.storage_offset()
    # Hooks around these, if there are any, are given what is saved in the end.
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    keep, back = outer or (_same, _same)

    def pack(tensor: Tensor) -> tuple[Any, ...]:
        is_rows = tensor.untyped_storage()._cdata == storage and tensor.shape == shape
        if not is_rows or tensor.storage_offset() != offset:
            return (keep(tensor),)
        above = cut(tensor, dim, has, Rows(has.first, mine.first)).clone()
        below = cut(tensor, dim, has, Rows(mine.stop, has.stop)).clone()
        return keep(above), keep(kept[0]), keep(below)

    def unpack(packed: tuple[Any, ...]) -> Tensor:
        if len(packed) == 1:
            return back(packed[0])  # type: ignore[no-any-return]
        above, strip, below = map(back, packed)
        if outer is None and strip._version != version:
            raise RuntimeError("a strip that a layer's backward needs was written into")
        return torch.cat([above, cut(strip, dim, own, mine), below], dim)

    with saved_tensors_hooks(pack, unpack):
        yield
    kept.clear()


def _same(tensor: Any) -> Any:
    return tensor
