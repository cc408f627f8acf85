"""Which slides train and which judge: by patient, never by tile."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from pathoseg.errors import PathosegError
from pathoseg.outputs.atomic import replaced

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
