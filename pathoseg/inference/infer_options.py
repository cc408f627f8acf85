"""Options of `infer` as a model takes them: what they leave open, and what fits no slide."""

from __future__ import annotations

import math

from pathoseg.config import InferConfig
from pathoseg.errors import PathosegError
from pathoseg.outputs.stitch import refuse_misfit

_WIDEST = 800  # pixels of the mask: a block of objects with its halo takes 2 GB then


def default_overlap(tile: int, multiple: int, reach: int | None) -> int:
    """Return the pixels that neighbouring tiles share, where the user does not say.

    A quarter of the tile, or less where less already makes predicting in tiles equal predicting
    the whole slide: twice the distance over which a tile's edge is felt, and a little to blend.

    Args:
        tile: Side of a tile in pixels.
        multiple: What the model divides by; the overlap is a multiple of it.
        reach: The distance in pixels, None where there is none (group or instance norm).
    """
    quarter = tile // 4
    wanted = quarter if reach is None else min(quarter, 2 * (reach + multiple))
    return -(-wanted // multiple) * multiple


def default_margin(overlap: int, reach: int | None) -> int:
    """Return the outer pixels of a tile that get no weight, where the user does not say.

    They are all pixels that feel the tile's edge, where the overlap holds them; elsewhere a quarter
    of the overlap on either side, which leaves half of it to blend.

    Args:
        overlap: Pixels that neighbouring tiles share.
        reach: The distance in pixels over which an edge is felt; None where there is none.
    """
    if reach is not None and 2 * reach <= overlap:
        return reach
    return overlap // 4


def blended_tile(
    options: InferConfig, side: int, overlap: int, multiple: int, reach: int | None
) -> tuple[int, int]:
    """Return side and overlap of the tiles that are blended.

    Args:
        options: `tile` and `overlap` overrule the model's.
        side: The side of the tiles that the model is trained on.
        overlap: The overlap of tiles of that side, where the user does not say.
        multiple: As for `default_overlap`.
        reach: As for `default_overlap`.
    """
    tile = options.tile or side
    if options.overlap is not None:
        return tile, options.overlap
    return tile, overlap if tile == side else default_overlap(tile, multiple, reach)


def trained_overlap(options: InferConfig, side: int, multiple: int, reach: int | None) -> int:
    """Return the overlap that a bundle records: of tiles of the side that it is trained on.

    Args:
        options: Those of the training. An `overlap` of tiles of another side is none of these.
        side: As for `blended_tile`.
        multiple: As for `default_overlap`.
        reach: As for `default_overlap`.
    """
    if options.overlap is not None and options.tile in (None, side):
        return options.overlap
    return default_overlap(side, multiple, reach)


def refuse_unfit(
    options: InferConfig, task: str, mpp: float, side: int, multiple: int, reach: int | None
) -> None:
    """Refuse, ahead of a training, options by which its model could segment no slide.

    Args:
        options: Those of the training, which `infer` is usually given too.
        task: The model's.
        mpp: Microns per pixel of its tiles.
        side: As for `blended_tile`.
        multiple: As for `default_overlap`.
        reach: As for `default_overlap`.

    Raises:
        PathosegError: Tile, overlap and margin do not fit the model and each other, or objects
            would take too much memory.
    """
    if task == "objects":
        object_extent(mpp, options)
    named = {key: getattr(options, key) for key in ("tile", "overlap", "margin")}
    given = {key: value for key, value in named.items() if value is not None}
    in_windows = reach is not None and given.keys() <= {"tile"}
    if task == "classify" or not given or in_windows:
        return
    own = trained_overlap(options, side, multiple, reach)
    tile, overlap = blended_tile(options, side, own, multiple, reach)
    try:
        refuse_misfit(tile, overlap, multiple, options.margin or 0)
    except PathosegError as error:
        told = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise PathosegError(f"[infer] {told}: {error.problem}", error.hint) from error


def object_extent(mpp: float, options: InferConfig) -> int:
    """Return the largest side of an object in pixels of a mask.

    Args:
        mpp: The mask's.
        options: `object_um` is used.

    Raises:
        PathosegError: Objects of that size take too much memory at that resolution.
    """
    extent = math.ceil(options.object_um / mpp)
    if extent > _WIDEST:
        raise PathosegError(
            f"[infer] object_um = {options.object_um:g} is {extent:,} px at {mpp:g} µm; "
            f"at most {_WIDEST} can be.",
            f"Set it to {_WIDEST * mpp:g} at most, or train at a larger [tiles] mpp.",
        )
    return extent
