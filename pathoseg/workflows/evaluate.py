"""Compares a model's segmentation of whole annotated slides with their annotations."""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.object_areas import ObjectAreas, TrueObject
from pathoseg.config import Config
from pathoseg.config_file import UNNUMBERED, given_options, load_config
from pathoseg.device import pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, ObjectMask
from pathoseg.host_memory import share_one_heap
from pathoseg.inference.publish import cut_warning, object_finder
from pathoseg.inference.segmenter import Segmenter, SlidePlan, class_table_of, load_segmenter
from pathoseg.interruption import Interruption
from pathoseg.models.boundary_f1 import BoundaryCounts
from pathoseg.models.bundle import load_card
from pathoseg.models.metrics import Calibration, Confusion, Figures
from pathoseg.models.object_metrics import ObjectCounts
from pathoseg.models.tally import FEWEST_PATIENTS, RESAMPLES, Tally, pooled_figures
from pathoseg.outputs.evaluation_report import (
    Evaluation,
    Figure,
    ScoredSlide,
    ScoredSplit,
    SlidePicture,
    best_median_worst,
    write_evaluation,
)
from pathoseg.outputs.overlay import MaskThumbnail, thumbnail_frame
from pathoseg.outputs.stitch import CONFIDENCE_LEVELS
from pathoseg.progress import answer, say
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.class_pixels import count_tiles
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.tiles import tile_labels
from pathoseg.time_spent import TimeSpent, time_told
from pathoseg.training.labelled_slides import (
    LabelledSlide,
    labelled_slides,
    read_slides,
    slide_files,
)
from pathoseg.training.run_folder import CONFIG, bundle_of, refuse_unwritable
from pathoseg.training.splits import Split
from pathoseg.version import __version__
from pathoseg.workflows.recorded_splits import TELLING, UNSEEN, RecordedSplits

_STRIP_PIXELS = 2**22  # compared at a time, so that a wide slide's bands cost no more
_PICTURE_SIDE = 640


def evaluate(
    model: Path | None,
    out: Path | None,
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    split: str | None,
    factory: str | None,
    verbose: bool = False,
    *,
    ends_process: bool = False,
) -> Path:
    """Write how well every slide is segmented, and all slides of a split taken together.

    A slide's split is what the model's run recorded; one that the run never saw is `unseen`.
    Figures of training slides therefore never mix with others. Slides are read as the model's run
    read them; a `config_file` overrules that.

    With `ends_process` a stop ends the process where a layer under way takes longer than two
    seconds; without, that layer is waited for.

    Returns:
        The table evaluation.csv, or evaluation-<split>.csv for one split:
        `slide,split,pixels,dice_mean,iou_mean,dice_<class>…,iou_<class>…` and the other figures.
        The other files lie beside it.

    Raises:
        PathosegError: The model cannot be used, an annotation has a class that it does not know, or
            no slide is left. Slides that fail are named once the tables of the others are written.
        StoppedError: A signal came.
    """
    share_one_heap()
    with time_told(verbose) as spent:
        return _evaluate(model, out, config_file, flags, split, factory, spent, ends_process)


