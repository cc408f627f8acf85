"""Writes the files of one slide's result while its mask's bands arrive."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.annotations.reading import read_regions_of_interest
from pathoseg.annotations.regions_of_interest import RegionOfInterest
from pathoseg.config import Config, InferConfig
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.host_memory import give_back_freed_memory
from pathoseg.inference.certainty import Certainty, certainty_files
from pathoseg.inference.result_folder import OVERLAY, SUMMARY
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.outputs.interest_counts import InterestCounts
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.object_files import ObjectWriter
from pathoseg.outputs.objects import FoundObjects, ObjectFinder, ObjectOptions
from pathoseg.outputs.overlay import MaskThumbnail, thumbnail_frame, write_overlay
from pathoseg.outputs.polygons import RegionTracer, write_regions
from pathoseg.outputs.pyramid import Add
from pathoseg.outputs.report import (
    Level0,
    Summary,
    TileCounts,
    class_summaries,
    count_pixels,
    write_summary,
)
from pathoseg.outputs.stitch import HEIGHT_LEVELS
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.stain import stain_densities
from pathoseg.version import __version__

MASK, ZARR_MASK, DICOM_MASK = "mask.ome.tiff", "mask.ome.zarr", "mask.dcm"
REGIONS = "regions.geojson"
OBJECTS, OBJECT_TABLE = "objects.geojson", "objects.csv"

_DEPTH = 1.0  # pixels, see `separate`; benchmarks/touching-nuclei compares others
_WIDEST = 800  # pixels of the mask: a block with its halo takes 2 GB then


@dataclass(frozen=True)
class PlannedSlide:
    """A slide ahead of its prediction.

    Attributes:
        plan: Its tiles.
        thumbnail: The frame of the overlay.
        picture: The slide in that frame: RGB, shape (height, width, 3), uint8.
        level0: Its pixels.
        seconds: The time that this took.
        interest: The regions of interest whose figures are wanted.
    """

    plan: SlidePlan
    thumbnail: Frame
    picture: NDArray[np.uint8]
    level0: Level0
    seconds: float
    interest: Sequence[RegionOfInterest] = ()


def plan_slide(
    slide: Path, segmenter: Segmenter, config: Config, annotation: Path | None
) -> PlannedSlide:
    """Find a slide's tissue, lay its tiles, and read the picture of its overlay.

    Args:
        slide: The file.
        segmenter: Plans it.
        config: `data.assume_mpp` and `annotations` are used.
        annotation: The file of its regions of interest, or None.

    Raises:
        PathosegError: The slide or the annotation cannot be read, or does not fit the model.
    """
    began = time.monotonic()
    with open_slide(slide, config.data.assume_mpp) as opened:
        plan = segmenter.plan(opened)
        thumbnail = thumbnail_frame(opened.size, opened.mpp)
        size = thumbnail.size
        level0 = Level0(opened.size, opened.mpp)
        picture = read_region(opened, thumbnail, Box(0, 0, size.width, size.height)).pixels
        interest = list[RegionOfInterest]()
        if annotation is not None:
            options = config.annotations.for_classes(segmenter.classes.names)
            interest = read_regions_of_interest(annotation, opened.size, opened.origin, options)
    give_back_freed_memory()  # finding tissue takes more of it than a row of tiles
    return PlannedSlide(plan, thumbnail, picture, level0, time.monotonic() - began, interest)


def publish(
    name: str,
    planned: PlannedSlide,
    rows: Generator[MaskRow],
    folder: Path,
    segmenter: Segmenter,
    config: Config,
) -> None:
    """Write a slide's result into a folder: mask, outlines, what is asked for, last the summary.

    Args:
        name: The slide's name in the batch.
        planned: The slide.
        rows: All rows of its mask from top to bottom, pulled one by one and closed in the end.
        folder: Exists.
        segmenter: The model that predicts them.
        config: `infer` and `outputs` are used.

    Raises:
        PathosegError: The slide or the device cannot do it.
        StoppedError: A signal came.
        OSError: The disk is full or cannot be written.
    """
    began, classes, options = time.monotonic(), segmenter.classes, config.infer
    plan, thumbnail = planned.plan, planned.thumbnail
    small = MaskThumbnail(plan.output, thumbnail)
    pixels, regions, unread_tiles = Counter[int](), Counter[int](), 0
    interest = InterestCounts(planned.interest, plan.output, classes, segmenter.separates)
    tracer = RegionTracer(options.simplify, _min_pixels(plan.output, options))
    suffix = ".gz" if options.compress_regions else ""
    outlines = f"{REGIONS}{suffix}"
    objects: _ObjectOutput | None = None
    certainty: Certainty | None = None
    others = list[Add]()  # other files that take the mask
    licence = segmenter.card.licence_warning()
    warnings = [*plan.warnings, *([] if licence is None else [licence])]
    origin = f"{name} {segmenter.model_id}"
    with ExitStack() as stack:
        stack.enter_context(closing(rows))
        writer = GeoJsonWriter(folder / outlines, classes, options.region_type)
        stack.enter_context(writer)
        if segmenter.separates:
            objects = _ObjectOutput(
                stack.enter_context(segmenter.open(plan.slide)),
                plan.output,
                stack.enter_context(
                    ObjectWriter(
                        folder / f"{OBJECTS}{suffix}", folder / OBJECT_TABLE, classes, plan.output
                    )
                ),
                options,
                interest,
            )
        if segmenter.tells_certainty:
            certainty = stack.enter_context(certainty_files(folder, plan, classes, origin))
        if config.outputs.ngff:
            from pathoseg.outputs.mask_zarr import zarr_mask_writer  # a second to import

            size, mpp = plan.output.size, plan.output.mpp
            path = folder / ZARR_MASK
            others.append(stack.enter_context(zarr_mask_writer(path, size, mpp, classes)))
        if config.outputs.dicom_seg:
            from pathoseg.outputs.mask_dicom import dicom_mask_writer, read_source  # likewise

            source = read_source(plan.slide, planned.level0.size)
            if source is None:
                warnings.append(f"{DICOM_MASK} is not written: the slide is no DICOM")
            else:
                path, model = folder / DICOM_MASK, segmenter.model_id
                seg = dicom_mask_writer(path, source, plan.output, classes, model)
                others.append(stack.enter_context(seg))

        def seen() -> Iterator[NDArray[np.uint8]]:
            nonlocal unread_tiles
            for row in rows:
                band, unread_tiles = row.band, unread_tiles + row.unread_tiles
                if objects is not None:
                    # A copy: what is kept of a view would keep all planes of the row.
                    objects.add(row.planes[:3].copy())
                if certainty is not None:
                    certainty.add(row)
                for add in others:
                    add(band)
                pixels.update(count_pixels(band, classes))
                interest.add_band(band)
                small.add(band)
                regions.update(write_regions(writer, tracer.add(band), plan.output))
                yield band

        write_mask(folder / MASK, plan.output.size, plan.output.mpp, seen(), classes, origin)
        regions.update(write_regions(writer, tracer.close(), plan.output))
    write_overlay(folder / OVERLAY, planned.picture, small.pixels, classes)
    ended = time.monotonic()
    tissue = plan.tissue.area_mm2
    if not regions.total() and any(pixels[index] for index in range(1, len(classes))):
        warnings.append(
            f"no region reaches {options.min_region_um2:g} µm² ([infer] min_region_um2), so "
            f"{outlines} is empty"
        )
    if objects is not None and objects.cut:
        warnings.append(cut_warning(objects.cut, options))
    summary = Summary(
        slide=name,
        model=segmenter.model_id,
        mpp=plan.output.mpp,
        tissue_mm2=tissue,
        classes=class_summaries(
            classes,
            pixels,
            regions,
            plan.output,
            tissue,
            None if objects is None else objects.written,
        ),
        tiles=TileCounts(len(plan.indices), plan.skipped, unread_tiles),
        unread_pixels=pixels[IGNORE],
        versions={"pathoseg": __version__, "torch": str(torch.__version__)},
        seconds={"plan": round(planned.seconds, 3), "segment": round(ended - began, 3)},
        warnings=tuple(warnings),
        level0=planned.level0,
        least_certain=None if certainty is None else certainty.least_certain(),
        objects_left_out=None if objects is None else objects.left_out,
        objects_cut=None if objects is None else objects.cut,
        regions_of_interest=interest.summaries(),
    )
    write_summary(folder / SUMMARY, summary)


def object_finder(frame: Frame, options: InferConfig) -> ObjectFinder:
    """Return the ObjectFinder of a mask.

    Args:
        frame: The mask's.
        options: `object_um`, `min_region_um2` and `simplify` are used.

    Raises:
        PathosegError: Objects of that size take too much memory at the mask's resolution.
    """
    extent = math.ceil(options.object_um / frame.mpp.mean)
    if extent > _WIDEST:
        raise PathosegError(
            f"[infer] object_um = {options.object_um:g} is {extent:,} px at {frame.mpp.mean:g} µm; "
            f"at most {_WIDEST} can be.",
            f"Set it to {_WIDEST * frame.mpp.mean:g} at most, or train at a larger [tiles] mpp.",
        )
    depth, smallest = round(_DEPTH * HEIGHT_LEVELS), _min_pixels(frame, options)
    return ObjectFinder(frame.size, ObjectOptions(depth, extent, smallest, options.simplify))


def cut_warning(count: int, options: InferConfig) -> str:
    """Return the sentence that says how many objects are too large to be found whole."""
    return (
        f"{count} objects are larger than [infer] object_um ({options.object_um:g}) allows for, "
        "and are cut"
    )


def _min_pixels(frame: Frame, options: InferConfig) -> int:
    """The smallest region, or object, that is written."""
    return max(1, round(options.min_region_um2 / frame.mpp.mean**2))


class _ObjectOutput:
    """Finds, measures and writes the objects of a slide while its rows arrive.

    Args:
        slide: Open; stains are measured on it.
        frame: The mask's.
        writer: Takes the objects.
        options: The form of the outputs.
        interest: Counts the objects, too.
    """

    def __init__(
        self,
        slide: Slide,
        frame: Frame,
        writer: ObjectWriter,
        options: InferConfig,
        interest: InterestCounts,
    ) -> None:
        self._slide, self._frame, self._writer = slide, frame, writer
        self._interest = interest
        self._finder = object_finder(frame, options)

    @property
    def written(self) -> Mapping[int, int]:
        """Number of objects by class index."""
        return self._writer.written

    @property
    def cut(self) -> int:
        """Number of them that are too large to be found whole."""
        return self._writer.cut

    @property
    def left_out(self) -> int:
        """Number of objects below `min_region_um2`."""
        return self._writer.left_out

    def add(self, planes: NDArray[np.uint8]) -> None:
        """Take the next rows of the mask."""
        # Most of what is seen around a block need not be read again.
        for found in map(FoundObjects.trimmed, self._finder.add(planes)):
            region = read_region(self._slide, self._frame, found.box)
            inside = found.labels > 0
            if region.unread is not None:
                inside &= ~region.unread
            stains = np.full((*inside.shape, 2), np.nan, np.float32)
            stains[inside] = stain_densities(region.pixels[inside])
            self._interest.add_objects(self._writer.add(found, stains), found.class_index)
