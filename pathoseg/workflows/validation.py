"""Judging a model on whole held-out tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.models.bundle import Bundle
from pathoseg.tiles.tiles import SlideTiles, Tile
from pathoseg.workflows.ahead import map_ahead
from pathoseg.workflows.device import memory_told, to_input
from pathoseg.workflows.records import comparison
from pathoseg.workflows.step import Loss
from pathoseg.workflows.tasks import Task


@dataclass(frozen=True)
class Verdict:
    """How good a model is: named figures, the score to compare epochs by, and a picture."""

    figures: dict[str, float]
    score: float
    picture: NDArray[np.uint8] | None


class Validation:
    """Held-out tiles and the judge of what a model makes of them.

    Args:
        slides: Their tiles; none leaves all epochs equally good.
        task: What a target is and how predictions are judged.
        classes: For the picture.
        card: The network's input scaling.
        batch: Tiles a forward pass.
        readers: Threads that read tiles.
    """

    def __init__(
        self,
        slides: Sequence[SlideTiles],
        task: Task,
        classes: ClassTable,
        card: Bundle,
        batch: int,
        readers: int,
    ) -> None:
        self._task, self._classes, self._card = task, classes, card
        self._batch, self._readers = batch, readers
        self._tiles = [(tiles, i) for tiles in slides for i in range(len(tiles))]
        self._shown = _most_varied(slides)

    @property
    def columns(self) -> Sequence[str]:
        """Names of the figures beyond the fixed columns of metrics.csv."""
        return self._task.columns

    @property
    def batches(self) -> int:
        return -(-len(self._tiles) // self._batch)

    def run(self, model: torch.nn.Module, loss: Loss, dtype: torch.dtype | None) -> Verdict:
        """Judges `model`, which is left in training mode.

        Raises:
            PathosegError: A tile cannot be read, or the device's memory is too small.
        """
        if not self._tiles:
            return Verdict({}, 0.0, None)
        device = next(model.parameters()).device
        judge, loss_sum, picture = self._task.judge(), 0.0, None
        model.eval()
        for first, tiles in self._batches():
            masks = np.stack([tile.mask for tile in tiles])
            targets = torch.from_numpy(self._task.targets(masks)).to(device)
            with (
                torch.inference_mode(),
                memory_told("A validation batch", "Lower [train] batch or microbatch, or --tile."),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                images = np.stack([tile.image for tile in tiles])
                logits = model(to_input(images, self._card.mean, self._card.std, device))
                loss_sum += float(loss(logits, targets).sum())
            judge.add(logits, targets)
            row = self._shown - first
            if 0 <= row < len(tiles) and logits.ndim == 4:
                guess = logits[row].argmax(0).cpu().numpy().astype(np.uint8)
                picture = comparison(images[row], masks[row], guess, self._classes)
        model.train()
        figures = {"val_loss": loss_sum / len(self._tiles), **judge.figures()}
        return Verdict(figures, judge.score(), picture)

    def _batches(self) -> Iterator[tuple[int, list[Tile]]]:
        """Number of the first tile, and the tiles, of each batch."""

        def read(which: tuple[SlideTiles, int]) -> Tile:
            return which[0].read(which[1])

        with closing(map_ahead(read, self._tiles, self._readers)) as tiles:
            for first in range(0, len(self._tiles), self._batch):
                count = min(self._batch, len(self._tiles) - first)
                yield first, [next(tiles) for _ in range(count)]


def _most_varied(slides: Sequence[SlideTiles]) -> int:
    """The tile to show: the one whose rarest class fills most of it."""
    rarest = [tiles.class_pixels[:, 1:].min(axis=1) for tiles in slides]
    return int(np.concatenate(rarest).argmax()) if rarest else 0
