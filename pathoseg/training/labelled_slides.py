"""From a folder of slides and annotations to training and validation tiles, split by patient."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast, get_args

from pathoseg.annotations.annotation import ClassTable, Labels
from pathoseg.annotations.reading import class_table, find_annotation, read_labels
from pathoseg.config import LARGEST_TILE, Config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame
from pathoseg.interruption import Interruption
from pathoseg.outputs.atomic import replaced
from pathoseg.progress import progress_bar, say
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
    names: Sequence[str],
    table: Path | None,
    seed: int,
    val_share: float,
    classes: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Member]:
    """Assign every slide a split.

    A row of the table that names a split keeps it. All other patients are ordered by a hash of
    seed and patient, so that adding a slide moves few others, and the first `val_share` of them
    (at least one, where there are two) validate. Before that order come two rules: every class is
    trained on, and one that several patients have is validated too where that is possible, even if
    more of them must validate.

    Args:
        names: File names of the slides.
        table: CSV with the columns slide, and optionally patient and split.
        seed: Seed of the run.
        val_share: Share of the patients without a given split that validate.
        classes: Slide name → the classes that it holds.

    Returns:
        Slide name → its member.

    Raises:
        PathosegError: The table misses a slide or a column, names an unknown split, or puts one
            patient on both sides.
    """
    rows = _read(table) if table else {}
    patients: dict[str, str] = {}
    given: dict[str, Split | None] = {}
    held: dict[str, set[str]] = {}
    for name in names:
        row = rows.get(name) or rows.get(Path(name).stem)
        if table and row is None:
            raise PathosegError(
                f"{table} has no row for {name}.", "Add one, or move the slide elsewhere."
            )
        patient = patients[name] = (row or {}).get("patient") or name
        split = _as_split((row or {}).get("split"), f"{table}: {name}")
        if given.setdefault(patient, split) != split:
            raise PathosegError(
                f"{table}: patient {patient} is in more than one split.",
                "A patient's slides belong together: give them one split.",
            )
        held.setdefault(patient, set()).update(classes.get(name, ()))
    validating = _drawn_to_validate(given, held, seed, val_share)
    return {
        name: Member(name, patient, given[patient] or ("val" if patient in validating else "train"))
        for name, patient in patients.items()
    }


def one_sided(
    members: Iterable[Member], classes: Mapping[str, Collection[str]]
) -> dict[str, Split]:
    """The classes that are on one side alone of training and validation, with that side.

    Args:
        members: All slides.
        classes: As for `split_slides`.
    """
    sides: dict[str, set[Split]] = {}
    for member in members:
        for name in classes.get(member.slide, ()):
            sides.setdefault(name, set()).update({member.split} - {"test"})
    return {name: next(iter(side)) for name, side in sorted(sides.items()) if len(side) == 1}


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


def _drawn_to_validate(
    given: Mapping[str, Split | None],
    held: Mapping[str, Collection[str]],
    seed: int,
    val_share: float,
) -> set[str]:
    """Patients without a given split that validate; see `split_slides`.

    Args:
        given: Patient → the split that the table names.
        held: Patient → classes.
        seed: As for `split_slides`.
        val_share: Likewise.
    """

    def rank(patient: str) -> bytes:
        return hashlib.sha256(f"{seed}:{patient}".encode()).digest()

    free = sorted((patient for patient, split in given.items() if split is None), key=rank)
    wanted = round(val_share * len(free))
    if wanted == 0 and len(free) > 1 and val_share > 0 and "val" not in given.values():
        wanted = 1
    if wanted == 0:
        return set()
    training = Counter[str]()
    validated = set[str]()
    for patient, split in given.items():
        if split == "val":
            validated.update(held[patient])
        elif split != "test":
            training.update(held[patient])
    chosen = set[str]()

    def can_go(patient: str) -> bool:
        return all(training[name] > 1 for name in held[patient])

    def choose(patient: str) -> None:
        chosen.add(patient)
        training.subtract(held[patient])
        validated.update(held[patient])

    while True:
        # The patient with most classes that nothing validates yet, of these the first.
        gains = {
            patient: len(set(held[patient]) - validated)
            for patient in free
            if patient not in chosen and can_go(patient)
        }
        if not max(gains.values(), default=0):
            break
        choose(max(gains, key=lambda patient: gains[patient]))
    for patient in free:
        if len(chosen) < wanted and patient not in chosen and can_go(patient):
            choose(patient)
    return chosen


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
    """

    usable: tuple[LabelledSlide, ...]
    classes: ClassTable
    left_out: dict[str, str]


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
    return LabelledSlides(tuple(usable), table, left_out)


def named_in(sources: LabelledSlides, table: Path) -> LabelledSlides:
    """Leave out slides that a run's own table of splits does not name: they came later."""
    rows = _read(table)
    late = [s.slide.name for s in sources.usable if s.slide.name not in rows]
    reasons = dict.fromkeys(late, "it came after the run began")
    usable = tuple(source for source in sources.usable if source.slide.name in rows)
    if not usable:
        raise PathosegError(
            f"None of the slides that {table} names can be used.", "Bring them back to go on."
        )
    return replace(sources, usable=usable, left_out=sources.left_out | reasons)


def classes_held(sources: LabelledSlides) -> dict[str, Collection[str]]:
    """Slide name → the classes that its annotation holds."""
    return {source.slide.name: tuple(source.labels.classes()) for source in sources.usable}


def with_tile(config: Config, sources: LabelledSlides, multiple: int) -> Config:
    """Return the configuration with a tile: where none is given, the largest that most images hold.

    Says which is chosen, and on how many images tiles are mostly padding.

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
    fitting = max(2, min(most_hold, LARGEST_TILE) // multiple) * multiple
    tile, advice = config.tiles.tile or fitting, ""
    if config.tiles.tile is None:
        if fitting < LARGEST_TILE // multiple * multiple:
            say(f"Tiles of {fitting} px: the largest that most images hold.")
        config = replace(config, tiles=replace(config.tiles, tile=fitting))
    elif fitting < tile:
        advice = f"; without --tile, tiles of {fitting} px would be taken"
    small = sum(min(tile, size.width) * min(tile, size.height) < tile**2 / 2 for size in sizes)
    if small:
        say(f"Tiles of {tile} px are mostly padding on {small} of {len(sizes)} images{advice}.")
    return config


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
        tile=config.tiles.side,
        overlap=overlap,
        offsets=config.tiles.offsets,
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
