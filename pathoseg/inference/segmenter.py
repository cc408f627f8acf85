"""Segments one slide: tissue, tiles, probabilities, stitched bands of the mask."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.config import Config
from pathoseg.device import amp_dtype, memory_told, pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, ModelInput, Size
from pathoseg.giving_up import GivenUpError, IsGivenUp, never
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.inference.infer_options import blended_tile, default_margin, object_extent
from pathoseg.inference.prediction import Context, predict
from pathoseg.inference.windows import WindowOptions, Windows, most_pixels
from pathoseg.interruption import Interruption
from pathoseg.memory_size import parse_memory
from pathoseg.models.build import check_tile, context_reach, declared_inputs, edge_reach
from pathoseg.models.bundle import Bundle, load_bundle
from pathoseg.models.bundle_identity import bundle_id
from pathoseg.models.layers import fold_norms
from pathoseg.outputs.stitch import (
    Finish,
    TilePrediction,
    argmax,
    argmax_and_confidence,
    certainty_planes,
    object_planes,
    reach_down,
    refuse_misfit,
    settle_certainty,
    stitch,
)
from pathoseg.platform_support import cores_to_use
from pathoseg.progress import progress_bar, say
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, model_frame, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.prefetch import in_background
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser, TooLittleStainError, fit_stain
from pathoseg.tiles.tissue import Tissue, find_tissue
from pathoseg.time_spent import TimeSpent

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
        warnings: Sentences for the user about the slide's results.
        context: What the network sees beside a tile, and the slide's pixels at its resolution.
    """

    slide: Path
    frame: Frame
    output: Frame
    grid: TileGrid | Windows
    indices: Sequence[int]
    tissue: Tissue
    stain: StainNormaliser | None
    warnings: Sequence[str] = ()
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
        planes: All that no later row of tiles changes, shape (planes, rows, width), uint8: class
            indices, where objects are separated what `object_planes` says, and last, where
            certainty is asked for, what `certainty_planes` and `settle_certainty` say.
        unread_tiles: Tiles of the row with pixels that could not be read, of it or around it.
    """

    number: int
    planes: Mask
    unread_tiles: int

    @property
    def band(self) -> Mask:
        """Class indices, shape (rows, width)."""
        classes: Mask = self.planes[0]
        return classes

    def certainty(self, classes: int) -> Mask:
        """Probabilities of so many classes, and last their entropy: (classes + 1, rows, width)."""
        return self.planes[-classes - 1 :]


def load_segmenter(
    bundle: Path,
    config: Config,
    factory: str | None,
    spent: TimeSpent | None = None,
    shows_progress: bool = True,
) -> Segmenter:
    """Load a bundle onto the device, and tell the user which model it is.

    Args:
        bundle: The bundle's folder.
        config: The options of the batch.
        factory: The user's own network that may be imported, as `module:factory`; or None.
        spent: As for `Segmenter`.
        shows_progress: As for `Segmenter`.

    Raises:
        PathosegError: The bundle or `infer` cannot be used, or its classes are not `data.classes`.
    """
    keep_freed_memory(LARGE)
    model, card = load_bundle(bundle, factory)
    names = ", ".join(card.class_names)
    if config.data.classes not in (None, card.class_names):
        raise PathosegError(
            f"The model {bundle} tells apart {names}, not {', '.join(config.data.classes or ())}.",
            "Name another model with --model, or leave `[data] classes` out of the configuration.",
        )
    say(f"Model: {bundle} ({names}; {card.mpp:g} µm)")
    if card.tiling == "blended" and config.infer.tile is None and edge_reach(model) is not None:
        say(
            f"This model is of an earlier version: its tiles of {card.tile} px are blended as that "
            "version did. [infer] tile = 2048 gives what one pass over the slide would, and is "
            "often faster."
        )
    device, known = pick_device(config.parallel.device), bundle_id(bundle)
    hint = "Lower [infer] batch, or choose another --device."
    with memory_told(f"The model {bundle}", hint, device):
        return Segmenter(model.to(device), card, config, known, spent, shows_progress)


class Segmenter:
    """A model on its device, with all that predicting slides needs.

    Args:
        model: In eval mode, on its device. Its batch norms are folded in place, unless it is a
            network of the user's own or of an earlier version.
        card: Classes, resolution, tile and normalisation.
        config: `infer`, `outputs`, `tissue`, `data.assume_mpp` and `train.amp` are used.
        model_id: Identifies the bundle in results.
        spent: Counts where the time goes; None makes a count of its own.
        shows_progress: False on the ranks that leave the progress bar to another.

    Attributes:
        spent: As given.
        card: As given.
        classes: The model's classes and colours.
        model_id: As given.
        tells_certainty: True if rows have the planes of `MaskRow.certainty`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        card: Bundle,
        config: Config,
        model_id: str = "",
        spent: TimeSpent | None = None,
        shows_progress: bool = True,
    ) -> None:
        self.spent, self._shows_progress = spent or TimeSpent(), shows_progress
        if not card.model.is_factory and card.tiling != "blended":  # whose answers stay exact
            fold_norms(model)
        self._model, self.card, self._config = model, card, config
        self.model_id = model_id
        self.tells_certainty = config.outputs.probability
        self.classes = class_table_of(card)
        device = next(model.parameters()).device
        self._dtype = amp_dtype(device, config.train.amp)
        self._context = card.context
        self._margins = self._find_margins()
        self._windows = self._choose_windows()
        if self.separates:
            object_extent(card.mpp, config.infer)  # refuses an object_um that is too large
        if self._windows is None and card.model.task != "classify":
            refuse_misfit(*self._tile, card.multiple, config.infer.margin or 0)
        if self._context and self._windows is None:
            check_tile(model, self._tile[0])
            self._context = declared_inputs(model, card.mpp, self._tile[0])[1:]

    @property
    def separates(self) -> bool:
        """True if the model separates objects."""
        return self.card.model.task == "objects"

    @property
    def planes(self) -> int:
        """The number of planes of a `MaskRow`."""
        certainty = len(self.classes) + 1 if self.tells_certainty else 0
        return (3 if self.separates else 1) + certainty

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
                if self._context:  # the trained size: the other inputs' fields match it
                    grid = replace(grid, tile=Size(self._tile[0], self._tile[0]))
            indices = [i for i, box in enumerate(grid) if has_tissue(box)]
        stain, warnings = None, [*slide.warnings]
        if card.stain is not None:
            # On the tiles of training, not on windows: colours do not depend on [infer] memory.
            tiles = grid
            if card.model.task != "classify":
                tiles = TileGrid.cover(frame.size, card.tile, card.overlap, card.multiple)
            boxes = [box for box in map(tiles.box, range(len(tiles))) if has_tissue(box)]
            method: Method = "macenko" if card.stain["method"] == "macenko" else "reinhard"
            try:
                stain = fit_stain(slide, frame, boxes, tissue, method) if boxes else None
            except TooLittleStainError:
                warnings.append(
                    "it has too little stained tissue for the model's stain normalisation: its "
                    "colours are left as they are"
                )
        if (unseen := card.unseen_resolution(slide.mpp.mean)) is not None:
            warnings.append(unseen)
        context = [(each, Frame.at(slide.size, slide.mpp, each.mpp)) for each in self._context]
        warnings += [
            f"it is smaller than the {each.size * each.mpp:g} µm that the model's input "
            f"`{each.name}` shows: what is not there is white"
            for each, at in context
            if min(at.size.width, at.size.height) < each.size
        ]
        return SlidePlan(slide.path, frame, output, grid, indices, tissue, stain, warnings, context)

    def bands_with_confidence(
        self, plan: SlidePlan, interruption: Interruption
    ) -> Generator[NDArray[np.int16]]:
        """Predict the mask of a slide from top to bottom; closing the generator ends its threads.

        Args:
            plan: The slide's tiles.
            interruption: Asked after every tile, and between the network's layers.

        Yields:
            (2, rows, width of `plan.output`), int16: class indices, 0 off the tissue, 255 where
            unread; and their probability times `CONFIDENCE_LEVELS`, 0 off the tissue, where no tile
            is predicted. Where objects are separated (3, …), last the height of `object_planes`.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        classes = len(self.classes)

        def finish(maps: torch.Tensor) -> torch.Tensor:
            planes = argmax_and_confidence(maps[:classes])
            if not self.separates:
                return planes
            return torch.cat([planes, object_planes(maps)[1:2].to(planes.dtype)])

        with closing(self._rows(plan, interruption, finish=finish)) as rows:
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
            interruption: Asked after every tile, and between the network's layers.
            numbers: Consecutive rows of tiles; None is all. Each is pulled when its reading begins,
                by the thread that predicts. Tiles above the first one that reach into it are
                predicted again.

        Yields:
            Each of these rows.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        classes, certain = len(self.classes), self.tells_certainty

        def finish(maps: torch.Tensor) -> torch.Tensor:
            planes = object_planes(maps) if self.separates else argmax(maps)[None]
            return torch.cat([planes, certainty_planes(maps[:classes])]) if certain else planes

        with closing(self._rows(plan, interruption, numbers, finish=finish)) as rows:
            for number, planes, unread in rows:
                row = MaskRow(number, planes, unread)
                if certain:
                    settle_certainty(row.band, row.certainty(classes))
                yield row

    def _rows(
        self,
        plan: SlidePlan,
        interruption: Interruption,
        numbers: Iterable[int] | None = None,
        *,
        finish: Finish,
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
        pulled, unread = set[int](), Counter[int]()

        def tiles() -> Iterator[Sequence[int]]:
            for row in chain(range(start, first + 1), remaining):
                pulled.add(row)
                yield plan.tiles_of(row)

        above, asked = bisect_left(plan.indices, grid.first_of(start)), interruption.is_asked
        with (
            closing(SlidePool(self.open)) as slides,
            _abandonable(
                in_background(self._predict(plan, slides, tiles(), asked), ahead=2), interruption
            ) as predictions,
            progress_bar(
                plan.slide.name, len(plan.indices), "tiles", above, is_shown=self._shows_progress
            ) as bar,
        ):

            def watched() -> Iterator[TilePrediction]:
                waiting = self.spent.waiting(predictions, "waiting for predictions")
                try:
                    while True:
                        with interruption.abandonable(bar.end):
                            prediction = next(waiting, None)
                        if prediction is None:
                            return
                        tile, _, unread_pixels = prediction
                        unread[grid.row_of(tile)] += unread_pixels is not None
                        interruption.raise_if_asked()
                        yield prediction
                        bar.advance()
                except GivenUpError:
                    interruption.raise_if_asked()
                    raise

            for row, band in enumerate(self._bands(plan, watched(), start, finish), start):
                # A wanted row has been pulled by now: its own predictions have come, or if it has
                # none the next one, or all.
                if row >= first:
                    if row not in pulled:
                        return
                    yield row, band, unread[row]

    def maps(self, slide: Slide) -> NDArray[np.float32]:
        """Return the maps of a whole slide at once; for pictures that fit into memory.

        Returns:
            The probability of each class and, where objects are separated, last the height in
            pixels. Shape (maps, rows, columns) of the model's frame of the slide; of its tiles
            where the model classifies tiles.

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
            bands = self._joined(plan.grid, predictions, lambda maps: maps)
            return np.concatenate(list(bands), axis=1)

    @property
    def _tile(self) -> tuple[int, int]:
        """Side and overlap of tiles that are blended."""
        card, reach = self.card, edge_reach(self._model)
        return blended_tile(self._config.infer, card.tile, card.overlap, card.multiple, reach)

    def _find_margins(self) -> Mapping[str, int] | None:
        """Return, by name, the margin around a window's field of each other input, in its pixels.

        Whole steps of what the network divides by, so that its poolings fall where they would in
        one pass over the slide. None where it is not known how far the network looks.
        """
        reaches, margins = context_reach(self._model), {}
        for each in self._context:
            if each.name not in reaches:
                return None
            step = self.card.multiple // each.ratio(self.card.mpp)
            margins[each.name] = -(-reaches[each.name] // step) * step
        return margins

    def _choose_windows(self) -> WindowOptions | None:
        """The options of windows, None where tiles are blended, or classified."""
        card, options = self.card, self._config.infer
        reach = None if self._margins is None else edge_reach(self._model)
        blended = options.overlap is not None or options.margin is not None
        # A bundle of an earlier version answers as it did, unless it is asked for another tile.
        blended |= card.tiling == "blended" and options.tile is None
        if reach is None or card.model.task == "classify" or blended:
            return None
        if options.tile is not None:
            largest = options.tile**2
        else:
            memory = parse_memory(options.memory)
            around = {
                each.name: (each.ratio(card.mpp), (self._margins or {})[each.name])
                for each in self._context
            }
            largest = most_pixels(self._model, card.multiple, memory, options.batch, around)
        return WindowOptions.choose(reach, card.multiple, largest)

    def _bands(
        self, plan: SlidePlan, predictions: Iterator[TilePrediction], start: int, finish: Finish
    ) -> Iterator[NDArray[Any]]:
        if self.card.model.task == "classify":
            return _coarse_rows(plan, predictions, start, finish, len(self.classes))
        return self._joined(plan.grid, predictions, finish, start)

    def _joined(
        self,
        grid: TileGrid | Windows,
        predictions: Iterator[TilePrediction],
        finish: Finish,
        first: int = 0,
    ) -> Iterator[NDArray[Any]]:
        if isinstance(grid, Windows):
            return grid.join(predictions, self.card.model.channels, finish, first)
        margin = self._config.infer.margin
        if margin is None:
            margin = default_margin(grid.overlap, edge_reach(self._model))
        return stitch(grid, predictions, self.card.model.channels, margin, finish, first)

    def _predict(
        self,
        plan: SlidePlan,
        slides: SlidePool,
        rows: Iterable[Sequence[int]],
        is_given_up: IsGivenUp = never,
    ) -> Generator[TilePrediction]:
        def read_box(frame: Frame, box: Box) -> Region:
            with slides.borrow(plan.slide) as slide:
                region = read_region(slide, frame, box)
            if plan.stain is None:
                return region
            return Region(plan.stain.apply(region.pixels), region.unread)

        def seen_from(box: Box, each: ModelInput) -> Box:
            if isinstance(grid, Windows):
                return each.beyond(box, self.card.mpp, (self._margins or {})[each.name])
            return each.around(box, self.card.mpp)

        def read(index: int) -> tuple[Region, Context]:
            box = grid.box(index)
            return read_box(plan.frame, box), {
                each.name: read_box(frame, seen_from(box, each)) for each, frame in plan.context
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
            is_given_up,
            self.spent,
        )

    def open(self, path: Path) -> Slide:
        """Open a slide as the batch's options say."""
        return open_slide(path, self._config.data.assume_mpp)


@contextmanager
def _abandonable(
    predictions: Generator[TilePrediction], interruption: Interruption
) -> Iterator[Generator[TilePrediction]]:
    """Make a context as `closing` does; while its end waits for the layer under way in the
    background, a signal may end the process."""
    try:
        yield predictions
    finally:
        with interruption.abandonable():
            predictions.close()


def _coarse_rows(
    plan: SlidePlan, predictions: Iterator[TilePrediction], start: int, finish: Finish, classes: int
) -> Iterator[NDArray[Any]]:
    """One pixel a tile: what `finish` makes of it, 255 where most of it was unread."""
    assert isinstance(plan.grid, TileGrid)
    blank = finish(torch.zeros(classes, 1, 1)).zero_().numpy()
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
