"""Segments one slide: tissue, tiles, probabilities, stitched bands of the mask."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.config import Config
from pathoseg.device import Arrival, amp_dtype, answer, memory_told, pick_device, to_inputs
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE, Box, Frame, ModelInput, Size
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.inference.windows import WindowOptions, Windows, most_pixels
from pathoseg.interruption import Interruption
from pathoseg.memory_size import parse_memory
from pathoseg.models.build import declared_inputs, edge_reach
from pathoseg.models.bundle import Bundle, bundle_id, load_bundle
from pathoseg.models.layers import fold_norms
from pathoseg.outputs.stitch import (
    Finish,
    Prediction,
    argmax,
    argmax_and_confidence,
    reach_down,
    stitch,
)
from pathoseg.platform_support import cores_to_use
from pathoseg.progress import progress_bar, say
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, model_frame, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.prefetch import in_background, prefetch_map
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser, fit_stain
from pathoseg.tiles.tissue import Tissue, find_tissue


def default_overlap(tile: int, multiple: int, reach: int | None) -> int:
    """Return the pixels that neighbouring tiles share, where the user does not say.

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
    """Return the outer pixels of a tile that get no weight, where the user does not say.

    They are all pixels that feel the tile's edge, where the overlap holds them; elsewhere a quarter
    of the overlap on either side, which leaves half of it to blend.

    Args:
        overlap: Pixels that neighbouring tiles share.
        reach: The distance in pixels over which an edge is felt; None where there is none.
    """
    if reach is not None and 2 * reach <= overlap:
        return reach
    return overlap // 4


_Context = Mapping[str, NDArray[np.uint8]]
_Read = tuple[int, bool, Region, _Context]
_Group = list[tuple[int, Region, _Context]]
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
    context: Callable[[int], _Context] | None = None,
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

    Yields:
        The tile's number, its probabilities (classes, h, w) or (classes,) as the model's logits
        are, on the model's device, and which pixels were unread (h, w), or None.

    Raises:
        PathosegError: The device's memory is too small, or an answer not finite or of wrong size.
    """
    device = next(model.parameters()).device
    layout = _laid_out(model, card, device)
    logits_inside: Any = getattr(model, "logits_inside", None)
    if logits_inside is None:
        inside = None
    waiting = deque[_Batch]()

    def read_tile(tile: tuple[int, bool]) -> _Read:
        index, last = tile
        return index, last, read(index), {} if context is None else context(index)

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
        for group in batches(tiles):
            images = np.stack([region.pixels for _, region, _ in group])
            names = group[0][2]
            others = {name: np.stack([around[name] for *_, around in group]) for name in names}
            with (
                torch.inference_mode(),
                memory_told(
                    f"A forward pass of {len(group)} tiles",
                    "Lower [infer] batch or tile, or train with a smaller --tile.",
                ),
                torch.autocast(device.type, dtype, enabled=dtype is not None),
            ):
                seen = {IMAGE: images, **others} if others else images
                inputs = to_inputs(seen, card.mean, card.std, device, layout)
                if inside is None:
                    logits = answer(model, inputs)
                else:
                    part = inside(group[0][0])
                    logits = logits_inside(inputs, part)
                    if logits.shape[-2:] != (part.height, part.width):
                        wrong = f"{type(model).__name__}.logits_inside answers {(*logits.shape,)}"
                        told = f"{wrong}, not {part.height} rows and {part.width} columns."
                        raise PathosegError(told, "Let it return the logits of that part alone.")
                chances = logits.float().contiguous().softmax(1)
                waiting.append((group, chances, Arrival(chances.sum())))
            # A batch is looked at while a device computes the next one.
            while len(waiting) > 1 or (waiting and waiting[0][2].is_here):
                yield from _checked(*waiting.popleft())
        while waiting:
            yield from _checked(*waiting.popleft())


def _laid_out(model: torch.nn.Module, card: Bundle, device: torch.device) -> torch.memory_format:
    """Lays a model's weights out channels-last, twice as fast on CPUs too, where it takes that."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
    if card.model.is_factory:
        blank = {
            each.name: np.zeros((1, each.size, each.size, 3), np.uint8) for each in card.inputs
        }
        seen = blank if len(blank) > 1 else blank[IMAGE]
        try:
            with torch.inference_mode():
                answer(model, to_inputs(seen, card.mean, card.std, device, torch.channels_last))
        except RuntimeError:  # it asks for views that only the usual layout has
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # not in its stub
            return torch.contiguous_format
    return torch.channels_last


