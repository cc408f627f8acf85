"""Writes the files of one slide's result while its mask's bands arrive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import shapely
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.annotations.reading import read_regions_of_interest
from pathoseg.annotations.regions_of_interest import RegionOfInterest
from pathoseg.config import Config, InferConfig, OutputsConfig
from pathoseg.errors import PathosegError, UnreadableError, first_names
from pathoseg.geometry import Box, Frame, area_text
from pathoseg.host_memory import give_back_freed_memory
from pathoseg.inference.certainty import Certainty, certainty_files
from pathoseg.inference.infer_options import object_extent
from pathoseg.inference.result_folder import (
    DICOM_MASK,
    MASK,
    OBJECT_TABLE,
    OBJECTS,
    OVERLAY,
    REGIONS,
    SUMMARY,
    ZARR_MASK,
)
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.inference.windows import Windows
from pathoseg.outputs.interest_counts import InterestCounts
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.object_files import ObjectWriter
from pathoseg.outputs.objects import FoundObjects, ObjectFinder, ObjectOptions
from pathoseg.outputs.overlay import MaskThumbnail, thumbnail_frame, write_overlay
from pathoseg.outputs.polygons import RegionTracer, TracedRegion, write_regions
from pathoseg.outputs.pyramid import Add
from pathoseg.outputs.report import (
    Level0,
    Summary,
    TileCounts,
    class_summaries,
    count_pixels,
    damage_warning,
    excess_warning,
    read_part,
    write_summary,
)
from pathoseg.outputs.stitch import HEIGHT_LEVELS
from pathoseg.slides.folder import files_of
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.stain import stain_densities
from pathoseg.version import __version__

_DEPTH = 1.0  # pixels, see `separate`; benchmarks/touching-nuclei compares others


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
        off_slide: The number of those that do not lie on the slide.
    """

    plan: SlidePlan
    thumbnail: Frame
    picture: NDArray[np.uint8]
    level0: Level0
    seconds: float
    interest: Sequence[RegionOfInterest] = ()
    off_slide: int = 0


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
        interest, off_slide = list[RegionOfInterest](), 0
        if annotation is not None:
            options = config.annotations.for_classes(segmenter.classes.names)
            interest, off_slide = read_regions_of_interest(
                annotation, opened.size, opened.origin, options
            )
    give_back_freed_memory()  # finding tissue takes more of it than a row of tiles
    seconds = time.monotonic() - began
    return PlannedSlide(plan, thumbnail, picture, level0, seconds, interest, off_slide)


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
        UnreadableError: Not one pixel of what is predicted could be read.
        StoppedError: A signal came.
        OSError: The disk is full or cannot be written.
    """
    began, mask, classes = time.monotonic(), planned.plan.output, segmenter.classes
    origin = f"{name} {segmenter.model_id}"
    with ExitStack() as stack:
        stack.enter_context(closing(rows))
        sinks = _RowSinks(stack, folder, planned, segmenter, config, origin)

        def bands() -> Iterator[NDArray[np.uint8]]:
            for row in rows:
                sinks.add(row)
                yield row.band

        write_mask(folder / MASK, mask.size, mask.mpp, bands(), classes, origin)
        sinks.close()
    _refuse_unread(planned.plan, sinks)
    write_overlay(folder / OVERLAY, planned.picture, sinks.small.pixels, classes)
    summary = _summary(name, planned, segmenter, sinks, time.monotonic() - began)
    write_summary(folder / SUMMARY, summary)


class _RowSinks:
    """Takes the rows of a slide's mask, for all of its result but the mask itself.

    Args:
        stack: Its end closes the files.
        folder: Of the result.
        planned: The slide.
        segmenter: The model that predicts it.
        config: `infer` and `outputs` are used.
        origin: What the result is made of.

    Attributes:
        small: The mask in the frame of the overlay.
        pixels: Number of pixels by class index.
        regions: Number of regions by class index.
        unread_tiles: Tiles with pixels that could not be read.
        unread_tissue: Number of pixels in the tissue that could not be read.
        interest: The counts of regions of interest.
        objects: None where the model separates none.
        certainty: None where it is not asked for.
        warnings: Sentences for the user.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        planned: PlannedSlide,
        segmenter: Segmenter,
        config: Config,
        origin: str,
    ) -> None:
        plan, classes, options = planned.plan, segmenter.classes, config.infer
        self._frame, self._classes, self._options = plan.output, classes, options
        self._tissue, self._top, self.unread_tissue = plan.tissue, 0, 0
        self.small = MaskThumbnail(plan.output, planned.thumbnail)
        self.pixels, self.regions, self.unread_tiles = Counter[int](), Counter[int](), 0
        self.interest = InterestCounts(planned.interest, plan.output, classes, segmenter.separates)
        self._tracer = RegionTracer(options.simplify, _min_pixels(plan.output, options))
        suffix = ".gz" if options.compress_regions else ""
        outlines = folder / f"{REGIONS}{suffix}"
        self._outlines = GeoJsonWriter(outlines, classes, options.region_type)
        stack.enter_context(self._outlines)
        self._outlines_name = outlines.name
        self.objects: _ObjectOutput | None = None
        if segmenter.separates:
            slide = stack.enter_context(segmenter.open(plan.slide))
            objects, table = folder / f"{OBJECTS}{suffix}", folder / OBJECT_TABLE
            writer = stack.enter_context(ObjectWriter(objects, table, classes, plan.output))
            self.objects = _ObjectOutput(slide, plan.output, writer, options, self.interest)
        self.certainty: Certainty | None = None
        if segmenter.tells_certainty:
            files = certainty_files(folder, plan, classes, origin)
            self.certainty = stack.enter_context(files)
        self._others, self.warnings = _other_writers(
            stack, folder, planned, segmenter, config.outputs
        )

    def add(self, row: MaskRow) -> None:
        """Take the next row."""
        band = row.band
        self.unread_tiles += row.unread_tiles
        if self.objects is not None:
            # A copy: what is kept of a view would keep all planes of the row.
            self.objects.add(row.planes[:3].copy())
        if self.certainty is not None:
            self.certainty.add(row)
        for add in self._others:
            add(band)
        counted = count_pixels(band, self._classes)
        self.pixels.update(counted)
        if counted[IGNORE]:
            place = Box(0, self._top, self._frame.size.width, len(band))
            in_tissue = self._tissue.pixels(place, self._frame)
            self.unread_tissue += int(np.count_nonzero(in_tissue & (band == IGNORE)))
        self._top += len(band)
        self.interest.add_band(band)
        self.small.add(band)
        self._write(self._tracer.add(band))

    def close(self) -> None:
        """Write the regions that are still open, once all rows are taken."""
        self._write(self._tracer.close())
        classes, smallest = range(1, len(self._classes)), self._options.min_region_um2
        if not self.regions.total() and any(self.pixels[index] for index in classes):
            self.warnings.append(
                f"no region reaches {smallest:g} µm² ([infer] min_region_um2), so "
                f"{self._outlines_name} is empty"
            )
        if self.objects is not None and self.objects.writer.cut:
            self.warnings.append(cut_warning(self.objects.writer.cut, self._options))
        if self.objects is not None:
            kept, left_out = self.objects.writer.written.total(), self.objects.writer.left_out
            if left_out > kept:
                self.warnings.append(
                    f"{_objects_are(left_out)} smaller than {smallest:g} µm² ([infer] "
                    f"min_region_um2) and left out, more than are kept ({kept:,})"
                )

    def _write(self, regions: Iterable[TracedRegion]) -> None:
        self.regions.update(write_regions(self._outlines, regions, self._frame))


