"""Figures of each slide as training sees it, and warnings about all slides together."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, AnnotationReport, ClassTable
from pathoseg.config import Config
from pathoseg.errors import first_names
from pathoseg.geometry import Box, Mpp, Size, area_text
from pathoseg.tiles.class_pixels import count_tiles
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.tiles import SlideTiles, tile_labels
from pathoseg.tiles.tissue import Tissue
from pathoseg.training.labelled_slides import LabelledSlides
from pathoseg.training.splits import TABLE, Member, Split

FEWEST_TILES = 10  # of a class, below which training has too little of it
_UNLIKE = 1.2  # times coarser or finer: beyond what augmentation covers (as of slides at inference)
_MOST = 0.5  # the share from which something is "mostly" so
_ROUNDING = 1e-9  # share of an area below which a difference of sums is none


@dataclass(frozen=True)
class SlideFacts:
    """Figures of a slide as training sees it.

    Attributes:
        member: Its name, patient and split.
        size: Level-0 pixels.
        mpp: Microns per level-0 pixel.
        annotation: Counts of the objects of its annotation file.
        tile: Side of a tile.
        areas_mm2: Area of each class at the resolution of training, background first; nan where
            overlapping tiles do not tell.
        tiles: Number of tiles that are kept.
        class_tiles: Number of tiles that hold each class, background first.
        padding: Share of the kept tiles that lies off the slide; nan without tiles.
        tissue_mm2: Tissue; nan where it was not asked.
        on_glass: By class, the share of its pixels off the tissue; empty where it was not asked.
        objects: By class, how many there are; None where objects are not learnt.
    """

    member: Member
    size: Size
    mpp: Mpp
    annotation: AnnotationReport
    tile: int
    areas_mm2: tuple[float, ...]
    tiles: int
    class_tiles: tuple[int, ...]
    padding: float
    tissue_mm2: float = math.nan
    on_glass: Mapping[str, float] = field(default_factory=dict)
    objects: Mapping[str, int] | None = None

    @property
    def slide_mm2(self) -> float:
        return self.size.pixels * self.mpp.pixel_mm2

    @property
    def interest_mm2(self) -> float:
        """Area of the regions of interest, all of the slide where there are none."""
        pixels = self.annotation.interest_pixels
        return self.slide_mm2 if pixels is None else pixels * self.mpp.pixel_mm2

    @property
    def ignored_mm2(self) -> float:
        """Area of interest without a label: ignored classes, and 255 in masks."""
        rest = self.interest_mm2 - sum(self.areas_mm2)
        return rest if rest > _ROUNDING * self.interest_mm2 else 0.0

    def regions(self, name: str) -> int | None:
        """Return the number of outlines or objects of a class; None for a mask of classes."""
        if self.objects is not None:
            return self.objects.get(name, 0)
        return None if self.annotation.is_mask else self.annotation.outlines.get(name, 0)


def slide_facts(
    member: Member,
    tiles: SlideTiles,
    config: Config,
    slide: Size,
    tissue: Tissue | None = None,
    on_glass: Mapping[str, float] | None = None,
    is_exact: bool = False,
) -> SlideFacts:
    """Return the facts of a slide that was cut.

    Args:
        member: Its place in the split.
        tiles: As `cut` makes them.
        config: `model.task` and `tiles` are used.
        slide: Level-0 pixels.
        tissue: As it was found.
        on_glass: As `shares_on_glass` gives them.
        is_exact: Count areas once more where tiles overlap.
    """
    counts, classes = tiles.class_pixels, tiles.classes
    pixels = tiles.grid_pixels.astype(np.float64)
    if tiles.grid.overlap:
        pixels *= math.nan
        if is_exact:
            apart = TileGrid(tiles.grid.extent, tiles.grid.tile, 0)
            pixels = count_tiles(apart, tiles.frame, tiles.labels, classes).sum(axis=0)
    if config.model.task == "classify":
        labels = tile_labels(counts, config.tiles.min_cover)
        held = np.bincount(labels[labels != IGNORE], minlength=len(classes))
    else:
        held = (counts > 0).sum(axis=0)
    return SlideFacts(
        member,
        slide,
        tiles.frame.level0_mpp,
        tiles.labels.report,
        tiles.grid.tile.width,
        tuple((pixels * tiles.frame.pixel_area_mm2).tolist()),
        len(tiles),
        tuple(held.tolist()),
        _padding(tiles, member.split),
        math.nan if tissue is None else tissue.area_mm2,
        on_glass or {},
        tiles.labels.object_counts(classes) if config.model.task == "objects" else None,
    )


def _padding(tiles: SlideTiles, split: Split) -> float:
    """Return the share of the tiles, where a split reads them, that lies off the slide."""
    if not len(tiles):
        return math.nan
    place = tiles.home if split == "train" else tiles.box
    size = tiles.frame.size
    whole = Box(0, 0, size.width, size.height)
    inside = [place(position).intersection(whole) for position in range(len(tiles))]
    held = sum(box.size.pixels for box in inside if box is not None)
    return 1 - held / (len(tiles) * tiles.grid.tile.pixels)


def shares_on_glass(
    mask: NDArray[np.uint8], tissue: Tissue, classes: ClassTable
) -> dict[str, float]:
    """Return the share of pixels off the tissue of each class that the picture holds.

    Args:
        mask: Class indices of a small picture of the whole slide, shape (height, width).
        tissue: Of that slide.
        classes: Their names.
    """
    rows, columns = (
        ((np.arange(length) + 0.5) * of / length).astype(np.int64)
        for length, of in zip(mask.shape, tissue.mask.shape, strict=True)
    )
    glass = ~tissue.mask[np.ix_(rows, columns)]
    shares = dict[str, float]()
    for index, name in enumerate(classes.names, start=1):
        found = mask == index
        if found.any():
            shares[name] = float(glass[found].mean())
    return shares


Columns = Sequence[tuple[str, bool]]
"""Title of each column of a table, and whether its cells are numbers."""


def rows_by_class(
    facts: Sequence[SlideFacts], classes: ClassTable
) -> tuple[Columns, list[list[str]]]:
    """Return columns and rows: of each class, how much there is to learn and to validate from."""
    parts, measures = ("train", "val"), ("Slides", "mm²", "Tiles")
    rows = []
    for index, name in enumerate(classes.names, start=1):
        cells = [name]
        for part in parts:
            own = [one for one in facts if one.member.split == part and one.class_tiles[index]]
            area = sum(one.areas_mm2[index] for one in own)
            tiles = sum(one.class_tiles[index] for one in own)
            cells += [str(len(own)), area_text(area), str(tiles)]
        rows.append(cells)
    titles = [f"{what}, {part}" for part in parts for what in measures]
    return [("Class", False), *((title, True) for title in titles)], rows


def slide_cells(facts: SlideFacts) -> dict[str, str]:
    """Return the cells of a slide's row by column, without those of classes."""
    return {
        "Slide": facts.member.slide,
        "Split": facts.member.split,
        "µm/px": f"{facts.mpp.mean:.4g}",
        "Pixels": f"{facts.size.width}×{facts.size.height}",
        "Of interest": area_text(facts.interest_mm2),
        "Tiles": str(facts.tiles),
    }


