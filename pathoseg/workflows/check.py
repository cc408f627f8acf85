"""A look through slides and annotations as training has it, before hours are spent on them."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError, UnreadableError, first_names
from pathoseg.geometry import Box, Frame, ModelInput, Mpp, Size, area_text
from pathoseg.inference.infer_options import refuse_unfit
from pathoseg.interruption import Interruption
from pathoseg.models.build import (
    build_model,
    check_tile,
    declared_inputs,
    edge_reach,
    tile_multiple,
)
from pathoseg.models.encoder_weights import set_encoder
from pathoseg.models.losses import build_loss
from pathoseg.outputs.check_report import (
    PAGE,
    TABLE,
    CheckedSlide,
    CheckPage,
    Thumbnail,
    write_check,
)
from pathoseg.outputs.overlay import thumbnail_frame
from pathoseg.progress import answer, answer_table, progress_bar, say
from pathoseg.slides.region import Region, read_region
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.tiles import SlideTiles
from pathoseg.training.encoder_training import prepare_encoder, with_low_rank
from pathoseg.training.first_weights import factory_of, take_encoder
from pathoseg.training.labelled_slides import (
    NO_ANNOTATION,
    LabelledSlide,
    LabelledSlides,
    ReadSlides,
    classes_held,
    labelled_slides,
    read_slides,
    with_tile,
)
from pathoseg.training.run_folder import refuse_unwritable
from pathoseg.training.slide_facts import (
    SlideFacts,
    class_cells,
    class_lines,
    context_lines,
    rows_by_class,
    shares_on_glass,
    slide_cells,
    slide_facts,
    warnings_of,
)
from pathoseg.training.splits import Member, find_table, split_slides
from pathoseg.training.training_tiles import cut_with_tissue, none_to_train_on, training_set
from pathoseg.version import __version__
from pathoseg.workflows.early_checks import check_first_weights

_MOST_ROWS = 40  # of the table on the terminal
_MOST_CLASSES = 4  # with columns of their own there


@dataclass(frozen=True)
class FolderCheck:
    """The result of checking a folder of slides.

    Attributes:
        table: The path of check.csv.
        page: The path of check.html.
        refusals: A sentence for each reason that training would refuse.
        warnings: A sentence for each thing that is likely a mistake.
    """

    table: Path
    page: Path
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """2 where training would refuse, 1 with warnings, 0 without."""
        return 2 if self.refusals else 1 if self.warnings else 0


def check(
    config_file: Path | None, flags: Mapping[str, Mapping[str, Any]], out: Path
) -> FolderCheck:
    """Write and tell what training would make of the slides; nothing is trained.

    Splits, classes and tiles are those of `train` with the same options: the same functions find
    them. A slide that cannot be used stops no other.

    Args:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        out: Folder of check.csv and check.html.

    Raises:
        PathosegError: No slide is found, an option is wrong, or the folder cannot be written.
        StoppedError: A signal came.
    """
    config = load_config(config_file, flags)
    refuse_unwritable(out, "folder of the check")
    found = _Check(config)
    with Interruption("Nothing is written; run the same command again.") as interruption:
        pool = SlidePool(lambda path: open_slide(path, config.data.assume_mpp))
        with (
            closing(pool),
            progress_bar("checking", len(found.read.files), "slides") as bar,
        ):
            for name in found.read.files:
                found.look_at(name, pool)
                bar.advance()
                interruption.raise_if_asked()
        found.conclude()
    rows = [found.row(one) for one in found.slides]
    table, has_replaced = write_check(out, rows, found.page())
    found.tell()
    instead = ", in place of an earlier one" if has_replaced else ""
    say(f"Written to {table}{instead}; to look at: {out / PAGE}")
    return FolderCheck(table, out / PAGE, tuple(found.refusals), tuple(found.warnings))


@dataclass
class _Seen:
    """A slide as far as it could be looked at."""

    name: str
    size: Size | None = None
    mpp: Mpp | None = None
    left_out: str = ""
    refused: bool = False
    facts: SlideFacts | None = None
    thumbnail: Thumbnail | None = None


@dataclass
class _Check:
    """All that is found, slide by slide.

    Attributes:
        config: As `train` would have it.
        read: The slides with their annotations.
        classes: None where they cannot be told.
        members: Name → place in the split; empty where that cannot be told.
        slides: Those looked at so far.
        refusals: Why training would refuse.
        warnings: What else is likely not meant.
    """

    config: Config
    read: ReadSlides = field(init=False)
    classes: ClassTable | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    slides: list[_Seen] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.read = read_slides(config)
        labelled = None
        self._sources = {source.name: source for source in self.read.usable}
        self._training = list[SlideTiles]()
        self._context: tuple[ModelInput, ...] = ()
        self._unreadable = list[str]()  # of those without an annotation
        self._uncut = dict[str, PathosegError]()  # what cannot be cut → why
        self._pictures = dict[str, str]()  # hash of a thumbnail → the slide
        bad = [*self._alike(self.read.bad)]
        if config.data.skip_bad_slides:
            self.warnings += [f"Left out: {text}" for text in bad]
        else:
            self.refusals += bad
        try:
            labelled = labelled_slides(config, self.read)
            self.classes, held = labelled.classes, classes_held(labelled)
            self.warnings += (*labelled.notes, *labelled.warnings)
            table = find_table(config.data)
            self.members = split_slides([*held], table, config.seed, config.data.val_share, held)
        except PathosegError as error:
            # Where a slide is to blame, that is said already.
            if self.read.usable or not bad:
                self.refusals.append(str(error))
        with self._refusing():
            self._prepare_network(labelled)
        if self.classes is not None:
            with self._refusing():
                build_loss(config.loss, config.model.task, len(self.classes))

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except PathosegError as error:
            self.refusals.append(str(error))

    def _prepare_network(self, labelled: LabelledSlides | None) -> None:
        """Build the network as training does, and take the tile that it would.

        Raises:
            PathosegError: Its first weights, its sizes, the tile or an option cannot be used.
        """
        config, weights = self.config, None
        check_first_weights(config.train.start_from)
        if config.train.start_from is None:  # else the earlier model names the network
            config = with_low_rank(config)
        if config.model.encoder_weights is not None:
            weights, config = take_encoder(config)
        sizes = config.model.with_classes(len(self.classes) if self.classes else 2)
        model = build_model(sizes, factory_of(config))
        if weights is not None:
            set_encoder(model.get_submodule("encoder"), weights)
        prepare_encoder(model, config.train)
        multiple, mpp = tile_multiple(model), config.tiles.mpp
        if labelled is not None:
            self.config = config = with_tile(config, labelled, multiple)
        side = config.tiles.side
        check_tile(model, side)
        self._context = declared_inputs(model, mpp, side)[1:]
        refuse_unfit(config.infer, sizes.task, mpp, side, multiple, edge_reach(model))

    @property
    def _facts(self) -> list[SlideFacts]:
        return [one.facts for one in self.slides if one.facts is not None]

    def look_at(self, name: str, pool: SlidePool) -> None:
        """Take in the next slide, whatever becomes of it."""
        seen = _Seen(name, left_out=self.read.left_out.get(name, ""))
        seen.refused = name in self.read.bad and not self.config.data.skip_bad_slides
        self.slides.append(seen)
        source = self._sources.get(name)
        try:
            with pool.borrow(self.read.files[name]) as slide:
                seen.size, seen.mpp = slide.size, slide.mpp
                self.warnings += [f"{name}: {warning}." for warning in slide.warnings]
                frame, seen_whole = _picture(slide, _picture_side(len(self.read.files)))
                image = seen_whole.pixels
                if lost := _unread_parts(slide, seen_whole):
                    self.warnings.append(
                        f"{name} is damaged: {lost} cannot be read, and will not be learnt from. "
                        "Copy it again from where it came."
                    )
            mask = None
            if source is not None and self.classes is not None:
                mask = self._learn(seen, source, self.classes, frame, pool)
            classes = self.classes or ClassTable((), ())
            seen.thumbnail = Thumbnail.of(image, mask, classes, frame)
        except PathosegError as error:
            if source is not None:
                # Training leaves out what cannot be read, never what cannot be cut; it cuts no
                # test slides.
                member = self.members.get(name)
                seen.refused = member is None or member.split != "test"
                seen.left_out = str(error)
                self._uncut[name] = error
            elif not seen.left_out or seen.left_out == NO_ANNOTATION:
                seen.left_out = f"{NO_ANNOTATION}, and cannot be read: {error.problem}"
                self._unreadable.append(name)
        else:
            if source is not None:
                self._warn_of_twins(name, image)

    def _learn(
        self,
        seen: _Seen,
        source: LabelledSlide,
        classes: ClassTable,
        frame: Frame,
        pool: SlidePool,
    ) -> NDArray[np.uint8]:
        """Cut a slide as training does; return its labels in the thumbnail."""
        config, size = self.config, frame.size
        mask = source.labels.rasterise(Box(0, 0, size.width, size.height), frame, classes)
        member = self.members.get(source.name, Member(source.name, source.name, "train"))
        overlap = config.tiles.overlap if member.split == "train" else 0
        tiles, tissue = cut_with_tissue(config, source, classes, pool, overlap, self._context)
        on_glass = shares_on_glass(mask, tissue, classes)
        assert seen.size is not None
        seen.facts = slide_facts(member, tiles, config, seen.size, tissue, on_glass, is_exact=True)
        if member.split == "train":
            self._training.append(tiles)
        return mask

    def _warn_of_twins(self, name: str, image: NDArray[np.uint8]) -> None:
        digest = hashlib.sha256(image.tobytes() + str(image.shape).encode()).hexdigest()
        other = self._pictures.setdefault(digest, name)
        sides = [self.members[each].split for each in (other, name) if each in self.members]
        if other != name and len(set(sides)) == 2:
            self.warnings.append(
                f"{other} ({sides[0]}) and {name} ({sides[1]}) look like the same slide: figures "
                "on it would be too good. Give both one patient in slides.csv."
            )

    def _alike(self, errors: Mapping[str, PathosegError]) -> Iterator[str]:
        """Yield a text for each error and its slides; alike are errors but for the file they name.

        Args:
            errors: By slide.
        """
        found = defaultdict[str, list[str]](list)
        for name, error in errors.items():
            labels = [self._sources[name].labels] if name in self._sources else []
            said = str(error)
            for file in (self.read.files[name], *(file for one in labels for file in one.files)):
                said = said.replace(str(file), "")
            found[said].append(name)
        for first, *others in found.values():
            whose = (
                f"{1 + len(others)} slides ({first_names([first, *others])})" if others else first
            )
            yield f"{whose}: {errors[first]}"

    def conclude(self) -> None:
        """Find out what follows from all slides together."""
        refused = {seen.name for seen in self.slides if seen.refused}
        self.refusals += self._alike({n: e for n, e in self._uncut.items() if n in refused})
        self.warnings += self._alike({n: e for n, e in self._uncut.items() if n not in refused})
        if self.members and self.classes is not None:
            try:
                if not any(member.split == "train" for member in self.members.values()):
                    raise none_to_train_on(self.members)
                if self._training:
                    training_set(self.config, self._training, self.classes, readers=1)
            except PathosegError as error:
                self.refusals.append(str(error))
            self.warnings += warnings_of(
                self._facts, self.classes, self.config, self.read.unlabelled
            )
        if self._unreadable:
            self.warnings.append(
                f"Of the slides without an annotation, {len(self._unreadable)} cannot be read: "
                f"{first_names(self._unreadable)}. {TABLE} says why."
            )

    def row(self, seen: _Seen) -> dict[str, object]:
        """A row of check.csv; what is not known is empty."""
        facts = seen.facts
        member = facts and facts.member
        row: dict[str, object] = {
            "slide": seen.name,
            "patient": member.patient if member and self.members else "",
            "split": member.split if member and self.members else "",
            "training": "refused" if seen.refused else "left out" if seen.left_out else "used",
            "reason": seen.left_out,
            "width": seen.size.width if seen.size else "",
            "height": seen.size.height if seen.size else "",
            "mpp": f"{seen.mpp.mean:.6g}" if seen.mpp else "",
            "annotation": facts.annotation.path.name if facts else "",
            "tissue_mm2": _csv(facts.tissue_mm2) if facts else "",
            "interest_mm2": _csv(facts.interest_mm2) if facts else "",
            "ignored_mm2": _csv(facts.ignored_mm2) if facts else "",
            "tiles": facts.tiles if facts else "",
            "padding": _csv(facts.padding) if facts else "",
        }
        names = ("background", *(self.classes.names if self.classes else ()))
        for index, name in enumerate(names):
            row[f"mm2_{name}"] = _csv(facts.areas_mm2[index]) if facts else ""
            regions = facts and facts.regions(name)
            row[f"regions_{name}"] = "" if regions is None else regions
            row[f"tiles_{name}"] = facts.class_tiles[index] if facts else ""
        return row

    def tell(self) -> None:
        """Print the table, and below it what was found."""
        columns, rows = self._table(is_page=False)
        answer_table(columns, rows[:_MOST_ROWS])
        if len(rows) > _MOST_ROWS:
            answer(f"… and {len(rows) - _MOST_ROWS} more slides.")
        if self._facts and self.classes and len(self.classes.names) <= _MOST_CLASSES:
            answer(f"Of each class: {_CELL}.")
        if self.classes is not None and self._facts:
            for line in (*class_lines(self._facts, self.classes), *context_lines(self._training)):
                answer(line)
        for text in self.warnings:
            answer(f"Take care: {text}")
        for text in self.refusals[:_MOST_ROWS]:
            answer(f"Training would refuse: {text}")
        if len(self.refusals) > _MOST_ROWS:
            answer(f"… and {len(self.refusals) - _MOST_ROWS} more refusals: see {TABLE}.")

    def page(self) -> CheckPage:
        """Return the content of check.html."""
        facts = self._facts
        names = self.classes.names if self.classes else ()
        labelled = sum(sum(one.areas_mm2[1:]) for one in facts)
        tissue = sum(one.tissue_mm2 for one in facts)
        counts = [
            sum(one.member.split == part for one in facts) for part in ("train", "val", "test")
        ]
        columns, rows = self._table(is_page=True)
        class_columns, class_rows = rows_by_class(facts, self.classes or ClassTable((), ()))
        return CheckPage(
            folders=self.config.data.told_folders,
            classes=list(zip(names, self.classes.colours, strict=True)) if self.classes else [],
            keys=[
                ("Slides", str(len(self.slides)), f"{len(facts)} to learn from"),
                ("Train / val / test", " / ".join(map(str, counts)), ""),
                ("Tiles", str(sum(one.tiles for one in facts)), f"of {self.config.tiles.side} px"),
                ("Labelled mm²", area_text(labelled), f"of {area_text(tissue)} mm² of tissue"),
            ],
            class_columns=class_columns,
            class_rows=class_rows,
            columns=columns,
            rows=rows,
            refusals=self.refusals,
            warnings=self.warnings,
            slides=[
                CheckedSlide(one.name, _told(one, names), one.refused, one.thumbnail)
                for one in self.slides
            ],
            version=__version__,
        )

    def _table(self, is_page: bool) -> tuple[list[tuple[str, bool]], list[list[str]]]:
        """Columns and rows of the table of slides: all of them, or what a terminal has room for."""
        names = self.classes.names if self.classes else ()
        shown = names if is_page or len(names) <= _MOST_CLASSES else ()
        facts = self._facts
        optional = {
            "Of interest": is_page or any(one.annotation.of_interest for one in facts),
            "Ignored": is_page or any(map(_ignores, facts)),
            "Padding": is_page or any(one.padding >= 0.1 for one in facts),
        }
        columns = [("Slide", False), ("Split", False), ("µm/px", True), ("Pixels", True)]
        columns += [("Tissue mm²", True)]
        columns += [(name, True) for name in ("Of interest", "Ignored") if optional[name]]
        columns += [("Tiles", True), *([("Padding", True)] if optional["Padding"] else [])]
        if names and not shown:
            columns += [("Labelled mm²", True), ("Classes", True)]
        rows = []
        for one in self.slides:
            cells = self._cells(one, names)
            fixed = [cells.get(title, "") for title, _ in columns]
            rows.append([*fixed, *class_cells(one.facts, shown)])
        return [*columns, *((name, True) for name in shown)], rows

    def _cells(self, seen: _Seen, names: Sequence[str]) -> dict[str, str]:
        """Return the texts of a slide's row by column, without those of classes."""
        facts, cells = seen.facts, {"Slide": seen.name}
        if seen.mpp and seen.size:
            cells["µm/px"] = f"{seen.mpp.mean:.4g}"
            cells["Pixels"] = f"{seen.size.width}×{seen.size.height}"
        if facts is None:
            state = "left out" if seen.left_out else "?"  # it was not cut, as classes are not known
            cells["Split"] = "refused" if seen.refused else state
            return cells
        held = sum(count > 0 for count in facts.class_tiles[1:])
        return {
            **cells,
            **slide_cells(facts),
            "Split": facts.member.split if self.members else "?",
            "Tissue mm²": area_text(facts.tissue_mm2),
            "Ignored": area_text(facts.ignored_mm2) if _ignores(facts) else "0",
            "Padding": "" if math.isnan(facts.padding) else f"{facts.padding:.0%}",
            "Labelled mm²": area_text(sum(facts.areas_mm2[1:])),
            "Classes": f"{held} of {len(names)}",
        }


