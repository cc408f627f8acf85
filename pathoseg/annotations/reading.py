"""Finds and reads the annotations of a slide, and gathers the classes of many."""

from __future__ import annotations

import colorsys
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import shapely

from pathoseg.annotations import asap_xml, imagescope_xml
from pathoseg.annotations.annotation import (
    IGNORE,
    UNCLASSIFIED,
    Annotation,
    AnnotationFile,
    AnnotationReport,
    ClassTable,
    Colour,
    Labels,
    PassedOver,
    is_background,
    quoted,
)
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_file import MASK_SUFFIXES, mask_files
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.qupath_geojson import read_geojson
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.regions_of_interest import RegionOfInterest, regions_on_slide
from pathoseg.annotations.xml_file import root_tag
from pathoseg.errors import PathosegError, first_names
from pathoseg.geometry import Size
from pathoseg.platform_support import composed, find_file, spellings

_GEOJSON = (".geojson", ".geojson.gz")
_OUTLINES = (".geojson", ".geojson.gz", ".json", ".xml")

# More are seldom meant: instances or free-text names look like this.
_MOST_UNNAMED = 32

_MOST_COMPARED = 50_000  # pairs of names, by their letters: about a second


def find_annotation(slide: Path, folder: Path | None) -> Path | None:
    """The annotation file of a slide, or None.

    It lies in `folder`, beside the slide where that is None, and is named like the slide, with its
    suffix or without: of `X.svs`, `X.geojson` or `X.svs.geojson`; likewise
    `.geojson.gz`, `.json`, `.xml`, `_mask.png`, `_mask.tif` and `_mask.ome.tif`, in another folder
    than the slide's also `X.png` and `X.tif`. A mask's suffix may be in capitals. Of `X.ome.tif`, X
    is `X.ome` or `X`. Letters may be composed (NFC) in one name and decomposed (NFD) in the other.

    Raises:
        PathosegError: There are several.
    """
    place = folder or slide.parent
    names = [stem + suffix for stem in _stems(slide) for suffix in _OUTLINES]
    found = [file for name in names if (file := find_file(place, name))]
    found += mask_files(place, [f"{stem}_mask" for stem in _stems(slide)])
    if place.resolve() != slide.parent.resolve():
        found += mask_files(place, _stems(slide))
    if len(found) > 1:
        raise PathosegError(
            f"{slide} has several annotation files: {', '.join(map(str, found))}.",
            "Keep the one that counts, or give a folder of its own to it with --annotations.",
        )
    return found[0] if found else None


def annotation_of(
    name: str, slide: Path, folder: Path | None, used: dict[Path, Path]
) -> Path | None:
    """Return the annotation file of a slide, or None.

    It lies in the folder of annotations, first in the folder inside it where the slide is in that
    of slides.

    Args:
        name: The slide's, with folders between slashes.
        slide: Its file.
        folder: That of annotations; None means beside the slide.
        used: Annotation → the file of the slide whose it is; this one is added.

    Raises:
        PathosegError: There are several, or it is another slide's.
    """
    within, found = PurePosixPath(name).parent, None
    if folder is not None and within.parts:
        mirrored = (folder / each for each in spellings(str(within)))
        if (place := next(filter(Path.is_dir, mirrored), None)) is not None:
            found = find_annotation(slide, place)
    found = found or find_annotation(slide, folder)
    file = slide.resolve()
    if found is not None and (other := used.setdefault(found.resolve(), file)) != file:
        raise PathosegError(
            f"{found} would be the annotation of both {other} and {slide}.",
            "Put annotations beside the slides, or into folders that are called like those that "
            "the slides are in.",
        )
    return found


