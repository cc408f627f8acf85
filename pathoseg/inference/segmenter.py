"""Segments one slide: tissue, tiles, probabilities, stitched bands of the mask."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.config import Config
from pathoseg.device import Arrival, amp_dtype, memory_told, pick_device, to_input
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Size
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.interruption import Interruption
from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import Bundle, bundle_id, load_bundle
from pathoseg.outputs.stitch import (
    Finish,
    Prediction,
    argmax,
    argmax_and_confidence,
    reach_down,
    stitch,
)
from pathoseg.progress import progress_bar, say
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, model_frame, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.prefetch import in_background, prefetch_map
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser, fit_stain
from pathoseg.tiles.tissue import Tissue, find_tissue


def default_overlap(tile: int, multiple: int, reach: int | None) -> int:
    """Pixels that neighbouring tiles share where nobody says.

    A quarter of the tile, or less where less already makes predicting in tiles equal predicting
    the whole slide: twice the distance over which a tile's edge is felt, and a little to blend.

    Args:
        tile: Side of a tile in pixels.
        multiple: What the model divides by; the overlap is a multiple of it.
        reach: The distance in pixels, None where there is none (group or instance norm).
    """
    quarter = tile // 4
    wanted = quarter if reach is None else min(quarter, 2 * (reach + multiple))
    return -(-wanted // multiple) * multiple


def default_margin(overlap: int, reach: int | None) -> int:
    """Outer pixels of a tile without weight: all that feel its edge, where the overlap holds them.

    Elsewhere a quarter of the overlap on either side, which leaves half of it to blend.
    """
    if reach is not None and 2 * reach <= overlap:
        return reach
    return overlap // 4


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
    with closing(prefetch_map(read_tile, _tiles(rows, batch), readers)) as tiles:
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


Mask = NDArray[np.uint8]


def class_table_of(card: Bundle) -> ClassTable:
    """The classes of a model as annotations and outputs know them."""
    return ClassTable(card.class_names, card.class_colours)


@dataclass(frozen=True)
class SlidePlan:
    """What of a slide is predicted, and where it goes.

    Attributes:
        slide: The slide's file.
        frame: Its pixels at the model's resolution.
        output: The frame of the mask: `frame`, or a pixel a tile where tiles are classified.
        grid: Tiles over `frame`.
        indices: Tiles of the grid that hold tissue.
        tissue: Where tissue lies.
        stain: Applied to every tile.
        warning: What is to be said of its results, or None.
    """

    slide: Path
    frame: Frame
    output: Frame
    grid: TileGrid
    indices: Sequence[int]
    tissue: Tissue
    stain: StainNormaliser | None
    warning: str | None = None

    def tiles_of(self, row: int) -> Sequence[int]:
        """Those of `indices` in a row of the grid."""
        columns = self.grid.columns
        start, end = (bisect_left(self.indices, edge * columns) for edge in (row, row + 1))
        return self.indices[start:end]


@dataclass(frozen=True, slots=True)
class MaskRow:
    """What a row of tiles makes of the mask.

    Attributes:
        number: Of the row.
        band: Class indices (rows, width): all that no later row of tiles changes.
        unread_tiles: Tiles of the row with pixels that could not be read.
    """

    number: int
    band: Mask
    unread_tiles: int


def load_segmenter(bundle: Path, config: Config, factory: str | None) -> Segmenter:
    """The segmenter of a bundle, on the device; tells the user which model it is.

    Raises:
        PathosegError: The bundle cannot be used, or knows other classes than `data.classes`.
    """
    keep_freed_memory(LARGE)
    model, card = load_bundle(bundle, factory)
    names = ", ".join(card.class_names)
    if config.data.classes not in (None, card.class_names):
        raise PathosegError(
            f"The model {bundle} tells apart {names}, not {', '.join(config.data.classes or ())}.",
            "Name another model with --model, or leave `classes` out of the configuration.",
        )
    say(f"Model: {bundle} ({names}; {card.mpp:g} µm)")
    return Segmenter(model.to(pick_device()), card, config, bundle_id(bundle))


class Segmenter:
    """A model ready for slides.

    Args:
        model: In eval mode, on its device.
        card: What using it needs.
        config: `infer`, `tissue`, `data.assume_mpp` and `train.amp` are used.
        model_id: What results say of where they come from.

    Attributes:
        card: As given.
        classes: What it tells apart.
        model_id: As given.
    """

    def __init__(
        self, model: torch.nn.Module, card: Bundle, config: Config, model_id: str = ""
    ) -> None:
        self._model, self.card, self._config = model, card, config
        self.model_id = model_id
        self.classes = class_table_of(card)
        device = next(model.parameters()).device
        self._dtype = amp_dtype(device, config.train.amp)

    def plan(self, slide: Slide) -> SlidePlan:
        """Finds tissue and lays the tiles.

        Raises:
            PathosegError: The slide is too coarse, or tile and overlap do not fit the model.
        """
        card, options = self.card, self._config.infer
        frame = output = model_frame(slide, card.mpp)
        if card.model.task == "classify":
            grid = TileGrid(frame.size, Size(card.tile, card.tile), 0)
            output = Frame.at(slide.size, slide.mpp, card.mpp * card.tile)
        else:
            overlap = card.overlap if options.overlap is None else options.overlap
            grid = TileGrid.cover(frame.size, card.tile, overlap, card.multiple)
        tissue = find_tissue(slide, self._config.tissue)
        indices = [i for i, box in enumerate(grid) if tissue.share(box, frame) > 0]
        stain = None
        if card.stain is not None:
            boxes = [grid.box(i) for i in indices]
            method: Method = "macenko" if card.stain["method"] == "macenko" else "reinhard"
            stain = fit_stain(slide, frame, boxes, tissue, method) if boxes else None
        warning = card.unseen_resolution(slide.mpp.mean)
        return SlidePlan(slide.path, frame, output, grid, indices, tissue, stain, warning)

    def bands_with_confidence(
        self, plan: SlidePlan, interruption: Interruption
    ) -> Generator[NDArray[np.int16]]:
        """The mask of a slide from top to bottom; closing the generator ends its threads.

        Yields:
            (2, rows, width of `plan.output`): class indices, 0 off the tissue, 255 where unread;
            and their probability times `CONFIDENCE_LEVELS`, 0 off the tissue, where no tile is
            predicted.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        with closing(self._rows(plan, interruption, finish=argmax_and_confidence)) as rows:
            for _, band, _ in rows:
                yield band

    def rows(
        self,
        plan: SlidePlan,
        interruption: Interruption,
        first: int = 0,
        take: Callable[[int], bool] = lambda _: True,
    ) -> Generator[MaskRow]:
        """The mask by rows of tiles, equal to the bit wherever one begins.

        Args:
            plan: What to predict.
            interruption: Asked after every tile.
            first: The row to begin with; what reaches into it from above is predicted again.
            take: Asked for each row when reading gets there, by another thread; the first that it
                refuses is the end.

        Yields:
            One row after the other, to the last one taken.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        with closing(self._rows(plan, interruption, first, take)) as rows:
            for row in rows:
                yield MaskRow(*row)

    def _rows(
        self,
        plan: SlidePlan,
        interruption: Interruption,
        first: int = 0,
        take: Callable[[int], bool] = lambda _: True,
        finish: Finish = argmax,
    ) -> Generator[tuple[int, NDArray[Any], int]]:
        """As `rows`; bands are what `finish` makes of probabilities."""
        grid = plan.grid
        start = max(0, first - reach_down(grid))
        taken, unread = set[int](), Counter[int]()

        def wanted() -> Iterator[Sequence[int]]:
            for row in range(start, grid.rows):
                if row >= first:
                    if not take(row):
                        return
                    taken.add(row)
                yield plan.tiles_of(row)

        above = bisect_left(plan.indices, start * grid.columns)
        with (
            closing(SlidePool(self._open)) as slides,
            closing(in_background(self._predict(plan, slides, wanted()), ahead=2)) as predictions,
            progress_bar(plan.slide.name, len(plan.indices), "tiles", done=above) as bar,
        ):

            def watched() -> Iterator[Prediction]:
                for prediction in predictions:
                    unread[prediction[0] // grid.columns] += prediction[2] is not None
                    interruption.raise_if_asked()
                    yield prediction
                    bar.advance()

            for row, band in enumerate(self._bands(plan, watched(), start, finish), start):
                # When a band comes, whether its row is taken has been asked: the prediction behind
                # it has come too, or there is none.
                if row in taken:
                    yield row, band, unread[row]
                elif row >= first:
                    return

    def probabilities(self, slide: Slide) -> NDArray[np.float32]:
        """Return the probabilities of a whole slide at once; for pictures that fit into memory.

        Returns:
            Shape (classes, rows, columns) of the model's frame of the slide; of its tiles where
            the model classifies tiles.

        Raises:
            PathosegError: The slide is too coarse, or the device's memory is too small.
        """
        plan = self.plan(slide)
        rows = (plan.tiles_of(row) for row in range(plan.grid.rows))
        with (
            closing(SlidePool(lambda _: copy(slide))) as slides,
            closing(self._predict(plan, slides, rows)) as predictions,
        ):
            if self.card.model.task == "classify":
                tiles = np.stack([chances.cpu().numpy() for _, chances, _ in predictions], axis=1)
                return tiles.reshape(-1, plan.grid.rows, plan.grid.columns)
            count, margin = len(self.classes), self._margin(plan)
            bands = stitch(plan.grid, predictions, count, margin, lambda chances: chances)
            return np.concatenate(list(bands), axis=1)

    def _margin(self, plan: SlidePlan) -> int:
        margin = self._config.infer.margin
        if margin is None:
            margin = default_margin(plan.grid.overlap, edge_reach(self._model))
        return margin

    def _bands(
        self, plan: SlidePlan, predictions: Iterator[Prediction], start: int, finish: Finish
    ) -> Iterator[NDArray[Any]]:
        if self.card.model.task == "classify":
            return _coarse_rows(plan, predictions, start, finish)
        margin = self._margin(plan)
        return stitch(plan.grid, predictions, len(self.classes), margin, finish, first=start)

    def _predict(
        self, plan: SlidePlan, slides: SlidePool, rows: Iterable[Sequence[int]]
    ) -> Generator[Prediction]:
        def read(index: int) -> Region:
            with slides.borrow(plan.slide) as slide:
                region = read_region(slide, plan.frame, plan.grid.box(index))
            if plan.stain is None:
                return region
            return Region(plan.stain.apply(region.pixels), region.unread)

        options = self._config.infer
        return predict(
            self._model, self.card, read, rows, options.batch, options.readers, self._dtype
        )

    def _open(self, path: Path) -> Slide:
        return open_slide(path, self._config.data.assume_mpp)


def _coarse_rows(
    plan: SlidePlan, predictions: Iterator[Prediction], start: int, finish: Finish
) -> Iterator[NDArray[Any]]:
    """One pixel a tile: what `finish` makes of it, 255 where most of it was unread."""
    blank = finish(torch.zeros(1, 1, 1)).zero_().numpy()
    following = next(predictions, None)
    for row in range(start, plan.grid.rows):
        coarse = np.repeat(blank, plan.grid.columns, axis=-1)
        while following is not None and following[0] // plan.grid.columns == row:
            index, chance, unread = following
            lost = unread is not None and bool(unread.mean() > 0.5)
            pixel = finish(chance[:, None, None]).cpu().numpy()[..., 0, 0]
            coarse[..., 0, index % plan.grid.columns] = IGNORE if lost else pixel
            following = next(predictions, None)
        yield coarse
