"""Computes the rows of one slide's mask, beside other processes that may work on the same slide."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

from pathoseg.inference.leases import Claims
from pathoseg.inference.saved_rows import SavedRows
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.interruption import Interruption

_NAP = 0.1  # seconds


class SharedSlide:
    """The rows of tiles of a slide, each computed by whichever process has claimed it.

    Args:
        segmenter: The model; the same one in every process.
        plan: Likewise.
        saved: Where the rows meet.
        claims: Those of this process.
        interruption: Asked after every tile.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        plan: SlidePlan,
        saved: SavedRows,
        claims: Claims,
        interruption: Interruption,
    ) -> None:
        self._segmenter, self._plan, self._saved = segmenter, plan, saved
        self._claims, self._interruption = claims, interruption

    def rows(self) -> Generator[MaskRow]:
        """Every row from top to bottom: what is saved is read, what nobody is at is computed.

        Raises:
            PathosegError: The device's memory is too small.
            StoppedError: A signal came.
            OSError: The disk is full or cannot be written.
        """
        due = 0
        while due < self._plan.grid.rows:
            known = self._saved.load(due)
            if known is not None:
                yield known
                due += 1
                continue
            asked = due
            with closing(self._computed(due)) as run:
                for row in run:
                    yield row
                    due = row.number + 1
            if due == asked and not self.help(until=due):
                self._interruption.raise_if_asked()
                time.sleep(_NAP)

    def help(self, until: int | None = None) -> bool:
        """Computes and saves rows from a place that nobody has taken, until another's begin.

        Args:
            until: Stops as soon as this row is saved.

        Returns:
            Whether there was anything to do.

        Raises:
            FileNotFoundError: The slide is done meanwhile.
            PathosegError, StoppedError, OSError: As `rows`.
        """
        place = self._free_place()
        if place is None:
            return False
        with closing(self._computed(place)) as run:
            for _ in run:
                if until is not None and self._saved.has(until):
                    break
        return True

    def _computed(self, first: int) -> Generator[MaskRow]:
        """Rows from `first` until the next one is saved or claimed; each is saved first."""
        held = set[int]()

        def take(row: int) -> bool:
            claim = self._saved.claim(row)
            if self._saved.has(row) or not self._claims.take(claim):
                return False
            held.add(row)
            return not self._saved.has(row)  # saved in between

        try:
            rows = self._segmenter.rows(self._plan, self._interruption, first, take)
            with closing(rows):
                for row in rows:
                    self._saved.save(row)
                    held.remove(row.number)
                    self._claims.release(self._saved.claim(row.number))
                    yield row
        finally:
            for number in held:
                self._claims.release(self._saved.claim(number))

    def _free_place(self) -> int | None:
        """Where another process is best to begin: in the middle of the longest free stretch.

        At its start where nobody works towards it.
        """
        saved, claimed = self._saved.listed()
        taken = {row for row in claimed if self._claims.is_taken(self._saved.claim(row))}
        best, length, start = None, 0, 0
        for row in range(self._plan.grid.rows + 1):
            if row < self._plan.grid.rows and row not in saved and row not in taken:
                continue
            begin = start + (row - start) // 2 if start - 1 in taken else start
            # A single row below a process at work is its next one.
            if row - begin > length and not (start - 1 in taken and row - start == 1):
                best, length = begin, row - begin
            start = row + 1
        return best
