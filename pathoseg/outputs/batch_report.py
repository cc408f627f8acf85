"""The page of a batch: each slide with its picture and figures, what is far off, what failed."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import quote

from PIL import Image

from pathoseg.annotations.annotation import Colour
from pathoseg.errors import PathosegError
from pathoseg.geometry import area_text
from pathoseg.outputs.atomic import replaced
from pathoseg.outputs.html_report import count, photograph, write_page
from pathoseg.outputs.overlay import thumbnail_frame
from pathoseg.outputs.report import ClassSummary, Summary, damage_warning, unread_text
from pathoseg.outputs.uncertain_fields import UncertainField

PAGE = "report.html"
FEWEST_SLIDES = 5
FARTHEST = 3.5  # usual distances from the median (Iglewicz and Hoaglin, 1993)
_LEAST = 0.005  # of the tissue: a slide that is nearer to the median is not far from it
_SIDE = 200  # pixels of a picture's longer side
_QUALITY = 78
_LARGEST = 5000  # pixels of a side of overlay.png, which has 2,000 and a legend
_SCREEN = 600  # pixels of the viewer that a field is to fill
_MICRONS_AT_1X = 10  # a pixel of the screen, as in the viewer


@dataclass(frozen=True)
class BatchSlide:
    """A slide that has a result.

    Attributes:
        summary: Its figures.
        folder: Of its result, within the batch's.
        seconds: Duration of the attempt that made it; None where that is not known, as of an
            earlier call whose result is kept.
        picture: A JPEG of its overlay; None where there is none.
    """

    summary: Summary
    folder: str
    seconds: float | None
    picture: bytes | None


@dataclass(frozen=True)
class BatchResults:
    """All that is told of a batch.

    Attributes:
        folder: Of its results.
        model: The bundle of the last call.
        colours: Of the classes, as far as known.
        slides: Those that have a result, of the last call at them or kept of an earlier one.
        failures: Slide to why the last call at it failed.
        begun: Slides that a process is at, or was when it ended.
        waiting: Slides of the last call that nobody has begun.
        is_stopped: True where the last call was stopped before its end.
        version: Of pathoseg.
    """

    folder: str
    model: str
    colours: Mapping[str, Colour]
    slides: Sequence[BatchSlide]
    failures: Mapping[str, PathosegError]
    begun: Sequence[str]
    waiting: Sequence[str]
    is_stopped: bool
    version: str


@dataclass(frozen=True)
class Outlier:
    """A slide with far more or far less of a class than the others.

    Attributes:
        slide: Its place among the summaries.
        name: The class.
        share: Of the slide's tissue.
        middle: The median of all slides.
        usual: The usual distance from it.
    """

    slide: int
    name: str
    share: float
    middle: float
    usual: float

    @property
    def distance(self) -> float:
        """The distance from the median in usual distances, negative below it."""
        return (self.share - self.middle) / self.usual


def outliers(summaries: Sequence[Summary]) -> list[Outlier]:
    """Find slides whose share of tissue of a class is far from the others', the farthest first.

    The distance is the modified z-score of Iglewicz and Hoaglin (1993): from the median, over
    1.4826 times the median distance from it, or, where more than half of the slides are at the
    median, 1.2533 times the mean distance. Above `FARTHEST` it is far. Slides without tissue have
    no part in it, nor has a class on fewer than `FEWEST_SLIDES` slides.
    """
    shares = dict[str, dict[int, float]]()
    for at, summary in enumerate(summaries):
        for of in summary.classes if summary.tissue_mm2 > 0 else ():
            shares.setdefault(of.name, {})[at] = of.share_of_tissue
    found = []
    for name, own in shares.items():
        if len(own) < FEWEST_SLIDES:
            continue
        middle = median(own.values())
        distances = [abs(share - middle) for share in own.values()]
        usual = 1.4826 * median(distances) or 1.2533 * fmean(distances)
        found += [
            outlier
            for at, share in own.items()
            if abs(share - middle) > max(_LEAST, FARTHEST * usual)
            for outlier in [Outlier(at, name, share, middle, usual)]
        ]
    return sorted(found, key=lambda outlier: -abs(outlier.distance))


def overlay_picture(overlay: Path, kept: Path, summary: Summary) -> bytes | None:
    """Return overlay.png as a small JPEG, without its legend.

    It takes a fifth of a second, so it is kept for the next report, until the overlay is newer.

    Args:
        overlay: The path of overlay.png.
        kept: Where the small one is kept.
        summary: Of the same result.

    Returns:
        The JPEG's bytes; None where the overlay is missing, or cannot be read.
    """
    try:
        if kept.is_file() and kept.stat().st_mtime_ns >= overlay.stat().st_mtime_ns:
            return kept.read_bytes()
        with Image.open(overlay, formats=["PNG"]) as image:
            if max(image.size) > _LARGEST:
                return None
            page = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # Pillow's words for a broken file
        return None
    if summary.level0 is not None:
        size = thumbnail_frame(summary.level0.size, summary.level0.mpp).size
        page = page.crop((0, 0, min(size.width, page.width), min(size.height, page.height)))
    page.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    page.save(data, "JPEG", quality=_QUALITY, optimize=True)
    with suppress(OSError), replaced(kept) as draft:  # it is made again
        draft.write_bytes(data.getvalue())
    return data.getvalue()


def write_batch_report(path: Path, batch: BatchResults) -> None:
    """Write the page of a batch.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    write_page(
        path,
        "batch.html",
        of=_Page(batch),
        version=batch.version,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    )


