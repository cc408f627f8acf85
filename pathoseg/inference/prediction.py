"""Predicts the tiles of a slide in their order, in batches that threads read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.device import Arrival, Images, answer, memory_told, to_inputs
from pathoseg.errors import PathosegError, is_out_of_memory
from pathoseg.geometry import IMAGE, Box
from pathoseg.giving_up import IsGivenUp, asking, never
from pathoseg.models.bundle import Bundle
from pathoseg.outputs.stitch import Prediction
from pathoseg.slides.region import Region
from pathoseg.tiles.prefetch import prefetch_map
from pathoseg.time_spent import TimeSpent

Context = Mapping[str, Region]
_Pixels = Mapping[str, NDArray[np.uint8]]
_Read = tuple[int, bool, Region, _Pixels]
_Group = list[tuple[int, Region, _Pixels]]
_Batch = tuple[_Group, torch.Tensor, Arrival]


def predict(
    model: torch.nn.Module,
    card: Bundle,
    read: Callable[[int], Region],
    rows: Iterable[Sequence[int]],
    batch: int,
    readers: int,
    dtype: torch.dtype | None,
    inside: Callable[[int], Box] | None = None,
    context: Callable[[int], Context] | None = None,
    is_given_up: IsGivenUp = never,
    spent: TimeSpent | None = None,
) -> Generator[Prediction]:
    """Predict the class probabilities of tiles, in their order.

    No batch spans two rows, so that a row's probabilities do not depend on where one begins, and
    all tiles of a batch have one size.

    Args:
        model: In eval mode, on its device.
        card: Its normalisation.
        read: Returns the pixels of a tile; called from `readers` threads.
        rows: Numbers of tiles, row by row; pulled when reading gets there, by the thread that
            predicts.
        batch: The most tiles of a forward pass.
        readers: Threads that read ahead.
        dtype: Autocast precision, or None.
        inside: Returns the part of a tile that is wanted, in its pixels: a network that has
            `logits_inside` computes no more of it. None is all of each.
        context: Reads the network's other inputs of a tile, by name, as `read` does the tile.
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
    layout = _lay_out(model, torch.channels_last)  # twice as fast, on CPUs too
    logits_inside: Any = getattr(model, "logits_inside", None)
    if logits_inside is None:
        inside = None
    waiting, spent = deque[_Batch](), spent or TimeSpent()

    def logits_of(seen: Images, part: Box | None) -> torch.Tensor:
        inputs = to_inputs(seen, card.mean, card.std, device, layout)
        logits: torch.Tensor
        logits = answer(model, inputs) if part is None else logits_inside(inputs, part)
        return logits

    def read_tile(tile: tuple[int, bool]) -> _Read:
        index, last = tile
        region, around = read(index), {} if context is None else context(index)
        if region.unread is None and any(seen.unread is not None for seen in around.values()):
            region = Region(region.pixels, np.zeros(region.pixels.shape[:2], bool))
        return index, last, region, {name: seen.pixels for name, seen in around.items()}

    def batches(tiles: Iterator[_Read]) -> Iterator[_Group]:
        group: _Group = []
        for index, last, region, around in tiles:
            if group and (
                group[0][1].pixels.shape != region.pixels.shape
                or (inside is not None and inside(group[0][0]) != inside(index))
            ):
                yield group
                group = []
            group.append((index, region, around))
            if last:
                yield group
                group = []

    with closing(prefetch_map(read_tile, _tiles(rows, batch), readers)) as tiles:
        for group in spent.waiting(batches(tiles), "waiting for tiles"):
            images = np.stack([region.pixels for _, region, _ in group])
            names = group[0][2]
            others = {name: np.stack([around[name] for *_, around in group]) for name in names}
            with (
                spent.on("computing"),
                torch.inference_mode(),
                asking(model, device, is_given_up),
                memory_told(
                    f"A forward pass of {len(group)} tiles",
                    "Lower [infer] batch or tile, or train with a smaller --tile.",
                    device,
                ),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                seen = {IMAGE: images, **others} if others else images
                part = None if inside is None else inside(group[0][0])
                logits: torch.Tensor | None = None
                try:
                    logits = logits_of(seen, part)
                except RuntimeError as error:
                    is_tried = layout == torch.contiguous_format or not card.model.is_factory
                    if is_tried or is_out_of_memory(error):
                        raise
                    # It may ask for views that only the usual layout has; any other fault recurs.
                    layout = _lay_out(model, torch.contiguous_format)
                if logits is None:  # out of the handler, which holds what the attempt has made
                    logits = logits_of(seen, part)
                if part is not None and logits.shape[-2:] != (part.height, part.width):
                    wrong = f"{type(model).__name__}.logits_inside answers {(*logits.shape,)}"
                    told = f"{wrong}, not {part.height} rows and {part.width} columns."
                    raise PathosegError(told, "Let it return the logits of that part alone.")
                chances = _maps(logits.float().contiguous(), card.model.classes)
                waiting.append((group, chances, Arrival(chances.sum())))
            # A batch is looked at while a device computes the next one.
            while len(waiting) > 1 or (waiting and waiting[0][2].is_here):
                yield from _checked(*waiting.popleft())
        while waiting:
            yield from _checked(*waiting.popleft())


def _maps(answer: torch.Tensor, classes: int) -> torch.Tensor:
    """Probabilities of the classes, and the other channels as they are."""
    if answer.shape[1] == classes:
        return answer.softmax(1)
    return torch.cat([answer[:, :classes].softmax(1), answer[:, classes:]], dim=1)


def _lay_out(model: torch.nn.Module, layout: torch.memory_format) -> torch.memory_format:
    """Lay a model's weights out so; returns the layout, for its inputs."""
    model.to(memory_format=layout)  # type: ignore[call-overload]  # not in its stub
    return layout


def _checked(group: _Group, chances: torch.Tensor, total: Arrival) -> Iterator[Prediction]:
    """The predictions of a batch, unless the sum of its channels is not finite."""
    if not np.isfinite(total.array()):
        raise PathosegError(
            f"The model answers tile {group[0][0]} with numbers that are not finite.",
            "Its weights are broken or overflow: train again, or set [train] amp to none.",
        )
    for (index, region, _), chance in zip(group, chances, strict=True):
        yield index, chance, region.unread


def _tiles(rows: Iterable[Sequence[int]], batch: int) -> Iterator[tuple[int, bool]]:
    """Every tile, and whether it is the last of its batch."""
    for row in rows:
        for start in range(0, len(row), batch):
            *others, last = row[start : start + batch]
            yield from ((index, False) for index in others)
            yield last, True
