"""The splits and patients of slides as a model's run recorded them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathoseg.config import Config
from pathoseg.config_file import UNNUMBERED, load_config
from pathoseg.platform_support import composed
from pathoseg.training.labelled_slides import LabelledSlide
from pathoseg.training.run_folder import CONFIG, SPLITS
from pathoseg.training.splits import find_table, patients_in, read_rows

UNSEEN = "unseen"
TELLING = ("test", UNSEEN, "val", "train")  # how much a split's figures say of new slides


@dataclass(frozen=True)
class RecordedSplits:
    """The recorded splits and patients of slides: by the run, or by a table.

    Attributes:
        names: Slide to what the run calls it.
        splits: Name in the run to split; empty where the model lies in no run.
        patients: Slide to patient.
        trained: Patients whose slides the model was trained on.
        has_patients: True where anything says which slides are one patient's.
    """

    names: Mapping[str, str]
    splits: Mapping[str, str]
    patients: Mapping[str, str]
    trained: Collection[str]
    has_patients: bool

    @classmethod
    def of(cls, run: Path, config: Config, files: Mapping[str, Path]) -> RecordedSplits:
        """Look slides up in the records of a run.

        Args:
            run: The folder that the model is in.
            config: `data` is used, for the table.
            files: The slides by name.

        Raises:
            PathosegError: The records or the table cannot be read.
        """
        table = run / SPLITS
        rows = read_rows(table, is_recorded=True) if table.is_file() else {}
        # A copy on another system may compose the letters of its names in another way.
        spelt = {composed(name): name for name in rows}
        names = {name: name if name in rows else spelt.get(composed(name), name) for name in files}
        placed = set[str]()
        if (run / CONFIG).is_file():
            # In the run's folders a slide is what the run calls it, wherever its name begins now:
            # neither unseen because of that, nor another slide that is called so there.
            for folder in load_config(run / CONFIG, None, UNNUMBERED).data.slide_folders:
                root = folder.resolve()
                for ours, file in files.items():
                    path = file.resolve()
                    if not path.is_relative_to(root):
                        continue
                    name = path.relative_to(root).as_posix()
                    if name not in rows:
                        name = spelt.get(composed(name), name)
                    if name in rows or ours not in placed:
                        names[ours] = name
                        placed.add(ours)
        # The folder of a model that was moved may have a table of the user's, without a column.
        splits = {name: row.get("split", "") for name, row in rows.items()}
        recorded = {name: row.get("patient") or name for name, row in rows.items()}
        table_now = find_table(config.data)
        patients = patients_in(table_now, [*names])
        patients |= {ours: recorded[its] for ours, its in names.items() if its in rows}
        return cls(
            names,
            {name: split for name, split in splits.items() if split in TELLING},
            patients,
            {recorded[name] for name, split in splits.items() if split == "train"},
            table_now is not None or any(patient != name for name, patient in recorded.items()),
        )

    def split_of(self, name: str) -> str:
        """Return the split of a slide, by its name."""
        return self.splits.get(self.names[name], UNSEEN)

    def warnings(self, chosen: Iterable[LabelledSlide]) -> Iterable[str]:
        """Yield warnings about slides that the model has seen, or whose resolution it has not."""
        if not self.splits:
            yield (
                "The model's folder has no splits.csv: whether it was trained on these slides is "
                "not known."
            )
        if not self.has_patients:
            yield (
                "Every slide counts as a patient of its own. Where a patient has several, the "
                "intervals are too narrow: slides.csv beside the slides says whose they are."
            )
        for source in chosen:
            patient = self.patients[source.name]
            if self.split_of(source.name) == UNSEEN and patient in self.trained:
                yield (
                    f"{source.name}: the model was trained on other slides of its patient, "
                    f"{patient}."
                )
