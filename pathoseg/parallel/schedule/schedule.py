"""A schedule: which rank holds which stage, and what every rank does, in which order, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Edge, Kind, Setting, Visit


@dataclass(frozen=True, slots=True)
class Placement:
    """The home of every stage of every replica.

    Attributes:
        ranks: Number of ranks.
        homes: `homes[replica][stage]` is the rank that holds it.
    """

    ranks: int
    homes: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.homes[0])

    @property
    def replicas(self) -> int:
        return len(self.homes)

    def holders(self, stage: int) -> list[int]:
        """Return the ranks that hold a copy of `stage`, ascending, each once."""
        return sorted({home[stage] for home in self.homes})

    def repeated(self, groups: int) -> Placement:
        """Return this placement on `groups` times the ranks, each group with its own replicas."""
        homes = tuple(
            tuple(rank + group * self.ranks for rank in home)
            for group in range(groups)
            for home in self.homes
        )
        return Placement(self.ranks * groups, homes)


def linear(ranks: int) -> Placement:
    """Place one replica with stage r on rank r."""
    return Placement(ranks, (tuple(range(ranks)),))


def folded(ranks: int) -> Placement:
    """Place one replica of 2 × `ranks` stages: rank r holds stages r and 2 × `ranks` - 1 - r.

    The two ends of a U-Net's long skips are stages s and 2 × `ranks` - 1 - s: they never leave
    their rank.
    """
    return Placement(ranks, (tuple(range(ranks)) + tuple(reversed(range(ranks))),))


def mirrored(ranks: int) -> Placement:
    """Place two replicas, the odd one inverted: rank r holds stage r of 0 and `ranks` - 1 - r of 1.

    With an odd number of ranks the middle one has the middle stage of both replicas, in one copy.
    """
    return Placement(ranks, (tuple(range(ranks)), tuple(reversed(range(ranks)))))


@dataclass(frozen=True)
class Schedule:
    """One list of actions for each rank, and what these actions speak of.

    An order holds F and B alone; `lowering.lower` adds the rest.

    Attributes:
        name: The order's name.
        placement: The rank of each stage of each replica.
        edges: The tensors between the stages.
        replica_of: The replica that runs each microbatch; as long as the step has microbatches.
        lists: By rank, its actions in order.
        groups: How many equal groups of `placement.ranks` ranks run these same lists, each with
            replicas and microbatches of its own; `expanded` writes them out.
    """

    name: str
    placement: Placement
    edges: tuple[Edge, ...]
    replica_of: tuple[int, ...]
    lists: tuple[tuple[Action, ...], ...]
    groups: int = 1

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def ranks(self) -> int:
        """The number of ranks of all groups together."""
        return self.placement.ranks * self.groups

    @property
    def microbatches(self) -> int:
        """The number of microbatches of the whole step, all groups together."""
        return len(self.replica_of) * self.groups

    @cached_property
    def lowered(self) -> bool:
        """Return True if the lists hold more than forwards and backwards."""
        plain = (Kind.FORWARD, Kind.BACKWARD)
        return any(action.kind not in plain for actions in self.lists for action in actions)

    @cached_property
    def setting(self) -> Setting:
        """The facts that the rule of precedence (`action.predecessors`) needs of this schedule."""
        stages = range(self.stages)
        homes = self.placement.homes
        messages = {
            (replica, edge)
            for replica, home in enumerate(homes)
            for edge in self.edges
            if self.lowered and home[edge.source] != home[edge.target]
        }
        microbatches: list[list[int]] = [[] for _ in homes]
        for microbatch, replica in enumerate(self.replica_of):
            microbatches[replica].append(microbatch)
        recomputed: set[Visit] = set()
        prefetched: dict[Visit, tuple[Action, ...]] = {}
        buckets = [0] * self.stages
        for action in self:
            if action.kind is Kind.RECOMPUTE:
                recomputed.add(visit_of(action))
            elif action.kind is Kind.PREFETCH:
                visit = visit_of(action)
                prefetched[visit] = (*prefetched.get(visit, ()), action)
            elif action.kind is Kind.REDUCE and action.bucket is not None:
                buckets[action.stage] = max(buckets[action.stage], action.bucket + 1)
        return Setting(
            tuple(tuple(edge for edge in self.edges if edge.target == stage) for stage in stages),
            tuple(tuple(edge for edge in self.edges if edge.source == stage) for stage in stages),
            messages,
            tuple(tuple(own) for own in microbatches),
            recomputed,
            prefetched,
            tuple(buckets),
        )

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.lists for action in actions)

    def expanded(self) -> Schedule:
        """Return the same step as one group, with every group's lists written out.

        Group g has the ranks, replicas and microbatches from g times one group's number on.
        """
        replicas = self.placement.replicas
        own = len(self.replica_of)
        lists = tuple(
            tuple(
                action._replace(
                    replica=action.replica + group * replicas,
                    microbatch=None
                    if action.microbatch is None
                    else action.microbatch + group * own,
                )
                for action in actions
            )
            for group in range(self.groups)
            for actions in self.lists
        )
        return replace(
            self,
            placement=self.placement.repeated(self.groups),
            replica_of=tuple(
                replica + group * replicas
                for group in range(self.groups)
                for replica in self.replica_of
            ),
            lists=lists,
            groups=1,
        )

    def __str__(self) -> str:
        homes = (" ".join(map(str, home)) for home in self.placement.homes)
        lines = [
            f"schedule {self.name}",
            f"ranks {self.placement.ranks}",
            f"groups {self.groups}",
            *(f"replica {replica} on {home}" for replica, home in enumerate(homes)),
            " ".join(["edges", *map(str, self.edges)]),
            " ".join(["microbatches", *map(str, self.replica_of)]),
            *(" ".join([f"rank {rank}:", *map(str, own)]) for rank, own in enumerate(self.lists)),
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text of a schedule; whether its order can run is for `validate`.

        Raises:
            PathosegError: A line is missing or unknown, or no schedule can be made of it.
        """
        header: dict[str, list[str]] = {}
        homes: list[tuple[int, ...]] = []
        lists: list[tuple[Action, ...]] = []
        for line in text.splitlines():
            word, *rest = line.split() or [""]
            if word == "rank" and rest[:1] == [f"{len(lists)}:"]:
                lists.append(tuple(Action.parse(item) for item in rest[1:]))
            elif word == "replica" and rest[:2] == [str(len(homes)), "on"]:
                homes.append(tuple(_numbers(rest[2:])))
            elif word in _HEADER:
                header[word] = rest
            elif word:
                raise _unfit(f"the line {line[:60]!r} unknown or out of turn")
        missing = [word for word in _HEADER if not header.get(word) and word != "edges"]
        if missing:
            raise _unfit(f"no line {missing[0]!r}, or nothing in it")
        return cls(
            " ".join(header["schedule"]),
            Placement(_numbers(header["ranks"])[0], tuple(homes)),
            tuple(Edge.parse(item) for item in header.get("edges", ())),
            tuple(_numbers(header["microbatches"])),
            tuple(lists),
            _numbers(header["groups"])[0],
        )


_HEADER = ("schedule", "ranks", "groups", "edges", "microbatches")


def _unfit(problem: str) -> PathosegError:
    return PathosegError(
        f"The schedule's text has {problem}.",
        f"It needs the lines {', '.join(_HEADER)}, then one for each replica and each rank.",
    )


def visit_of(action: Action) -> Visit:
    """Return (replica, stage, microbatch) of an action that has a microbatch."""
    assert action.microbatch is not None
    return action.replica, action.stage, action.microbatch


def _numbers(words: Sequence[str]) -> list[int]:
    if not all(word.isascii() and word.isdigit() for word in words):
        raise PathosegError(
            f"{' '.join(words)!r} in the schedule's text is no list of numbers.",
            "Write numbers from 0, with blanks between them.",
        )
    return [int(word) for word in words]