def stray_annotations(folder: Path, slides: Sequence[Path]) -> dict[Path, Path | None]:
    """Return the files of outlines that belong to no slide → the slide each is named most like.

    Of very many files, the first ones are compared with all slides by their letters, the others by
    how their names begin.

    Args:
        folder: Where to look, without the folders inside it.
        slides: All slides, also those whose annotations lie elsewhere.
    """
    stems = {composed(stem): slide for slide in slides for stem in _stems(slide)}
    by_name = {stem.casefold(): slide for stem, slide in stems.items()}
    own = {stem + suffix for stem in stems for suffix in _OUTLINES}
    strays = dict[Path, Path | None]()
    left = _MOST_COMPARED
    for path in sorted(folder.iterdir()):
        written = composed(path.name)
        name = written.casefold()
        suffix = next((suffix for suffix in _OUTLINES if name.endswith(suffix)), None)
        if suffix is None or name.startswith(".") or written in own:
            continue
        left -= len(by_name)
        near = _nearest(name.removesuffix(suffix), by_name, by_letters=left >= 0)
        # JSON and XML may be anything.
        if path.is_file() and (near is not None or suffix in _GEOJSON):
            strays[path] = near
    return strays


def _stems(slide: Path) -> dict[str, None]:
    """The names that an annotation file of a slide may have before its suffix."""
    return dict.fromkeys((slide.name, slide.stem, slide.stem.removesuffix(".ome")))


def _nearest(name: str, slides: Mapping[str, Path], by_letters: bool) -> Path | None:
    """Return the slide whose name begins like `name` or, `by_letters`, differs in a few, if any."""
    close = [other for other in slides if name.startswith(other) or other.startswith(name)]
    if by_letters and not close:
        close = difflib.get_close_matches(name, slides, n=1, cutoff=0.8)
    return slides[max(close, key=len)] if close and name else None


