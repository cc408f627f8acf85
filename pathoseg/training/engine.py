"""The engine protocol that the trainer drives: one device, or many ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.tiles.dataset import Batch

# Per-sample losses (n,) of logits and targets.
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of a step: the sum of per-sample losses, and whether its gradient was finite."""

    loss_sum: float
    finite: bool


class Engine(Protocol):
    """Every rank makes the same calls in the same order; one device is a rank alone."""

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

    def step(self, number: int, batch: Batch, rate: float) -> StepResult:
        """One optimizer step, the run's `number`-th from 0, at learning rate `rate`.

        The result is that of the whole batch, on every rank.

        Args:
            number: Decides, with the seed, what layers draw at random.
            batch: The samples of `rows`.
            rate: Learning rate.

        Raises:
            PathosegError: The device's memory is too small, or another rank failed.
        """
        ...

    def predict(
        self, sizes: Sequence[int], images: Mapping[int, NDArray[np.uint8]]
    ) -> dict[int, torch.Tensor]:
        """Logits in `eval` mode, by batch of the round, of those that this rank is to judge.

        Args:
            sizes: Tiles of each batch; 0 where a round has fewer.
            images: (n, h, w, 3) of each batch that this rank `reads`.
        """
        ...

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        ...

    def state(self) -> dict[str, Any]:
        """The whole of it for a checkpoint, where this rank leads.

        Returns:
            `model`, the network's state dict; `optimizer`, what it keeps for each parameter, by
            name; `scaler`, the loss scale's. Nothing on ranks that do not lead.
        """
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Takes over a `state`, which any number of ranks may have written.

        Raises:
            KeyError, RuntimeError, ValueError: It is that of another model or optimizer.
        """
        ...
