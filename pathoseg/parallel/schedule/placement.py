"""Which rank holds which stage of which replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The home of every stage of every replica.

    Attributes:
        ranks: How many ranks there are.
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
        """The ranks that hold a copy of `stage`, ascending, each once."""
        return sorted({home[stage] for home in self.homes})

    def repeated(self, groups: int) -> Placement:
        """This placement on `groups` times the ranks, each group with replicas of its own."""
        homes = tuple(
            tuple(rank + group * self.ranks for rank in home)
            for group in range(groups)
            for home in self.homes
        )
        return Placement(self.ranks * groups, homes)


def linear(ranks: int) -> Placement:
    """One replica, stage r on rank r."""
    return Placement(ranks, (tuple(range(ranks)),))


def folded(ranks: int) -> Placement:
    """One replica of 2 × `ranks` stages: rank r holds stages r and 2 × `ranks` - 1 - r.

    The two ends of a U-Net's long skips are stages s and 2 × `ranks` - 1 - s: they never leave
    their rank.
    """
    return Placement(ranks, (tuple(range(ranks)) + tuple(reversed(range(ranks))),))


def mirrored(ranks: int) -> Placement:
    """Two replicas, the odd one inverted: rank r holds stage r of 0 and `ranks` - 1 - r of 1.

    With an odd number of ranks the middle one holds both copies of the middle stage.
    """
    return Placement(ranks, (tuple(range(ranks)), tuple(reversed(range(ranks)))))
