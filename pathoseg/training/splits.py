"""The split of slides into training, validation and test, by patient."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal, cast, get_args

from pathoseg.config import DataConfig
from pathoseg.errors import PathosegError, not_permitted
from pathoseg.outputs.atomic import write_rows
from pathoseg.platform_support import composed

Split = Literal["train", "val", "test"]
TABLE = "slides.csv"
_ANNOTATION = "annotation"  # the column of its hash in that file


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
    *,
    is_recorded: bool = False,
) -> dict[str, Member]:
    """Assign every slide a split.

    A row of the table that names a split keeps it. All other patients are ordered by a hash of
    seed and patient, so that adding a slide moves few others, and the first `val_share` of them
    (at least one, where there are two) validate. Before that order come two rules: every class is
    trained on, and one that several patients have is validated too where that is possible, even if
    more of them must validate.

    Args:
        names: Names of the slides: their paths in the folder of slides.
        table: CSV with the columns slide, and optionally patient and split.
        seed: Seed of the run.
        val_share: Share of the patients without a given split that validate.
        classes: Slide name → the classes that it holds.
        is_recorded: True if `write_splits` has written the table.

    Returns:
        Slide name → its member.

    Raises:
        PathosegError: The table misses a slide or a column, names an unknown split, or puts one
            patient on both sides.
    """
    rows = _Rows(table, names, is_recorded=is_recorded)
    patients: dict[str, str] = {}
    given: dict[str, Split | None] = {}
    held: dict[str, set[str]] = {}
    for name in names:
        row = rows.of(name)
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


def patients_in(table: Path | None, names: Collection[str]) -> dict[str, str]:
    """Read each slide's patient; one of which the table says nothing is a patient of its own.

    Raises:
        PathosegError: The table cannot be read.
    """
    rows = _Rows(table, names)
    return {name: (rows.of(name) or {}).get("patient") or name for name in names}


def find_table(data: DataConfig) -> Path | None:
    """Find the table of slides: the one that is named, else `slides.csv` in one of the folders.

    Raises:
        PathosegError: Several folders have one.
    """
    if data.table is not None:
        return Path(data.table)
    folders = [*data.slide_folders, *([Path(data.annotations)] if data.annotations else [])]
    tables = [folder / TABLE for folder in folders if (folder / TABLE).is_file()]
    if len({table.resolve() for table in tables}) > 1:
        raise PathosegError(
            f"There are several tables of slides: {' and '.join(map(str, tables))}.",
            "Put all rows into one file, and name it: `[data] table`.",
        )
    return tables[0] if tables else None


def write_splits(path: Path, members: Iterable[Member], annotations: Mapping[str, str]) -> None:
    """Write the table of a run's slides.

    Args:
        path: The file.
        members: The slides.
        annotations: Slide name → hash of its annotation, as far as they are known.
    """
    rows = (
        {
            "slide": m.slide,
            "patient": m.patient,
            "split": m.split,
            _ANNOTATION: annotations.get(m.slide, ""),
        }
        for m in members
    )
    write_rows(path, rows, ("slide", "patient", "split", _ANNOTATION))


def changed_annotations(table: Path, annotations: Mapping[str, str]) -> list[str]:
    """Return the slides whose annotation is another than when the table was written.

    Args:
        table: As `write_splits` writes it; one of an older version tells nothing.
        annotations: As for `write_splits`, of now.

    Raises:
        PathosegError: The table cannot be read.
    """
    rows = read_rows(table, is_recorded=True)
    before = {name: row.get(_ANNOTATION) for name, row in rows.items()}
    return [name for name, now in annotations.items() if (before.get(name) or now) != now]


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
        return hashlib.sha256(f"{seed}:{patient}".encode(errors="surrogateescape")).digest()

    free = sorted((patient for patient, split in given.items() if split is None), key=rank)
    wanted = round(val_share * len(free))
    if wanted == 0 and len(free) > 1 and val_share > 0 and "val" not in given.values():
        wanted = 1
    if val_share == 0:
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


def read_rows(table: Path, *, is_recorded: bool = False) -> dict[str, dict[str, str]]:
    """Read a table of slides.

    Args:
        table: CSV, of the user or of a run.
        is_recorded: True if `write_splits` has written it, with the very names of the slides: they
            need not be UTF-8, and may end in blanks.

    Returns:
        Its rows by the slide's name; in each, text by column name in lower case.

    Raises:
        PathosegError: It cannot be read, has no column `slide`, or two rows of a slide differ.
    """
    errors, blanks = ("surrogateescape", "") if is_recorded else ("strict", None)
    try:
        with table.open(newline="", encoding="utf-8-sig", errors=errors) as file:
            rows = [
                {(k or "").strip().lower(): (v or "").strip(blanks) for k, v in row.items() if k}
                for row in csv.DictReader(file)
            ]
    except PermissionError:
        raise not_permitted(table) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PathosegError(
            f"{table} cannot be read as CSV ({error}).", "Save it as UTF-8 CSV."
        ) from None
    if not rows or "slide" not in rows[0]:
        raise PathosegError(
            f"{table} has no column `slide`.",
            "Its first line should be: slide,patient,split (with commas, no semicolons).",
        )
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        name = row["slide"] if is_recorded else row["slide"].replace("\\", "/")
        if found.setdefault(name, row) != row:
            raise PathosegError(
                f"{table} has two rows of {name} that differ.", "Leave the one that holds."
            )
    return found


class _Rows:
    """The rows of a table of slides.

    A row names a slide by its path in the folder of slides, or by its file's name alone where no
    other slide is called so; the suffix may be left out. Letters may be composed (NFC) in one name
    and decomposed (NFD) in the other; of two names that differ in nothing else, each is itself.

    Args:
        table: The file; None holds nothing.
        names: All slides.
        is_recorded: As for `read_rows`.
    """

    def __init__(
        self, table: Path | None, names: Iterable[str], *, is_recorded: bool = False
    ) -> None:
        self._table = table
        self._written = read_rows(table, is_recorded=is_recorded) if table else {}
        self._rows = {composed(name): row for name, row in self._written.items()}
        paths = [PurePosixPath(composed(name)) for name in names]
        self._called = Counter(called for path in paths for called in {path.name, path.stem})
        own = {path.as_posix() for path in paths}
        own |= {path.with_suffix("").as_posix() for path in paths}
        self._others = self._rows.keys() - own  # what is a slide's whole name is no other's

    def of(self, name: str) -> dict[str, str] | None:
        """The row of a slide, None where there is none.

        Raises:
            PathosegError: The only row that could be meant could also mean another slide.
        """
        if name in self._written:
            return self._written[name]
        path = PurePosixPath(composed(name))
        for key in (path.as_posix(), path.with_suffix("").as_posix()):
            if key in self._rows:
                return self._rows[key]
        found = next((key for key in (path.name, path.stem) if key in self._others), None)
        if found is not None and self._called[found] > 1:
            raise PathosegError(
                f"{self._table}: {found} could be any of {self._called[found]} slides.",
                f"Name slides by their path in the folder of slides, such as {name}.",
            )
        return None if found is None else self._rows[found]


def split_lines(
    members: Mapping[str, Member], table: Path | None, classes: Iterable[str]
) -> list[str]:
    """Return lines that tell how many slides each split has, their classes, and who says so.

    Args:
        members: The slides by name.
        table: The file that gives patients and splits; None where there is none.
        classes: Names of the classes.
    """
    counts = Counter(member.split for member in members.values())
    split = ", ".join(f"{counts[part]} {part}" for part in ("train", "val", "test"))
    if table is None:
        patients = f"Every slide counts as a patient of its own; {TABLE} can say otherwise."
    else:
        patients = f"Patients and splits: {table}"
    return [f"{len(members)} slides ({split}). Classes: {', '.join(classes)}.", patients]