def _checked(group: _Group, chances: torch.Tensor, total: Arrival) -> Iterator[Prediction]:
    """The predictions of a batch, unless the sum of its probabilities is not finite."""
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


Mask = NDArray[np.uint8]


def class_table_of(card: Bundle) -> ClassTable:
    """Return a model's classes and colours as annotations and outputs take them."""
    return ClassTable(card.class_names, card.class_colours)


@dataclass(frozen=True)
class SlidePlan:
    """The tiles of one slide that are predicted, and the frame of its mask.

    Attributes:
        slide: The slide's file.
        frame: Its pixels at the model's resolution.
        output: The frame of the mask: `frame`, or a pixel a tile where tiles are classified.
        grid: Tiles over `frame`, or windows over its tissue.
        indices: Numbers of those that hold tissue, ascending.
        tissue: The slide's tissue.
        stain: Applied to every tile; None leaves colours as they are.
        warning: A sentence for the user about the slide's results, or None.
        context: What the network sees beside a tile, and the slide's pixels at its resolution.
    """

    slide: Path
    frame: Frame
    output: Frame
    grid: TileGrid | Windows
    indices: Sequence[int]
    tissue: Tissue
    stain: StainNormaliser | None
    warning: str | None = None
    context: Sequence[tuple[ModelInput, Frame]] = ()

    def tiles_of(self, row: int) -> Sequence[int]:
        """Return those of `indices` in a row of the grid, ascending."""
        edges = self.grid.first_of(row), self.grid.first_of(row + 1)
        start, end = (bisect_left(self.indices, edge) for edge in edges)
        return self.indices[start:end]

    @property
    def skipped(self) -> int:
        """The number of tiles, or of windows' cells, without tissue."""
        grid = self.grid
        return grid.skipped if isinstance(grid, Windows) else len(grid) - len(self.indices)


@dataclass(frozen=True, slots=True)
class MaskRow:
    """The part of the mask that a row of tiles completes.

    Attributes:
        number: Number of the row, from 0 at the top.
        band: Class indices (rows, width): all that no later row of tiles changes.
        unread_tiles: Tiles of the row with pixels that could not be read.
    """

    number: int
    band: Mask
    unread_tiles: int


