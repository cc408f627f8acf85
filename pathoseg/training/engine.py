"""The engine protocol that the trainer drives: one device, or many ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pathoseg.device import Images
from pathoseg.giving_up import Commit, at_any_time
from pathoseg.tiles.dataset import Batch

# Per-sample losses (n,) of logits and targets.
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of a step; the same on all ranks.

    Attributes:
        loss_sum: Sum of the per-sample losses.
        finite: True if the gradient was finite; if not, neither parameters nor buffers changed.
    """

    loss_sum: float
    finite: bool


class Engine(Protocol):
    """A network in training, on one device or cut over ranks.

    Every rank makes the same calls in the same order; one device is a rank alone.
    """

    @property
    def leads(self) -> bool:
        """True if this rank writes the run's files and messages."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """The samples of a batch that this rank reads, ascending."""
        ...

    @property
    def round(self) -> int:
        """The number of validation batches that are predicted together, a round."""
        ...

    @property
    def reads(self) -> Collection[int]:
        """The batches of a round whose tiles this rank reads."""
        ...

    def step(
        self, number: int, batch: Batch, rate: float, commit: Commit = at_any_time
    ) -> StepResult:
        """Make one optimizer step on the mean loss of a batch.

        Args:
            number: The run's step, from 0; with the configured seed, the seed of what layers draw.
            batch: The samples of `rows`.
            rate: Learning rate.
            commit: Called ahead of the first change for good: until then `begun` can be called, by
                another thread.

        Returns:
            The result of the whole batch, on every rank.

        Raises:
            PathosegError: The device's memory is too small, or another rank failed.
            GivenUpError: The run is asked to stop, in the middle of the step: the engine's state is
                that before it, on every rank.
        """
        ...

    def predict(
        self, sizes: Sequence[int], images: Mapping[int, Images]
    ) -> dict[int, torch.Tensor]:
        """Run the network in `eval` mode on the batches of a round.

        Args:
            sizes: Tiles of each batch; 0 where a round has fewer.
            images: By batch that this rank `reads`, uint8 RGB of shape (n, height, width, 3); of a
                network of several inputs, those of each by name.

        Returns:
            By batch that this rank is to judge, its logits (n, classes, height, width), or (n,
            classes) where tiles are classified.

        Raises:
            PathosegError: As `step`.
            GivenUpError: The run is asked to stop; on every rank.
        """
        ...

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank."""
        ...

    def state(self) -> dict[str, Any]:
        """Gather the training state for a checkpoint on the rank that leads.

        Returns:
            `model`, the network's state dict; `optimizer`, the optimizer's state of each parameter,
            by name; `scaler`, the loss scale's. An empty dict on ranks that do not lead.
        """
        ...

    def begun(self) -> dict[str, Any]:
        """Return the `state` ahead of the step under way, from a thread beside the one that is at
        it and has not committed it; all ranks call it once, and end after it.

        Ranks that do not lead return once that which does has ended.

        Raises:
            PathosegError: The rank that leads goes on instead, as it cannot save.
        """
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Load a `state` that any number of ranks may have written.

        Raises:
            KeyError, RuntimeError, ValueError: It is the state of another model or optimizer.
        """
        ...
