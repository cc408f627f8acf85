"""Judging a model on whole held-out tiles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.tiles.dataset import stacked, stacked_labels
from pathoseg.tiles.prefetch import prefetch_map
from pathoseg.tiles.tiles import SlideTiles, Tile
from pathoseg.training.engine import Engine, Loss
from pathoseg.training.run_log import comparison, from_text, to_text
from pathoseg.training.tasks import Task


@dataclass(frozen=True)
class Verdict:
    """The result of a validation, the same on all ranks.

    Attributes:
        figures: By name, such as `val_dice_mean`; nan where there is none.
        score: The score by which epochs are compared; higher is better.
        picture: Tiles with truth and prediction: RGB, shape (height, width, 3), uint8; None without
            tiles.
    """

    figures: dict[str, float]
    score: float
    picture: NDArray[np.uint8] | None


class Validation:
    """Held-out tiles and the judge of what a model makes of them.

    Args:
        slides: Their tiles; none leaves all epochs equally good.
        task: What a target is and how predictions are judged.
        classes: For the picture.
        batch: Tiles a forward pass.
        readers: Threads that read tiles.
    """

    def __init__(
        self,
        slides: Sequence[SlideTiles],
        task: Task,
        classes: ClassTable,
        batch: int,
        readers: int,
    ) -> None:
        self._task, self._classes = task, classes
        self._batch, self._readers = batch, readers
        self._tiles = [(tiles, i) for tiles in slides for i in range(len(tiles))]
        self._shown = _most_varied(slides)

    @property
    def columns(self) -> Sequence[str]:
        """The names of the figures beyond the fixed columns of metrics.csv."""
        return self._task.columns

    @property
    def batches(self) -> int:
        return -(-len(self._tiles) // self._batch)

    def run(self, engine: Engine, loss: Loss) -> Verdict:
        """Predict the validation tiles and compute their figures; all ranks call it.

        Args:
            engine: Has the network.
            loss: The training's loss, per sample.

        Returns:
            The verdict, the same on all ranks.

        Raises:
            PathosegError: A tile cannot be read, or the device's memory is too small.
        """
        if not self._tiles:
            return Verdict({}, 0.0, None)
        judge, loss_sum, picture = self._task.judge(), 0.0, ""
        for firsts, sizes, tiles in self._rounds(engine):
            images = {at: stacked(own) for at, own in tiles.items()}
            for at, logits in engine.predict(sizes, images).items():
                masks, objects = stacked_labels(tiles[at])
                targets = torch.from_numpy(self._task.targets(masks, objects)).to(logits.device)
                with torch.inference_mode():
                    loss_sum += float(loss(logits, targets).sum())
                judge.add(logits, targets)
                row = self._shown - firsts[at]
                if 0 <= row < sizes[at] and logits.ndim == 4:
                    guess = (
                        logits[row, : len(self._classes)].argmax(0).cpu().numpy().astype(np.uint8)
                    )
                    shown = comparison(tiles[at][row].image, masks[row], guess, self._classes)
                    picture = to_text(shown)
        whole = self._task.judge()
        found = {"loss": loss_sum, "seen": judge.seen(), "picture": picture}
        parts = [json.loads(part) for part in engine.gather(json.dumps(found))]
        for part in parts:
            whole.merge(part["seen"])
        mean = sum(part["loss"] for part in parts) / len(self._tiles)
        pictures = [from_text(part["picture"]) for part in parts if part["picture"]]
        figures = {"val_loss": mean, **whole.figures()}
        return Verdict(figures, whole.score(), pictures[0] if pictures else None)

    def _rounds(self, engine: Engine) -> Iterator[tuple[range, list[int], dict[int, list[Tile]]]]:
        """The batches that are predicted together: the number of the first tile of each, their
        sizes, and the tiles of those that this rank reads."""

        def read(which: tuple[SlideTiles, int]) -> Tile:
            return which[0].read(which[1])

        count, size = len(self._tiles), self._batch
        rounds = [
            range(first, first + engine.round * size, size)
            for first in range(0, count, engine.round * size)
        ]
        needed = sorted(engine.reads)
        wanted = [self._tiles[firsts[at] : firsts[at] + size] for firsts in rounds for at in needed]
        with closing(prefetch_map(read, list(chain(*wanted)), self._readers)) as tiles:
            for firsts in rounds:
                sizes = [max(0, min(size, count - first)) for first in firsts]
                own = {at: list(islice(tiles, sizes[at])) for at in needed if sizes[at]}
                yield firsts, sizes, own


def _most_varied(slides: Sequence[SlideTiles]) -> int:
    """The tile to show: the one whose rarest class fills most of it."""
    rarest = [tiles.class_pixels[:, 1:].min(axis=1) for tiles in slides]
    return int(np.concatenate(rarest).argmax()) if rarest else 0
