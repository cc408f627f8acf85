"""Reads the XML of Aperio ImageScope, whose layers are classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.annotations.annotation import Annotation, AnnotationFile, Colour, PassedOver
from pathoseg.annotations.outline import WITHOUT_AREA, cut_out, refuse_without_area, region
from pathoseg.annotations.xml_file import number, read_xml

ROOT = "Annotations"

_POLYGON, _RECTANGLE, _ELLIPSE = "0", "1", "2"
# A column that ImageScope gives to every layer, so its name says nothing of the class.
_DEFAULT_ATTRIBUTE = "Description"


def read_imagescope(path: Path) -> AnnotationFile:
    """The regions of an ImageScope file, in level-0 pixels of the uncropped slide.

    A region's class is its layer's Name, else the layer's Attribute (its Value, else its Name),
    else the region's Text, else the layer's LineColor as #RRGGBB. Negative regions
    (NegativeROA="1") are holes of all regions of their layer. Rulers, arrows and points have no
    area and are passed over and counted.

    Raises:
        PathosegError: The file is malformed, or holds regions but none with an area.
    """
    file = _ImageScopeFile()
    read_xml(path, file)
    annotations = [annotation for layer in file.layers for annotation in layer.annotations()]
    refuse_without_area(path, file.regions, len(annotations))
    passed_over = Counter[PassedOver]()
    for layer in file.layers:
        passed_over.update(
            PassedOver(what, layer.class_of(text)) for what, text in layer.passed_over
        )
    return AnnotationFile(annotations, passed_over)


@dataclass(slots=True)
class _Layer:
    name: str
    colour: Colour
    attributes: list[str] = field(default_factory=list)
    positive: list[tuple[str, Polygon | MultiPolygon]] = field(default_factory=list)
    negative: list[Polygon | MultiPolygon] = field(default_factory=list)
    passed_over: list[tuple[str, str]] = field(default_factory=list)

    def class_of(self, text: str) -> str:
        """The class of a region with this text."""
        named = self.name or next(iter(self.attributes), "")
        return named or text or "#{:02X}{:02X}{:02X}".format(*self.colour)

    def annotations(self) -> list[Annotation]:
        regions = [
            Annotation(area, self.class_of(text), self.colour) for text, area in self.positive
        ]
        return cut_out(regions, self.negative)


@dataclass(slots=True)
class _Region:
    kind: str
    negative: bool
    text: str
    corners: list[tuple[float, float]] = field(default_factory=list)

    def area(self) -> Polygon | MultiPolygon | None:
        if self.corners and self.kind == _ELLIPSE and len(self.corners) <= 4:
            return region([_ellipse(self.corners)])
        if self.kind == _RECTANGLE and len(self.corners) == 2:
            (left, top), (right, bottom) = self.corners
            return region([[(left, top), (right, top), (right, bottom), (left, bottom)]])
        return region([self.corners])


class _ImageScopeFile:
    """Collects layers; a layer's attributes may come before or after its regions."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self.regions = 0
        self._region: _Region | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in ("Attribute", "Region") and not self.layers:
            raise ValueError(f"the {tag} stands outside of all Annotations")
        if tag == "Vertex" and self._region:
            self._region.corners.append((number(attributes["X"]), number(attributes["Y"])))
        elif tag == "Annotation":
            packed = int(number(attributes.get("LineColor") or "0"))
            shade = packed & 255, packed >> 8 & 255, packed >> 16 & 255  # Windows' order: BGR
            self.layers.append(_Layer(attributes.get("Name", "").strip(), shade))
        elif tag == "Attribute" and not self._region:
            name, value = attributes.get("Name", "").strip(), attributes.get("Value", "").strip()
            if value or name not in ("", _DEFAULT_ATTRIBUTE):
                self.layers[-1].attributes.append(value or name)
        elif tag == "Region":
            self.regions += 1
            self._region = _Region(
                kind=attributes.get("Type", "0"),
                negative=attributes.get("NegativeROA") == "1",
                text=attributes.get("Text", "").strip(),
            )

    def end(self, tag: str) -> None:
        if tag == "Region" and self._region:
            layer = self.layers[-1]
            if area := self._region.area():
                if self._region.negative:
                    layer.negative.append(area)
                else:
                    layer.positive.append((self._region.text, area))
            else:
                drawn = self._region.kind in (_POLYGON, _RECTANGLE, _ELLIPSE)
                what = WITHOUT_AREA if drawn else "rulers, arrows and points"
                layer.passed_over.append((what, self._region.text))
            self._region = None


def _ellipse(bounding: ArrayLike) -> NDArray[np.float64]:
    """256 corners of the upright ellipse that touches the box around `bounding`."""
    corners = np.asarray(bounding, dtype=np.float64)
    low, high = corners.min(axis=0), corners.max(axis=0)
    angle = np.linspace(0, 2 * np.pi, 256, endpoint=False)
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    ellipse: NDArray[np.float64] = (low + high) / 2 + circle * (high - low) / 2
    return ellipse
