"""From a folder of slides and annotations to training and validation tiles, split by patient."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from pathoseg.annotations.annotation import ClassTable, Labels
from pathoseg.annotations.reading import (
    class_table,
    find_annotation,
    read_labels,
    stray_annotations,
    what_is_left_out,
)
from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame
from pathoseg.interruption import Interruption
from pathoseg.outputs.atomic import replaced
from pathoseg.progress import progress_bar
from pathoseg.slides.folder import slides_in
from pathoseg.slides.slide import model_frame, open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import fit_stain
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles
from pathoseg.tiles.tissue import find_tissue

Split = Literal["train", "val", "test"]
TABLE = "slides.csv"


@dataclass(frozen=True)
class Member:
    """A slide's place in the split."""

    slide: str
    patient: str
    split: Split


def split_slides(
    names: Sequence[str], table: Path | None, seed: int, val_share: float
) -> dict[str, Member]:
    """Assigns every slide a split.

    A row of the table that names a split keeps it. All other patients are ordered by a hash of
    seed and patient, so that adding a slide moves no other, and the first `val_share` of them
    (at least one, where there are two) validate.

    Args:
        names: File names of the slides.
        table: CSV with the columns slide, and optionally patient and split.
        seed: Seed of the run.
        val_share: Share of the patients without a given split that validate.

    Returns:
        Slide name → its member.

    Raises:
        PathosegError: The table misses a slide or a column, names an unknown split, or puts one
            patient on both sides.
    """
    rows = _read(table) if table else {}
    patients: dict[str, str] = {}
    given: dict[str, Split | None] = {}
    for name in names:
        row = rows.get(name) or rows.get(Path(name).stem)
        if table and row is None:
            raise PathosegError(
                f"{table} has no row for {name}.", "Add one, or move the slide elsewhere."
            )
        patients[name] = (row or {}).get("patient") or name
        split = _as_split((row or {}).get("split"), f"{table}: {name}")
        if given.setdefault(patients[name], split) != split:
            raise PathosegError(
                f"{table}: patient {patients[name]} is in more than one split.",
                "A patient's slides belong together: give them one split.",
            )
    drawn = _draw([p for p, split in given.items() if split is None], given, seed, val_share)
    return {
        name: Member(name, patient, given[patient] or drawn[patient])
        for name, patient in patients.items()
    }


def patients_in(table: Path | None, names: Iterable[str]) -> dict[str, str]:
    """The patient of each slide; one of which the table says nothing is a patient of its own.

    Raises:
        PathosegError: The table cannot be read.
    """
    rows = _read(table) if table else {}
    return {
        name: (rows.get(name) or rows.get(Path(name).stem) or {}).get("patient") or name
        for name in names
    }


def find_table(given: str | None, *folders: Path | None) -> Path | None:
    """The table of slides: the one that is named, else `slides.csv` in one of the folders."""
    if given is not None:
        return Path(given)
    beside = [folder / TABLE for folder in folders if folder is not None]
    return next((table for table in beside if table.is_file()), None)


def write_splits(path: Path, members: Iterable[Member]) -> None:
    with replaced(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["slide", "patient", "split"])
        writer.writerows([m.slide, m.patient, m.split] for m in members)


def _as_split(text: str | None, where: str) -> Split | None:
    for split in get_args(Split):
        if text == split:
            return cast(Split, split)
    if text:
        raise PathosegError(f"{where} has the split {text!r}.", "Write train, val or test.")
    return None


def _draw(
    free: list[str], given: Mapping[str, Split | None], seed: int, val_share: float
) -> dict[str, Split]:
    def rank(patient: str) -> bytes:
        return hashlib.sha256(f"{seed}:{patient}".encode()).digest()

    held_out = round(val_share * len(free))
    if held_out == 0 and len(free) > 1 and val_share > 0 and "val" not in given.values():
        held_out = 1
    ordered = sorted(free, key=rank)
    return {p: "val" if i < held_out else "train" for i, p in enumerate(ordered)}


