"""Writes the probabilities of a slide and their entropy, and finds its least certain fields."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pathoseg.annotations.annotation import IGNORE, ClassTable, Colour
from pathoseg.geometry import Box
from pathoseg.inference.result_folder import PROBABILITY, UNCERTAINTY
from pathoseg.inference.segmenter import MaskRow, SlidePlan
from pathoseg.outputs.mask_tiff import map_writer
from pathoseg.outputs.pyramid import Add
from pathoseg.outputs.uncertain_fields import FieldRanking, UncertainField

FIELD = 256  # pixels at the model's resolution
_WHITE: Colour = (255, 255, 255)


class Certainty:
    """Takes the rows of a slide.

    Args:
        plan: The slide's.
        classes: Number of classes with background.
        add_probability: Takes the next rows of all probabilities.
        add_uncertainty: Takes those of their entropy.
    """

    def __init__(
        self, plan: SlidePlan, classes: int, add_probability: Add, add_uncertainty: Add
    ) -> None:
        self._plan, self._classes = plan, classes
        self._add_probability, self._add_uncertainty = add_probability, add_uncertainty
        pixel = plan.output.mpp.mean / plan.frame.mpp.mean  # a tile, where tiles are classified
        self._fields = FieldRanking(plan.output.size, max(1, round(FIELD / pixel)))
        self._top = 0

    def add(self, row: MaskRow) -> None:
        """Take the next row."""
        planes, width = row.certainty(self._classes), self._plan.output.size.width
        self._add_probability(planes[:-1])
        self._add_uncertainty(planes[-1:])
        # In strips, as a band has many more pixels than there is need to hold once more.
        for start in range(0, len(row.band), FIELD):
            mask = row.band[start : start + FIELD]
            box = Box(0, self._top + start, width, len(mask))
            tissue = self._plan.tissue.pixels(box, self._plan.output)
            self._fields.add(planes[-1, start : start + FIELD], tissue & (mask != IGNORE))
        self._top += len(row.band)

    def least_certain(self) -> tuple[UncertainField, ...]:
        """Return the fields of which the model is least certain, once all rows are taken."""
        return self._fields.least_certain(self._plan.output, self._plan.tissue.slide_size)


@contextmanager
def certainty_files(
    folder: Path, plan: SlidePlan, classes: ClassTable, origin: str
) -> Iterator[Certainty]:
    """Make a context that takes the rows of a slide; the files are in `folder` at its end.

    Args:
        folder: Exists.
        plan: The slide's.
        classes: Names and colours.
        origin: What the result is made of.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    size, mpp = plan.output.size, plan.output.mpp
    # On white, so that their sum is the mean colour of what a pixel may be.
    channels = [("background", _WHITE), *zip(classes.names, classes.colours, strict=True)]
    one = [("uncertainty", _WHITE)]
    with (
        map_writer(folder / PROBABILITY, size, mpp, channels, f"{origin} {PROBABILITY}") as shares,
        map_writer(folder / UNCERTAINTY, size, mpp, one, f"{origin} {UNCERTAINTY}") as entropy,
    ):
        yield Certainty(plan, len(classes), shares, entropy)
