"""Cuts the slides of a run into training and validation tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.interruption import Interruption
from pathoseg.progress import progress_bar
from pathoseg.slides.slide import Slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import Method, StainNormaliser, sample_pixels
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles
from pathoseg.tiles.tissue import Tissue, find_tissue
from pathoseg.training.labelled_slides import Source, Sources
from pathoseg.training.splits import Member

_STAINED = 0.5  # least share of tissue in a tile that the stain normaliser looks at


@dataclass(frozen=True)
class SplitTiles:
    """Tiles of training and of validation slides."""

    train: Sequence[SlideTiles]
    val: Sequence[SlideTiles]


def cut_sources(
    config: Config,
    sources: Sources,
    members: Mapping[str, Member],
    slides: SlidePool,
    interruption: Interruption,
) -> SplitTiles:
    """Finds tissue on every training and validation slide and cuts it; test slides stay whole.

    Training tiles overlap as configured, validation tiles never do, so that a pixel counts once.

    Raises:
        PathosegError: A slide or its annotation cannot be read, or no slide is left to train on.
        StoppedError: A signal came.
    """
    train, val = list[SlideTiles](), list[SlideTiles]()
    used = [s for s in sources.usable if members[s.slide.name].split != "test"]
    with progress_bar("cutting tiles", len(used), "slides") as bar:
        for source in used:
            training = members[source.slide.name].split == "train"
            overlap = config.tiles.overlap if training else 0
            (train if training else val).append(cut(config, source, sources, slides, overlap))
            bar.advance()
            interruption.raise_if_asked()
    if not train:
        raise PathosegError(
            f"None of the {len(members)} slides is left to train on.",
            "Annotate more slides, or give more of them the split `train` in slides.csv.",
        )
    return SplitTiles(train, val)


def cut(
    config: Config, source: Source, sources: Sources, slides: SlidePool, overlap: int
) -> SlideTiles:
    """The tiles of one slide."""
    options = TileOptions(
        tile=config.tiles.tile,
        overlap=overlap,
        min_tissue=config.tiles.min_tissue,
        cache=Path(config.tiles.cache) if config.tiles.cache else None,
        codec=config.tiles.codec,
    )
    with slides.borrow(source.slide) as slide:
        tissue = find_tissue(slide, config.tissue)
    tiles = cut_tiles(
        source.slide,
        source.frame,
        source.labels,
        config.annotations,
        sources.classes,
        tissue,
        options,
        slides,
    )
    if config.tiles.stain != "none":
        boxes = [tiles.box(position) for position in range(len(tiles))]
        with slides.borrow(source.slide) as slide:
            tiles.stain = fit_stain(slide, source.frame, boxes, tissue, config.tiles.stain)
    return tiles


def fit_stain(
    slide: Slide, frame: Frame, boxes: Sequence[Box], tissue: Tissue, method: Method
) -> StainNormaliser:
    """The normaliser of a slide, from those of `boxes` that are mostly tissue.

    Raises:
        PathosegError: There is too little stained tissue.
    """
    stained = [box for box in boxes if tissue.share(box, frame) >= _STAINED] or list(boxes)
    return StainNormaliser.fit(sample_pixels(slide, frame, stained), method, slide.path)
