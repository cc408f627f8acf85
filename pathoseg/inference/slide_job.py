"""One slide of a batch, shared by processes: its rows, saved and resumed, and its result."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.inference.leases import Leases
from pathoseg.inference.publish import publish
from pathoseg.inference.result_folder import (
    State,
    read_state,
    result_folder,
    state_file,
    write_state,
)
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.interruption import Interruption
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.fingerprint import Fingerprint

_HEAD = struct.Struct("<8sQQQ")  # magic, rows of pixels, width, unread tiles
_MAGIC = b"pathrow1"
_ROW, _ROW_CLAIM = ".row", ".claim"


class SavedRows:
    """Rows that processes save for the one that writes the result, and for a later attempt.

    Args:
        folder: Of one slide, model and set of options.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def listed(self) -> tuple[set[int], set[int]]:
        """The rows that are saved, and those with a claim, dead or alive.

        Raises:
            FileNotFoundError: The folder is gone: the slide is done.
        """
        names = [path.name for path in self._folder.iterdir()]
        saved, claimed = (
            {int(name.removesuffix(end)) for name in names if name[0] != "." and name.endswith(end)}
            for end in (_ROW, _ROW_CLAIM)
        )
        return saved, claimed

    def claim(self, row: int) -> Path:
        """The file by which a process leases the row."""
        return self._folder / f"{row:06d}{_ROW_CLAIM}"

    def has(self, row: int) -> bool:
        return self._file(row).exists()

    def save(self, row: MaskRow) -> None:
        """Appears whole or not at all. No fsync: what a crash of the machine cuts short, `load`
        refuses.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        draft = self._folder / f".{uuid4().hex[:8]}"
        head = _HEAD.pack(_MAGIC, *row.band.shape, row.unread_tiles)
        try:
            with draft.open("wb") as file:
                file.write(head)
                file.write(zlib.compress(np.ascontiguousarray(row.band).data, level=1))
            draft.replace(self._file(row.number))
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def load(self, row: int) -> MaskRow | None:
        """The row, None where it is not saved; a broken file is removed."""
        file = self._file(row)
        try:
            data = file.read_bytes()
            magic, height, width, unread = _HEAD.unpack_from(data)
            if magic == _MAGIC:
                pixels = zlib.decompress(data[_HEAD.size :], bufsize=height * width)
                return MaskRow(row, np.frombuffer(pixels, np.uint8).reshape(height, width), unread)
        except FileNotFoundError:
            return None
        except (struct.error, zlib.error, ValueError):
            pass
        file.unlink(missing_ok=True)
        return None

    def _file(self, row: int) -> Path:
        return self._folder / f"{row:06d}{_ROW}"


_NAP = 0.1  # seconds


class SharedSlide:
    """The rows of tiles of a slide, each computed by whichever process has claimed it.

    Args:
        segmenter: The model; the same one in every process.
        plan: Likewise.
        saved: Where the rows meet.
        leases: Those of this process.
        interruption: Asked after every tile.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        plan: SlidePlan,
        saved: SavedRows,
        leases: Leases,
        interruption: Interruption,
    ) -> None:
        self._segmenter, self._plan, self._saved = segmenter, plan, saved
        self._leases, self._interruption = leases, interruption

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
            if self._saved.has(row) or not self._leases.take(claim):
                return False
            held.add(row)
            return not self._saved.has(row)  # saved in between

        try:
            rows = self._segmenter.rows(self._plan, self._interruption, first, take)
            with closing(rows):
                for row in rows:
                    self._saved.save(row)
                    held.remove(row.number)
                    self._leases.release(self._saved.claim(row.number))
                    yield row
        finally:
            for number in held:
                self._leases.release(self._saved.claim(number))

    def _free_place(self) -> int | None:
        """Return the row at which to start helping: the middle of the longest free stretch.

        At its start where nobody works towards it.
        """
        saved, claimed = self._saved.listed()
        taken = {row for row in claimed if self._leases.is_taken(self._saved.claim(row))}
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


