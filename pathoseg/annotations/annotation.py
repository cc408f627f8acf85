"""An outlined region with its class, the table of classes, and the Labels protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame

BACKGROUND = 0
IGNORE = 255
UNCLASSIFIED = "annotation"
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
    """

    geometry: Polygon | MultiPolygon
    class_name: str | None
    colour: Colour | None = None


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
    """What a file of outlines holds.

    Attributes:
        annotations: Its regions, in the order of the file.
        passed_over: What it holds besides → how often.
    """

    annotations: list[Annotation]
    passed_over: Mapping[PassedOver, int]


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """What is learnt from an annotation file, and what is not.

    Attributes:
        path: The file.
        outlines: Class → its outlines that count, background among them; empty for a mask.
        of_interest: How many outlines are regions of interest.
        unclassified: How many outlines without a class are ignored, or are of the class
            `fallback` where no file has any class.
        fallback: That class.
        passed_over: What is not learnt from, in the plural → how many; ignored outlines among it.
        is_mask: Whether the file is a mask, of which nothing is counted.
    """

    path: Path
    outlines: Mapping[str, int] = field(default_factory=dict)
    of_interest: int = 0
    unclassified: int = 0
    fallback: str = UNCLASSIFIED
    passed_over: Mapping[str, int] = field(default_factory=dict)
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class AnnotationOptions:
    """How annotation files are understood.

    Attributes:
        frame: What (0, 0) is in files of outlines: the corner of the slide's "bounds", as QuPath
            counts, or of the "full" scan, as ASAP and ImageScope count. "auto" takes the habit of
            the program that wrote the file. Only slides with bounds (MRXS) tell them apart.
        exclude: ASAP groups, in any case, that are cut out of all other regions.
        mask: What the values of a mask image are: "indices" of classes (255 is ignored), or
            "binary", where whatever is above 0 is class 1 (a map of instances counts as such).
        rename: Names of classes in annotation files → names in the run, such as "Tumor" → "tumour".
            Values of masks are called "class 1", "class 2"…. Several classes may get one name;
            one that ends in * is ignored.
        roi: Classes, in any case and by their names in the run, whose outlines are regions of
            interest: inside them what nobody outlined is background, outside them nothing is known.
            A slide without one was annotated everywhere.
        unlabelled: What nobody outlined is "background", or, where annotations are sparse strokes,
            "ignore"d everywhere; background is then drawn as the class "background".
        unclassified: What outlines without a class are: "ignore" makes their insides unknown where
            no outline with a class covers them, "refuse" refuses the file, any other text is their
            class. Those that hold outlines with a class say nothing, and where no file has any
            class, all are of the class "annotation".

    Raises:
        PathosegError: A class is given no name.
    """

    frame: Literal["auto", "bounds", "full"] = "auto"
    exclude: tuple[str, ...] = ("exclusion", "_2")
    mask: Literal["indices", "binary"] = "indices"
    rename: Mapping[str, str] = field(default_factory=dict)
    roi: tuple[str, ...] = ("Region*", "ROI", "Region")
    unlabelled: Literal["background", "ignore"] = "background"
    unclassified: str = "ignore"

    def __post_init__(self) -> None:
        if not self.unclassified or self.unclassified != self.unclassified.strip():
            raise PathosegError(
                f'[annotations] unclassified = "{self.unclassified}" is no name of a class.',
                'Write "ignore", "refuse", or a class without blanks around it.',
            )
        for old, new in self.rename.items():
            if not new or new != new.strip():
                raise PathosegError(
                    f'[annotations] rename gives the class "{old}" the name "{new}".',
                    "Give it one without blanks around it; one that ends in * is ignored.",
                )

    def renamed(self, class_name: str | None) -> str | None:
        """The run's name of a class in a file."""
        return None if class_name is None else self.rename.get(class_name, class_name)

    def is_roi(self, class_name: str) -> bool:
        """Whether outlines of this class, renamed already, are regions of interest."""
        return class_name.casefold() in {name.casefold() for name in self.roi}

    def for_classes(self, names: Iterable[str]) -> AnnotationOptions:
        """These options for a model of given classes: none of them is a region of interest."""
        learnt = {name.casefold() for name in names}
        return replace(self, roi=tuple(name for name in self.roi if name.casefold() not in learnt))


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes of a model: index 0 is background, `names[i]` has index i + 1."""

    names: tuple[str, ...]
    colours: tuple[Colour, ...]

    def index(self, name: str) -> int:
        return self.names.index(name) + 1

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
                "Train with it among the config's `classes`, or rename it with `[annotations] "
                "rename`: a name that ends in * is ignored.",
            )
        return {name: self.index(name) for name in names} | dict.fromkeys(background, BACKGROUND)

    def __len__(self) -> int:
        """Number of classes with background."""
        return len(self.names) + 1


class Labels(Protocol):
    """What is known of a slide's pixels, from polygons or from an index mask."""

    @property
    def path(self) -> Path: ...
    @property
    def report(self) -> AnnotationReport:
        """What is learnt from the file, and what is not."""
        ...

    def classes(self) -> Mapping[str, Colour | None]:
        """Names in use with their colours, without ignored ones, regions and background."""
        ...

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Class indices of `box` (pixels of `frame`) by pixel centres.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide.

        Raises:
            PathosegError: A class is not in `classes`.
        """
        ...


def is_background(class_name: str) -> bool:
    """Whether a class of this name is index 0, unless a model has it among its classes."""
    return class_name.casefold() == _BACKGROUND_NAME


def is_ignored(class_name: str) -> bool:
    """Whether regions of a class of this name say nothing of what they show."""
    return class_name.endswith(_IGNORED_SUFFIX)


def quoted(names: Iterable[str]) -> str:
    """Names as they are told: "a", "b"."""
    return ", ".join(f'"{name}"' for name in names)
