"""Segments one slide: tissue, tiles, probabilities, stitched bands, files."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Size
from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import Bundle, bundle_id, load_bundle
from pathoseg.outputs.stitch import stitch
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser
from pathoseg.tiles.tissue import Tissue, find_tissue
from pathoseg.workflows.ahead import in_background
from pathoseg.workflows.config import Config
from pathoseg.workflows.cutting import fit_stain
from pathoseg.workflows.device import amp_dtype, pick_device
from pathoseg.workflows.interruption import Interruption
from pathoseg.workflows.margins import default_margin
from pathoseg.workflows.predict import Prediction, predict
from pathoseg.workflows.progress import progress_bar, say
from pathoseg.workflows.sources import model_frame

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


def load_segmenter(bundle: Path, config: Config, factory: str | None) -> Segmenter:
    """The segmenter of a bundle, on the device; tells the user which model it is.

    Raises:
        PathosegError: The bundle cannot be used, or knows other classes than `data.classes`.
    """
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
        unread_tiles: Tiles of the last slide, so far, with pixels that could not be read.
    """

    def __init__(
        self, model: torch.nn.Module, card: Bundle, config: Config, model_id: str = ""
    ) -> None:
        self._model, self.card, self._config = model, card, config
        self.model_id = model_id
        self.classes = class_table_of(card)
        self.unread_tiles = 0
        device = next(model.parameters()).device
        self._dtype = amp_dtype(device, config.train.amp)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's

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
        with (
            closing(SlidePool(self._open)) as slides,
            closing(in_background(self._predict(plan, slides), ahead=2)) as predictions,
            progress_bar(plan.slide.name, len(plan.indices), "tiles") as bar,
        ):

            def watched() -> Iterator[Prediction]:
                self.unread_tiles = 0
                for prediction in predictions:
                    self.unread_tiles += prediction[2] is not None
                    interruption.raise_if_asked()
                    yield prediction
                    bar.advance()

            if self.card.model.task == "classify":
                yield _coarse_map(plan, watched())
                return
            overlap = plan.grid.overlap
            margin = self._config.infer.margin
            if margin is None:
                margin = default_margin(overlap, edge_reach(self._model))
            yield from stitch(plan.grid, watched(), len(self.classes), margin)

    def _predict(self, plan: SlidePlan, slides: SlidePool) -> Generator[Prediction]:
        def read(index: int) -> Region:
            with slides.borrow(plan.slide) as slide:
                region = read_region(slide, plan.frame, plan.grid.box(index))
            if plan.stain is None:
                return region
            return Region(plan.stain.apply(region.pixels), region.unread)

        options = self._config.infer
        return predict(
            self._model, self.card, read, plan.indices, options.batch, options.readers, self._dtype
        )

    def _open(self, path: Path) -> Slide:
        return open_slide(path, self._config.data.assume_mpp)


def _coarse_map(plan: SlidePlan, predictions: Iterator[Prediction]) -> Mask:
    """One pixel a tile: its likeliest class, 255 where most of it was unread."""
    coarse = np.zeros((plan.grid.rows, plan.grid.columns), np.uint8)
    for index, chance, unread in predictions:
        lost = unread is not None and bool(unread.mean() > 0.5)
        coarse.flat[index] = 255 if lost else chance.argmax()
    return coarse