def load_segmenter(bundle: Path, config: Config, factory: str | None) -> Segmenter:
    """Load a bundle onto the device, and tell the user which model it is.

    Args:
        bundle: The bundle's folder.
        config: The options of the batch.
        factory: The user's own network that may be imported, as `module:factory`; or None.

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
    if card.tiling == "blended" and config.infer.tile is None and edge_reach(model) is not None:
        say(
            f"A model of an earlier version: tiles of {card.tile} px are blended as then. [infer] "
            "tile = 2048 predicts what one pass over the slide would, and often sooner."
        )
    return Segmenter(model.to(pick_device()), card, config, bundle_id(bundle))


class Segmenter:
    """A model on its device, with all that predicting slides needs.

    Args:
        model: In eval mode, on its device; batch norms of ours, of this version, are folded.
        card: Classes, resolution, tile and normalisation.
        config: `infer`, `tissue`, `data.assume_mpp` and `train.amp` are used.
        model_id: Identifies the bundle in results.

    Attributes:
        card: As given.
        classes: The model's classes and colours.
        model_id: As given.
    """

    def __init__(
        self, model: torch.nn.Module, card: Bundle, config: Config, model_id: str = ""
    ) -> None:
        if not card.model.is_factory and card.tiling != "blended":  # which answers as it did
            fold_norms(model)
        self._model, self.card, self._config = model, card, config
        self.model_id = model_id
        self.classes = class_table_of(card)
        device = next(model.parameters()).device
        self._dtype = amp_dtype(device, config.train.amp)
        self._context = declared_inputs(model, card.mpp, self._tile[0])[1:]
        self._windows = self._choose_windows()

    @property
    def tiling(self) -> Mapping[str, int] | None:
        """The options of windows, by name; None where tiles are blended, or classified."""
        return None if self._windows is None else asdict(self._windows)

    def plan(self, slide: Slide) -> SlidePlan:
        """Find a slide's tissue and lay its tiles.

        Raises:
            PathosegError: The slide is too coarse, or tile and overlap do not fit the model.
        """
        card = self.card
        frame = output = model_frame(slide, card.mpp)
        tissue = find_tissue(slide, self._config.tissue)

        def has_tissue(box: Box) -> bool:
            return tissue.share(box, frame) > 0

        grid: TileGrid | Windows
        if self._windows is not None:
            grid = Windows.over(frame, self._windows, has_tissue)
            indices: Sequence[int] = range(len(grid))
        else:
            if card.model.task == "classify":
                grid = TileGrid(frame.size, Size(card.tile, card.tile), 0)
                output = Frame.at(slide.size, slide.mpp, card.mpp * card.tile)
            else:
                grid = TileGrid.cover(frame.size, *self._tile, card.multiple)
                if self._context:  # of the size that belongs to theirs, also on a smaller picture
                    grid = replace(grid, tile=Size(self._tile[0], self._tile[0]))
            indices = [i for i, box in enumerate(grid) if has_tissue(box)]
        stain = None
        if card.stain is not None:
            # On the same tiles whether there are windows or not, so that colours are the same.
            tiles = grid
            if card.model.task != "classify":
                overlap = self._config.infer.overlap
                overlap = card.overlap if overlap is None else overlap
                tiles = TileGrid.cover(frame.size, card.tile, overlap, card.multiple)
            boxes = [box for box in map(tiles.box, range(len(tiles))) if has_tissue(box)]
            method: Method = "macenko" if card.stain["method"] == "macenko" else "reinhard"
            stain = fit_stain(slide, frame, boxes, tissue, method) if boxes else None
        warning = card.unseen_resolution(slide.mpp.mean)
        context = [(each, Frame.at(slide.size, slide.mpp, each.mpp)) for each in self._context]
        return SlidePlan(slide.path, frame, output, grid, indices, tissue, stain, warning, context)

    def bands_with_confidence(
        self, plan: SlidePlan, interruption: Interruption
    ) -> Generator[NDArray[np.int16]]:
        """Predict the mask of a slide from top to bottom; closing the generator ends its threads.

        Args:
            plan: The slide's tiles.
            interruption: Asked after every tile.

        Yields:
            (2, rows, width of `plan.output`), int16: class indices, 0 off the tissue, 255 where
            unread; and their probability times `CONFIDENCE_LEVELS`, 0 off the tissue, where no tile
            is predicted.

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
        numbers: Iterable[int] | None = None,
    ) -> Generator[MaskRow]:
        """Predict rows of the mask, equal to the bit wherever one begins.

        Args:
            plan: The slide's tiles.
            interruption: Asked after every tile.
            numbers: Consecutive rows of tiles; None is all. Each is pulled when its reading begins,
                by the thread that predicts. Tiles above the first one that reach into it are
                predicted again.

        Yields:
            Each of these rows.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        with closing(self._rows(plan, interruption, numbers)) as rows:
            for row in rows:
                yield MaskRow(*row)

    def _rows(
        self,
        plan: SlidePlan,
        interruption: Interruption,
        numbers: Iterable[int] | None = None,
        finish: Finish = argmax,
    ) -> Generator[tuple[int, NDArray[Any], int]]:
        """As `rows`; bands are what `finish` makes of probabilities."""
        grid = plan.grid
        remaining = iter(range(grid.rows) if numbers is None else numbers)
        first = next(remaining, None)
        if first is None:
            return
        start = first
        if isinstance(grid, TileGrid):
            start = max(0, first - reach_down(grid))
        pulled, unread = {first}, Counter[int]()

        def wanted() -> Iterator[Sequence[int]]:
            for row in range(start, first + 1):
                yield plan.tiles_of(row)
            for row in remaining:
                pulled.add(row)
                yield plan.tiles_of(row)

        above = bisect_left(plan.indices, grid.first_of(start))
        with (
            closing(SlidePool(self._open)) as slides,
            closing(in_background(self._predict(plan, slides, wanted()), ahead=2)) as predictions,
            progress_bar(plan.slide.name, len(plan.indices), "tiles", done=above) as bar,
        ):

            def watched() -> Iterator[Prediction]:
                for prediction in predictions:
                    unread[grid.row_of(prediction[0])] += prediction[2] is not None
                    interruption.raise_if_asked()
                    yield prediction
                    bar.advance()

            for row, band in enumerate(self._bands(plan, watched(), start, finish), start):
                # When a band comes, its row has been pulled if it is wanted: the prediction behind
                # it has come too, or there is none.
                if row in pulled:
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
                assert isinstance(plan.grid, TileGrid)
                tiles = np.stack([chances.cpu().numpy() for _, chances, _ in predictions], axis=1)
                return tiles.reshape(-1, plan.grid.rows, plan.grid.columns)
            bands = self._joined(plan.grid, predictions, lambda chances: chances)
            return np.concatenate(list(bands), axis=1)

    @property
    def _tile(self) -> tuple[int, int]:
        """Side and overlap of tiles that are blended."""
        card, options = self.card, self._config.infer
        tile, overlap = options.tile or card.tile, options.overlap
        if overlap is None:
            reach = edge_reach(self._model)
            trained = tile == card.tile
            overlap = card.overlap if trained else default_overlap(tile, card.multiple, reach)
        return tile, overlap

    def _choose_windows(self) -> WindowOptions | None:
        """The options of windows, None where tiles are blended, or classified."""
        card, options = self.card, self._config.infer
        reach = None if self._context else edge_reach(self._model)
        blended = options.overlap is not None or options.margin is not None
        # A bundle of an earlier version answers as it did, unless it is asked for another tile.
        blended |= card.tiling == "blended" and options.tile is None
        if reach is None or card.model.task == "classify" or blended:
            return None
        if options.tile is not None:
            largest = options.tile**2
        else:
            memory = parse_memory(options.memory)
            largest = most_pixels(self._model, card.multiple, memory, options.batch)
        return WindowOptions.choose(reach, card.multiple, largest)

    def _bands(
        self, plan: SlidePlan, predictions: Iterator[Prediction], start: int, finish: Finish
    ) -> Iterator[NDArray[Any]]:
        if self.card.model.task == "classify":
            return _coarse_rows(plan, predictions, start, finish)
        return self._joined(plan.grid, predictions, finish, start)

    def _joined(
        self,
        grid: TileGrid | Windows,
        predictions: Iterator[Prediction],
        finish: Finish,
        first: int = 0,
    ) -> Iterator[NDArray[Any]]:
        if isinstance(grid, Windows):
            return grid.join(predictions, len(self.classes), finish, first)
        margin = self._config.infer.margin
        if margin is None:
            margin = default_margin(grid.overlap, edge_reach(self._model))
        return stitch(grid, predictions, len(self.classes), margin, finish, first)

    def _predict(
        self, plan: SlidePlan, slides: SlidePool, rows: Iterable[Sequence[int]]
    ) -> Generator[Prediction]:
        def read_box(frame: Frame, box: Box) -> Region:
            with slides.borrow(plan.slide) as slide:
                region = read_region(slide, frame, box)
            if plan.stain is None:
                return region
            return Region(plan.stain.apply(region.pixels), region.unread)

        def read(index: int) -> Region:
            return read_box(plan.frame, plan.grid.box(index))

        def around(index: int) -> _Context:
            box, mpp = plan.grid.box(index), self.card.mpp
            return {
                each.name: read_box(frame, each.around(box, mpp)).pixels
                for each, frame in plan.context
            }

        options, grid = self._config.infer, plan.grid
        return predict(
            self._model,
            self.card,
            read,
            rows,
            options.batch,
            options.readers or cores_to_use(),
            self._dtype,
            grid.inside if isinstance(grid, Windows) else None,
            around if plan.context else None,
        )

    def _open(self, path: Path) -> Slide:
        return open_slide(path, self._config.data.assume_mpp)


def _coarse_rows(
    plan: SlidePlan, predictions: Iterator[Prediction], start: int, finish: Finish
) -> Iterator[NDArray[Any]]:
    """One pixel a tile: what `finish` makes of it, 255 where most of it was unread."""
    assert isinstance(plan.grid, TileGrid)
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
