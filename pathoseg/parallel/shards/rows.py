"""Interval arithmetic: the input rows that each strip of a layer's output reads.

A convolution of kernel 3, stride 2, padding 1, on 8 rows in two strips of 4:

    input rows     . 0 1 2 3 | 4 5 6 7 .        "." is padding, "|" the cut of the input
    output row 0   #-#-#     |
    output row 1       #-#-# |                  output strip 0 = rows [0, 2): reads rows [-1, 4)
    output row 2           #-|-#-#
    output row 3             |   #-#-#          output strip 1 = rows [2, 4): reads rows [3, 8)

    strip 0 needs  [-1, 4) = 1 row of padding + its own 4 rows
    strip 1 needs  [ 3, 8) = 1 halo row of strip 0 + its own 4 rows

(1) `Split` says which rows of a tensor of any height each rank owns: those of the model's input in
    proportion. So tensors of one height are cut alike, whatever path led to them.
(2) `SlidingWindow.reads` is the interval that the output rows [first, stop) need. It may reach
    beyond the tensor: rows above 0 and below its height are padding, which the rank fills in by
    itself.
(3) What of it another rank owns is a halo. It comes from that rank in the forward, and its gradient
    goes back there in the backward, to be added (`exchange.Extended`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pathoseg.errors import PathosegError

# A strip may be so much larger than the mean, for the sake of cuts at which strides fit.
_SLACK = 1 / 16


class Rows(NamedTuple):
    """Rows `first` to before `stop`; negative ones and those from the height on are padding."""

    first: int
    stop: int

    @property
    def height(self) -> int:
        return max(0, self.stop - self.first)

    def within(self, other: Rows) -> Rows:
        """Return the rows that both have; of no count where there are none."""
        first = max(self.first, other.first)
        return Rows(first, max(first, min(self.stop, other.stop)))


def strips(bounds: Sequence[int]) -> list[Rows]:
    """Return the rows of each rank, by the first of each and the height at the end."""
    return [Rows(first, stop) for first, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Split:
    """(1) The strips of a model's input, and of every tensor behind it in proportion.

    Attributes:
        bounds: First row of each strip of the input, and its height at the end.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bounds[0] or any(first >= stop for first, stop in pairwise(self.bounds)):
            raise PathosegError(
                f"{self.height} rows cannot be cut into {self.shards} strips.",
                f"Choose at most {self.height} shards, or a larger tile.",
            )

    @classmethod
    def even(cls, height: int, shards: int) -> Split:
        """Return strips of about equal height, cut at a multiple of a high power of 2.

        Strides of 2 fit such cuts, so that poolings send nothing.
        """
        unit = 1
        while height % (2 * unit) == 0:
            largest = -(-height // (2 * unit) // shards) * 2 * unit
            if largest * shards > height * (1 + _SLACK):
                break
            unit *= 2
        units = height // unit
        return cls(tuple(unit * (rank * units // shards) for rank in range(shards + 1)))

    @property
    def height(self) -> int:
        return self.bounds[-1]

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1

    def of(self, height: int) -> tuple[int, ...]:
        """Return the bounds of the strips of a tensor of this height."""
        whole = self.height
        return tuple((2 * bound * height + whole) // (2 * whole) for bound in self.bounds)


def checked(bounds: Sequence[int], what: str) -> tuple[int, ...]:
    """Return the bounds of strips of which none is empty.

    Raises:
        PathosegError: One is.
    """
    if any(first >= stop for first, stop in pairwise(bounds)):
        raise PathosegError(
            f"The output of {what} has {bounds[-1]} rows, too few for {len(bounds) - 1} strips.",
            "Choose fewer shards ([parallel] shards), or a larger tile.",
        )
    return tuple(bounds)


@dataclass(frozen=True)
class SlidingWindow:
    """(2) How a layer's output rows look at its input rows, as `torch.nn` has it.

    Attributes:
        kernel: Rows of the kernel.
        stride: Input rows between two output rows.
        padding: Rows of padding above the input.
        dilation: Input rows between two of the kernel's.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """The rows from the first to the last that the kernel sees."""
        return self.dilation * (self.kernel - 1) + 1

    def height(self, rows: int, below: int, ceil: bool = False) -> int:
        """Return the output rows of so many input rows.

        Args:
            rows: Of the input.
            below: Rows of padding below it.
            ceil: Whether the last window may reach beyond the padding, if it begins before it.
        """
        room = rows + self.padding + below - self.span
        made = (room + (self.stride - 1 if ceil else 0)) // self.stride + 1
        return made - (ceil and (made - 1) * self.stride >= rows + self.padding)

    def reads(self, made: Rows) -> Rows:
        """Return the input rows that these output rows need, and no others."""
        first = made.first * self.stride - self.padding
        return Rows(first, (made.stop - 1) * self.stride - self.padding + self.span)

    def reached(self, rows: Rows) -> Rows:
        """Return the output rows whose windows reach over any of these input rows."""
        first = (rows.first + self.padding - self.span) // self.stride + 1
        return Rows(first, -(-(rows.stop + self.padding) // self.stride))

    def spread(self, rows: int, more: int) -> int:
        """Return the output rows of a transposed layer; `more` is its output padding."""
        return (rows - 1) * self.stride - 2 * self.padding + self.span + more

    def reads_transposed(self, made: Rows) -> Rows:
        """Return the input rows that reach these output rows of a transposed layer.

        Input row i is added to the output rows i · stride - padding and `span` - 1 on. Where the
        stride exceeds the span some output rows are reached by none: the interval is long enough
        to begin and end there all the same.
        """
        padded = Rows(made.first + self.padding, made.stop + self.padding)
        first = min(-((self.span - 1 - padded.first) // self.stride), padded.first // self.stride)
        last = max((padded.stop - 1) // self.stride, -((self.span - padded.stop) // self.stride))
        return Rows(first, last + 1)

    def reached_from(self, row: int) -> int:
        """Return the first output row that an input row of a transposed layer is added to."""
        return row * self.stride - self.padding


def check_halos(bounds: Sequence[int], reads: Sequence[Rows], what: str) -> None:
    """Refuse strips that are smaller than the halo that their neighbour asks of them.

    Args:
        bounds: Of the strips of a layer's input.
        reads: The rows of it that each rank needs.
        what: The layer, for the error.

    Raises:
        PathosegError: A rank needs rows of one that is no neighbour.
    """
    last = len(bounds) - 1
    for rank, wanted in enumerate(reads):
        real = wanted.within(Rows(0, bounds[-1]))
        near = Rows(bounds[max(0, rank - 1)], bounds[min(last, rank + 2)])
        if real.height and real.within(near) != real:
            halo = max(bounds[rank] - real.first, real.stop - bounds[rank + 1])
            least = min(one.height for one in strips(bounds))
            raise PathosegError(
                f"{what} looks {halo} rows beyond its strip, and the strips of its input have as "
                f"few as {least} rows of {bounds[-1]}: a halo must fit into the neighbour's strip.",
                "Choose fewer shards ([parallel] shards), or a larger tile.",
            )
