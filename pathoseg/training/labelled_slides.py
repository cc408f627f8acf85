"""The slides of a folder with their labels, classes and splits, checked before work starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pathoseg.annotations.annotation import ClassTable, Labels
from pathoseg.annotations.reading import class_table, find_annotation, read_labels
from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame
from pathoseg.slides.folder import slides_in
from pathoseg.slides.slide import Slide, open_slide


@dataclass(frozen=True)
class Source:
    """A readable slide with what is known of its pixels."""

    slide: Path
    labels: Labels
    frame: Frame


@dataclass(frozen=True)
class Sources:
    """What a folder offers.

    Attributes:
        usable: Slides with labels.
        classes: The classes of the labels, or those the configuration names.
        left_out: File name → why it is not used.
    """

    usable: tuple[Source, ...]
    classes: ClassTable
    left_out: dict[str, str]


def model_frame(slide: Slide, mpp: float) -> Frame:
    """The frame of a slide at a model's resolution.

    Raises:
        PathosegError: The slide is more than twice coarser than the model sees.
    """
    if slide.mpp.mean > 2 * mpp:
        raise PathosegError(
            f"{slide.path} has {slide.mpp.mean:.4g} µm per pixel, more than twice the {mpp:g} µm "
            "of the model: the detail it needs was never scanned.",
            f"Train at --mpp {ceil(50 * slide.mpp.mean) / 100:g} or coarser, or use a finer scan.",
        )
    return Frame.at(slide.size, slide.mpp, mpp)


def find_sources(config: Config, classes: ClassTable | None = None) -> Sources:
    """Opens every slide of the configured folder and reads its labels.

    Args:
        config: `data`, `annotations` and `tiles.mpp` are used.
        classes: The classes to use instead of those found (a trained model's).

    Raises:
        PathosegError: No folder is given, a slide or annotation cannot be read (unless
            `data.skip_bad_slides`), or nothing is left.
    """
    data = config.data
    if data.slides is None:
        raise PathosegError("No slides are given.", "Name their folder with --slides DIR.")
    folder = Path(data.slides)
    notes = Path(data.annotations) if data.annotations else None
    if notes is not None and not notes.is_dir():
        raise PathosegError(f"{notes} is not a folder.", "Check --annotations.")
    usable: list[Source] = []
    left_out: dict[str, str] = {}
    for path in slides_in(folder):
        annotation = find_annotation(path, notes)
        if annotation is None:
            left_out[path.name] = "it has no annotation"
            continue
        try:
            with open_slide(path, data.assume_mpp) as slide:
                frame = model_frame(slide, config.tiles.mpp)
                labels = read_labels(annotation, slide.size, slide.origin, config.annotations)
            usable.append(Source(path, labels, frame))
        except PathosegError as error:
            if not data.skip_bad_slides:
                raise PathosegError(
                    error.problem,
                    f"{error.mend} Or leave such slides out ([data] skip_bad_slides = true).",
                ) from error
            left_out[path.name] = str(error)
    if not usable:
        raise _nothing_left(notes or folder, left_out)
    table = classes or class_table([source.labels for source in usable], data.classes)
    return Sources(tuple(usable), table, left_out)


def _nothing_left(folder: Path, left_out: dict[str, str]) -> PathosegError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return PathosegError(
        f"No slide can be used ({reasons}{more}).",
        f"Annotations are looked for in {folder} under the slide's name: X.geojson, X.xml or "
        "X_mask.png for X.svs.",
    )
