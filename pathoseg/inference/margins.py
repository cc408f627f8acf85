"""How much tiles share in inference, and how much of their edge is not trusted."""

from __future__ import annotations


def default_overlap(tile: int, multiple: int, reach: int | None) -> int:
    """Pixels that neighbouring tiles share where nobody says.

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
    """Outer pixels of a tile without weight: all that feel its edge, where the overlap holds them.

    Elsewhere a quarter of the overlap on either side, which leaves half of it to blend.
    """
    if reach is not None and 2 * reach <= overlap:
        return reach
    return overlap // 4
