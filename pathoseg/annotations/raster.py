"""Labels from outlined regions: which class covers most of each pixel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    TOUCHING,
    UNCLASSIFIED,
    Annotation,
    AnnotationReport,
    ClassTable,
    Colour,
    is_background,
    is_ignored,
)
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.coverage import (
    INTEREST,
    Ints,
    Steps,
    counted,
    ignore_outside,
    most_covered,
    most_covering,
    object_value,
    pixel_centres,
    rows_at_once,
    units_on_slide,
)
from pathoseg.annotations.edges import Edges, Geometries
from pathoseg.annotations.object_colours import colours, near_outlines
from pathoseg.annotations.outline import areal
from pathoseg.annotations.scan_conversion import paint_centres
from pathoseg.geometry import Box, Frame, Size

_LONG = 500  # corners; of longer outlines, the neighbourhood is enough
_MOST_CORNERS = 2**20  # of outlines that are painted at once
_SHARE_HELD = 0.99  # of the area of a region that another one holds
_SLIVER = 1e-6  # level-0 pixels: neighbours that share an edge overlap by rounding


class PolygonLabels:
    """Regions of one slide; where they overlap the smaller one shows, so nested ones do.

    Classes whose names end in * are ignored (255). Regions without a class lie below all others and
    are ignored, too, unless the run has the class that they are of where nothing has a class; those
    that hold others say where somebody looked, and nothing else. Where there are regions of
    interest, all outside of them is ignored.

    What is painted over is taken away from what lies below it once (`_showing`), so that areas add
    up; `labels = "centre"` paints regions one over the other instead.

    Args:
        path: The file they come from.
        annotations: In level-0 pixels of the slide's frame, their classes renamed already.
        slide_size: Level-0 pixels of the slide.
        options: How they are understood.
        passed_over: Number of other objects in the file by kind, for the report.
        file_classes: Class names in the file, of all its objects.
    """

    def __init__(
        self,
        path: Path,
        annotations: Sequence[Annotation],
        slide_size: Size,
        options: AnnotationOptions | None = None,
        passed_over: Mapping[str, int] = MappingProxyType({}),
        file_classes: Set[str] = frozenset(),
    ) -> None:
        options = options or AnnotationOptions()
        named = [region for region in annotations if region.class_name is not None]
        unnamed = [region for region in annotations if region.class_name is None]
        fallback = options.renamed(UNCLASSIFIED) or UNCLASSIFIED
        without = Counter(passed_over)
        if options.unclassified == "skip":
            if named:
                without["outlines without a class"] += len(unnamed)
            else:
                named = [replace(region, class_name=fallback) for region in unnamed]
            unnamed = []
        around = _that_hold(unnamed, named)
        without["outlines without a class that hold others"] += len(around)
        regions = [region for place, region in enumerate(unnamed) if place not in around]
        regions.sort(key=lambda region: -region.geometry.area)
        regions += sorted(named, key=lambda region: -region.geometry.area)
        self._path = path
        self._file_classes = file_classes
        self._slide_size = slide_size
        self._unlabelled = IGNORE if options.unlabelled == "ignore" else BACKGROUND
        self._by_centre = options.labels == "centre"
        self._fallback = fallback
        self._names: list[str | None] = []
        self._regions: list[shapely.Geometry] = []
        self._of_interest: list[shapely.Geometry] = []
        self._shown: _Outlines | None = None
        self._colours = dict[float, NDArray[np.uint8]]()  # by distance
        self._working_out = Lock()
        self._classes: dict[str, Colour | None] = {}
        for region in regions:
            name = region.class_name
            if name is not None and options.is_roi(name):
                self._of_interest.append(region.geometry)
                continue
            self._names.append(name)
            self._regions.append(region.geometry)
            if name is not None and not is_ignored(name) and not is_background(name):
                self._classes[name] = self._classes.get(name) or region.colour
        self._report = self._reported(+without)  # those that occur

    def _reported(self, passed_over: Mapping[str, int]) -> AnnotationReport:
        size = self._slide_size
        slide = shapely.box(0, 0, size.width, size.height)
        on_slide = known = shapely.intersects(slide, self._regions)
        interest_pixels = None
        if self._of_interest:
            interest = shapely.union_all(self._of_interest)
            known = shapely.intersects(interest, self._regions)
            interest_pixels = float(shapely.intersection(interest, slide).area)
        outlines, missed = Counter[str](), Counter(passed_over)
        unclassified = 0
        for name, lies_on_slide, is_known in zip(self._names, on_slide, known, strict=True):
            if not lies_on_slide:
                missed["outlines off the slide"] += 1
            elif not is_known:
                missed["outlines outside the regions of interest"] += 1
            elif name is None:
                unclassified += 1
            elif is_ignored(name):
                missed[f"outlines of {name}"] += 1
            else:
                outlines[name] += 1
        return AnnotationReport(
            self._path,
            outlines,
            len(self._of_interest),
            interest_pixels,
            unclassified,
            self._fallback,
            missed,
        )

    @property
    def path(self) -> Path:
        return self._path

    @property
    def files(self) -> Sequence[Path]:
        """The file of the outlines."""
        return [self._path]

    @property
    def report(self) -> AnnotationReport:
        """Counts of the objects in use and of those left out."""
        return self._report

    def classes(self) -> Mapping[str, Colour | None]:
        """Names in use with their colours, without ignored ones, regions and background."""
        return self._classes

    def file_classes(self) -> Set[str]:
        """Return the class names that the file itself has."""
        return self._file_classes

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Return the class index of each pixel of `box`, in pixels of `frame`.

        Corners are taken to 1/256 pixel; areas between them are exact. Of classes that have as
        much of a pixel, the one that is painted last has it, and background comes last. Where the
        options say "centre", a pixel has the class of its centre.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide or the
            regions of interest.

        Raises:
            PathosegError: A class is not in `classes`.
        """
        values = self._values(classes)
        if self._by_centre:
            mask = self._paint_centres(box, frame, values)
        else:
            interest = bool(self._of_interest)

            def settle(steps: Steps, part: Box, widths: Ints) -> NDArray[np.uint8]:
                height = self._slide_size.height / frame.scale_y
                heights = units_on_slide(part.y, part.bottom, height)
                return most_covered(steps, heights, widths, self._unlabelled, interest)

            mask = self._paint_majority(box, frame, values, settle)
        ignore_outside(mask, box, frame, self._slide_size)
        return mask

    def refuse_without_objects(self) -> None:
        """Refuse nothing: every outline is an object."""

    def object_counts(self, classes: ClassTable) -> Mapping[str, int]:
        """Return the number of outlines in use of each class that is no background."""
        report, counts = self._report, Counter[str]()
        for name, count in report.outlines.items():
            if name in classes.names:
                counts[name] += count
        if report.unclassified and report.fallback in classes.names:
            counts[report.fallback] += report.unclassified
        return counts

    def objects(
        self,
        box: Box,
        frame: Frame,
        classes: ClassTable,
        mask: NDArray[np.uint8],
        apart: float = TOUCHING,
    ) -> NDArray[np.uint8]:
        """Return the object plane, as `Labels.objects` has it: every outline of a learnt class.

        A multi-polygon has one colour: its parts are one object where they touch. What outlines
        that are painted later cover is not the object's, be they objects, background or ignored.

        Raises:
            PathosegError: A class is not in `classes`, or more than 254 outlines lie on one spot.
        """
        values = self._values(classes)
        distance = apart * max(frame.scale_x, frame.scale_y)
        colour = np.append(self._coloured(distance), np.uint8(0))
        learnt = (values != BACKGROUND) & (values != IGNORE) & (values != INTEREST) & (colour > 0)
        if self._by_centre:
            painted = self._paint_centres(box, frame, np.where(learnt, colour, 0))
            return np.where((mask == BACKGROUND) | (mask == IGNORE), mask, painted)
        of = np.where(learnt, object_value(values, colour), np.where(values == INTEREST, values, 0))

        def settle(steps: Steps, part: Box, widths: Ints) -> NDArray[np.uint8]:
            return most_covering(steps, mask[part.within(box)], widths)

        return self._paint_majority(box, frame, of, settle)

    def _values(self, classes: ClassTable) -> Ints:
        """The class index of each region, and `INTEREST` for the regions of interest."""
        learnt = {name for name in self._names if name is not None and not is_ignored(name)}
        indices = dict(classes.indices(learnt, self._path))
        unnamed = IGNORE
        if self._fallback in classes.names or is_background(self._fallback):
            unnamed = classes.indices([self._fallback], self._path)[self._fallback]
        # -1, the regions of interest, finds the last one.
        return np.array(
            [unnamed if name is None else indices.get(name, IGNORE) for name in self._names]
            + [INTEREST]
        )

    def _coloured(self, distance: float) -> NDArray[np.uint8]:
        """The colour of each region, 0 for one of which nothing shows.

        Args:
            distance: Level-0 pixels within which two have different colours.
        """
        outlines = self._outlines
        with self._working_out:
            if distance not in self._colours:
                shown = np.unique(outlines.region[outlines.region >= 0])
                geometry = np.array([self._regions[one] for one in shown], dtype=object)
                pairs = near_outlines(geometry, distance)
                found = np.zeros(len(self._regions), np.uint8)
                found[shown] = colours(len(shown), pairs, self._path)
                self._colours[distance] = found
            return self._colours[distance]

    def _paint_majority(
        self,
        box: Box,
        frame: Frame,
        values: Ints,
        settle: Callable[[Steps, Box, Ints], NDArray[np.uint8]],
    ) -> NDArray[np.uint8]:
        """Paint a box some rows at a time.

        Args:
            box: In pixels of `frame`.
            frame: Their resolution.
            values: Of each region, and last of the regions of interest.
            settle: Makes pixels of the steps in a part of the box and the widths of its columns.
        """
        near = self._outlines.near(*frame.to_level0(box))
        if near.corners > _MOST_CORNERS and box.height > 1:  # edges take 200 bytes each
            middle = box.height // 2
            halves = [
                Box(box.x, box.y, box.width, middle),
                Box(box.x, box.y + middle, box.width, box.height - middle),
            ]
            # Where most lines reach across both, halves would be halved in turn and save nothing.
            both = sum(self._outlines.near(*frame.to_level0(half)).corners for half in halves)
            if both < 1.5 * near.corners:
                painted = [self._paint_majority(half, frame, values, settle) for half in halves]
                return np.vstack(painted)
        mask = np.empty((box.height, box.width), dtype=np.uint8)
        value, edges = values[near.region], Edges.of(near.lines, near.sign, near.region, frame)
        widths = units_on_slide(box.x, box.right, self._slide_size.width / frame.scale_x)
        rows = rows_at_once(box.width, len(np.unique(value)), edges.most_steps(box))
        for start in range(0, box.height, rows):
            part = Box(box.x, box.y + start, box.width, min(rows, box.height - start))
            mask[start : start + rows] = settle(edges.steps(part, value), part, widths)
        return mask

    def _paint_centres(self, box: Box, frame: Frame, values: Ints) -> NDArray[np.uint8]:
        mask = np.full((box.height, box.width), self._unlabelled, dtype=np.uint8)
        left, top, width, height = frame.to_level0(box)
        area = shapely.box(left, top, left + width, top + height)
        near = np.sort(self._tree.query(area))
        x, y = pixel_centres(box, frame)
        paint_centres(mask, self._tree.geometries[near], values[near].astype(np.uint8), x, y)
        if self._of_interest:
            inside = np.zeros_like(mask)
            interest = np.array(self._of_interest, dtype=object)
            paint_centres(inside, interest, np.ones(len(interest), np.uint8), x, y)
            mask[inside == 0] = IGNORE
        return mask

    @cached_property
    def _tree(self) -> shapely.STRtree:
        return shapely.STRtree(self._regions)

    @property
    def _outlines(self) -> _Outlines:
        """Outlines of what shows of the regions, computed when labels are first asked for."""
        with self._working_out:  # GEOS prepares geometries for one thread at a time
            if self._shown is None:
                self._shown = self._work_out()
            return self._shown

    def _work_out(self) -> _Outlines:
        size = self._slide_size
        known: shapely.Geometry = shapely.box(0, 0, size.width, size.height)
        if not self._of_interest:
            return _Outlines.of(*_showing(self._regions, known))
        known = shapely.intersection(known, shapely.union_all(self._of_interest))
        areas, region, sign = _showing(self._regions, known)
        areas = np.array([*areas, known], dtype=object)
        return _Outlines.of(areas, np.append(region, -1), np.append(sign, 1))