def _other_writers(
    stack: ExitStack,
    folder: Path,
    planned: PlannedSlide,
    segmenter: Segmenter,
    outputs: OutputsConfig,
) -> tuple[list[Add], list[str]]:
    """Return what takes the rows of each further mask file, and warnings of impossible files."""
    plan, classes = planned.plan, segmenter.classes
    writers = list[Add]()
    if outputs.ngff:
        from pathoseg.outputs.mask_zarr import zarr_mask_writer  # a second to import

        size, mpp = plan.output.size, plan.output.mpp
        ngff = zarr_mask_writer(folder / ZARR_MASK, size, mpp, classes)
        writers.append(stack.enter_context(ngff))
    if outputs.dicom_seg:
        from pathoseg.outputs.mask_dicom import dicom_mask_writer, read_source  # likewise

        try:
            _, *others = files_of(plan.slide)
            source = read_source(plan.slide, planned.level0.size, others)
            if source is None:
                return writers, [f"{DICOM_MASK} is not written: the slide is no DICOM"]
            path, model = folder / DICOM_MASK, segmenter.model_id
            seg = dicom_mask_writer(path, source, plan.output, classes, model)
            writers.append(stack.enter_context(seg))
        except PathosegError as error:  # by its header
            return writers, [f"{DICOM_MASK} is not written: {str(error).removesuffix('.')}"]
    return writers, []


