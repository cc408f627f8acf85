"""What the planner is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from pathoseg.errors import PathosegError
from pathoseg.parallel.planning.orders import AUTO, find_order
from pathoseg.parallel.retention.policy_options import Ways


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    Attributes:
        ranks: The most ranks.
        memory: Bytes of each.
        batch: Samples of a step.
        order: Name of an order, or `auto`.
        stages: How many stages; None tries all.
        cut: The layers or modules before which the model is cut; empty leaves it to the planner.
        all_ranks: Whether every rank has to have work, as those of a job that has started do.
        ways: What of a layer's storages may be done where they do not all fit.
    """

    ranks: int
    memory: int
    batch: int
    order: str = AUTO
    stages: int | None = None
    cut: tuple[str, ...] = ()
    all_ranks: bool = False
    ways: Ways = field(default_factory=Ways)

    def __post_init__(self) -> None:
        for name in ("ranks", "memory", "batch"):
            if getattr(self, name) < 1:
                raise PathosegError(
                    f"{name} is {getattr(self, name)}.", "Choose a whole number from 1."
                )
        find_order(self.order)
        if self.cut and self.stages not in (None, len(self.cut) + 1):
            raise PathosegError(
                f"{len(self.cut)} cuts make {len(self.cut) + 1} stages, not {self.stages}.",
                "Leave out the cuts or the number of stages.",
            )
