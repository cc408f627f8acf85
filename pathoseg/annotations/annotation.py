"""An outlined region with its class, the table of classes, and the Labels protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame

BACKGROUND = 0
IGNORE = 255
UNCLASSIFIED = "annotation"
TOUCHING = 3.0
"""Distance in pixels (2√2, up). Objects further apart never cover the same or adjacent pixels."""

UNREAD_COLOUR = (110, 110, 110)

_BACKGROUND_NAME = "background"
_IGNORED_SUFFIX = "*"  # QuPath's way

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A region in level-0 pixels of its slide's frame.

    Attributes:
        geometry: A valid polygon or multi-polygon; holes count.
        class_name: Its class, or None where the file gives none.
        colour: The class's colour as the file has it.
        name: The name that was given to it beside its class, in QuPath; or None.
    """

    geometry: Polygon | MultiPolygon
    class_name: str | None
    colour: Colour | None = None
    name: str | None = None


class PassedOver(NamedTuple):
    """A kind of drawn object that has no label.

    Attributes:
        what: Its kind in the plural, as it is told: "points", "lines".
        class_name: Its class in the file.
    """

    what: str
    class_name: str | None = None


@dataclass(frozen=True, slots=True)
class AnnotationFile:
    """The content of an annotation file with outlines.

    Attributes:
        annotations: Its regions, in the order of the file.
        passed_over: Number of other objects, by kind and class.
    """

    annotations: list[Annotation]
    passed_over: Mapping[PassedOver, int]


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """Counts of the objects of an annotation file that training uses, and of those it leaves out.

    Attributes:
        path: The file.
        outlines: Number of outlines in use by class, background among them; empty for a mask.
        of_interest: Number of outlines that are regions of interest.
        interest_pixels: Their area on the slide in level-0 pixels; None where there are none.
        unclassified: Number of outlines without a class. They are ignored, or of the class
            `fallback` where no file has any class.
        fallback: That class.
        passed_over: Number of objects left out, by kind in the plural; ignored outlines among them.
        is_mask: True for a mask, of which nothing is counted.
    """

    path: Path
    outlines: Mapping[str, int] = field(default_factory=dict)
    of_interest: int = 0
    interest_pixels: float | None = None
    unclassified: int = 0
    fallback: str = UNCLASSIFIED
    passed_over: Mapping[str, int] = field(default_factory=dict)
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes of a model: index 0 is background, `names[i]` has index i + 1."""

    names: tuple[str, ...]
    colours: tuple[Colour, ...]

    def index(self, name: str) -> int:
        return self.names.index(name) + 1

    def palette(self) -> NDArray[np.uint8]:
        """Return the colour of each index, shape (256, 3): background black, unread grey."""
        palette = np.zeros((256, 3), np.uint8)
        palette[1 : len(self)] = self.colours
        palette[IGNORE] = UNREAD_COLOUR
        return palette

    def indices(self, names: Iterable[str], path: Path) -> dict[str, int]:
        """The index of each of the classes that `path` uses.

        A class drawn as background has index 0, unless the table lists one of that name.

        Raises:
            PathosegError: The table lacks one of them.
        """
        names = set(names)
        background = {name for name in names if is_background(name)}.difference(self.names)
        names -= background
        if unknown := sorted(names.difference(self.names)):
            raise PathosegError(
                f"{path} has regions of class {quoted(unknown)}, beside the classes of this run: "
                f"{quoted(self.names)}.",
                "Train a model with it among `[data] classes`, or write `[annotations] rename = "
                f'{{ "{unknown[0]}" = "{self._like(unknown[0])}" }}`: a name that ends in * is '
                f"ignored, and {quoted(self.names[:1])} makes it that class.",
            )
        return {name: self.index(name) for name in names} | dict.fromkeys(background, BACKGROUND)

    def _like(self, name: str) -> str:
        """Return the class that a name is most likely meant to be; none has it ignored."""
        known = {each.casefold(): each for each in self.names}
        near = get_close_matches(name.casefold(), known, n=1, cutoff=0.7)
        return known[near[0]] if near else f"{name}*"

    def __len__(self) -> int:
        """Number of classes with background."""
        return len(self.names) + 1


class Labels(Protocol):
    """The labels of one slide, read from polygons or from an index mask."""

    @property
    def path(self) -> Path: ...
    @property
    def files(self) -> Sequence[Path]:
        """All files that the labels come from: `path`, and what lies beside it."""
        ...

    @property
    def report(self) -> AnnotationReport:
        """Counts of the objects in use and of those left out."""
        ...

    def classes(self) -> Mapping[str, Colour | None]:
        """Names in use with their colours, without ignored ones, regions and background."""
        ...

    def file_classes(self) -> Set[str]:
        """Return the class names that the file itself has, before they are renamed."""
        ...

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Return the class index of each pixel of `box`, in pixels of `frame`.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide.

        Raises:
            PathosegError: A class is not in `classes`.
        """
        ...

    def refuse_without_objects(self) -> None:
        """Refuse labels that do not tell objects apart.

        Raises:
            PathosegError: They say which class a pixel has, and not which object.
        """
        ...

    def object_counts(self, classes: ClassTable) -> Mapping[str, int]:
        """Return the number of objects of each class that has any, by its name.

        Raises:
            PathosegError: As `rasterise` and `refuse_without_objects`.
        """
        ...

    def objects(
        self,
        box: Box,
        frame: Frame,
        classes: ClassTable,
        mask: NDArray[np.uint8],
        apart: float = TOUCHING,
    ) -> NDArray[np.uint8]:
        """Return the object plane of `box`: each object in a colour, a number from 1 to 254.

        Objects that are no further apart than `apart` have different colours, so that a connected
        area of one colour is what shows of one object, or a piece of it. Of the objects of its
        class, a pixel belongs to the one that covers most of it. All boxes of a frame have the
        same colours where `apart` is the same.

        Args:
            box: In pixels of `frame`.
            frame: Their resolution.
            classes: The classes of the run.
            mask: What `rasterise` returned for the same box, frame and classes.
            apart: In pixels of the frame.

        Returns:
            Array of shape (height, width): 0 where `mask` is 0, 255 where it is 255.

        Raises:
            PathosegError: As `rasterise` and `refuse_without_objects`, or more than 254 objects lie
                on one spot.
        """
        ...


def is_background(class_name: str) -> bool:
    """Return True if a class of this name is index 0, unless a model lists it among its classes."""
    return class_name.casefold() == _BACKGROUND_NAME


def is_ignored(class_name: str) -> bool:
    """Return True if pixels of a class of this name are left out of training and evaluation."""
    return class_name.endswith(_IGNORED_SUFFIX)


def quoted(names: Iterable[str]) -> str:
    """Names as they are told: "a", "b"."""
    return ", ".join(f'"{name}"' for name in names)
