"""From a folder of slides and annotations to the slides that can be learnt from.

Imports neither PyTorch nor the tiles, so that a slide that cannot be used is told at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pathoseg.annotations.annotation import ClassTable, Labels
from pathoseg.annotations.reading import (
    annotation_of,
    class_table,
    colour_names,
    read_labels,
    stray_annotations,
    unknown_names,
    what_is_left_out,
    what_is_limited,
)
from pathoseg.config import LARGEST_TILE, Config, DataConfig
from pathoseg.errors import PathosegError, first_names
from pathoseg.geometry import Frame, Size
from pathoseg.progress import progress_bar, say
from pathoseg.slides.folder import find_slides
from pathoseg.slides.slide import model_frame, open_slide

_LITTLE = 0.05  # padding over the side of an image that a tile may have, to be one instead of four


@dataclass(frozen=True)
class LabelledSlide:
    """A readable slide with what is known of its pixels.

    Attributes:
        name: Its path in the folder of slides.
        slide: Its file.
        labels: What is known of it.
        frame: Its pixels at the resolution of training.
        size: Its level-0 pixels; the frame's sides are rounded up.
    """

    name: str
    slide: Path
    labels: Labels
    frame: Frame
    size: Size


@dataclass(frozen=True)
class LabelledSlides:
    """The slides of a folder that can be learnt from, and their classes.

    Attributes:
        usable: Slides with labels.
        classes: The classes of the labels, or those the configuration names.
        left_out: By name, the reason why a slide is not used.
        notes: A sentence for each kind of what annotations hold and training leaves out.
        remarks: Sentences about annotations that limit what is known, which are no fault.
        warnings: Sentences about options that say nothing of these annotations.
    """

    usable: tuple[LabelledSlide, ...]
    classes: ClassTable
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Lines that say which slides are not used, and what of the annotations is not."""
        yield from (f"Left out: {name}: {reason}" for name, reason in self.left_out.items())
        yield from (*self.remarks, *self.notes)


NO_ANNOTATION = "it has no annotation"
CAME_LATER = "it came after the run began"


@dataclass(frozen=True)
class ReadSlides:
    """The slides of the configured folders, each opened once.

    Attributes:
        files: Name → file, of all.
        usable: Those with labels.
        unlabelled: Names of those without an annotation, which are not opened.
        bad: Name → why the slide or its annotation cannot be used.
        late: Names of those that are not asked for, and not opened.
        gone: Names that are asked for, and not there.
    """

    files: Mapping[str, Path]
    usable: tuple[LabelledSlide, ...]
    unlabelled: tuple[str, ...]
    bad: Mapping[str, PathosegError]
    late: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    @property
    def left_out(self) -> dict[str, str]:
        """The reason why each slide is not used, by name; those that are gone come last."""
        reasons = dict.fromkeys(self.late, CAME_LATER)
        reasons |= dict.fromkeys(self.unlabelled, NO_ANNOTATION)
        reasons |= {name: str(error) for name, error in self.bad.items()}
        listed = {name: reasons[name] for name in self.files if name in reasons}
        return listed | dict.fromkeys(self.gone, "it is gone, and the run began with it")


def slide_files(data: DataConfig) -> dict[str, Path]:
    """Find the slides of the configured folders; none is opened.

    Returns:
        Name → file, see `find_slides`.

    Raises:
        PathosegError: No folder is given, one is missing or holds no slides.
    """
    if not data.slide_folders:
        raise PathosegError("No slides are given.", "Name their folder with --slides DIR.")
    annotations = _annotations_folder(data)
    if annotations is not None and not annotations.is_dir():
        raise PathosegError(f"{annotations} is not a folder.", "Check --annotations.")
    return find_slides(data.slide_folders, () if annotations is None else (annotations,))


def _annotations_folder(data: DataConfig) -> Path | None:
    """Return the folder of annotations; None where they lie beside the slides."""
    return Path(data.annotations) if data.annotations else None