def _read(table: Path) -> dict[str, dict[str, str]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                {(k or "").strip().lower(): (v or "").strip() for k, v in row.items() if k}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PathosegError(
            f"{table} cannot be read as CSV ({error}).", "Save it as UTF-8 CSV."
        ) from None
    if not rows or "slide" not in rows[0]:
        raise PathosegError(
            f"{table} has no column `slide`.", "Its first line should be: slide,patient,split"
        )
    return {row["slide"]: row for row in rows}


@dataclass(frozen=True)
class LabelledSlide:
    """A readable slide with what is known of its pixels."""

    slide: Path
    labels: Labels
    frame: Frame


@dataclass(frozen=True)
class LabelledSlides:
    """What a folder offers.

    Attributes:
        usable: Slides with labels.
        classes: The classes of the labels, or those the configuration names.
        left_out: File name → why it is not used.
        notes: What annotations hold and nothing is learnt from, a sentence for each kind.
    """

    usable: tuple[LabelledSlide, ...]
    classes: ClassTable
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()


def find_labelled_slides(config: Config, classes: ClassTable | None = None) -> LabelledSlides:
    """Opens every slide of the configured folder and reads its labels.

    Args:
        config: `data`, `annotations` and `tiles.mpp` are used.
        classes: The classes to use instead of those found (a trained model's).

    Raises:
        PathosegError: No folder is given, a slide or annotation cannot be read (unless
            `data.skip_bad_slides`), a class is both learnt and a region of interest, or nothing is
            left.
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
    if data.slides is None:
        raise PathosegError("No slides are given.", "Name their folder with --slides DIR.")
    folder = Path(data.slides)
    notes = Path(data.annotations) if data.annotations else None
    if notes is not None and not notes.is_dir():
        raise PathosegError(f"{notes} is not a folder.", "Check --annotations.")
    usable: list[LabelledSlide] = []
    left_out: dict[str, str] = {}
    for path in slides_in(folder):
        annotation = find_annotation(path, notes)
        if annotation is None:
            left_out[path.name] = "it has no annotation"
            continue
        try:
            with open_slide(path, data.assume_mpp) as slide:
                frame = model_frame(slide, config.tiles.mpp)
                labels = read_labels(annotation, slide.size, slide.origin, options)
            usable.append(LabelledSlide(path, labels, frame))
        except PathosegError as error:
            if not data.skip_bad_slides:
                raise PathosegError(
                    error.problem,
                    f"{error.hint} Or leave such slides out ([data] skip_bad_slides = true).",
                ) from error
            left_out[path.name] = str(error)
    if not usable:
        raise _nothing_left(notes or folder, left_out)
    table = classes or class_table([source.labels for source in usable], data.classes)
    reports = [source.labels.report for source in usable]
    strays = stray_annotations(folder if notes is None else notes, slides_in(folder))
    lines = what_is_left_out(reports, strays, table)
    return LabelledSlides(tuple(usable), table, left_out, tuple(lines))


def _nothing_left(folder: Path, left_out: dict[str, str]) -> PathosegError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return PathosegError(
        f"No slide can be used ({reasons}{more}).",
        f"Annotations are looked for in {folder} under the slide's name: X.geojson, X.xml or "
        "X_mask.png for X.svs.",
    )


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
) -> SplitTiles:
    """Finds tissue on every training and validation slide and cuts it; test slides stay whole.

    Training tiles overlap as configured, validation tiles never do, so that a pixel counts once.

    Raises:
        PathosegError: A slide or its annotation cannot be read, or no slide is left to train on.
        StoppedError: A signal came.
    """
    train, val = list[SlideTiles](), list[SlideTiles]()
    used = [s for s in sources.usable if members[s.slide.name].split != "test"]
    with progress_bar("cutting tiles", len(used), "slides") as bar:
        for source in used:
            training = members[source.slide.name].split == "train"
            overlap = config.tiles.overlap if training else 0
            (train if training else val).append(cut(config, source, sources, slides, overlap))
            bar.advance()
            interruption.raise_if_asked()
    if not train:
        raise PathosegError(
            f"None of the {len(members)} slides is left to train on.",
            "Annotate more slides, or give more of them the split `train` in slides.csv.",
        )
    return SplitTiles(train, val)


def cut(
    config: Config, source: LabelledSlide, sources: LabelledSlides, slides: SlidePool, overlap: int
) -> SlideTiles:
    """The tiles of one slide."""
    options = TileOptions(
        tile=config.tiles.tile,
        overlap=overlap,
        min_tissue=config.tiles.min_tissue,
        cache=Path(config.tiles.cache) if config.tiles.cache else None,
        codec=config.tiles.codec,
    )
    with slides.borrow(source.slide) as slide:
        tissue = find_tissue(slide, config.tissue)
    tiles = cut_tiles(
        source.slide,
        source.frame,
        source.labels,
        config.annotations,
        sources.classes,
        tissue,
        options,
        slides,
    )
    if config.tiles.stain != "none":
        boxes = [tiles.box(position) for position in range(len(tiles))]
        with slides.borrow(source.slide) as slide:
            tiles.stain = fit_stain(slide, source.frame, boxes, tissue, config.tiles.stain)
    return tiles
