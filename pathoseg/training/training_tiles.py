"""From slides with labels to training and validation tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.geometry import ModelInput
from pathoseg.interruption import Interruption
from pathoseg.progress import progress_bar, say
from pathoseg.tiles.dataset import TrainingSet
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import fit_stain
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles
from pathoseg.tiles.tissue import Tissue, find_tissue
from pathoseg.tiles.transform import Augmentation, object_distance
from pathoseg.training.labelled_slides import LabelledSlide, LabelledSlides
from pathoseg.training.splits import Member


@dataclass(frozen=True)
class SplitTiles:
    """Tiles of training and of validation slides."""

    train: Sequence[SlideTiles]
    val: Sequence[SlideTiles]


def cut_labelled_slides(
    config: Config,
    sources: LabelledSlides,
    members: Mapping[str, Member],
    slides: SlidePool,
    interruption: Interruption,
    context: tuple[ModelInput, ...] = (),
    labelled: str | None = None,
) -> SplitTiles:
    """Find tissue on every training and validation slide and cut it; test slides stay whole.

    Training tiles overlap as configured, validation tiles never do, so that a pixel counts once.
    `context` is what the network sees beside the tile, `labelled` that of it whose labels training
    asks for.

    Raises:
        PathosegError: A slide or its annotation cannot be read, or no slide is left to train on.
        StoppedError: A signal came.
    """
    train, val = list[SlideTiles](), list[SlideTiles]()
    used = [s for s in sources.usable if members[s.name].split != "test"]
    with progress_bar("cutting tiles", len(used), "slides") as bar:
        for source in used:
            training = members[source.name].split == "train"
            overlap = config.tiles.overlap if training else 0
            asked = labelled if training else None
            tiles = cut(config, source, sources, slides, overlap, context, asked)
            (train if training else val).append(tiles)
            bar.advance()
            interruption.raise_if_asked()
    if not train:
        raise none_to_train_on(members)
    return SplitTiles(train, val)


def none_to_train_on(members: Mapping[str, Member]) -> PathosegError:
    """The refusal of slides of which none is left to train on."""
    return PathosegError(
        f"None of the {len(members)} slides is left to train on.",
        "Annotate more slides, or give more of them the split `train` in slides.csv.",
    )


def cut(
    config: Config,
    source: LabelledSlide,
    sources: LabelledSlides,
    slides: SlidePool,
    overlap: int,
    context: tuple[ModelInput, ...] = (),
    labelled: str | None = None,
) -> SlideTiles:
    """Cut one slide into its tiles."""
    return cut_with_tissue(config, source, sources.classes, slides, overlap, context, labelled)[0]


def cut_with_tissue(
    config: Config,
    source: LabelledSlide,
    classes: ClassTable,
    slides: SlidePool,
    overlap: int,
    context: tuple[ModelInput, ...] = (),
    labelled: str | None = None,
) -> tuple[SlideTiles, Tissue]:
    """Cut one slide into its tiles; return them and its tissue."""
    options = TileOptions(
        tile=config.tiles.side,
        overlap=overlap,
        offsets=config.tiles.offsets,
        min_tissue=config.tiles.min_tissue,
        cache=Path(config.tiles.cache) if config.tiles.cache else None,
        codec=config.tiles.codec,
        context=context,
        apart=object_distance(config.augment, config.tiles.side)
        if config.model.task == "objects"
        else None,
        labelled=labelled,
    )
    with slides.borrow(source.slide) as slide:
        tissue = find_tissue(slide, config.tissue)
    tiles = cut_tiles(
        source.slide,
        source.frame,
        source.labels,
        config.annotations,
        classes,
        tissue,
        options,
        slides,
    )
    if config.tiles.stain != "none" and len(tiles):
        boxes = [tiles.box(position) for position in range(len(tiles))]
        with slides.borrow(source.slide) as slide:
            tiles.stain = fit_stain(slide, source.frame, boxes, tissue, config.tiles.stain)
    return tiles, tissue


def training_set(
    config: Config, slides: Sequence[SlideTiles], classes: ClassTable, readers: int
) -> TrainingSet:
    """Return the training tiles of a run, and say which classes `balance_limit` holds back.

    Args:
        config: `train`, `tiles`, `augment`, `seed` and `model.task` are used.
        slides: The training slides, cut.
        classes: The classes of the masks.
        readers: Number of threads that read and augment.

    Raises:
        PathosegError: No tile holds anything that can be learnt from.
    """
    training = TrainingSet(
        slides,
        config.train.batch,
        config.seed,
        config.train.samples_per_epoch,
        config.tiles.balance,
        config.tiles.balance_limit,
        config.tiles.min_cover if config.model.task == "classify" else None,
        config.tiles.offsets,
        Augmentation(config.augment),
        readers,
    )
    for index, held in training.held_back.items():
        say(
            f"{classes.names[index - 1]} is in {held.tiles} of {held.of} tiles: {held.share:.0%} "
            f"of those drawn hold it, not {held.even:.0%}, as none is drawn more than "
            f"{config.tiles.balance_limit:g} times as often as on average ([tiles] balance_limit)."
        )
    return training