def read_labels(
    path: Path, slide_size: Size, origin: tuple[int, int], options: AnnotationOptions
) -> Labels:
    """Read an annotation file of any kind, known by its suffix and, for XML, its content.

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
    if path.name.lower().endswith(MASK_SUFFIXES):
        return MaskLabels(path, slide_size, options)
    annotations, passed_over, classes = _read_outlines(path, slide_size, origin, options)
    return PolygonLabels(path, annotations, slide_size, options, passed_over, classes)


def read_regions_of_interest(
    path: Path, slide_size: Size, origin: tuple[int, int], options: AnnotationOptions
) -> tuple[list[RegionOfInterest], int]:
    """Read the regions of interest of an annotation file.

    Args:
        path: As for `read_labels`; a mask has none.
        slide_size: Likewise.
        origin: Likewise.
        options: Likewise.

    Returns:
        The regions, in the order of the file, and the number of those that lie off the slide.

    Raises:
        PathosegError: As `read_labels`.
    """
    if path.name.lower().endswith(MASK_SUFFIXES):
        return [], 0
    annotations, *_ = _read_outlines(path, slide_size, origin, options)
    marked = [region for region in annotations if options.is_roi(region.class_name or "")]
    found = regions_on_slide(marked, slide_size)
    return found, len(marked) - len(found)


def _read_outlines(
    path: Path, slide_size: Size, origin: tuple[int, int], options: AnnotationOptions
) -> tuple[list[Annotation], Counter[str], set[str]]:
    """Return the outlines of a file in the slide's frame, and of the rest the number by kind.

    The class names that the file has come third.
    """
    name = path.name.lower()
    if name.endswith(".xml"):
        file, frame = _read_xml(path, options), "full"
    elif name.endswith(_OUTLINES):
        file, frame = read_geojson(path), "bounds"
    else:
        raise PathosegError(
            f"{path} is no annotation that pathoseg reads.",
            "Give GeoJSON from QuPath, XML from ASAP or ImageScope, or a PNG or TIFF mask.",
        )
    if options.frame != "auto":
        frame = options.frame
    shift = origin if frame == "full" else (0, 0)
    annotations = [_understood(one, shift, options) for one in file.annotations]
    _refuse_outside(path, annotations, slide_size, frame, options)
    _refuse_unclear(path, annotations, file.passed_over, options)
    passed_over = Counter[str]()
    for kind, count in file.passed_over.items():
        passed_over[kind.what] += count
    drawn = {region.class_name for region in file.annotations}
    drawn |= {kind.class_name for kind in file.passed_over}
    classes = {composed(name) for name in drawn if name is not None}
    if file.annotations and not classes:
        classes = {UNCLASSIFIED}
    return annotations, passed_over, classes


def _understood(
    region: Annotation, shift: tuple[int, int], options: AnnotationOptions
) -> Annotation:
    """A region with the run's name of its class, in the slide's frame."""
    name, geometry = options.renamed(region.class_name), region.geometry
    if name is None and options.unclassified not in ("ignore", "skip", "refuse"):
        name = options.unclassified
    if shift != (0, 0):
        geometry = shapely.transform(geometry, lambda xy: xy - shift)
    return replace(region, geometry=geometry, class_name=name)


def _refuse_unclear(
    path: Path,
    annotations: Sequence[Annotation],
    passed_over: Iterable[PassedOver],
    options: AnnotationOptions,
) -> None:
    """Refuse regions without a class where that is wished, and regions of interest of no area."""
    unclassified = sum(region.class_name is None for region in annotations)
    if unclassified and options.unclassified == "refuse":
        raise PathosegError(
            f"{path} has outlines without a class: {unclassified} of {len(annotations)}.",
            "Give them one in the program that drew them, or set `[annotations] unclassified` to "
            '"ignore" or to the class that they are.',
        )
    names = (options.renamed(kind.class_name) for kind in passed_over)
    empty = any(name is not None and options.is_roi(name) for name in names)
    if empty and not any(options.is_roi(region.class_name or "") for region in annotations):
        raise PathosegError(
            f"The region of interest in {path} encloses no area.",
            "Draw it as a rectangle or an outline, or delete it: then all of the slide counts.",
        )


def _read_xml(path: Path, options: AnnotationOptions) -> AnnotationFile:
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
    """Refuse annotations of another slide or frame; a few strays beside the slide may be."""
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


def class_table(
    labels: Sequence[Labels], wanted: tuple[str, ...] | None, others: Iterable[Colour] = ()
) -> ClassTable:
    """The classes of a run: those wanted, or all that are in use, sorted, numbers by value.

    Where nothing has a class, outlines without one are of the one class "annotation". A colour is
    the first that a file gives to the class, unless another class has it already; the rest get
    colours of their own.

    Args:
        labels: Of all slides.
        wanted: The classes in their order; None is all that are in use.
        others: Colours that no class may have.

    Raises:
        PathosegError: No class is in use, more than 254 are wanted, or one twice, or background,
            more than 32 are in use and none is named, or classes are wanted and no outline has any.
    """
    if listed := [name for name in wanted or () if is_background(name)]:
        raise PathosegError(
            f'The config names the class "{listed[0]}"; background is index 0 and is not listed.',
            "Leave it out of `[data] classes`: what is drawn as background, and 0 in masks, is it "
            "all the same.",
        )
    colours: dict[str, Colour | None] = {}
    for one in labels:
        for name, colour in one.classes().items():
            colours[name] = colours.get(name) or colour
    if not colours:
        colours = {one.report.fallback: None for one in labels if one.report.unclassified}
        if wanted and colours and not colours.keys() & set(wanted):
            count = sum(one.report.unclassified for one in labels)
            raise PathosegError(
                f"None of the {count} outlines has a class; the config names {quoted(wanted)}.",
                f'Say what they are: `[annotations] unclassified = "{wanted[0]}"`.',
            )
    is_empty = bool(labels) and not colours
    names = tuple(sorted(colours, key=_natural)) if wanted is None else wanted
    if is_empty or not names:
        raise PathosegError(
            "The annotations hold no region of any class.",
            "Annotate at least one region, or see whether --annotations is the right folder.",
        )
    if wanted is None and len(names) > _MOST_UNNAMED:
        raise PathosegError(
            f"The annotations use {len(names)} classes, {names[0]} to {names[-1]}.",
            "Name those to learn in `[data] classes`. If the values of masks number objects, "
            'set `[annotations] mask = "binary"` to learn where there are any, or "instances" to '
            "separate them.",
        )
    most = IGNORE - 1
    if len(names) > most or len(set(names)) < len(names):
        raise PathosegError(
            f"The config names {len(names)} classes; {most} are possible, no two of one name.",
            "Correct `[data] classes`.",
        )
    taken = [*others]
    for name in names:
        own = colours.get(name)
        taken.append(own if own and own not in taken else _fresh_colour(taken))
    return ClassTable(names, tuple(taken[len(taken) - len(names) :]))


def what_is_left_out(
    reports: Iterable[AnnotationReport], strays: Mapping[Path, Path | None], classes: ClassTable
) -> list[str]:
    """Describe what annotations hold and training leaves out, a sentence for each kind.

    Args:
        reports: What was read of each file.
        strays: Files that belong to no slide → the slide each is named most like.
        classes: The classes of the run.
    """
    found = defaultdict[str, dict[Path, int]](dict)
    for one in reports:
        for what, count in one.passed_over.items():
            found[what][one.path] = count
        if one.unclassified and one.fallback not in classes.names:
            found[_WITHOUT_CLASS][one.path] = one.unclassified
    lines = [
        f"{what[0].upper()}{what[1:]}: {sum(counts.values())} not used, in {_files(list(counts))}."
        + (_SAY_WHAT if what == _WITHOUT_CLASS else "")
        for what, counts in found.items()
    ]
    if strays:
        named = [
            path.name if near is None else f"{path.name} (like {near.name})"
            for path, near in strays.items()
        ]
        lines.append(f"Annotations without a slide of their name: {first_names(named)}.")
    return lines


def what_is_limited(reports: Iterable[AnnotationReport]) -> list[str]:
    """Describe which slides have regions of interest, and which no outline that counts."""
    limited, empty = list[Path](), list[Path]()
    for one in reports:
        if one.of_interest:
            limited.append(one.path)
        elif not (one.outlines or one.unclassified or one.is_mask):
            empty.append(one.path)
    lines = []
    if limited:
        lines.append(f"Regions of interest in {_files(limited)}: outside is not known.")
    if empty:
        lines.append(
            f"No outline counts in {_files(empty)}: all of the slide is unlabelled, which is "
            "background unless [annotations] unlabelled says otherwise."
        )
    return lines


def unknown_names(labels: Collection[Labels], rename: Mapping[str, str]) -> list[str]:
    """Describe which keys of `[annotations] rename` no file has, a sentence each.

    Args:
        labels: Of all slides.
        rename: Names of classes in files → names in the run.
    """
    if not rename:
        return []
    classes = sorted({name for one in labels for name in one.file_classes()})
    lines = []
    for missing in (name for name in rename if name not in classes):
        nearest = sorted(classes, key=partial(_likeness, missing), reverse=True)
        there_are = first_names([quoted([name]) for name in nearest]) or "none"
        lines.append(
            "[annotations] rename: no annotation that can be read has a class "
            f"{quoted([missing])}; there are {there_are}."
        )
    return lines


def colour_names(classes: ClassTable) -> list[str]:
    """Describe which classes are called by their colour, as layers of ImageScope may be."""
    coloured = [name for name in classes.names if _COLOUR.fullmatch(name)]
    if not coloured:
        return []
    told = f"Without a name, and called by their colour, are the classes {quoted(coloured)}."
    return [f'{told} `[annotations] rename = {{ "{coloured[0]}" = "tumour" }}` names one.']


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.casefold(), other.casefold()).ratio()


_WITHOUT_CLASS = "outlines without a class"
_SAY_WHAT = " [annotations] unclassified can say what they are."
_COLOUR = re.compile("#[0-9A-Fa-f]{6}")  # as `imagescope_xml` writes it


def _files(paths: Sequence[Path]) -> str:
    count = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    return f"{count} ({first_names([path.name for path in paths])})"


def _natural(name: str) -> list[str | int]:
    """A sort key by which "class 10" follows "class 9"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _fresh_colour(taken: list[Colour]) -> Colour:
    """A bright colour; hues a golden section apart never come close again.

    The first are cyan and amber: red, pink and violet are those of the tissue.
    """
    step = len(taken)
    while True:
        red, green, blue = colorsys.hsv_to_rgb((0.5 + step * 0.618034) % 1, 0.75, 0.9)
        colour = round(red * 255), round(green * 255), round(blue * 255)
        if colour not in taken:
            return colour
        step += 1
