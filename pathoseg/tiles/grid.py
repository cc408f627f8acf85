"""The regular grid of tiles over a frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Size


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Equal tiles, row by row, `stride` pixels apart, the first at (0, 0).

    The last row and column may reach past the extent; what lies outside is padding.

    Attributes:
        extent: The pixels to be covered.
        tile: Size of every tile.
        overlap: Pixels that neighbours share.
    """

    extent: Size
    tile: Size
    overlap: int

    @classmethod
    def cover(cls, extent: Size, tile: int, overlap: int = 0, multiple: int = 1) -> TileGrid:
        """The grid of square tiles over `extent`; an extent below a tile shrinks the tile to it.

        Args:
            extent: Pixels to be covered.
            tile: Side of a tile in pixels.
            overlap: Pixels that neighbours share.
            multiple: What the model divides by (2^depth): sides and strides are multiples of it,
                so that pooling cells of all tiles coincide.

        Raises:
            PathosegError: The tile or the stride is no positive multiple of `multiple`.
        """
        if tile < 1 or tile % multiple or not 0 <= overlap < tile or (tile - overlap) % multiple:
            raise PathosegError(
                f"Tiles of {tile} px with {overlap} px overlap do not fit a model that needs "
                f"multiples of {multiple} px.",
                f"Choose a tile size and an overlap divisible by {multiple}, overlap below tile.",
            )
        fit = extent.rounded_up(multiple)
        return cls(extent, Size(min(tile, fit.width), min(tile, fit.height)), overlap)

    @property
    def stride(self) -> Size:
        return Size(max(1, self.tile.width - self.overlap), max(1, self.tile.height - self.overlap))

    @property
    def columns(self) -> int:
        return _count(self.extent.width, self.tile.width, self.stride.width)

    @property
    def rows(self) -> int:
        return _count(self.extent.height, self.tile.height, self.stride.height)

    def __len__(self) -> int:
        return self.columns * self.rows

    def box(self, index: int) -> Box:
        """The box of tile `index`, counted row by row."""
        row, column = divmod(index, self.columns)
        return Box(
            column * self.stride.width, row * self.stride.height, self.tile.width, self.tile.height
        )

    def row_of(self, index: int) -> int:
        """The row that tile `index` lies in."""
        return index // self.columns

    def first_of(self, row: int) -> int:
        """The first tile of a row."""
        return row * self.columns

    def __iter__(self) -> Iterator[Box]:
        return (self.box(index) for index in range(len(self)))


def _count(extent: int, tile: int, stride: int) -> int:
    return 1 + max(0, -(-(extent - tile) // stride))