def class_cells(facts: SlideFacts | None, classes: Sequence[str]) -> list[str]:
    """Return the cells of a slide's row for classes: mm², regions or objects, and tiles of each.

    A class may be called like another column, so these are no part of `slide_cells`.

    Args:
        facts: Of the slide; of None the cells are empty.
        classes: Their names.
    """
    if facts is None:
        return [""] * len(classes)
    cells = []
    for index, name in enumerate(classes, start=1):
        area, tiles = facts.areas_mm2[index], facts.class_tiles[index]
        regions = facts.regions(name)
        parts = [area_text(area), *([] if regions is None else [str(regions)]), str(tiles)]
        cells.append(" · ".join(parts) if tiles or area > 0 else "–")
    return cells


def class_lines(facts: Sequence[SlideFacts], classes: ClassTable) -> Iterator[str]:
    """Yield a line for each class: how much of it there is to learn from, and to validate."""
    for index, name in enumerate(classes.names, start=1):
        parts = []
        for split, whose in (("train", "training"), ("val", "validation")):
            own = [one for one in facts if one.member.split == split]
            if not own:
                parts.append(f"no {whose} slide")
                continue
            with_it = [one for one in own if one.class_tiles[index]]
            tiles = sum(one.class_tiles[index] for one in with_it)
            area = sum(one.areas_mm2[index] for one in with_it)
            told = "" if math.isnan(area) else f", {area_text(area)} mm²"
            if objects := [one.objects.get(name, 0) for one in with_it if one.objects]:
                told += f", {sum(objects):,} objects"
            slides = "slide" if len(own) == 1 else "slides"
            parts.append(
                f"{len(with_it)} of {len(own)} {whose} {slides}, {tiles} {_tiles(tiles)}{told}"
            )
        yield f"{name}: on {'; on '.join(parts)}"


