"""The cases of the schedule benchmark, and the named orders that fit each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, StageCost
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Placement, Schedule, linear, mirrored
from pathoseg.parallel.schedule.simulate import simulate

SHAPES = ("even", "falling", "ends", "random")


@dataclass(frozen=True)
class Case:
    """One step to be ordered.

    Attributes:
        shape: How time and bytes lie over the stages, of `SHAPES`.
        ranks: D.
        microbatches: N.
        cap: Bytes on a rank, in activations of the largest stage.
        both: Whether there is a mirrored second replica.
    """

    shape: str
    ranks: int
    microbatches: int
    cap: int
    both: bool

    @property
    def costs(self) -> Costs:
        return Costs(tuple(_stages(self.shape, self.ranks)))

    @property
    def bytes(self) -> int:
        """The cap in the unit of the costs."""
        return self.cap * max(stage.activations for stage in self.costs.stages)

    @property
    def placement(self) -> Placement:
        return mirrored(self.ranks) if self.both else linear(self.ranks)

    def named(self) -> dict[str, float]:
        """The times of the named orders that keep to the cap."""
        times: dict[str, float] = {}
        for name, order in self._orders():
            run = simulate(order, self.costs)
            if max(run.peak_activations) <= self.bytes:
                times[name] = run.time
        return times

    def _orders(self) -> Iterator[tuple[str, Schedule]]:
        yield "mp-basic", mp_basic(linear(self.ranks), self.microbatches)
        for flush in range(2, self.microbatches + 1):
            yield f"gpipe/{flush}", gpipe(linear(self.ranks), self.microbatches, flush)
        yield "1f1b", one_f_one_b(self.ranks, self.microbatches)
        if not self.both:
            return
        yield "chimera", bidirectional(self.ranks, self.microbatches)
        for per_visit in range(1, self.microbatches // 2 + 1):
            if self.microbatches % (2 * per_visit) == 0:
                pairs = self.microbatches // (2 * per_visit)
                yield f"gems/{per_visit}", gems(self.ranks, pairs, per_visit)


def grid(shapes: Sequence[str], ranks: Sequence[int], per_rank: Sequence[int]) -> Iterator[Case]:
    """All caps from 1 to D, one way and both, for N = D times each of `per_rank`."""
    for shape in shapes:
        for size in ranks:
            for factor in per_rank:
                for both in (False, True):
                    for cap in range(1, size + 1):
                        yield Case(shape, size, factor * size, cap, both)


def small() -> Iterator[Case]:
    """Cases that an exact solver ends."""
    for shape in ("even", "random"):
        for ranks in (2, 3, 4):
            for microbatches in (2, 3, 4):
                for both in (False, True):
                    for cap in range(1, min(ranks, microbatches) + 1):
                        yield Case(shape, ranks, microbatches, cap, both)


def _stages(shape: str, ranks: int) -> Iterator[StageCost]:
    """Whole numbers, so that times are exact; where not random, b = 2f."""
    draw = random.Random(ranks)
    for stage in range(ranks):
        if shape == "even":
            time, size = 10, 10
        elif shape == "falling":  # an encoder: late stages compute more and hold less
            time, size = 8 + 8 * stage // ranks, 16 - 10 * stage // ranks
        elif shape == "ends":  # a U-Net: both ends are heavy
            time = size = 6 + 8 * abs(2 * stage - ranks + 1) // ranks
        else:
            time, size = draw.randint(5, 15), draw.randint(5, 15)
        back = draw.randint(time, 3 * time) if shape == "random" else 2 * time
        yield StageCost(time, back, size)
