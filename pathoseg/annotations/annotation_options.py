"""Options of reading annotation files, without a heavy import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pathoseg.errors import PathosegError
from pathoseg.platform_support import composed


@dataclass(frozen=True, slots=True)
class AnnotationOptions:
    """Options of reading annotation files.

    Attributes:
        frame: What (0, 0) is in files of outlines: the corner of the slide's "bounds", as QuPath
            counts, or of the "full" scan, as ASAP and ImageScope count. "auto" takes the habit of
            the program that wrote the file. Only slides with bounds (MRXS) tell them apart.
        exclude: ASAP groups, in any case, that are cut out of all other regions.
        mask: What the values of a mask image are: "indices" of classes (255 is ignored), "binary",
            where whatever is above 0 is class 1 (a map of instances counts as such), or
            "instances", numbers of objects: all class 1, or of the class that covers most of each
            in `X_classes.png` or `.tif`, a mask of indices beside `X_mask.png`.
        mask_ignore: Values of "instances" that are no object, such as 255 or 65535: what is there
            is unknown.
        rename: Names of classes in annotation files → names in the run, such as "Tumor" → "tumour".
            Values of masks are called "class 1", "class 2"…. Several classes may get one name;
            one that ends in * is ignored.
        roi: Classes, in any case and by their names in the run, whose outlines are regions of
            interest: inside them what nobody outlined is background, outside them nothing is known.
            A slide without one was annotated everywhere.
        unlabelled: What nobody outlined is "background", or, where annotations are sparse strokes,
            "ignore"d everywhere; background is then drawn as the class "background".
        unclassified: What outlines without a class are: "ignore" makes their insides unknown where
            no outline with a class covers them, "skip" takes them for not drawn, "refuse" refuses
            the file, any other text is their class. One that contains outlines with a class is
            not used; where no outline has any class, all are of the class "annotation".
        labels: Which class a pixel of a label has: that which covers most of it ("majority"), or
            that of its "centre", as runs had it until format 1.

    Raises:
        PathosegError: A class is given no name, or outlines without one are; or values are ignored
            that cannot be.
    """

    frame: Literal["auto", "bounds", "full"] = "auto"
    exclude: tuple[str, ...] = ("exclusion", "_2")
    mask: Literal["indices", "binary", "instances"] = "indices"
    mask_ignore: tuple[int, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    roi: tuple[str, ...] = ("Region*", "ROI", "Region")
    unlabelled: Literal["background", "ignore"] = "background"
    unclassified: str = "ignore"
    labels: Literal["majority", "centre"] = "majority"

    def __post_init__(self) -> None:
        if not self.unclassified or self.unclassified != self.unclassified.strip():
            raise PathosegError(
                f'[annotations] unclassified = "{self.unclassified}" is no name of a class.',
                'Write "ignore", "skip", "refuse", or a class without blanks around it.',
            )
        if self.mask_ignore and (self.mask != "instances" or min(self.mask_ignore) < 1):
            raise PathosegError(
                f"[annotations] mask_ignore = {list(self.mask_ignore)} ignores no numbers of "
                "objects.",
                'Give numbers from 1, with `mask = "instances"`; of "indices", 255 is ignored.',
            )
        # Names are compared composed, whichever system wrote them.
        rename = {composed(old): composed(new) for old, new in self.rename.items()}
        object.__setattr__(self, "rename", rename)
        object.__setattr__(self, "roi", tuple(map(composed, self.roi)))
        object.__setattr__(self, "unclassified", composed(self.unclassified))
        for old, new in self.rename.items():
            if not new or new != new.strip():
                raise PathosegError(
                    f'[annotations] rename gives the class "{old}" the name "{new}".',
                    "Give it one without blanks around it; one that ends in * is ignored.",
                )

    def renamed(self, class_name: str | None) -> str | None:
        """The run's name of a class in a file."""
        name = None if class_name is None else composed(class_name)
        return None if name is None else self.rename.get(name, name)

    def is_roi(self, class_name: str) -> bool:
        """Return True if outlines of this class, renamed already, are regions of interest."""
        return composed(class_name).casefold() in {name.casefold() for name in self.roi}

    def for_classes(self, names: Iterable[str]) -> AnnotationOptions:
        """Return these options with no region of interest that is one of a model's classes.

        Args:
            names: The model's classes; upper and lower case are the same.
        """
        learnt = {composed(name).casefold() for name in names}
        return replace(self, roi=tuple(name for name in self.roi if name.casefold() not in learnt))
