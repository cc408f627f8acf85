"""The tables of a batch: summary.json of each slide, summary.csv and failures.csv of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Mpp, Size, area_text
from pathoseg.outputs.atomic import write_rows, write_text
from pathoseg.outputs.uncertain_fields import UncertainField
from pathoseg.typed_json import from_json


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The area, the regions and the objects of one class on a slide, or in a region of interest.

    Attributes:
        name: The class.
        pixels: In the mask.
        area_mm2: Their area.
        share_of_tissue: That area over the tissue's, 0 where there is no tissue. Above 1 where
            regions reach past the tissue. In a region of interest, over the region's.
        regions: Traced in regions.geojson; None in a region of interest.
        objects: Separated in objects.geojson; None where the model separates none.
        objects_per_mm2: Their number over the area of the tissue, or of the region of interest,
            that could be read.
    """

    name: str
    pixels: int
    area_mm2: float
    share_of_tissue: float
    regions: int | None
    objects: int | None = None
    objects_per_mm2: float | None = None


@dataclass(frozen=True, slots=True)
class InterestSummary:
    """The figures of one region of interest.

    Attributes:
        name: Its name, or its number.
        area_mm2: Its area on the slide.
        classes: One each, in order of the index.
        unread_pixels: Pixels of the mask in it that no tile could read.
    """

    name: str
    area_mm2: float
    classes: tuple[ClassSummary, ...]
    unread_pixels: int


@dataclass(frozen=True, slots=True)
class TileCounts:
    """Tiles of a slide: predicted, skipped as glass, and with pixels that could not be read."""

    done: int
    skipped: int
    unread: int


@dataclass(frozen=True, slots=True)
class Level0:
    """The level-0 frame that the coordinates of a result refer to.

    Attributes:
        size: Pixels of the slide's level 0, within its bounds.
        mpp: Microns per such pixel.
    """

    size: Size
    mpp: Mpp


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one slide's result.

    Attributes:
        slide: Its name in the batch: the file's, in a folder inside that of slides its path.
        model: Identifies the bundle that made it.
        mpp: Microns per pixel of the mask.
        tissue_mm2: Area of the tissue found.
        classes: One each, in order of the index.
        tiles: How many were predicted.
        unread_pixels: Pixels of the mask that no tile could read.
        versions: Program or library to version.
        seconds: Step of the work to its duration.
        warnings: Sentences for the user.
        level0: Of the slide; None in results of earlier versions.
        least_certain: The fields of which the model is least certain, the worst one first; None
            where probabilities were not asked for.
        objects_left_out: Number of objects that were too small; None where none are separated.
        objects_cut: Number of objects that are too large to be found whole.
        regions_of_interest: Those that the slide's annotation has, where one was given.
        read_mm2: Area of the tissue that could be read; None in results of earlier versions.
    """

    slide: str
    model: str
    mpp: Mpp
    tissue_mm2: float
    classes: tuple[ClassSummary, ...]
    tiles: TileCounts
    unread_pixels: int
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    level0: Level0 | None = None
    least_certain: tuple[UncertainField, ...] | None = None
    objects_left_out: int | None = None
    objects_cut: int | None = None
    regions_of_interest: tuple[InterestSummary, ...] = ()
    read_mm2: float | None = None


def unread_text(summary: Summary) -> str:
    """Return how much of a slide's mask could not be read: "0.26 mm² (25 % of the mask)"."""
    area, level0 = summary.unread_pixels * summary.mpp.pixel_mm2, summary.level0
    if level0 is None:
        return f"{area_text(area)} mm²"
    share = min(1.0, area / (level0.size.pixels * level0.mpp.pixel_mm2))
    return f"{area_text(area)} mm² ({100 * share:.3g} % of the mask)"


def damage_warning(summary: Summary) -> str | None:
    """Return the sentence that says what could not be read of a slide, None where all could."""
    tiles = summary.tiles
    if not tiles.unread:
        return None
    told = f"the slide is damaged: {tiles.unread} of {tiles.done} tiles could not be read whole"
    return f"{told}, {unread_text(summary)} not at all" if summary.unread_pixels else told


def excess_warning(
    classes: Iterable[ClassSummary], tissue_mm2: float, tile_um: float | None = None
) -> str | None:
    """Return the sentence that says that more is segmented than there is tissue, None if not so.

    Args:
        classes: Of a slide.
        tissue_mm2: Its area of tissue.
        tile_um: The side of a tile where whole tiles are classified, else None.
    """
    area = sum(each.area_mm2 for each in classes)
    if not tissue_mm2 or area <= _MOST_SHARE * tissue_mm2:
        return None
    if tile_um is not None:
        return (
            f"areas are of whole tiles of {tile_um:.3g} µm, glass in them included: "
            f"{area_text(area)} mm² are classified, and {area_text(tissue_mm2)} mm² are tissue"
        )
    return (
        f"{area_text(area)} mm² are segmented, and {area_text(tissue_mm2)} mm² of tissue were "
        "found: the model takes glass for a class. Train it with glass that is background, or see "
        "[tissue] if tissue was missed"
    )