def _that_hold(outer: Sequence[Annotation], inner: Sequence[Annotation]) -> set[int]:
    """Return the positions of the regions in `outer` that hold any region of `inner`.

    At least 99 % of the area that is held lies inside: corners of a region that was clipped to an
    outline lie beside its slanted edges, by rounding.
    """
    around = np.array([region.geometry for region in outer], dtype=object)
    inside = np.array([region.geometry for region in inner], dtype=object)
    least = _SHARE_HELD * shapely.area(inside)
    tree = shapely.STRtree(inside)
    found = set[int](tree.query(around, predicate="contains")[0].tolist())
    one, other = tree.query(around)
    large = shapely.area(around)[one] >= least[other]
    near = defaultdict[int, list[int]](list)
    for holder, held in zip(one[large].tolist(), other[large].tolist(), strict=True):
        near[holder].append(held)
    for holder in near.keys() - found:
        common = _common(around[holder], inside, near[holder])
        if any(area.area >= least[held] for held, area in common):
            found.add(holder)
    return found


@dataclass(frozen=True)
class _Outlines:
    """Outlines of areas that, added and taken away, are what shows of overlapping regions.

    They are cut into short lines, as one outline may go round all that is on a slide, and one
    multi-polygon may be all that a pixel classifier found there: a box needs those near it alone.

    Attributes:
        lines: Of at most `_LONG` edges, the area on the right where y points up; shape (lines,).
        right: The right end of the whole outline of each, in level-0 pixels.
        region: The region of each, in the order of painting; -1 for the regions of interest.
        sign: 1 where its area is added, -1 where it is taken away.
    """

    lines: Geometries
    right: NDArray[np.float64]
    region: Ints
    sign: Ints

    @classmethod
    def of(cls, areas: Geometries, region: Ints, sign: Ints) -> _Outlines:
        """Cut the outlines of polygons and multi-polygons into lines.

        Args:
            areas: Shape (areas,).
            region: The region of each.
            sign: 1 where it is added, -1 where it is taken away.
        """
        # Normal outlines run with the clock, where y points up, and holes against it.
        polygons, area = shapely.get_parts(shapely.normalize(areas), return_index=True)
        rings, polygon = shapely.get_rings(polygons, return_index=True)
        corners = shapely.get_num_coordinates(rings).astype(np.int64)
        lines = -(-(corners - 1) // _LONG)
        ring, number = np.repeat(np.arange(len(rings)), lines), counted(lines)
        # A line ends with the corner that the next one begins with.
        first = (np.cumsum(corners) - corners)[ring] + number * _LONG
        count = np.minimum(corners[ring] - number * _LONG, _LONG + 1)
        xy = shapely.get_coordinates(rings)[np.repeat(first, count) + counted(count)]
        line = np.repeat(np.arange(len(ring)), count)
        right, of = shapely.bounds(rings)[ring, 2], area[polygon[ring]]
        found = np.array(shapely.linestrings(xy, indices=line), dtype=object)
        return cls(found, right, region[of], sign[of])

    @property
    def corners(self) -> int:
        """Number of corners of all lines."""
        return int(shapely.get_num_coordinates(self.lines).sum())

    @cached_property
    def _tree(self) -> shapely.STRtree:
        # What a line changes goes on along its rows, as far as its outline does.
        left, top, _, bottom = shapely.bounds(self.lines).T
        return shapely.STRtree(shapely.box(left, top, self.right, bottom))

    def near(self, left: float, top: float, width: float, height: float) -> _Outlines:
        """Return the lines that change anything in a rectangle, and some more."""
        found = np.sort(self._tree.query(shapely.box(left, top, left + width, top + height)))
        return _Outlines(self.lines[found], self.right[found], self.region[found], self.sign[found])


def _showing(
    regions: Sequence[shapely.Geometry], known: shapely.Geometry
) -> tuple[Geometries, Ints, Ints]:
    """Compute the visible part of each region, painted in order, clipped to `known`.

    No hole is cut into a region for those painted over it: what they hide is taken away from it as
    areas of its own. These do not overlap, as one that lies in another is left out, and those that
    overlap are united.

    Returns:
        Areas, the region of each, and 1 where it is added, -1 where it is taken away.
    """
    geometry = np.array(regions, dtype=object)
    shapely.prepare(known)
    across = np.flatnonzero(~shapely.covers(known, geometry))
    for one, clipped in zip(across, shapely.intersection(geometry[across], known), strict=True):
        geometry[one] = areal(clipped)
    number = np.flatnonzero(shapely.area(geometry) > _SLIVER)
    geometry = geometry[number]

    below, above = _meeting(geometry)
    holders = defaultdict[int, set[int]](set)
    for holder, held in (*_held(geometry, below, above), *_held(geometry, above, below)):
        holders[held].add(holder)
    buried = {one for one, around in holders.items() if max(around) > one}
    hidden = defaultdict[int, dict[int, shapely.Geometry]](dict)
    overlaps = defaultdict[int, set[int]](set)
    crossing = defaultdict[int, list[int]](list)
    for under, over in zip(below.tolist(), above.tolist(), strict=True):
        if under in buried or over in buried:
            continue
        if under in holders[over]:
            hidden[under][over] = geometry[over]
        else:
            crossing[under].append(over)
    for under, others in crossing.items():
        for over, common in _common(geometry[under], geometry, others):
            hidden[under][over] = common
            overlaps[under].add(over)
            overlaps[over].add(under)

    shown = [one for one in range(len(geometry)) if one not in buried]
    taken = [
        (below, piece) for below in shown for piece in _apart(hidden[below], holders, overlaps)
    ]
    pieces = np.array([*geometry[shown], *(piece for _, piece in taken)], dtype=object)
    return (
        pieces,
        number[[*shown, *(below for below, _ in taken)]],
        np.repeat([1, -1], [len(shown), len(taken)]),
    )


def _meeting(geometry: Geometries) -> tuple[Ints, Ints]:
    """The pairs of regions that have a point in common, the smaller number first."""
    below, above = shapely.STRtree(geometry).query(geometry)
    below, above = below[below < above], above[below < above]
    prepared = geometry[np.unique(below)]
    shapely.prepare(prepared)
    meet = shapely.intersects(geometry[below], geometry[above])
    shapely.destroy_prepared(prepared)
    return below[meet], above[meet]


def _held(geometry: Geometries, holder: Ints, held: Ints) -> Iterator[tuple[int, int]]:
    """Yield the pairs (holder, held) whose first region contains the second."""
    bounds = shapely.bounds(geometry)
    around = (bounds[holder, :2] <= bounds[held, :2]) & (bounds[holder, 2:] >= bounds[held, 2:])
    holder, held = holder[around.all(axis=1)], held[around.all(axis=1)]
    prepared = geometry[np.unique(holder)]
    shapely.prepare(prepared)
    holds = shapely.contains(geometry[holder], geometry[held])
    shapely.destroy_prepared(prepared)
    yield from zip(holder[holds].tolist(), held[holds].tolist(), strict=True)


def _common(
    one: shapely.Geometry, regions: Geometries, others: Sequence[int]
) -> Iterator[tuple[int, shapely.Polygon | shapely.MultiPolygon]]:
    """Yield the intersections of a region with others that have an area.

    Args:
        one: The region.
        regions: Others.
        others: The numbers of those that count.

    Yields:
        The number of a region, and what it has in common with `one`.
    """
    # Of a long outline the neighbourhood of the others is enough, and found much sooner; of half of
    # them at a time, so that not each of many is looked for in all of it.
    if shapely.get_num_coordinates(one) > _LONG:
        bounds = shapely.bounds(regions[others])
        (left, top), (right, bottom) = bounds[:, :2].min(axis=0), bounds[:, 2:].max(axis=0)
        near = shapely.clip_by_rect(one, left - 1, top - 1, right + 1, bottom + 1)
        one = near if near.is_valid else one
        if len(others) > 1 and shapely.get_num_coordinates(one) > _LONG:
            order = np.argsort(bounds[:, 0 if right - left > bottom - top else 1])
            for half in np.array_split(np.array(others)[order], 2):
                yield from _common(one, regions, half.tolist())
            return
    for other in others:
        common = areal(shapely.intersection(one, regions[other]))
        if common is not None and common.area > _SLIVER:
            yield other, common


def _apart(
    pieces: Mapping[int, shapely.Geometry],
    holders: Mapping[int, set[int]],
    overlaps: Mapping[int, set[int]],
) -> Iterator[shapely.Geometry]:
    """Yield pieces that do not overlap and together cover the same area as `pieces`.

    Args:
        pieces: By the number of the region that each belongs to.
        holders: The regions that each region lies in.
        overlaps: The regions that each region overlaps, where none holds the other.
    """
    left = {one for one in pieces if not holders[one] & pieces.keys()}
    while left:
        group, reached = set[int](), {left.pop()}
        while reached:
            group |= reached
            reached = {other for one in reached for other in overlaps[one] & left}
            left -= reached
        if len(group) == 1:
            yield pieces[group.pop()]
        elif united := areal(shapely.union_all([pieces[one] for one in group])):
            yield united
