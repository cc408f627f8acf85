"""Writes the files of one slide's result while its mask's bands arrive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.config import Config, InferConfig
from pathoseg.geometry import Box, Frame
from pathoseg.host_memory import give_back_freed_memory
from pathoseg.inference.result_folder import SUMMARY
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.overlay import MaskThumbnail, thumbnail_frame, write_overlay
from pathoseg.outputs.polygons import RegionTracer, write_regions
from pathoseg.outputs.report import (
    Level0,
    Summary,
    TileCounts,
    class_summaries,
    count_pixels,
    write_summary,
)
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.version import __version__

MASK = "mask.ome.tiff"
REGIONS = "regions.geojson"
OVERLAY = "overlay.png"


@dataclass(frozen=True)
class PlannedSlide:
    """A slide ahead of its prediction.

    Attributes:
        plan: Its tiles.
        thumbnail: The frame of the overlay.
        picture: The slide in that frame: RGB, shape (height, width, 3), uint8.
        level0: Its pixels.
        seconds: The time that this took.
    """

    plan: SlidePlan
    thumbnail: Frame
    picture: NDArray[np.uint8]
    level0: Level0
    seconds: float


def plan_slide(slide: Path, segmenter: Segmenter, config: Config) -> PlannedSlide:
    """Find a slide's tissue, lay its tiles, and read the picture of its overlay.

    Args:
        slide: The file.
        segmenter: Plans it.
        config: `data.assume_mpp` is used.

    Raises:
        PathosegError: The slide cannot be read, or does not fit the model.
    """
    began = time.monotonic()
    with open_slide(slide, config.data.assume_mpp) as opened:
        plan = segmenter.plan(opened)
        thumbnail = thumbnail_frame(opened.size, opened.mpp)
        size = thumbnail.size
        level0 = Level0(opened.size, opened.mpp)
        picture = read_region(opened, thumbnail, Box(0, 0, size.width, size.height)).pixels
    give_back_freed_memory()  # finding tissue takes more of it than a row of tiles
    return PlannedSlide(plan, thumbnail, picture, level0, time.monotonic() - began)


def publish(
    name: str,
    planned: PlannedSlide,
    rows: Generator[MaskRow],
    folder: Path,
    segmenter: Segmenter,
    options: InferConfig,
) -> None:
    """Write a slide's result into a folder: mask, outlines, overlay, and last the summary.

    Args:
        name: The slide's name in the batch.
        planned: The slide.
        rows: All rows of its mask from top to bottom, pulled one by one and closed in the end.
        folder: Exists.
        segmenter: The model that predicts them.
        options: The form of the outputs.

    Raises:
        PathosegError: The slide or the device cannot do it.
        StoppedError: A signal came.
        OSError: The disk is full or cannot be written.
    """
    began, classes = time.monotonic(), segmenter.classes
    plan, thumbnail = planned.plan, planned.thumbnail
    small = MaskThumbnail(plan.output, thumbnail)
    pixels, regions, unread_tiles = Counter[int](), Counter[int](), 0
    min_pixels = max(1, round(options.min_region_um2 / plan.output.mpp.mean**2))
    tracer = RegionTracer(options.simplify, min_pixels)
    outlines = f"{REGIONS}.gz" if options.compress_regions else REGIONS
    with (
        closing(rows),
        GeoJsonWriter(folder / outlines, classes, options.region_type) as writer,
    ):

        def seen() -> Iterator[NDArray[np.uint8]]:
            nonlocal unread_tiles
            for row in rows:
                band, unread_tiles = row.band, unread_tiles + row.unread_tiles
                pixels.update(count_pixels(band, classes))
                small.add(band)
                regions.update(write_regions(writer, tracer.add(band), plan.output))
                yield band

        origin = f"{name} {segmenter.model_id}"
        write_mask(folder / MASK, plan.output.size, plan.output.mpp, seen(), classes, origin)
        regions.update(write_regions(writer, tracer.close(), plan.output))
    write_overlay(folder / OVERLAY, planned.picture, small.pixels, classes)
    ended = time.monotonic()
    tissue = plan.tissue.area_mm2
    warnings = [] if plan.warning is None else [plan.warning]
    if not regions.total() and any(pixels[index] for index in range(1, len(classes))):
        warnings.append(
            f"no region reaches {options.min_region_um2:g} µm² ([infer] min_region_um2), so "
            f"{outlines} is empty"
        )
    summary = Summary(
        slide=name,
        model=segmenter.model_id,
        mpp=plan.output.mpp,
        tissue_mm2=tissue,
        classes=class_summaries(classes, pixels, regions, plan.output, tissue),
        tiles=TileCounts(len(plan.indices), plan.skipped, unread_tiles),
        unread_pixels=pixels[IGNORE],
        versions={"pathoseg": __version__, "torch": str(torch.__version__)},
        seconds={"plan": round(planned.seconds, 3), "segment": round(ended - began, 3)},
        warnings=tuple(warnings),
        level0=planned.level0,
    )
    write_summary(folder / SUMMARY, summary)
