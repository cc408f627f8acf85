"""Segments one slide: tissue, tiles, probabilities, stitched bands, files."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.device import amp_dtype, pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Size
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.inference.margins import default_margin
from pathoseg.inference.predict import predict
from pathoseg.interruption import Interruption
from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import Bundle, bundle_id, load_bundle
from pathoseg.outputs.stitch import Prediction, reach_down, stitch
from pathoseg.progress import progress_bar, say
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.prefetch import in_background
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser
from pathoseg.tiles.tissue import Tissue, find_tissue
from pathoseg.training.cutting import fit_stain
from pathoseg.training.labelled_slides import model_frame

Mask = NDArray[np.uint8]
Bands = Generator[Mask]


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
    """

    slide: Path
    frame: Frame
    output: Frame
    grid: TileGrid
    indices: Sequence[int]
    tissue: Tissue
    stain: StainNormaliser | None

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
        return SlidePlan(slide.path, frame, output, grid, indices, tissue, stain)

    def bands(self, plan: SlidePlan, interruption: Interruption) -> Bands:
        """The mask of a slide from top to bottom; closing the generator ends its threads.

        Yields:
            Class indices (rows, width of `plan.output`): 0 off the tissue, 255 where unread.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
        """
        with closing(self.rows(plan, interruption)) as rows:
            for row in rows:
                yield row.band

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

            for row, band in enumerate(self._bands(plan, watched(), start), start):
                # When a band comes, whether its row is taken has been asked: the prediction behind
                # it has come too, or there is none.
                if row in taken:
                    yield MaskRow(row, band, unread[row])
                elif row >= first:
                    return

    def _bands(
        self, plan: SlidePlan, predictions: Iterator[Prediction], start: int
    ) -> Iterator[Mask]:
        if self.card.model.task == "classify":
            return _coarse_rows(plan, predictions, start)
        margin = self._config.infer.margin
        if margin is None:
            margin = default_margin(plan.grid.overlap, edge_reach(self._model))
        return stitch(plan.grid, predictions, len(self.classes), margin, first=start)

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


def _coarse_rows(plan: SlidePlan, predictions: Iterator[Prediction], start: int) -> Iterator[Mask]:
    """One pixel a tile: its likeliest class, 255 where most of it was unread."""
    following = next(predictions, None)
    for row in range(start, plan.grid.rows):
        coarse = np.zeros((1, plan.grid.columns), np.uint8)
        while following is not None and following[0] // plan.grid.columns == row:
            index, chance, unread = following
            lost = unread is not None and bool(unread.mean() > 0.5)
            coarse[0, index % plan.grid.columns] = 255 if lost else int(chance.argmax())
            following = next(predictions, None)
        yield coarse