def _refuse_unread(plan: SlidePlan, sinks: _RowSinks) -> None:
    """Refuse a result without a pixel that could be read."""
    unread = sinks.pixels[IGNORE]
    if 0 < len(plan.indices) == sinks.unread_tiles and unread == _predicted_pixels(plan):
        area = area_text(unread * plan.output.pixel_area_mm2)
        raise UnreadableError(
            f"{plan.slide} cannot be segmented: nothing of the {area} mm² that are not glass "
            "could be read.",
            "Copy the file again from where it came.",
        )


def _predicted_pixels(plan: SlidePlan) -> int:
    """Return the number of pixels of a slide's mask that are predicted."""
    grid, size = plan.grid, plan.frame.size
    if isinstance(grid, Windows):
        return grid.pixels
    if plan.output != plan.frame:  # one a tile
        return len(plan.indices)
    boxes = np.array([(box.x, box.y, box.right, box.bottom) for box in map(grid.box, plan.indices)])
    boxes[:, 2:] = np.minimum(boxes[:, 2:], (size.width, size.height))
    return round(shapely.union_all(shapely.box(*boxes.T)).area)


def _summary(
    name: str, planned: PlannedSlide, segmenter: Segmenter, sinks: _RowSinks, seconds: float
) -> Summary:
    """The summary of a result whose rows are all taken; they took `seconds`."""
    plan, tissue = planned.plan, planned.plan.tissue.area_mm2
    licence = segmenter.card.licence_warning()
    objects = None if sinks.objects is None else sinks.objects.writer
    read = read_part(tissue, sinks.unread_tissue, plan.output)
    classes = class_summaries(
        segmenter.classes,
        sinks.pixels,
        sinks.regions,
        plan.output,
        tissue,
        None if objects is None else objects.written,
        read,
    )
    of_tiles = plan.output != plan.frame
    excess = excess_warning(classes, tissue, plan.output.mpp.mean if of_tiles else None)
    told = [warning for warning in (licence, excess) if warning is not None]
    if planned.off_slide:
        told.append(f"regions of interest off the slide: {planned.off_slide}, without figures")
    if missed := sinks.interest.without_pixels():
        what = "tile" if of_tiles else "pixel"
        told.append(
            f"regions of interest that hold no {what}'s centre, so that their areas are 0: "
            f"{first_names(missed)}"
        )
    summary = Summary(
        slide=name,
        model=segmenter.model_id,
        mpp=plan.output.mpp,
        tissue_mm2=tissue,
        classes=classes,
        tiles=TileCounts(len(plan.indices), plan.skipped, sinks.unread_tiles),
        unread_pixels=sinks.pixels[IGNORE],
        versions={"pathoseg": __version__, "torch": str(torch.__version__)},
        seconds={"plan": round(planned.seconds, 3), "segment": round(seconds, 3)},
        warnings=(*plan.warnings, *told, *sinks.warnings),
        level0=planned.level0,
        least_certain=None if sinks.certainty is None else sinks.certainty.least_certain(),
        objects_left_out=None if objects is None else objects.left_out,
        objects_cut=None if objects is None else objects.cut,
        regions_of_interest=sinks.interest.summaries(),
        read_mm2=read,
    )
    damage = damage_warning(summary)
    return summary if damage is None else replace(summary, warnings=(*summary.warnings, damage))


def object_finder(frame: Frame, options: InferConfig) -> ObjectFinder:
    """Return the ObjectFinder of a mask.

    Args:
        frame: The mask's.
        options: `object_um`, `min_region_um2` and `simplify` are used.

    Raises:
        PathosegError: As `object_extent`.
    """
    extent = object_extent(frame.mpp.mean, options)
    depth, smallest = round(_DEPTH * HEIGHT_LEVELS), _min_pixels(frame, options)
    return ObjectFinder(frame.size, ObjectOptions(depth, extent, smallest, options.simplify))


def cut_warning(count: int, options: InferConfig) -> str:
    """Return the sentence that says how many objects are too large to be found whole."""
    limit = f"[infer] object_um ({options.object_um:g})"
    return f"{_objects_are(count)} larger than {limit} allows for, and cut"


def _objects_are(count: int) -> str:
    return "1 object is" if count == 1 else f"{count:,} objects are"


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

    Attributes:
        writer: As given.
    """

    def __init__(
        self,
        slide: Slide,
        frame: Frame,
        writer: ObjectWriter,
        options: InferConfig,
        interest: InterestCounts,
    ) -> None:
        self._slide, self._frame, self.writer = slide, frame, writer
        self._interest = interest
        self._finder = object_finder(frame, options)

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
            self._interest.add_objects(self.writer.add(found, stains), found.class_index)
