"""Predicts the tiles of a slide in their order, in batches that threads read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.device import Arrival, Images, answer, memory_told, to_inputs
from pathoseg.errors import PathosegError, is_out_of_memory
from pathoseg.geometry import IMAGE, Box
from pathoseg.giving_up import IsGivenUp, asking, never
from pathoseg.models.bundle import Bundle
from pathoseg.outputs.stitch import TilePrediction
from pathoseg.slides.region import Region
from pathoseg.tiles.prefetch import prefetch_map
from pathoseg.time_spent import TimeSpent

Context = Mapping[str, Region]


class _Read(NamedTuple):
    """A tile that was read, with the network's other inputs by name."""

    number: int
    ends_batch: bool
    region: Region
    context: Mapping[str, NDArray[np.uint8]]


class _Batch(NamedTuple):
    """Tiles that were predicted: their maps, and the sum of these on its way to the host."""

    tiles: Sequence[_Read]
    maps: torch.Tensor
    total: Arrival


def predict(
    model: torch.nn.Module,
    card: Bundle,
    read: Callable[[int], tuple[Region, Context]],
    rows: Iterable[Sequence[int]],
    batch: int,
    readers: int,
    dtype: torch.dtype | None,
    inside: Callable[[int], Box] | None = None,
    is_given_up: IsGivenUp = never,
    spent: TimeSpent | None = None,
) -> Generator[TilePrediction]:
    """Predict the class probabilities of tiles, in their order.

    No batch spans two rows, so that a row's probabilities do not depend on where one begins, and
    all tiles of a batch have one size.

    Args:
        model: In eval mode, on its device.
        card: Its normalisation.
        read: Returns the pixels of a tile, and by name those of the network's other inputs; called
            from `readers` threads.
        rows: Numbers of tiles, row by row; pulled when reading gets there, by the thread that
            predicts.
        batch: The most tiles of a forward pass.
        readers: Threads that read ahead.
        dtype: Autocast precision, or None.
        inside: Returns the part of a tile that is wanted, in its pixels: a network that has
            `logits_inside` computes no more of it. None is all of each.
        is_given_up: Asked between layers, by the thread that predicts.
        spent: Counts where this thread's time goes.

    Yields:
        The tile's number, its probabilities (classes, h, w) or (classes,) as the model's logits
        are, with the height as one more channel where objects are separated, on the model's
        device, and which pixels were unread (h, w), or None. Where only its other inputs were not
        read whole, it is none of the tile's pixels.

    Raises:
        PathosegError: The device's memory is too small, or an answer not finite or of wrong size.
        GivenUpError: `is_given_up` says so.
    """
    device = next(model.parameters()).device
    network = _Network(model, card, device)
    if not network.has_parts:
        inside = None
    waiting, spent = deque[_Batch](), spent or TimeSpent()

    def read_tile(tile: tuple[int, bool]) -> _Read:
        number, ends_batch = tile
        region, around = read(number)
        if region.unread is None and any(seen.unread is not None for seen in around.values()):
            region = Region(region.pixels, np.zeros(region.pixels.shape[:2], bool))
        return _Read(
            number, ends_batch, region, {name: seen.pixels for name, seen in around.items()}
        )

    with closing(prefetch_map(read_tile, _tiles(rows, batch), readers)) as reads:
        for tiles in spent.waiting(_same_shaped(reads, inside), "waiting for tiles"):
            images = np.stack([tile.region.pixels for tile in tiles])
            names = tiles[0].context
            others = {name: np.stack([tile.context[name] for tile in tiles]) for name in names}
            seen = {IMAGE: images, **others} if others else images
            part = None if inside is None else inside(tiles[0].number)
            with (
                spent.on("computing"),
                torch.inference_mode(),
                asking(model, device, is_given_up),
                memory_told(
                    f"A forward pass of {len(tiles)} tiles",
                    "Lower [infer] batch or tile, or train with a smaller --tile.",
                    device,
                ),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                logits = network.logits(seen, part)
                maps = _maps(logits.float().contiguous(), card.model.classes)
                waiting.append(_Batch(tiles, maps, Arrival(maps.sum())))
            # A batch is looked at while a device computes the next one.
            while len(waiting) > 1 or (waiting and waiting[0].total.is_here):
                yield from _checked(waiting.popleft())
        while waiting:
            yield from _checked(waiting.popleft())


class _Network:
    """A model and the memory layout of its weights and inputs: channels last where it can be.

    Args:
        model: In eval mode.
        card: Its normalisation.
        device: The model's.
    """

    def __init__(self, model: torch.nn.Module, card: Bundle, device: torch.device) -> None:
        self._model, self._card, self._device = model, card, device
        self._logits_inside: Any = getattr(model, "logits_inside", None)
        self._lay_out(torch.channels_last)  # twice as fast, on CPUs too

    @property
    def has_parts(self) -> bool:
        """True if it computes parts of tiles."""
        return self._logits_inside is not None

    def logits(self, seen: Images, part: Box | None) -> torch.Tensor:
        """Return the logits of images, or of a part of each.

        Raises:
            PathosegError: Those of the part are of another size.
        """
        try:
            return self._answer(seen, part)
        except RuntimeError as error:
            is_tried = self._layout == torch.contiguous_format or not self._card.model.is_factory
            if is_tried or is_out_of_memory(error):
                raise
            # It may ask for views that only the usual layout has; any other fault recurs.
            self._lay_out(torch.contiguous_format)
        # Outside the handler, whose traceback keeps what the attempt made in memory.
        return self._answer(seen, part)

    def _answer(self, seen: Images, part: Box | None) -> torch.Tensor:
        inputs = to_inputs(seen, self._card.mean, self._card.std, self._device, self._layout)
        logits: torch.Tensor
        if part is None:
            logits = answer(self._model, inputs)
            return logits
        logits = self._logits_inside(inputs, part)
        if logits.shape[-2:] != (part.height, part.width):
            wrong = f"{type(self._model).__name__}.logits_inside answers {(*logits.shape,)}"
            told = f"{wrong}, not {part.height} rows and {part.width} columns."
            raise PathosegError(told, "Let it return the logits of that part alone.")
        return logits

    def _lay_out(self, layout: torch.memory_format) -> None:
        self._model.to(memory_format=layout)  # type: ignore[call-overload]  # not in its stub
        self._layout = layout


def _maps(answer: torch.Tensor, classes: int) -> torch.Tensor:
    """Probabilities of the classes, and the other channels as they are."""
    if answer.shape[1] == classes:
        return answer.softmax(1)
    return torch.cat([answer[:, :classes].softmax(1), answer[:, classes:]], dim=1)


def _checked(batch: _Batch) -> Iterator[TilePrediction]:
    """The predictions of a batch, unless the sum of its channels is not finite."""
    if not np.isfinite(batch.total.array()):
        raise PathosegError(
            f"The model answers tile {batch.tiles[0].number} with numbers that are not finite.",
            "Its weights are broken or overflow: train again, or set [train] amp to none.",
        )
    for tile, chances in zip(batch.tiles, batch.maps, strict=True):
        yield tile.number, chances, tile.region.unread


def _same_shaped(
    tiles: Iterable[_Read], inside: Callable[[int], Box] | None
) -> Iterator[Sequence[_Read]]:
    """Tiles by batch, cut where their size changes or the part of them that is wanted."""
    group = list[_Read]()
    for tile in tiles:
        if group and (
            group[0].region.pixels.shape != tile.region.pixels.shape
            or (inside is not None and inside(group[0].number) != inside(tile.number))
        ):
            yield group
            group = []
        group.append(tile)
        if tile.ends_batch:
            yield group
            group = []


def _tiles(rows: Iterable[Sequence[int]], batch: int) -> Iterator[tuple[int, bool]]:
    """Every tile, and whether it is the last of its batch."""
    for row in rows:
        for start in range(0, len(row), batch):
            *others, last = row[start : start + batch]
            yield from ((index, False) for index in others)
            yield last, True