def read_slides(
    config: Config,
    classes: ClassTable | None = None,
    skip_bad: bool = True,
    only: Collection[str] | None = None,
) -> ReadSlides:
    """Open every slide of the configured folders and read its labels.

    Args:
        config: `data`, `annotations`, `tiles.mpp` and `model.task` are used.
        classes: The classes to use instead of those found (a trained model's).
        skip_bad: Go on after a slide that cannot be used.
        only: Names of the slides to read; None is all.

    Raises:
        PathosegError: No folder is given or one holds no slides, a class is both learnt and a
            region of interest, or a slide cannot be used and `skip_bad` is false.
    """
    data, options = config.data, config.annotations
    if classes is not None:
        options = options.for_classes(classes.names)
    elif both := [name for name in data.classes or () if options.is_roi(name)]:
        raise PathosegError(
            f'The class "{both[0]}" is to be learnt ([data] classes) and marks regions of interest '
            "([annotations] roi).",
            "Take it out of one of the two: `roi = []` makes it a class like others.",
        )
    files, annotations = slide_files(data), _annotations_folder(data)
    usable, unlabelled, late = list[LabelledSlide](), list[str](), list[str]()
    bad = dict[str, PathosegError]()
    used = dict[Path, Path]()  # annotation → its slide
    with progress_bar("reading annotations", len(files), "slides") as bar:
        for name, path in files.items():
            bar.advance()
            if only is not None and name not in only:
                late.append(name)
                continue
            try:
                annotation = annotation_of(name, path, annotations, used)
                if annotation is None:
                    unlabelled.append(name)
                    continue
                with open_slide(path, data.assume_mpp) as slide:
                    frame, size = model_frame(slide, config.tiles.mpp), slide.size
                    labels = read_labels(annotation, size, slide.origin, options)
                if config.model.task == "objects":
                    labels.refuse_without_objects()
                if classes is None:
                    labels.classes()  # decodes a mask, which is kept; one that is odd is refused
            except PathosegError as error:
                if not skip_bad:
                    raise PathosegError(
                        error.problem,
                        f"{error.hint} Or leave such slides out ([data] skip_bad_slides = true).",
                    ) from error
                bad[name] = error
            else:
                usable.append(LabelledSlide(name, path, labels, frame, size))
    gone = sorted(set(only or ()) - files.keys())
    return ReadSlides(files, tuple(usable), tuple(unlabelled), bad, tuple(late), tuple(gone))


def find_labelled_slides(
    config: Config, classes: ClassTable | None = None, only: Collection[str] | None = None
) -> LabelledSlides:
    """Find the slides that can be learnt from, with their classes.

    Args:
        config: As for `read_slides`.
        classes: Likewise.
        only: Likewise.

    Raises:
        PathosegError: As `read_slides`, a slide cannot be used (unless `data.skip_bad_slides`), or
            nothing is left.
    """
    return labelled_slides(
        config, read_slides(config, classes, config.data.skip_bad_slides, only), classes
    )


def labelled_slides(
    config: Config, read: ReadSlides, classes: ClassTable | None = None
) -> LabelledSlides:
    """The usable ones of the slides that were read, with their classes.

    Raises:
        PathosegError: There is none, or the classes cannot be told, or a new run's class is called
            mean or all.
    """
    if not read.usable:
        place = config.data.annotations or config.data.told_folders
        reasons = {name: why for name, why in read.left_out.items() if name not in read.late}
        if reasons.keys() == set(read.gone):
            raise PathosegError(
                f"{config.data.told_folders} holds none of the run's slides: "
                f"{first_names(reasons)}.",
                "Name the folder that the run began with, or begin another run (--out).",
            )
        raise _nothing_left(place, reasons, _strays(config, read.files))
    if classes is None:  # those of a recorded run stay as they are
        drawn = class_table([source.labels for source in read.usable], config.data.classes)
        classes = _without_names_of_figures(drawn)
    labels = [source.labels for source in read.usable]
    reports = [one.report for one in labels]
    return LabelledSlides(
        read.usable,
        classes,
        read.left_out,
        notes=tuple(what_is_left_out(reports, _strays(config, read.files), classes)),
        remarks=tuple(what_is_limited(reports)),
        warnings=(*unknown_names(labels, config.annotations.rename), *colour_names(classes)),
    )