_MOST_SHARE = 1.01  # of the tissue: its outline is smooth
SUMMARY_COLUMNS = (
    *("slide", "class", "area_mm2", "share_of_tissue", "regions", "objects", "objects_per_mm2"),
    *("tissue_mm2", "unread_mm2", "mpp", "model", "region_of_interest"),
)


def count_pixels(band: NDArray[np.uint8], classes: ClassTable) -> Counter[int]:
    """Count the pixels of a band by class index, 255 included."""
    values = (*range(1, len(classes)), IGNORE)
    return Counter({value: int(np.count_nonzero(band == value)) for value in values})


def class_summaries(
    classes: ClassTable,
    pixels: Mapping[int, int],
    regions: Mapping[int, int] | None,
    mask: Frame,
    within_mm2: float,
    objects: Mapping[int, int] | None = None,
    read_mm2: float | None = None,
) -> tuple[ClassSummary, ...]:
    """Compute the area, its share, and the number of regions and objects of each class.

    Args:
        classes: Their names.
        pixels: By class index, pixels of the mask; what is missing is none.
        regions: By class index, regions traced; likewise. None where none are counted.
        mask: The mask's frame.
        within_mm2: Area of the tissue, or of the region of interest.
        objects: By class index; None where the model separates none.
        read_mm2: The part of that area that could be read; None is all of it.
    """
    found, read = [], within_mm2 if read_mm2 is None else read_mm2
    for index, name in enumerate(classes.names, start=1):
        area = pixels.get(index, 0) * mask.pixel_area_mm2
        share = area / within_mm2 if within_mm2 > 0 else 0.0
        traced = None if regions is None else regions.get(index, 0)
        one = ClassSummary(name, pixels.get(index, 0), area, share, traced)
        if objects is not None:
            count = objects.get(index, 0)
            density = count / read if read > 0 else 0.0
            one = replace(one, objects=count, objects_per_mm2=density)
        found.append(one)
    return tuple(found)


def read_part(area_mm2: float, unread: int, mask: Frame) -> float:
    """Return what is left of an area without its unread pixels; 0 where that is no whole one.

    Args:
        area_mm2: Of the tissue, or of a region of interest.
        unread: Number of pixels of the mask in it that could not be read.
        mask: The mask's frame.
    """
    left = area_mm2 - unread * mask.pixel_area_mm2
    # An outline's area is no sum of pixels: less than half of one is rounding.
    return left if not unread or left > mask.pixel_area_mm2 / 2 else 0.0


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    write_text(path, json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(path: Path) -> Summary:
    """Read a summary.json.

    Raises:
        PathosegError: It was written by something else, or cannot be read.
    """
    try:
        return from_json(Summary, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, PathosegError) as error:
        why = error.problem.rstrip(".") if isinstance(error, PathosegError) else error
        raise PathosegError(
            f"{path} is no summary of a result ({why}).",
            "Remove its folder and segment the slide again.",
        ) from error


def write_summary_table(path: Path, summaries: Iterable[Summary]) -> None:
    """Write summary.csv: a row for each class of each slide, and of its regions of interest.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    write_rows(path, (row for one in summaries for row in _summary_rows(one)), SUMMARY_COLUMNS)


def _summary_rows(summary: Summary) -> Iterator[dict[str, object]]:
    """The rows of the slide, then those of each region; what is not counted is empty."""
    tissue = f"{summary.tissue_mm2:.9g}"
    parts = [("", tissue, summary.unread_pixels, summary.classes)]
    parts += [
        (region.name, "", region.unread_pixels, region.classes)
        for region in summary.regions_of_interest
    ]
    for region_name, tissue_mm2, unread_pixels, classes in parts:
        for of in classes:
            density = of.objects_per_mm2
            yield {
                "slide": summary.slide,
                "class": of.name,
                "area_mm2": f"{of.area_mm2:.9g}",
                "share_of_tissue": f"{of.share_of_tissue:.6g}",
                "regions": "" if of.regions is None else of.regions,
                "objects": "" if of.objects is None else of.objects,
                "objects_per_mm2": "" if density is None else f"{density:.6g}",
                "tissue_mm2": tissue_mm2,
                "unread_mm2": f"{unread_pixels * summary.mpp.pixel_mm2:.9g}",
                "mpp": f"{summary.mpp.mean:.6g}",
                "model": summary.model,
                "region_of_interest": region_name,
            }


def write_failures(path: Path, failures: Mapping[str, PathosegError]) -> None:
    """Write failures.csv: a row for each slide, by name, that failed.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    rows = (
        {"slide": slide, "reason": error.problem, "hint": error.hint}
        for slide, error in failures.items()
    )
    write_rows(path, rows, ("slide", "reason", "hint"))