# Options of [infer] and [tissue] that have been in a slide's key from the first.
_ALWAYS_TOLD = {
    *("overlap", "margin", "batch", "simplify", "min_region_um2", "compress_regions"),
    *("region_type", "method", "threshold"),
}
_NEVER_TOLD = {"readers"}  # changes no result


def _told(options: Any) -> dict[str, object]:
    """Return what a slide's key says of a table of options.

    An option that came later is told only where it is not at its default, so that rows and
    results of the time before it are still found.
    """
    told = dict[str, object]()
    for option in fields(options):
        value, is_late = getattr(options, option.name), option.name not in _ALWAYS_TOLD
        if option.name not in _NEVER_TOLD and not (is_late and value == option.default):
            told[option.name] = value
    return told


WORK = ".work"  # in the output folder: what is not whole, a folder for each slide
_SLIDE_CLAIM = "claim"

Outcome = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class WorkerContext:
    """A process that works on a batch.

    Attributes:
        segmenter: The model.
        config: The options.
        leases: What it has taken.
        interruption: What stops it.
        resume: Whether results and rows of earlier batches are taken over.
        since: When this batch began, by the clock of `leases`.
    """

    segmenter: Segmenter
    config: Config
    leases: Leases
    interruption: Interruption
    resume: bool
    since: float