def _evaluate(
    model: Path | None,
    out: Path | None,
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    split: str | None,
    factory: str | None,
    spent: TimeSpent,
    ends_process: bool,
) -> Path:
    bundle = bundle_of(model)
    refuse_unwritable(out or bundle.parent, "evaluation's folder")
    config = _configured(bundle.parent / CONFIG, config_file, flags)
    pick_device(config.parallel.device)  # refused before slides are read
    card = load_card(bundle)
    config = replace(config, tiles=replace(config.tiles, mpp=card.mpp))
    if card.model.task == "objects":  # so that labels without objects are refused
        config = replace(config, model=replace(config.model, task="objects"))
    files, folders = slide_files(config.data), config.data.told_folders
    records = RecordedSplits.of(bundle.parent, config, files)
    asked = [name for name in files if split in (None, records.split_of(name))]
    if not asked:
        raise _none_of_split(str(split), folders, {*map(records.split_of, files)})
    read = read_slides(config, class_table_of(card), only=asked)  # the others are not read
    sources = labelled_slides(config, read, class_table_of(card))
    chosen = sources.usable
    for source in chosen:  # a class that the model does not know is refused before hours of work
        source.labels.rasterise(Box(0, 0, 1, 1), source.frame, class_table_of(card))
    segmenter = load_segmenter(bundle, config, factory, spent)
    failed = {} if config.data.skip_bad_slides else dict(read.bad)
    for name, error in failed.items():
        say(f"{name} is not compared: {error}")
    advice = "Nothing is written; run the same command again."
    with Interruption(advice, ends_process) as interruption:
        interruption.leave = spent.tell
        compared = _compare_all(segmenter, chosen, config, records, failed, interruption)
    of_split = defaultdict[str, list[_Compared]](list)
    for one in compared:
        of_split[one.slide.split].append(one)
    splits = [_split(part, of_split[part], segmenter, config) for part in TELLING if of_split[part]]
    warnings = [*records.warnings(chosen), *(told for one in compared for told in one.warnings)]
    for part in splits:
        warnings += _never_annotated(part, segmenter.classes.names)
    evaluation = Evaluation(
        model=str(bundle),
        model_id=segmenter.model_id,
        classes=segmenter.classes,
        mpp=segmenter.card.mpp,
        slides=folders,
        unit="tiles" if segmenter.card.model.task == "classify" else "pixels",
        boundary_um=_boundary_um(segmenter, config),
        centroid_um=config.evaluate.centroid_um if segmenter.separates else None,
        seed=config.seed,
        resamples=RESAMPLES,
        fewest_patients=FEWEST_PATIENTS,
        warnings=tuple(warnings),
        left_out={
            **{name: why for name, why in sources.left_out.items() if name in asked},
            **{name: each.problem for name, each in failed.items()},
        },
        splits=tuple(splits),
        version=__version__,
    )
    path, has_replaced = write_evaluation(out or bundle.parent, split, evaluation)
    _answer(evaluation, (*sources.remarks, *sources.notes))
    instead = ", in place of an earlier one" if has_replaced else ""
    say(f"Written to {path}{instead}; to read: {path.with_suffix('.html')}")
    if failed:
        raise PathosegError(
            f"{len(failed)} of {len(failed) + len(compared)} slides could not be compared: "
            f"{', '.join(failed)}.",
            f"The figures in {path} are of the others; the reasons stand above and there.",
        )
    return path