def _strays(config: Config, slides: Mapping[str, Path]) -> dict[Path, Path | None]:
    """Return the annotations that belong to no slide, see `stray_annotations`."""
    files = list(slides.values())
    places = {path.parent for path in files}
    if config.data.annotations:
        root = Path(config.data.annotations)
        mirrored = {root / PurePosixPath(name).parent for name in slides}
        places = {place for place in (root, *mirrored) if place.is_dir()}
    strays = dict[Path, Path | None]()
    for folder in sorted(places):
        strays |= stray_annotations(folder, files)
    return strays


def _without_names_of_figures(classes: ClassTable) -> ClassTable:
    """Return the classes; refuse names that would be columns of all classes' figures."""
    for name in ("mean", "all"):
        if name in classes.names:
            raise PathosegError(
                f'A class is called "{name}", as figures of all classes together are.',
                f'Give it another name: `[annotations] rename = {{ "{name}" = "{name} tissue" }}`.',
            )
    return classes


def classes_held(sources: LabelledSlides) -> dict[str, Collection[str]]:
    """Return, by slide name, the classes that its annotation shows.

    Outlines off the slide, or outside its regions of interest, show nothing.
    """
    names = set(sources.classes.names)
    held = dict[str, Collection[str]]()
    for source in sources.usable:
        own, report = set(source.labels.classes()), source.labels.report
        if not report.is_mask:
            own &= report.outlines.keys()
        if report.unclassified:  # they are of that class where the run has it
            own |= {report.fallback} & names
        held[source.name] = sorted(own)
    return held


def annotation_digests(sources: LabelledSlides) -> dict[str, str]:
    """Return, by slide name, a hash of its annotation files.

    Raises:
        OSError: A file is gone or cannot be read.
    """
    found = dict[str, str]()
    for source in sources.usable:
        whole = hashlib.sha256()
        for path in source.labels.files:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        found[source.name] = whole.hexdigest()[:16]
    return found


def with_tile(config: Config, sources: LabelledSlides, multiple: int) -> Config:
    """Return the configuration with a tile: where none is given, the largest that most images hold.

    The side is rounded up to what the model divides where that is little padding: a smaller tile
    would leave a sliver at each edge, which is a padded tile of its own. Says which is chosen, and
    on how many images tiles are mostly padding.

    Args:
        config: Its `tiles.tile` may be None.
        sources: The images.
        multiple: What the model divides by.

    Raises:
        PathosegError: `tiles.overlap` is not below the tile.
    """
    sizes = [source.frame.size for source in sources.usable]
    sides = sorted(min(size.width, size.height) for size in sizes)
    most_hold = sides[(len(sides) - 1) // 2]
    wanted = min(most_hold, LARGEST_TILE)
    above = max(2, -(-wanted // multiple)) * multiple
    below = max(2, wanted // multiple) * multiple
    fitting = above if above <= min(LARGEST_TILE, wanted * (1 + _LITTLE)) else below
    tile, advice = config.tiles.tile or fitting, ""
    if config.tiles.tile is None:
        if fitting < LARGEST_TILE // multiple * multiple:
            size = f" of {most_hold} px" if fitting > most_hold else ""
            say(f"Tiles of {fitting} px, the largest for the sides of most images{size}.")
        config = replace(config, tiles=replace(config.tiles, tile=fitting))
    elif fitting < tile:
        advice = f"; without --tile, tiles of {fitting} px would be taken"
    small = sum(min(tile, size.width) * min(tile, size.height) < tile**2 / 2 for size in sizes)
    if small:
        say(f"Tiles of {tile} px are mostly padding on {small} of {len(sizes)} images{advice}.")
    return config


def _nothing_left(
    folder: str, left_out: dict[str, str], strays: Mapping[Path, Path | None]
) -> PathosegError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return PathosegError(
        f"No slide can be used ({reasons}{more}).",
        f"Annotations are looked for in {folder} under the slide's name: X.geojson, X.xml or "
        + " ".join(["X_mask.png for X.svs.", *what_is_left_out([], strays, ClassTable((), ()))]),
    )