def context_lines(slides: Sequence[SlideTiles]) -> Iterator[str]:
    """Yield a line for each further input of the network, some of which lies off training slides.

    Args:
        slides: Those that are trained on.
    """
    found = [tiles.off_slide(tiles.home) for tiles in slides]
    count = sum(map(len, slides))
    for name, (shown, _, _) in (found[0] if found else {}).items():
        touched = sum(each[name][1] for each in found)
        if touched:
            share = sum(each[name][2] for each in found) / count
            yield (
                f"The input `{name}` shows {shown.size * shown.mpp:g} µm around a tile's middle, "
                f"and reaches beyond the slide on {touched} of {count} training {_tiles(count)}: "
                f"{share:.0%} of it is white."
            )


def facts_of_training(
    config: Config,
    sources: LabelledSlides,
    members: Mapping[str, Member],
    tiles: Iterable[SlideTiles],
) -> list[SlideFacts]:
    """Return what a training has found out of its slides anyway, without another look at them.

    Args:
        config: Of the run.
        sources: Its slides.
        members: Their splits.
        tiles: Of the training and validation slides.
    """
    by_file = {source.slide: source for source in sources.usable}
    facts = []
    for own in tiles:
        source = by_file[own.slide]
        found = slide_facts(members[source.name], own, config, source.size)
        facts.append(replace(found, padding=math.nan))  # `with_tile` has said it
    return facts


def warnings_of(
    facts: Sequence[SlideFacts], classes: ClassTable, config: Config, unlabelled: Collection[str]
) -> list[str]:
    """Return what would go wrong, or is likely not meant, a sentence or two each.

    Args:
        facts: Of all slides that are used.
        classes: The classes of the run.
        config: Of the run.
        unlabelled: Names of slides without an annotation.
    """
    if not facts:
        return []
    return [
        *_about_slides(facts, config, unlabelled),
        *_about_classes(facts, classes),
        *_about_annotations(facts),
        *_about_tiles(facts),
    ]


def _of_one_patient(names: Collection[str]) -> list[str]:
    """Beginnings of names, with a number in each, that several slides share: likely patients.

    Empty unless that is the way of naming: there are three, and half of the slides have one.
    """
    beginnings = Counter(
        re.split(r"[-_ /.](?=[^-_ /.]*$)", name.rpartition(".")[0])[0] for name in names
    )
    shared = {start: n for start, n in beginnings.items() if n > 1 and re.search(r"\d", start)}
    is_habit = len(shared) >= 3 and 2 * sum(shared.values()) >= len(names)
    return sorted(shared) if is_habit else []


