"""From the tiles of one slide to probabilities, reading and computing at the same time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.models.bundle import Bundle
from pathoseg.slides.region import Region
from pathoseg.workflows.ahead import map_ahead
from pathoseg.workflows.device import memory_told, to_input

T = TypeVar("T")

Prediction = tuple[int, NDArray[np.float32], NDArray[np.bool_] | None]


def predict(
    model: torch.nn.Module,
    card: Bundle,
    read: Callable[[int], Region],
    indices: Sequence[int],
    batch: int,
    readers: int,
    dtype: torch.dtype | None,
) -> Generator[Prediction]:
    """Class probabilities of tiles, in the order of `indices`.

    Args:
        model: In eval mode, on its device.
        card: Its normalisation.
        read: The pixels of a tile; called from `readers` threads.
        indices: Which tiles.
        batch: Tiles a forward pass.
        readers: Threads that read ahead.
        dtype: Autocast precision, or None.

    Yields:
        Index, probabilities (classes, h, w) or (classes,) as the model's logits are, and which
        pixels were unread.

    Raises:
        PathosegError: The device's memory is too small, or an answer is not finite.
    """
    device = next(model.parameters()).device
    with closing(map_ahead(read, indices, readers)) as regions:
        for group in _groups(zip(indices, regions, strict=True), batch):
            images = np.stack([region.pixels for _, region in group])
            with (
                torch.inference_mode(),
                memory_told(
                    f"A forward pass of {len(group)} tiles",
                    "Lower [infer] batch, or train with a smaller --tile.",
                ),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                logits = model(to_input(images, card.mean, card.std, device))
                chances = logits.float().softmax(1).cpu().numpy()
            if not np.isfinite(chances).all():
                raise PathosegError(
                    f"The model answers tile {group[0][0]} with numbers that are not finite.",
                    "Its weights are broken or overflow: train again, or set [train] amp to none.",
                )
            for (index, region), chance in zip(group, chances, strict=True):
                yield index, chance, region.unread


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    waiting = iter(items)
    while group := list(islice(waiting, size)):
        yield group