class SlideJob:
    """The work on one slide: to lead it, or to help its leader.

    Args:
        slide: Its file.
        folder: Of its result, in the output folder.
        context: This process.
    """

    def __init__(self, slide: Path, folder: Path, context: WorkerContext) -> None:
        self.slide, self.folder, self._context = slide, folder, context
        self._out = folder.parent
        self._outcome: Outcome | None = None
        self._plan: SlidePlan | None = None
        self._left = False  # to others, as this process cannot help

    @property
    def state(self) -> State | None:
        """The state of the slide; None if another slide has its folder, or nothing is known."""
        state = read_state(state_file(self._out, self.folder))
        return state if state is not None and Path(state.slide).name == self.slide.name else None

    def outcome(self) -> Outcome | None:
        """Return the outcome of the slide in this batch, by any process; None while it is open.

        Skipped is what an earlier batch has done.
        """
        if self._outcome is None:
            self._outcome = self._settled()
        return self._outcome

    def lead(self) -> bool:
        """Makes the result, where no other process does; what goes wrong is written down.

        Returns:
            Whether this process has settled what comes of the slide.

        Raises:
            PathosegError: Not even that can be written.
            StoppedError: A signal came.
        """
        if self.outcome() is not None:
            return False
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            with self._context.leases.held(self._work / _SLIDE_CLAIM) as mine:
                if not (mine and self._is_apart() and self._settled() is None):
                    return False
                try:
                    self._attempt()
                finally:
                    with suppress(PathosegError, OSError):  # it holds something, or is gone
                        self._rows.rmdir()
                return True
        except FileNotFoundError:
            return False  # another has just finished it
        except OSError as error:
            raise PathosegError(
                f"The work in {self._out} cannot be written down ({error.strerror or error}).",
                "Free space there or give --out another disk, then run again with --resume.",
            ) from error
        finally:
            with suppress(OSError):  # in use, or gone
                self._work.rmdir()

    def help(self) -> bool:
        """Computes rows for the process that leads; whether there was something to do.

        Raises:
            StoppedError: A signal came.
        """
        context, state = self._context, self.state
        try:
            if self._left or state is None or state.status != "begun" or state.key != self._key:
                return False
            if not self._rows.exists():
                return False
            if self._plan is None:
                with open_slide(self.slide, context.config.data.assume_mpp) as opened:
                    self._plan = context.segmenter.plan(opened)
            return self._shared(self._plan).help()
        except FileNotFoundError:
            return False  # it is done
        except (PathosegError, OSError):
            self._left = True  # the process that leads meets the same, and says so
            return False

    def _attempt(self) -> None:
        context, began = self._context, time.monotonic()
        before = self.state or State(str(self.slide), "begun", "", 0, "")
        begun = replace(
            before,
            slide=str(self.slide),
            status="begun",
            attempts=before.attempts + 1,
            host=socket.gethostname(),
            outputs={},
            problem="",
            hint="",
        )
        try:
            begun = replace(begun, key=self._key)
            self._write(begun)
            going_on = context.resume or (
                before.status == "begun" and before.written >= context.since
            )
            self._clear(but=(_SLIDE_CLAIM, self._rows.name) if going_on else (_SLIDE_CLAIM,))
            self._rows.mkdir(exist_ok=True)
            with result_folder(self.folder, self._work) as partial:
                publish(self.slide, partial, context.segmenter, context.config, self._all_rows)
                self._refuse_change()
                outputs = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        except PathosegError as error:
            if self._settled() is None:  # else another took over, and has done it
                seconds = (*begun.seconds, round(time.monotonic() - began, 3))
                failed = replace(
                    begun, status="failed", seconds=seconds, problem=error.problem, hint=error.hint
                )
                try:
                    self._write(failed)
                except OSError:
                    raise error from None
        else:
            seconds = (*begun.seconds, round(time.monotonic() - began, 3))
            self._write(replace(begun, status="done", seconds=seconds, outputs=outputs))
            shutil.rmtree(self._work, ignore_errors=True)

    def _refuse_change(self) -> None:
        """Fail if the slide file changed while it was being read; saved rows are dropped too.

        Raises:
            PathosegError: It is.
        """
        with suppress(PathosegError):  # it is gone
            if Fingerprint.of(self.slide) == self._fingerprint:
                return
        shutil.rmtree(self._rows, ignore_errors=True)
        raise PathosegError(
            f"{self.slide} changed while it was read.",
            "Wait until it is copied whole, then run again with --resume.",
        )

    def _settled(self) -> Outcome | None:
        state, since = self.state, self._context.since
        if state is None or state.status == "begun":
            return None
        if state.status == "failed":
            return "failed" if state.written >= since else None
        if not (self._context.resume or state.written >= since):
            return None
        with suppress(PathosegError):
            if state.is_whole(self.folder) and state.key == self._key:
                return "done" if state.written >= since else "skipped"
        return None

    def _is_apart(self) -> bool:
        """Moves on to the slide's whole name where a process beside this one took the stem."""
        state = read_state(state_file(self._out, self.folder))
        if state is None or Path(state.slide).name == self.slide.name:
            return True
        self.folder = self._out / self.slide.name
        return False

    @property
    def _work(self) -> Path:
        return self._out / WORK / self.folder.name

    @property
    def _rows(self) -> Path:
        return self._work / self._key

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        """The fingerprint of the file when this process first opened it."""
        return Fingerprint.of(self.slide)

    @cached_property
    def _key(self) -> str:
        """A hash of all that the result depends on."""
        config, tiling = self._context.config, self._context.segmenter.tiling
        told: dict[str, object] = {
            "slide": asdict(self._fingerprint),
            "model": self._context.segmenter.model_id,
            "assume_mpp": config.data.assume_mpp,
            "tissue": _told(config.tissue),
            "infer": _told(config.infer),
        }
        if tiling is not None:  # rows of earlier versions were all blended, and are still found
            told["tiling"] = dict(tiling)
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def _all_rows(self, plan: SlidePlan) -> Generator[MaskRow]:
        return self._shared(plan).rows()

    def _shared(self, plan: SlidePlan) -> SharedSlide:
        context = self._context
        rows = SavedRows(self._rows)
        return SharedSlide(context.segmenter, plan, rows, context.leases, context.interruption)

    def _clear(self, but: tuple[str, ...]) -> None:
        for path in self._work.iterdir():
            if path.name not in but:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, state: State) -> None:
        write_state(state_file(self._out, self.folder), state)