def _about_slides(
    facts: Sequence[SlideFacts], config: Config, unlabelled: Collection[str]
) -> Iterator[str]:
    if unlabelled:
        have = "slide has" if len(unlabelled) == 1 else "slides have"
        yield (
            f"{len(unlabelled)} {have} no annotation and {_are(unlabelled)} left out: "
            f"{first_names(unlabelled)}."
        )
    if not any(one.member.split == "val" for one in facts):
        yield "No slide validates: the last epoch is kept, whatever it is worth."
    names = [one.member.slide for one in facts]
    alike = _of_one_patient(names) if names == [one.member.patient for one in facts] else []
    if alike:
        yield (
            f"Every slide counts as a patient of its own, and {len(alike)} beginnings of names "
            f"come several times: {first_names(alike)}. If these are patients, they may be on both "
            f"sides of the split, and figures too good: say whose slides they are in {TABLE}."
        )
    usual = median_low(one.mpp.mean for one in facts)
    unlike = [
        f"{one.member.slide} ({one.mpp.mean:.4g})"
        for one in facts
        if max(one.mpp.mean / usual, usual / one.mpp.mean) > _UNLIKE
    ]
    if unlike:
        yield (
            f"{len(unlike)} of {len(facts)} slides have another resolution than the middle one, "
            f"{usual:.4g} µm per pixel: {first_names(unlike)}. See whether that is true."
        )
    oblong = [
        f"{one.member.slide} ({one.mpp.x:.4g} × {one.mpp.y:.4g} µm)"
        for one in facts
        if max(one.mpp.x / one.mpp.y, one.mpp.y / one.mpp.x) > _UNLIKE
    ]
    if oblong:
        yield f"Pixels are no squares, see whether that is true: {first_names(oblong)}."
    coarse = [one.member.slide for one in facts if one.mpp.mean > _UNLIKE * config.tiles.mpp]
    if coarse:
        yield (
            f"{len(coarse)} of {len(facts)} slides are coarser than the {config.tiles.mpp:g} µm "
            f"per pixel of the model, and enlarged: {first_names(coarse)}."
        )


def _about_classes(facts: Sequence[SlideFacts], classes: ClassTable) -> Iterator[str]:
    spelt = defaultdict[str, list[str]](list)
    for name in classes.names:
        spelt[" ".join(name.casefold().replace("_", " ").split())].append(name)
    for names in spelt.values():
        if len(names) > 1:
            told = " and ".join(f'"{name}"' for name in names)
            yield f"{told} are different classes: [annotations.rename] makes them one."
    for index, name in enumerate(classes.names, start=1):
        tiles = Counter[str]()
        for one in facts:
            tiles[one.member.split] += one.class_tiles[index]
        if not tiles["train"]:
            others = sorted({one.member.slide for one in facts if one.class_tiles[index]})
            where = (
                f"only on slides that are held out ({first_names(others)})" if others else "nowhere"
            )
            yield f"{name} is {where}: the model cannot learn it."
            continue
        if tiles["train"] < FEWEST_TILES:
            yield (
                f"{name} is in {tiles['train']} training {_tiles(tiles['train'])}, fewer than "
                f"{FEWEST_TILES}: annotate more of it, or choose smaller tiles."
            )
        if not tiles["val"] and any(one.member.split == "val" for one in facts):
            yield f"{name} is on no validation slide: how well it is learnt is not measured."


def _about_annotations(facts: Sequence[SlideFacts]) -> Iterator[str]:
    boxed = [one for one in facts if one.annotation.of_interest]
    if boxed and len(boxed) < len(facts):
        others = [one.member.slide for one in facts if not one.annotation.of_interest]
        yield (
            f"{len(boxed)} of {len(facts)} slides have regions of interest. The others count as "
            f"annotated everywhere, which may not be meant: {first_names(others)}."
        )
    glass = [
        f"{one.member.slide} ({name}, {share:.0%})"
        for one in facts
        for name, share in one.on_glass.items()
        if share > _MOST
    ]
    if glass:
        yield (
            f"Labels lie mostly on glass: {first_names(glass)}. Are they another slide's, or "
            "shifted? ([annotations] frame, [tissue])"
        )
    bare = [one.member.slide for one in facts if one.tissue_mm2 == 0]
    if bare:
        yield f"No tissue is found on {first_names(bare)} ([tissue] threshold)."


def _about_tiles(facts: Sequence[SlideFacts]) -> Iterator[str]:
    empty = [one.member.slide for one in facts if not one.tiles]
    if empty:
        yield f"No tile is cut from {first_names(empty)}: there is neither tissue nor annotation."
    padded = [one for one in facts if one.padding > _MOST]
    if padded:
        share = sum(one.padding for one in padded) / len(padded)
        yield (
            f"Tiles of {padded[0].tile} px are {share:.0%} padding on {len(padded)} of "
            f"{len(facts)} slides: choose smaller ones (--tile)."
        )


def _are(things: Collection[str]) -> str:
    return "is" if len(things) == 1 else "are"


def _tiles(count: int) -> str:
    return "tile" if count == 1 else "tiles"
