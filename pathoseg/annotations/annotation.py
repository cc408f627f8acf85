"""An outlined region with its class, the table of classes, and the Labels protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame

BACKGROUND = 0
IGNORE = 255
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
                f"{path} has regions of class {_quoted(unknown)}, beside the classes of this run: "
                f"{_quoted(self.names)}.",
                "Train with it among the config's `classes`, or rename it with `[annotations] "
                "rename`: a name that ends in * is ignored.",
            )
        return {name: self.index(name) for name in names} | dict.fromkeys(background, BACKGROUND)

    def __len__(self) -> int:
        """Number of classes with background."""
        return len(self.names) + 1


class Labels(Protocol):
    """The labels of one slide, read from polygons or from an index mask."""

    @property
    def path(self) -> Path: ...

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
    """Return True if a class of this name is index 0, unless a model lists it among its classes."""
    return class_name.casefold() == _BACKGROUND_NAME


def is_ignored(class_name: str) -> bool:
    """Return True if pixels of a class of this name are left out of training and evaluation."""
    return class_name.endswith(_IGNORED_SUFFIX)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
