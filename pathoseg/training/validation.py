"""Judging a model on whole held-out tiles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.tiles.dataset import stacked, stacked_labels
from pathoseg.tiles.prefetch import prefetch_map
from pathoseg.tiles.tiles import SlideTiles, Tile
from pathoseg.training.engine import Engine, Loss
from pathoseg.training.run_log import comparison, from_text, to_text
from pathoseg.training.tasks import Task


@dataclass(frozen=True)
class ShownTile:
    """A held-out tile that is shown because of its loss.

    Attributes:
        slide: The file's name.
        loss: Its loss.
        picture: The tile, its truth and its prediction: RGB, shape (height, 3 width, 3), uint8.
    """

    slide: str
    loss: float
    picture: NDArray[np.uint8]


@dataclass(frozen=True)
class Verdict:
    """The result of a validation, the same on all ranks.

    Attributes:
        figures: By name, such as `val_dice_mean`; nan where there is none.
        score: The score by which epochs are compared; higher is better.
        picture: Tiles with truth and prediction: RGB, shape (height, width, 3), uint8; None without
            tiles.
        confusion: Numbers of pixels, or tiles, by truth and prediction; None without tiles.
        shown: The tile with the least loss of those with a class but the background, as "best", and
            the one with the most loss, as "worst"; empty for models that classify tiles.
    """

    figures: dict[str, float]
    score: float
    picture: NDArray[np.uint8] | None
    confusion: NDArray[np.int64] | None = None
    shown: Mapping[str, ShownTile] = field(default_factory=dict)


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
    def tiles(self) -> int:
        """The number of held-out tiles."""
        return len(self._tiles)

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
            return Verdict({}, -math.inf, None)
        judge, loss_sum, known, picture = self._task.judge(), 0.0, 0, ""
        extremes = _Extremes()
        for firsts, sizes, tiles in self._rounds(engine):
            images = {at: stacked(own) for at, own in tiles.items()}
            for at, logits in engine.predict(sizes, images).items():
                labels = stacked_labels(tiles[at])
                targets = torch.from_numpy(self._task.targets(labels)).to(logits.device)
                with torch.inference_mode():
                    losses = loss(logits, targets)
                    loss_sum += float(losses.sum())
                # The loss of a tile of unknown class is 0.
                known += len(targets) if targets.ndim > 1 else int((targets != IGNORE).sum())
                judge.add(logits, targets)
                if logits.ndim != 4:
                    continue
                row = self._shown - firsts[at]
                if 0 <= row < sizes[at]:
                    picture = to_text(
                        self._compared(tiles[at][row].image, labels.masks[row], logits[row])
                    )
                for row, value in enumerate(losses.tolist()):
                    image, mask = tiles[at][row].image, labels.masks[row]
                    draw = partial(self._compared, image, mask, logits[row])
                    extremes.see(value, firsts[at] + row, mask, draw)
        found = {"loss": loss_sum, "known": known, "seen": judge.seen(), "picture": picture}
        told = json.dumps({**found, "extremes": extremes.told()})
        parts, whole = [json.loads(part) for part in engine.gather(told)], self._task.judge()
        for part in parts:
            whole.merge(part["seen"])
        of = sum(part["known"] for part in parts)
        mean = sum(part["loss"] for part in parts) / of if of else math.nan
        pictures = [from_text(part["picture"]) for part in parts if part["picture"]]
        figures = {"val_loss": mean, **whole.figures()}
        return Verdict(
            figures,
            whole.score(),
            pictures[0] if pictures else None,
            whole.confusion(),
            _Extremes.merged(
                [part["extremes"] for part in parts],
                lambda number: self._tiles[number][0].slide.name,
            ),
        )

    def _compared(
        self, image: NDArray[np.uint8], mask: NDArray[np.uint8], logits: torch.Tensor
    ) -> NDArray[np.uint8]:
        guess = logits[: len(self._classes)].argmax(0).cpu().numpy().astype(np.uint8)
        return comparison(image, mask, guess, self._classes)

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


_EXTREMES: Mapping[str, Callable[..., Any]] = {"best": min, "worst": max}
_EXTREME_SIDE = 512  # pixels of a tile that is shown


class _Extremes:
    """The "best" and the "worst" tile of those seen so far, see `Verdict`; by loss, then number."""

    def __init__(self) -> None:
        self._found = dict[str, tuple[tuple[float, int], NDArray[np.uint8]]]()

    def see(
        self,
        loss: float,
        number: int,
        mask: NDArray[np.uint8],
        draw: Callable[[], NDArray[np.uint8]],
    ) -> None:
        """Take in a tile, which is drawn if it is the best or the worst so far."""
        for name, choose in _EXTREMES.items():
            if name in self._found:
                before, _ = self._found[name]
                if choose((loss, number), before) == before:
                    continue
            known = mask != IGNORE
            if math.isfinite(loss) and (known & (mask > 0) if name == "best" else known).any():
                step = -(-max(mask.shape) // _EXTREME_SIDE)
                self._found[name] = (loss, number), draw()[::step, ::step]

    def told(self) -> dict[str, tuple[float, int, str]]:
        """Return loss, number and picture of what was found; it is told to other ranks as JSON."""
        return {name: (*rank, to_text(picture)) for name, (rank, picture) in self._found.items()}

    @staticmethod
    def merged(
        parts: Sequence[Mapping[str, Sequence[Any]]], slide_of: Callable[[int], str]
    ) -> dict[str, ShownTile]:
        """Return the best and the worst of what all ranks have told.

        Args:
            parts: What each has `told`.
            slide_of: Returns the name of a tile's slide.
        """
        shown = {}
        for name, choose in _EXTREMES.items():
            if of_ranks := [part[name] for part in parts if name in part]:
                loss, number, picture = choose(of_ranks, key=itemgetter(0, 1))
                shown[name] = ShownTile(slide_of(number), loss, from_text(picture))
        return shown


def _most_varied(slides: Sequence[SlideTiles]) -> int:
    """The tile to show: of those with most classes, the one whose rarest fills most of it."""
    if not (pixels := [tiles.class_pixels[:, 1:] for tiles in slides if len(tiles)]):
        return 0
    held = np.concatenate(pixels)
    rarest = np.where(held > 0, held, np.inf).min(axis=1)
    return int(np.lexsort((-np.arange(len(held)), rarest, (held > 0).sum(axis=1)))[-1])
