"""The files of a check of slides: a table for programs, and a page with their pictures."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable, Colour
from pathoseg.geometry import Frame
from pathoseg.outputs.atomic import write_rows
from pathoseg.outputs.html_report import picture, scale_bar, write_page
from pathoseg.outputs.overlay import overlay_layer

TABLE, PAGE = "check.csv", "check.html"


@dataclass(frozen=True)
class Thumbnail:
    """A slide with its labels, ready for the page.

    Attributes:
        uri: The slide.
        layer: Its labels; None where it has none.
        width: Pixels.
        height: Pixels.
        bar: Width and text of its scale bar.
    """

    uri: str
    layer: str | None
    width: int
    height: int
    bar: tuple[float, str]

    @classmethod
    def of(
        cls,
        image: NDArray[np.uint8],
        mask: NDArray[np.uint8] | None,
        classes: ClassTable,
        frame: Frame,
    ) -> Thumbnail:
        """Encode a picture.

        Args:
            image: Shape (height, width, 3).
            mask: Class indices of shape (height, width), 255 ignored; None where there is none.
            classes: Names and colours.
            frame: Of both.
        """
        height, width, _ = image.shape
        layer = None if mask is None else picture(overlay_layer(mask, classes))
        return cls(picture(image), layer, width, height, scale_bar(width, frame.mpp.x))


@dataclass(frozen=True)
class CheckedSlide:
    """A slide on the page.

    Attributes:
        name: The slide's name.
        told: What is said below its name.
        is_refused: Whether training would refuse it.
        thumbnail: Its picture, where it can be read.
    """

    name: str
    told: str
    is_refused: bool
    thumbnail: Thumbnail | None


@dataclass(frozen=True)
class CheckPage:
    """All that the page shows.

    Attributes:
        folders: Of the slides.
        classes: Name and colour of each class.
        keys: Label, value and remark of the key figures.
        class_columns: Title, and whether its cells are numbers.
        class_rows: A row for each class.
        columns: As `class_columns`, of the table of slides.
        rows: A row for each slide.
        refusals: Why training would refuse.
        warnings: What else is likely not meant.
        slides: Every slide.
        version: Of pathoseg.
    """

    folders: str
    classes: Sequence[tuple[str, Colour]]
    keys: Sequence[tuple[str, str, str]]
    class_columns: Sequence[tuple[str, bool]]
    class_rows: Sequence[Sequence[str]]
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    refusals: Sequence[str]
    warnings: Sequence[str]
    slides: Sequence[CheckedSlide]
    version: str


def write_check(
    folder: Path, rows: Sequence[Mapping[str, object]], page: CheckPage
) -> tuple[Path, bool]:
    """Write check.csv and check.html.

    Args:
        folder: Made where it is missing.
        rows: Of check.csv, one a slide.
        page: What check.html shows.

    Returns:
        The path of check.csv, and whether an earlier one was replaced.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_replaced = write_rows(folder / TABLE, rows)
    date = datetime.date.today().isoformat()
    write_page(folder / PAGE, "check.html", of=page, version=page.version, date=date)
    return folder / TABLE, has_replaced
