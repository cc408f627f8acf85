"""The costs of stages and links that a schedule is simulated against."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from pathoseg.parallel.schedule.action import Edge


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor of a stage that is in host memory between a forward and its backward.

    Attributes:
        bytes: Its size.
        made: Time from the start of the forward (or recomputation) until it is made.
        needed: Time from the start of the backward until it is needed.
    """

    bytes: int
    made: float = 0
    needed: float = 0


@dataclass(frozen=True, slots=True)
class StageCost:
    """Times and bytes of one stage for one microbatch. Any unit of time, the same everywhere.

    Attributes:
        forward: Time of a forward.
        backward: Time of a backward, with what it recomputes by itself.
        activations: Bytes on the device between a forward and its backward, beyond the tensors
            received from other stages; what is offloaded is none of them.
        weights: Bytes of parameters, gradients and optimizer state: every copy, all the time.
        gradients: Bytes that are summed over the copies.
        forward_workspace: Bytes beyond `activations` while a forward (or recomputation) runs.
        backward_workspace: Bytes beyond `activations` while a backward runs.
        update_workspace: Bytes beyond `weights` while the optimizer updates the stage.
        checkpoint: Bytes that a recomputed forward keeps instead of `activations`.
        recompute: Time of a recomputation; None is a forward's.
        step: Time of the optimizer's step.
        tensors: The saved tensors that may be offloaded, by name.
    """

    forward: float
    backward: float
    activations: int = 0
    weights: int = 0
    gradients: int = 0
    forward_workspace: int = 0
    backward_workspace: int = 0
    update_workspace: int = 0
    checkpoint: int = 0
    recompute: float | None = None
    step: float = 0
    tensors: Mapping[str, Saved] = field(default_factory=dict)

    @property
    def recomputation(self) -> float:
        return self.forward if self.recompute is None else self.recompute


class Network(Protocol):
    """The network between the ranks: the time of a message and of a sum."""

    def latency(self, source: int, target: int) -> float:
        """Return the time from a message's end at rank `source` to its arrival at `target`."""

    def transfer(self, source: int, target: int, size: int) -> float:
        """Return the time for which a message keeps the outgoing channel of its sender busy.

        Args:
            source: The sending rank.
            target: The receiving rank.
            size: Bytes.
        """

    def all_reduce(self, ranks: Sequence[int], size: int) -> float:
        """Return the time to sum `size` bytes over `ranks`; 0 for a single rank."""


@dataclass(frozen=True, slots=True)
class Link:
    """A latency and a bandwidth, the same between any two ranks (Hockney's alpha-beta model).

    Attributes:
        alpha: Time per message.
        beta: Time per byte; 0 is a link without limit.
    """

    alpha: float = 0
    beta: float = 0

    def latency(self, source: int, target: int) -> float:
        return self.alpha

    def transfer(self, source: int, target: int, size: int) -> float:
        return size * self.beta

    def all_reduce(self, ranks: Sequence[int], size: int) -> float:
        """Return the time of a ring: reduce-scatter and all-gather (Patarasuk and Yuan, 2009)."""
        return _ring(len(ranks), size, self)


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster of nodes with equally many ranks: rank r is on node r // `per_node`.

    Attributes:
        per_node: Ranks on a node.
        inside: The link between two ranks of one node.
        between: The link of a node to the others, which all of its ranks share.
    """

    per_node: int
    inside: Link
    between: Link

    def latency(self, source: int, target: int) -> float:
        return self._link(source, target).alpha

    def transfer(self, source: int, target: int, size: int) -> float:
        return size * self._link(source, target).beta

    def all_reduce(self, ranks: Sequence[int], size: int) -> float:
        """Return the time of a hierarchical sum: in the node, in a ring of nodes, in the node
        again.

        It is a reduce-scatter, a ring and an all-gather. All ranks are taken to sum at once, each
        set of ranks its own stage: `per_node` / (ranks of this sum on a node) such rings share the
        node's link.
        """
        nodes = sorted({rank // self.per_node for rank in ranks})
        local = -(-len(ranks) // len(nodes))
        time = self.inside.all_reduce(range(local), size)
        if len(nodes) == 1:
            return time
        shared = Link(self.between.alpha, self.between.beta * Fraction(self.per_node, local))
        return time + _ring(len(nodes), size, shared)

    def _link(self, source: int, target: int) -> Link:
        same = source // self.per_node == target // self.per_node
        return self.inside if same else self.between


@dataclass(frozen=True, slots=True)
class Teams:
    """A network of teams, whose ranks share tiles: a strip meets strips of its own place.

    Attributes:
        network: Joins all ranks, those of a team one after the other.
        shards: Ranks of a team.
    """

    network: Network
    shards: int

    def latency(self, source: int, target: int) -> float:
        return self.network.latency(source * self.shards, target * self.shards)

    def transfer(self, source: int, target: int, size: int) -> float:
        return self.network.transfer(source * self.shards, target * self.shards, size)

    def all_reduce(self, ranks: Sequence[int], size: int) -> float:
        """Return the time to sum `size` bytes over all ranks of these teams."""
        teams = (range(team * self.shards, (team + 1) * self.shards) for team in ranks)
        return self.network.all_reduce([rank for team in teams for rank in team], size)


def _ring(members: int, size: int, link: Link) -> float:
    steps = 2 * (members - 1)
    # A fraction, so that exact costs stay exact.
    return steps * link.alpha + Fraction(steps * size, members) * link.beta


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that a simulation needs beside the schedule.

    Attributes:
        stages: The cost of each stage.
        sizes: Bytes of each edge's tensor for one microbatch; an edge that is not here has none.
        network: The links between ranks; `Link()` costs nothing.
        host: The link of a rank to its host's memory, each direction its own channel.
        window: Staging buffer in bytes: as many may wait on the device to be copied to the host,
            and as many more may be back ahead of their use. Where the directions take turns
            (`take_turns`), one buffer serves both. 0 without offload.
        shards: Ranks that share the tiles of each rank (`Teams`), whose gradients are summed.
        one_way: Edges whose tensors have no gradient, such as those of a frozen encoder.
    """

    stages: tuple[StageCost, ...]
    sizes: Mapping[Edge, int] = field(default_factory=dict)
    network: Network = field(default_factory=Link)
    host: Link = field(default_factory=Link)
    window: int = 0
    shards: int = 1
    one_way: Collection[Edge] = frozenset()

    def size(self, edge: Edge, forward: bool) -> int:
        """Return the bytes of an edge's tensor, or of its gradient, for one microbatch."""
        return self.sizes.get(edge, 0) if forward or edge not in self.one_way else 0

    @classmethod
    def equal(cls, stages: int, forward: float, backward: float, activations: int = 1) -> Costs:
        """Return the costs of equal stages on free links: the setting of the closed forms.

        Args:
            stages: Number of stages.
            forward: Time of one microbatch's forward through a stage.
            backward: Likewise.
            activations: Bytes that a forward keeps for its backward.
        """
        return cls((StageCost(forward, backward, activations),) * stages)
