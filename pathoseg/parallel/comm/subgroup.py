"""Some of the ranks of a transport, numbered from 0, as a transport of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from pathoseg.parallel.comm.transport import Pending, Transport


class Subgroup:
    """Joins some ranks of a transport: implements Transport.

    Two ranks belong to one subgroup of those in use at most, or no tag is used by both: messages
    are those of the whole transport. `gather` and `barrier` are called by all its ranks together,
    whatever their subgroup, and so is `prepare`; `abort` ends all.

    Args:
        whole: The transport.
        members: Its ranks that belong to the subgroup, ascending, this one among them.
    """

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        self.rank, self.ranks = members.index(whole.rank), len(members)
        self.reads = whole.reads
        self._whole, self._members = whole, tuple(members)
        self.barrier, self.abort = whole.barrier, whole.abort

    def prepare(self, peers: Collection[int], groups: Collection[tuple[int, ...]]) -> None:
        of_whole = [tuple(self._members[rank] for rank in group) for group in groups]
        self._whole.prepare([self._members[rank] for rank in peers], of_whole)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        return self._whole.send(tensor, self._members[to], tag)

    def receive(self, into: Tensor, source: int, tag: int) -> Pending:
        return self._whole.receive(into, self._members[source], tag)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        return self._whole.sum(tensor, tuple(self._members[rank] for rank in ranks))

    def gather(self, text: str) -> list[str]:
        told = self._whole.gather(text)
        return [told[rank] for rank in self._members]

    def close(self) -> None:
        """Leave the whole transport open, which others use too."""