def _none_of_split(split: str, folders: str, found: Collection[str]) -> PathosegError:
    """Return the refusal of a split that no slide in `folders` has; they have those `found`."""
    near = get_close_matches(split, {*get_args(Split), UNSEEN, *found} - {split}, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return PathosegError(
        f"No annotated slide in {folders} is of the split {split!r}.",
        f"{hint}They are of these: {', '.join(sorted(found))}; what the model's run never saw "
        f"is {UNSEEN}.",
    )


def _compare_all(
    segmenter: Segmenter,
    chosen: Sequence[LabelledSlide],
    config: Config,
    records: RecordedSplits,
    failed: dict[str, PathosegError],
    interruption: Interruption,
) -> list[_Compared]:
    """Compare the model with each slide, and print a slide's figures when they are known.

    Args:
        segmenter: The model.
        chosen: The slides.
        config: The options.
        records: The splits and patients of the slides.
        failed: By name, why slides could not be compared; those that fail here are added.
        interruption: Asked after every tile.

    Raises:
        PathosegError: None of the slides, nor of those that failed before, can be compared.
        StoppedError: A signal came.
    """
    compared, tried = list[_Compared](), len(failed) + len(chosen)
    for source in chosen:
        try:
            one = _compare(segmenter, source, config, records, interruption)
        except PathosegError as error:
            failed[source.name] = error
            if len(failed) == tried:
                raise
            say(f"{source.name} is not compared: {error}")
            continue
        compared.append(one)
        for line in _lines(one.slide.name, one.slide.split, one.slide.figures):
            answer(line)
    return compared


def _answer(evaluation: Evaluation, notes: Iterable[str]) -> None:
    """Print the figures of each split, and below them what is to be known of them."""
    for part in evaluation.splits:
        for line in _lines("all", part.name, {name: f.value for name, f in part.figures.items()}):
            answer(line)
        answer(_interval_line(part.figures, part.patients))
    for warning in evaluation.warnings:
        answer(f"Take care: {warning}")
    for name, reason in evaluation.left_out.items():
        answer(f"Left out: {name}: {reason}")
    for note in notes:
        answer(note)


def _configured(
    recorded: Path, config_file: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> Config:
    """The configuration: the run's, or `config_file` with what only the run knows."""
    if not recorded.is_file():
        return load_config(config_file, flags)
    run = load_config(recorded, None, UNNUMBERED)
    if config_file is not None:
        config = load_config(config_file, flags)
        stated = given_options(config_file, flags).get("annotations", {})
        own = {key: getattr(config.annotations, key) for key in stated}
        annotations = _renamed_too(run, replace(run.annotations, **own))
        assume_mpp = config.data.assume_mpp or run.data.assume_mpp
        data = replace(config.data, assume_mpp=assume_mpp)
        return replace(config, annotations=annotations, data=data)
    config = load_config(recorded, flags, UNNUMBERED)
    device = flags.get("parallel", {}).get("device")  # another machine's may be the run's
    config = replace(config, parallel=replace(config.parallel, device=device))
    config = replace(config, annotations=_renamed_too(run, config.annotations))
    if config.data.slides != run.data.slides:
        # Where the run's annotations and table lie says nothing of other slides'.
        annotations_folder = flags.get("data", {}).get("annotations")
        table = flags.get("data", {}).get("table")
        data = replace(config.data, annotations=annotations_folder, table=table)
        config = replace(config, data=data)
    return config


def _renamed_too(run: Config, options: AnnotationOptions) -> AnnotationOptions:
    """Add the names that the run gives to classes, unless the options give them others."""
    return replace(options, rename={**run.annotations.rename, **options.rename})


def _boundary_um(segmenter: Segmenter, config: Config) -> float | None:
    """The tolerance of boundaries; a map of tiles has none that are worth comparing."""
    if segmenter.card.model.task == "classify":
        return None
    return config.evaluate.boundary_um or max(2.0, 2 * segmenter.card.mpp)


@dataclass(frozen=True)
class _Compared:
    """A slide that was compared.

    Attributes:
        source: The slide.
        slide: Its figures.
        tally: What they follow from.
        thumbnail: The frame of small masks.
        truth: A small mask of the annotation, compressed.
        prediction: Likewise of the model's.
        warnings: What is to be said of the figures.
    """

    source: LabelledSlide
    slide: ScoredSlide
    tally: Tally
    thumbnail: Frame
    truth: bytes
    prediction: bytes
    warnings: tuple[str, ...]

    def small(self, mask: bytes) -> NDArray[np.uint8]:
        size = self.thumbnail.size
        pixels = np.frombuffer(zlib.decompress(mask), np.uint8)
        return pixels.reshape(size.height, size.width)


def _compare(
    segmenter: Segmenter,
    source: LabelledSlide,
    config: Config,
    records: RecordedSplits,
    interruption: Interruption,
) -> _Compared:
    """Segment a slide and count, strip by strip."""
    spent = segmenter.spent
    with open_slide(source.slide, config.data.assume_mpp) as slide, spent.on("finding tissue"):
        plan = segmenter.plan(slide)
        thumbnail = thumbnail_frame(slide.size, slide.mpp, _PICTURE_SIDE)
        mpp = slide.mpp.mean
    comparison = _SlideComparison(segmenter, source, plan, thumbnail, config)
    rows = max(1, _STRIP_PIXELS // plan.output.size.width)
    with (
        spent.on("joining and comparing"),
        closing(segmenter.bands_with_confidence(plan, interruption)) as bands,
    ):
        for band in bands:
            for start in range(0, band.shape[1], rows):
                comparison.add(band[:, start : start + rows])
    tally, unread = comparison.close(), comparison.unread
    name = source.name
    scored = ScoredSlide(
        name,
        records.patients[name],
        records.split_of(name),
        mpp,
        plan.output.pixel_area_mm2,
        tally.confusion,
        tally.object_numbers,
        {key: float(value) for key, value in tally.figures(segmenter.classes.names).items()},
    )
    warnings = [f"{name}: {warning}." for warning in plan.warnings]
    if unread:
        share = unread / (unread + tally.pixels)
        warnings.append(
            f"{name}: {100 * share:.3g} % of it could not be read, and is not compared."
        )
    if comparison.cut:
        warnings.append(f"{name}: {cut_warning(comparison.cut, config.infer)}.")
    truth, prediction = (
        zlib.compress(small.pixels.tobytes())
        for small in (comparison.small_truth, comparison.small_prediction)
    )
    return _Compared(source, scored, tally, thumbnail, truth, prediction, tuple(warnings))


class _SlideComparison:
    """Compares the mask of a slide with its annotation while its strips arrive, top to bottom.

    Args:
        segmenter: The model.
        source: The slide.
        plan: Its tiles.
        thumbnail: The frame of small masks.
        config: `infer` and `evaluate` are used.

    Attributes:
        small_truth: A small mask of the annotation.
        small_prediction: Likewise of the model's.
        unread: Number of annotated pixels that could not be read.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        source: LabelledSlide,
        plan: SlidePlan,
        thumbnail: Frame,
        config: Config,
    ) -> None:
        frame, classes = plan.output, len(segmenter.classes)
        self._whole, self._top = Box(0, 0, frame.size.width, frame.size.height), 0
        self._truth_in = _truth(segmenter, source, plan, config)
        self._colours_in = partial(source.labels.objects, frame=frame, classes=segmenter.classes)
        self._confusion, self._calibration = Confusion(classes), Calibration()
        self._boundary: BoundaryCounts | None = None
        tolerance = _boundary_um(segmenter, config)
        if tolerance is not None:
            self._boundary = BoundaryCounts(classes, tolerance / frame.mpp.mean)
        self._objects: _ObjectComparison | None = None
        if segmenter.separates:
            self._objects = _ObjectComparison(frame, classes, config)
        self.small_truth = MaskThumbnail(frame, thumbnail)
        self.small_prediction = MaskThumbnail(frame, thumbnail)
        self.unread = 0

    @property
    def cut(self) -> int:
        """Number of predicted objects that are too large to be found whole."""
        return 0 if self._objects is None else self._objects.cut

    def add(self, strip: NDArray[np.int16]) -> None:
        """Take the next rows of `Segmenter.bands_with_confidence`."""
        prediction, level = strip[0].astype(np.uint8), strip[1]
        box = replace(self._whole, y=self._top, height=len(prediction))
        self._top = box.bottom
        truth = self._truth_in(box)
        lost = prediction == IGNORE
        if self._objects is not None:
            colours = self._colours_in(box, mask=truth)
            colours[lost] = IGNORE
            self._objects.add(prediction, strip[2].astype(np.uint8), colours, truth)
        self.unread += int(np.count_nonzero(lost & (truth != IGNORE)))
        truth[lost] = IGNORE
        self._confusion.update(prediction, truth)
        asked = (truth != IGNORE) & (level > 0)
        right = prediction[asked] == truth[asked]
        self._calibration.update(level[asked] / np.float32(CONFIDENCE_LEVELS), right)
        if self._boundary is not None:
            self._boundary.add(prediction, truth)
        self.small_truth.add(truth)
        self.small_prediction.add(prediction)

    def close(self) -> Tally:
        """Return the slide's counts, once all rows are taken."""
        boundary = None
        if self._boundary is not None:
            self._boundary.close()
            boundary = self._boundary.counts
        objects = None if self._objects is None else self._objects.close()
        return Tally(self._confusion.matrix, self._calibration.bins, boundary, objects)


def _truth(
    segmenter: Segmenter, source: LabelledSlide, plan: SlidePlan, config: Config
) -> Callable[[Box], NDArray[np.uint8]]:
    """Return a function of a box of the mask: its true class indices, 255 where unknown.

    Tiles of a classifier have the labels that it is trained on, not the class of most pixels.
    """
    if segmenter.card.model.task != "classify":
        return partial(source.labels.rasterise, frame=plan.output, classes=segmenter.classes)
    assert isinstance(plan.grid, TileGrid)  # not windows
    counts = count_tiles(plan.grid, plan.frame, source.labels, segmenter.classes)
    labels = tile_labels(counts, config.tiles.min_cover).astype(np.uint8)
    tiles = labels.reshape(plan.grid.rows, plan.grid.columns)

    def tiles_in(box: Box) -> NDArray[np.uint8]:
        return tiles[box.y : box.bottom, box.x : box.right].copy()

    return tiles_in


class _ObjectComparison:
    """Compares the objects of a slide while the strips of its mask arrive.

    Keeps the pixels of objects that may still meet others, and what the truth does not know of the
    rows in which predicted objects may still be found.

    Args:
        frame: The mask's.
        classes: Number of classes with background.
        config: `infer` says which objects the model finds, `evaluate` which are near each other.

    Attributes:
        cut: Number of predicted objects that are too large to be found whole.
    """

    def __init__(self, frame: Frame, classes: int, config: Config) -> None:
        self._counts = ObjectCounts(classes, config.evaluate.centroid_um / frame.mpp.mean)
        self._finder = object_finder(frame, config.infer)
        self._areas = ObjectAreas(frame.size.width)
        self._whole, self._top = Box(0, 0, frame.size.width, frame.size.height), 0
        self._unknown = deque[tuple[Box, NDArray[np.bool_]]]()
        self.cut = 0

    def add(
        self,
        prediction: NDArray[np.uint8],
        height: NDArray[np.uint8],
        colours: NDArray[np.uint8],
        truth: NDArray[np.uint8],
    ) -> None:
        """Take the next rows, each of shape (rows, width).

        Args:
            prediction: Predicted class indices.
            height: The height, see `object_planes`.
            colours: True objects, see `Labels.objects`.
            truth: True class indices.
        """
        box = replace(self._whole, y=self._top, height=len(truth))
        self._top = box.bottom
        unknown = colours == IGNORE
        if unknown.any():
            self._unknown.append((box, unknown))
        self._add_true(self._areas.add(colours, truth))
        # The probability plane is not compared.
        for found in self._finder.add(np.stack([prediction, height, np.zeros_like(height)])):
            self.cut += int(found.is_cut.sum())
            masks = found.masks()
            hidden = [self._unknown_of(each) for each in masks]
            self._counts.add_predicted(masks, found.class_index.tolist(), hidden)
        self._counts.settle(min(self._areas.settled, self._finder.settled))
        while self._unknown and self._unknown[0][0].bottom <= self._finder.settled:
            self._unknown.popleft()

    def close(self) -> Figures:
        """Return the slide's counters, see `ObjectCounts.counters`."""
        self._add_true(self._areas.close())
        return self._counts.counters()

    def _add_true(self, objects: Sequence[TrueObject]) -> None:
        masks, classes = [each.mask for each in objects], [each.class_index for each in objects]
        self._counts.add_true(masks, classes)

    def _unknown_of(self, of: ObjectMask) -> NDArray[np.bool_] | None:
        """The pixels of an object's box that the truth does not know; None where it knows all."""
        hidden = None
        for box, unknown in self._unknown:
            common = box.intersection(of.box)
            if common is not None:
                if hidden is None:
                    hidden = np.zeros_like(of.pixels)
                hidden[common.within(of.box)] = unknown[common.within(box)]
        return hidden


def _split(
    name: str, compared: Sequence[_Compared], segmenter: Segmenter, config: Config
) -> ScoredSplit:
    """The figures of a split's slides together, and pictures of some."""
    tallies = [each.tally for each in compared]
    patients = [each.slide.patient for each in compared]
    by_name = {each.slide.name: each for each in compared}
    slides = tuple(each.slide for each in compared)
    pictures = []
    for title, slide in best_median_worst(slides):
        with suppress(PathosegError):  # a slide that is gone by now loses its picture alone
            pictures.append(_picture(title, by_name[slide.name], config.data.assume_mpp))
    return ScoredSplit(
        name,
        slides,
        np.sum([tally.confusion for tally in tallies], axis=0),
        np.sum([tally.calibration for tally in tallies], axis=0),
        pooled_figures(tallies, patients, segmenter.classes.names, config.seed),
        tuple(pictures),
    )


def _never_annotated(split: ScoredSplit, names: Sequence[str]) -> Iterable[str]:
    """Yield a warning for each class that the model finds and no slide of the split shows."""
    annotated, predicted = (split.confusion.sum(axis) for axis in (1, 0))
    for index, name in enumerate(names, 1):
        if predicted[index] and not annotated[index]:
            yield (
                f"No slide of the split {split.name} shows {name}, and the model finds some: its "
                "Dice there is 0, and counts in the mean."
            )


def _picture(title: str, of: _Compared, assume_mpp: float | None) -> SlidePicture:
    size = of.thumbnail.size
    with open_slide(of.source.slide, assume_mpp) as slide:
        image = read_region(slide, of.thumbnail, Box(0, 0, size.width, size.height)).pixels
    truth, prediction = of.small(of.truth), of.small(of.prediction)
    return SlidePicture(title, of.slide, of.thumbnail, image, truth, prediction)


def _lines(slide: str, split: str, figures: Mapping[str, float]) -> Iterable[str]:
    each = "  ".join(
        f"{key.removeprefix('dice_')} {value:.4f}"
        for key, value in figures.items()
        if key.startswith("dice_") and value == value
    )
    yield f"{slide} ({split})  Dice: {each}"
    if "aji_all" in figures:
        aji, pq, sq, rq, near, ratio = (
            figures[f"{name}_all"]
            for name in ("aji", "pq", "sq", "rq", "centroid_f1", "object_ratio")
        )
        yield (
            f"  objects: AJI {aji:.4f}  PQ {pq:.4f} (SQ {sq:.4f} × RQ {rq:.4f})  "
            f"F1 by centroid {near:.4f}  {ratio:.3f} found for each annotated one"
        )


def _interval_line(figures: Mapping[str, Figure], patients: int) -> str:
    figure = figures["dice_mean"]
    if figure.low != figure.low:
        found = "1 patient" if patients == 1 else f"{patients} patients"
        return f"  no 95 % interval: {found}, and at least {FEWEST_PATIENTS} are needed"
    told = {"the mean": figure}
    told |= {name.upper(): figures[f"{name}_all"] for name in ("aji", "pq") if "aji_all" in figures}
    each = ", of ".join(f"{name} {of.low:.4f}–{of.high:.4f}" for name, of in told.items())
    return f"  95 % interval over {patients} patients of {each}"