class _Page:
    """The content of the page.

    Slides far off come first, then those with something to say of them, then the others by name.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: BatchResults) -> None:
        self.batch = batch
        summaries = [slide.summary for slide in batch.slides]
        far = outliers(summaries)
        far_of = dict[int, list[Outlier]]()
        for outlier in far:
            far_of.setdefault(outlier.slide, []).append(outlier)
        places = range(len(summaries))
        order = sorted(
            places,
            key=lambda at: (at not in far_of, not _remarks(summaries[at]), summaries[at].slide),
        )
        unfinished = dict.fromkeys(batch.begun, "open") | dict.fromkeys(batch.failures, "failed")
        self.kept = sum(one.slide in unfinished for one in summaries)
        self.classes = [*dict.fromkeys(of.name for one in summaries for of in one.classes)]
        self.has_objects = any(of.objects is not None for one in summaries for of in one.classes)
        self.has_enough = len(summaries) >= FEWEST_SLIDES
        self.fewest, self.farthest = FEWEST_SLIDES, FARTHEST
        self.outliers = [
            {
                "id": _id(one.slide),
                "slide": summaries[one.slide].slide,
                "name": one.name,
                "told": _told(one),
            }
            for one in far
        ]
        self.rows = [
            _row(at, batch.slides[at], far_of.get(at, []), self.classes)
            | {"told_in": unfinished.get(summaries[at].slide, "")}  # if its result is kept
            for at in order
        ]
        self.remarks = dict[str, list[tuple[str, str]]]()  # to the slides that share it
        for at in places:
            for told in _remarks(summaries[at]):
                self.remarks.setdefault(told, []).append((_id(at), summaries[at].slide))
        self.class_rows = [_class_row(name, summaries, far, batch.colours) for name in self.classes]
        self.regions = [
            {"slide": one.slide, "name": region.name, "area": area_text(region.area_mm2)}
            | {"cells": _cells(region.classes, self.classes)}
            | {"unread": region.unread_pixels * one.mpp.pixel_mm2}
            for one in summaries
            for region in one.regions_of_interest
        ]
        self.fields = [
            {"slide": one.slide, "rows": [_field(one, field) for field in one.least_certain]}
            for one in sorted(summaries, key=_least_certain)
            if one.least_certain
        ]
        self.tissue = sum(one.tissue_mm2 for one in summaries)
        self.unread = sum(one.unread_pixels * one.mpp.pixel_mm2 for one in summaries)
        known = [slide.seconds for slide in batch.slides if slide.seconds is not None]
        self.seconds, self.median_seconds = sum(known), median(known) if known else 0.0
        self.models = _numbers([one.model for one in summaries])
        self.versions = _numbers(
            [
                ", ".join(f"{name} {version}" for name, version in one.versions.items())
                for one in summaries
            ]
        )
        self.mpps = _numbers([f"{one.mpp.mean:.4g} µm per pixel" for one in summaries])


def _id(at: int) -> str:
    return f"slide-{at + 1}"


def _told(of: Outlier) -> str:
    times = abs(of.distance)
    return (
        f"{_percent(of.share)} of its tissue; of the middle slide {_percent(of.middle)}. "
        f"That is {times:.3g} times as far from the middle as is usual here "
        f"({100 * of.usual:.2g} percentage points)."
    )


def _remarks(summary: Summary) -> list[str]:
    """What is to be said of a slide: nothing of most."""
    tiles, damage = summary.tiles, damage_warning(summary)  # which is told in other words
    told = [f"{each[:1].upper()}{each[1:]}" for each in summary.warnings if each != damage]
    if summary.unread_pixels:
        told.append(
            f"{unread_text(summary)} could not be read, in {tiles.unread} of {tiles.done} tiles: "
            "hatched in the overlay"
        )
    elif tiles.unread:
        told.append(f"Around {tiles.unread} of {tiles.done} tiles not all could be read")
    if not summary.tissue_mm2:
        told.append("No tissue was found")
    return told


def _row(
    at: int, slide: BatchSlide, far: Sequence[Outlier], names: Sequence[str]
) -> dict[str, Any]:
    summary = slide.summary
    return {
        "id": _id(at),
        "slide": summary.slide,
        "folder": slide.folder,
        "picture": None if slide.picture is None else photograph(slide.picture),
        "far": [f"{'much' if one.share > one.middle else 'little'} {one.name}" for one in far],
        "remarks": len(_remarks(summary)),
        "tissue": area_text(summary.tissue_mm2),
        "unread": summary.unread_pixels * summary.mpp.pixel_mm2,
        "seconds": slide.seconds,
        "cells": _cells(summary.classes, names),
    }


def _cells(classes: Sequence[ClassSummary], names: Sequence[str]) -> list[dict[str, str] | None]:
    """The figures of each class; None where there is no such class."""
    by_name = {of.name: of for of in classes}
    return [_cell(by_name[name]) if name in by_name else None for name in names]


def _cell(of: ClassSummary) -> dict[str, str]:
    numbers = [] if of.regions is None else [_plural(of.regions, "region")]
    if of.objects is not None:
        density = of.objects_per_mm2 or 0.0
        numbers.append(f"{_plural(of.objects, 'object')}, {area_text(density)} per mm²")
    return {
        "area": area_text(of.area_mm2),
        "share": _percent(of.share_of_tissue),
        "numbers": "; ".join(numbers),
    }


def _class_row(
    name: str, summaries: Sequence[Summary], far: Sequence[Outlier], colours: Mapping[str, Colour]
) -> dict[str, Any]:
    of = [
        (at, one, own)
        for at, one in enumerate(summaries)
        for own in one.classes
        if own.name == name
    ]
    shares = [own.share_of_tissue for _, one, own in of if one.tissue_mm2 > 0]
    tissue = sum(one.tissue_mm2 for _, one, _ in of)
    read = sum(one.tissue_mm2 if one.read_mm2 is None else one.read_mm2 for _, one, _ in of)
    area = sum(own.area_mm2 for _, _, own in of)
    objects = [own.objects for _, _, own in of if own.objects is not None]
    far_off = {outlier.slide for outlier in far if outlier.name == name}
    return {
        "name": name,
        "colour": colours.get(name),
        "area": area_text(area),
        "share": _percent(area / tissue) if tissue else "–",
        "middle": _percent(median(shares)) if shares else "–",
        "range": f"{_percent(min(shares))} – {_percent(max(shares))}" if shares else "–",
        "most": max(shares, default=0.0),
        "dots": [
            (own.share_of_tissue, f"{one.slide}: {_percent(own.share_of_tissue)}", at in far_off)
            for at, one, own in of
            if one.tissue_mm2 > 0
        ],
        "slides": sum(own.pixels > 0 for _, _, own in of),
        "regions": count(sum(own.regions or 0 for _, _, own in of)),
        "objects": count(sum(objects)) if objects else "–",
        "density": area_text(sum(objects) / read) if objects and read else "–",
    }


def _field(summary: Summary, field: UncertainField) -> list[str]:
    """The place of a field, its uncertainty, and the end of the viewer's address of it."""
    x, y = field.x + field.width // 2, field.y + field.height // 2
    place = f"{field.x:,}, {field.y:,}; {field.width:,} × {field.height:,}"
    mpp = summary.mpp.x if summary.level0 is None else summary.level0.mpp.x
    times = min(40.0, _MICRONS_AT_1X * _SCREEN / (max(field.width, field.height, 1) * mpp))
    # As JavaScript's encodeURIComponent leaves them.
    name = quote(summary.slide, safe="!'()*", errors="surrogateescape")
    return [place, f"{field.uncertainty:.3f}", f"#{name},{x},{y},{times:.4g}"]


def _least_certain(summary: Summary) -> float:
    return -max((field.uncertainty for field in summary.least_certain or ()), default=0.0)


def _numbers(values: Sequence[str]) -> list[tuple[str, str]]:
    """Each value with the number of slides that have it."""
    return [(value, _plural(values.count(value), "slide")) for value in dict.fromkeys(values)]


def _percent(share: float) -> str:
    return f"{Decimal(f'{100 * share:.3g}'):f} %"


def _plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
