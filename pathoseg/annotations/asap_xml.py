"""Reads the XML of ASAP, whose groups are classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shapely import MultiPolygon, Polygon

from pathoseg.annotations.annotation import Annotation, AnnotationFile, Colour, PassedOver
from pathoseg.annotations.outline import WITHOUT_AREA, cut_out, refuse_without_area, region
from pathoseg.annotations.xml_file import colour, number, read_xml
from pathoseg.platform_support import composed

ROOT = "ASAP_Annotations"

_WITHOUT_AREA = {"dot": "points", "pointset": "points", "measurement": "lines"}


def read_asap(path: Path, exclude: Collection[str]) -> AnnotationFile:
    """The regions of an ASAP file, in level-0 pixels of the uncropped slide.

    A region's class is the group it stands in; None where it stands in no group. Splines are
    taken as the polygon through their control points; dots and measurements have no area and
    are passed over and counted.

    Args:
        path: The file.
        exclude: Names of groups, in any case, that are cut out of all other regions, and with
            them the groups inside them.

    Raises:
        PathosegError: The file is malformed, or holds outlines but none with an area.
    """
    file = _AsapFile()
    read_xml(path, file)
    unwanted = {composed(name).casefold() for name in exclude}
    annotations: list[Annotation] = []
    holes: list[Polygon | MultiPolygon] = []
    passed_over = Counter[PassedOver]()
    for outline in file.outlines:
        if not (area := outline.region):
            passed_over[PassedOver(outline.without_area or WITHOUT_AREA, outline.group)] += 1
            continue
        if any(composed(name).casefold() in unwanted for name in file.lineage(outline.group)):
            holes.append(area)
        else:
            own = file.groups.get(outline.group or "")
            shade = (own and own.colour) or outline.colour
            annotations.append(Annotation(area, outline.group, shade))
    refuse_without_area(path, len(file.outlines), len(annotations) + len(holes))
    return AnnotationFile(cut_out(annotations, holes), passed_over)


@dataclass(slots=True)
class _Outline:
    group: str | None
    colour: Colour | None
    without_area: str | None
    corners: list[tuple[float, float, float]] = field(default_factory=list)
    region: Polygon | MultiPolygon | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    parent: str | None
    colour: Colour | None


class _AsapFile:
    """Collects outlines and groups; outlines come before the groups they stand in."""

    def __init__(self) -> None:
        self.outlines: list[_Outline] = []
        self.groups: dict[str, _Group] = {}
        self._enclosing: list[str] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "Coordinate":
            if not self.outlines:
                raise ValueError("a Coordinate stands outside of all Annotations")
            corners = self.outlines[-1].corners
            order = number(attributes.get("Order", str(len(corners))))
            corners.append((order, number(attributes["X"]), number(attributes["Y"])))
        elif tag == "Annotation":
            without_area = _WITHOUT_AREA.get(attributes.get("Type", "").lower())
            group, shade = _group_name(attributes), colour(attributes.get("Color", ""))
            self.outlines.append(_Outline(group, shade, without_area))
        elif tag == "Group":
            name = attributes["Name"].strip()
            parent = _group_name(attributes) or next(reversed(self._enclosing), None)
            self.groups[name] = _Group(parent, colour(attributes.get("Color", "")))
            self._enclosing.append(name)

    def end(self, tag: str) -> None:
        if tag == "Annotation":
            outline = self.outlines[-1]
            if outline.without_area is None:
                # By Order alone, as some programs write the same one for all corners.
                corners = sorted(outline.corners, key=lambda corner: corner[0])
                outline.region = region([[corner[1:] for corner in corners]])
            outline.corners.clear()
        elif tag == "Group":
            self._enclosing.pop()

    def lineage(self, group: str | None) -> Iterator[str]:
        """A group and all that it stands in, from the inside out."""
        seen = set()
        while group and group not in seen:
            yield group
            seen.add(group)
            group = self.groups[group].parent if group in self.groups else None


def _group_name(attributes: dict[str, str]) -> str | None:
    name = attributes.get("PartOfGroup", "").strip()
    return None if name in ("", "None") else name
