"""From the tiles of one slide to probabilities, reading and computing at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing

import numpy as np
import torch

from pathoseg.device import memory_told, to_input
from pathoseg.errors import PathosegError
from pathoseg.models.bundle import Bundle
from pathoseg.outputs.arrival import Arrival
from pathoseg.outputs.stitch import Prediction
from pathoseg.slides.region import Region
from pathoseg.tiles.prefetch import map_ahead

_Batch = tuple[list[tuple[int, Region]], torch.Tensor, Arrival]


def predict(
    model: torch.nn.Module,
    card: Bundle,
    read: Callable[[int], Region],
    rows: Iterable[Sequence[int]],
    batch: int,
    readers: int,
    dtype: torch.dtype | None,
) -> Generator[Prediction]:
    """Class probabilities of tiles, in their order.

    No batch spans two rows, so that a row's probabilities do not depend on where one begins.

    Args:
        model: In eval mode, on its device.
        card: Its normalisation.
        read: The pixels of a tile; called from `readers` threads.
        rows: Which tiles, row by row; asked for as reading gets there, by the thread that predicts.
        batch: Most tiles of a forward pass.
        readers: Threads that read ahead.
        dtype: Autocast precision, or None.

    Yields:
        Index, probabilities (classes, h, w) or (classes,) as the model's logits are, on the model's
        device, and which pixels were unread.

    Raises:
        PathosegError: The device's memory is too small, or an answer is not finite.
    """
    device = next(model.parameters()).device
    layout = _laid_out(model, card, device)
    waiting = deque[_Batch]()

    def read_tile(tile: tuple[int, bool]) -> tuple[int, bool, Region]:
        index, last = tile
        return index, last, read(index)

    group: list[tuple[int, Region]] = []
    with closing(map_ahead(read_tile, _tiles(rows, batch), readers)) as tiles:
        for index, last, region in tiles:
            group.append((index, region))
            if not last:
                continue
            images = np.stack([region.pixels for _, region in group])
            with (
                torch.inference_mode(),
                memory_told(
                    f"A forward pass of {len(group)} tiles",
                    "Lower [infer] batch, or train with a smaller --tile.",
                ),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                logits = model(to_input(images, card.mean, card.std, device, layout))
                chances = logits.float().contiguous().softmax(1)
                waiting.append((group, chances, Arrival(chances.sum())))
            group = []
            # A batch is looked at while a device computes the next one.
            while len(waiting) > 1 or (waiting and waiting[0][2].is_here):
                yield from _checked(*waiting.popleft())
        while waiting:
            yield from _checked(*waiting.popleft())


def _laid_out(model: torch.nn.Module, card: Bundle, device: torch.device) -> torch.memory_format:
    """Lays a model's weights out channels-last, twice as fast on CPUs too, where it takes that."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
    if card.model.is_factory:
        image = torch.zeros(1, 3, card.tile, card.tile, device=device)
        try:
            with torch.inference_mode():
                model(image.contiguous(memory_format=torch.channels_last))
        except RuntimeError:  # it asks for views that only the usual layout has
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # not in its stub
            return torch.contiguous_format
    return torch.channels_last


def _checked(
    group: Sequence[tuple[int, Region]], chances: torch.Tensor, total: Arrival
) -> Iterator[Prediction]:
    """The predictions of a batch, unless the sum of its probabilities is not finite."""
    if not np.isfinite(total.array()):
        raise PathosegError(
            f"The model answers tile {group[0][0]} with numbers that are not finite.",
            "Its weights are broken or overflow: train again, or set [train] amp to none.",
        )
    for (index, region), chance in zip(group, chances, strict=True):
        yield index, chance, region.unread


def _tiles(rows: Iterable[Sequence[int]], batch: int) -> Iterator[tuple[int, bool]]:
    """Every tile, and whether it is the last of its batch."""
    for row in rows:
        for start in range(0, len(row), batch):
            *others, last = row[start : start + batch]
            yield from ((index, False) for index in others)
            yield last, True
