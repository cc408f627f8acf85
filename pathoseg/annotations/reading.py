"""Finds and reads the annotations of a slide, and gathers the classes of many."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import shapely

from pathoseg.annotations import asap_xml, imagescope_xml
from pathoseg.annotations.annotation import IGNORE, Annotation, ClassTable, Colour, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.qupath_geojson import read_geojson
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.xml_file import root_tag
from pathoseg.errors import PathosegError
from pathoseg.geometry import Size

_OUTLINES = (".geojson", ".geojson.gz", ".json", ".xml")
_MASKS = (".png", ".tif", ".tiff")

# More are seldom meant: instances or free-text names look like this.
_MOST_UNNAMED = 32


def find_annotation(slide: Path, folder: Path | None) -> Path | None:
    """The annotation file of a slide, or None.

    It lies beside the slide or, where `folder` is given, there, and is named like the slide
    without its suffix: `X.geojson`, `X.geojson.gz`, `X.json`, `X.xml`, `X_mask.png`,
    `X_mask.tif`; in another folder than the slide's also `X.png` and `X.tif`. Of `X.ome.tif`, X is
    `X.ome` or `X`.

    Raises:
        PathosegError: There are several.
    """
    place = slide.parent if folder is None else folder
    suffixes = [*_OUTLINES, *(f"_mask{suffix}" for suffix in _MASKS)]
    if place.resolve() != slide.parent.resolve():
        suffixes += _MASKS
    stems = dict.fromkeys((slide.stem, slide.stem.removesuffix(".ome")))
    names = [stem + suffix for stem in stems for suffix in suffixes]
    found = [place / name for name in names if (place / name).is_file()]
    if len(found) > 1:
        raise PathosegError(
            f"{slide} has several annotation files: {', '.join(map(str, found))}.",
            "Keep the one that counts, or give a folder of its own to it with --annotations.",
        )
    return found[0] if found else None


def read_labels(
    path: Path, slide_size: Size, origin: tuple[int, int], options: AnnotationOptions
) -> Labels:
    """Reads an annotation file of any kind, known by its suffix and, for XML, its content.

    Args:
        path: GeoJSON (gzipped or not), ASAP or ImageScope XML, or a PNG or TIFF mask.
        slide_size: Level-0 pixels of the slide's frame.
        origin: Where that frame's (0, 0) lies in the uncropped level 0.
        options: How the file is understood; the frame matters to outlines only, a mask covers
            the slide's own frame.

    Raises:
        PathosegError: The file is of no known kind, malformed, a bomb, or most of its regions lie
            wholly outside the slide.
    """
    name = path.name.lower()
    if name.endswith(_MASKS):
        return MaskLabels(path, slide_size, options)
    if name.endswith(".xml"):
        annotations, frame = _read_xml(path, options), "full"
    elif name.endswith(_OUTLINES):
        annotations, frame = read_geojson(path), "bounds"
    else:
        raise PathosegError(
            f"{path} is no annotation that pathoseg reads.",
            "Give GeoJSON from QuPath, XML from ASAP or ImageScope, or a PNG or TIFF mask.",
        )
    if options.frame != "auto":
        frame = options.frame
    if frame == "full" and origin != (0, 0):
        annotations = [
            replace(region, geometry=shapely.transform(region.geometry, lambda xy: xy - origin))
            for region in annotations
        ]
    annotations = [replace(one, class_name=options.renamed(one.class_name)) for one in annotations]
    _refuse_outside(path, annotations, slide_size, frame, options)
    return PolygonLabels(path, annotations, slide_size, options)


def _read_xml(path: Path, options: AnnotationOptions) -> list[Annotation]:
    root = root_tag(path)
    if root == asap_xml.ROOT:
        return asap_xml.read_asap(path, options.exclude)
    if root == imagescope_xml.ROOT:
        return imagescope_xml.read_imagescope(path)
    raise PathosegError(
        f"{path} is XML, but from neither ASAP nor ImageScope: its outermost element is <{root}>.",
        "Export the annotations from ASAP, ImageScope, or as GeoJSON from QuPath.",
    )


def _refuse_outside(
    path: Path,
    annotations: list[Annotation],
    slide_size: Size,
    frame: str,
    options: AnnotationOptions,
) -> None:
    """Refuses annotations of another slide or frame; a few strays beside the slide may be."""
    slide = shapely.box(0, 0, slide_size.width, slide_size.height)

    def lie_outside(regions: list[Annotation]) -> int:
        return sum(not slide.intersects(region.geometry) for region in regions)

    of_interest = [region for region in annotations if options.is_roi(region.class_name or "")]
    outside = lie_outside(annotations)
    size = f"{slide_size.width} × {slide_size.height} px"
    if 2 * outside > len(annotations):
        problem = f"{outside} of the {len(annotations)} regions in {path} lie wholly outside their "
        problem += f"slide of {size}."
    elif of_interest and lie_outside(of_interest) == len(of_interest):
        problem = f"No region of interest in {path} lies on its slide of {size}."
    else:
        return
    other = "bounds" if frame == "full" else "full"
    raise PathosegError(
        problem,
        "See whether the file belongs to this slide, with coordinates in level-0 pixels; for "
        f'a slide that is cropped to its bounds, try `[annotations] frame = "{other}"`.',
    )


def class_table(labels: Iterable[Labels], wanted: tuple[str, ...] | None) -> ClassTable:
    """The classes of a run: those wanted, or all that are in use, sorted, numbers by value.

    A colour is the first that a file gives to the class, unless another class has it already;
    the rest get colours of their own.

    Raises:
        PathosegError: No class is in use, more than 254 are wanted, or one twice, or more than 32
            are in use and none is named.
    """
    colours: dict[str, Colour | None] = {}
    for one in labels:
        for name, colour in one.classes().items():
            colours[name] = colours.get(name) or colour
    names = tuple(sorted(colours, key=_natural)) if wanted is None else wanted
    if not names:
        raise PathosegError(
            "The annotations hold no region of any class.",
            "Annotate at least one region, or see whether --annotations is the right folder.",
        )
    if wanted is None and len(names) > _MOST_UNNAMED:
        raise PathosegError(
            f"The annotations use {len(names)} classes, {names[0]} to {names[-1]}.",
            "Name those to learn in the config's `classes`. If the values of masks number "
            'instances, set `[annotations] mask = "binary"`.',
        )
    most = IGNORE - 1
    if len(names) > most or len(set(names)) < len(names):
        raise PathosegError(
            f"The config names {len(names)} classes; {most} are possible, no two of one name.",
            "Correct the config's `classes`.",
        )
    taken: list[Colour] = []
    for name in names:
        own = colours.get(name)
        taken.append(own if own and own not in taken else _fresh_colour(taken))
    return ClassTable(names, tuple(taken))


def _natural(name: str) -> list[str | int]:
    """A sort key by which "class 10" follows "class 9"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _fresh_colour(taken: list[Colour]) -> Colour:
    """A bright colour; hues a golden section apart never come close again."""
    step = len(taken)
    while True:
        red, green, blue = colorsys.hsv_to_rgb(step * 0.618034 % 1, 0.75, 0.9)
        colour = round(red * 255), round(green * 255), round(blue * 255)
        if colour not in taken:
            return colour
        step += 1