_CELL = "mm² · regions (none are counted in masks of classes) · tiles"
_PLACES = 4  # on each axis, that are read of level 0
_ROUNDING = 0.01  # share of what is of interest: labels end at whole pixels


def _told(seen: _Seen, names: Sequence[str]) -> str:
    """Return the caption of a slide's picture."""
    return " · ".join(_parts(seen, names))


def _parts(seen: _Seen, names: Sequence[str]) -> Iterator[str]:
    if seen.facts is not None:
        yield seen.facts.member.split
    if seen.mpp is not None:
        yield f"{seen.mpp.mean:.4g} µm/px"
    if seen.facts is None:
        yield seen.left_out
        return
    for name, area in zip(names, seen.facts.areas_mm2[1:], strict=True):
        if area:
            yield f"{name} {area_text(area)} mm²"


def _ignores(facts: SlideFacts) -> bool:
    return facts.ignored_mm2 > _ROUNDING * facts.interest_mm2


def _csv(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.9g}"


def _picture_side(slides: int) -> int:
    """The longest side of thumbnails: the page holds them all."""
    return 480 if slides <= 50 else 320 if slides <= 200 else 160


def _picture(slide: Slide, side: int) -> tuple[Frame, Region]:
    frame = thumbnail_frame(slide.size, slide.mpp, side)
    return frame, read_region(slide, frame, Box(0, 0, frame.size.width, frame.size.height))


def _unread_parts(slide: Slide, overview: Region) -> str:
    """Return what cannot be read of a slide's overview and of some places of level 0, in words."""
    size, lost = slide.size, 0
    steps = [(2 * number + 1) / (2 * _PLACES) for number in range(_PLACES)]
    for x, y in product(steps, steps):
        try:
            slide.read_level(0, Box(int(x * size.width), int(y * size.height), 1, 1))
        except UnreadableError:
            lost += 1
    if lost:
        return f"{lost} of {_PLACES**2} places of it"
    return "" if overview.unread is None else "part of a coarse level"
