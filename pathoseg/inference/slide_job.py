"""One slide of a batch, shared by processes: its rows, saved and resumed, and its result.

    OUT/.work/<slide>/claim            lease of the process that leads (leases.py)
    OUT/.work/<slide>/<key>/3.claim    lease of a process on a row of tiles that it computes
    OUT/.work/<slide>/<key>/2.row      a finished row, for the leader and for later attempts
    OUT/.work/<slide>/new-.../         the result that is being written

    rows of tiles    0  1  2  3  4  5  6  7  8  9
                     .row     |  free   |  free        L leads and is at row 3; H helps from row 6
                              L -->     H -->          on, the middle of what was free

(1) `SlideJob.lead`: one process has the slide's lease, and writes the result; others `help`.
(2) `SharedSlide.rows`: the leader takes the rows from top to bottom. One that is saved is loaded;
    one that nobody is at is computed, and so are those after it until another's begin.
(3) `SharedSlide.help`: a helper, or a leader that waits for a row, begins in the middle of the
    longest free stretch (`_free_place`).
(4) `_computed`: a row is leased when its reading begins, and saved before the lease is given back.
(5) `SlideJob._attempt`: the result appears by rename, and what was shared is removed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import struct
import time
import traceback
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal
from uuid import uuid4

import numpy as np

from pathoseg.config import Config
from pathoseg.errors import PathosegError, StoppedError, UnreadableError
from pathoseg.giving_up import GivenUpError
from pathoseg.inference.leases import Leases
from pathoseg.inference.provenance import key_options, refuse_difference
from pathoseg.inference.publish import plan_slide, publish
from pathoseg.inference.result_folder import (
    WORK,
    Provenance,
    State,
    put_back,
    read_state,
    refuse_namesakes,
    refuse_strangers,
    result_folder,
    state_file,
    stored_bytes,
    write_state,
)
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.interruption import Interruption
from pathoseg.progress import say
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.fingerprint import Fingerprint

_HEAD = struct.Struct("<8sQQQ")  # magic, rows of pixels of all planes, width, unread tiles
_MAGIC = b"pathrow1"
_ROW, _ROW_CLAIM = ".row", ".claim"


class SavedRows:
    """The finished rows of one slide, model and set of options, as files that processes share.

    Args:
        folder: Holds them; made by the process that leads.
        planes: How many each row has.
    """

    def __init__(self, folder: Path, planes: int = 1) -> None:
        self._folder, self._planes = folder, planes

    def listed(self) -> tuple[set[int], set[int]]:
        """List the folder.

        Returns:
            The numbers of the saved rows, and of those with a lease, whether its owner lives or
            not.

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
        """Return the path of the lease on a row."""
        return self._folder / f"{row:06d}{_ROW_CLAIM}"

    def has(self, row: int) -> bool:
        return self._file(row).exists()

    def save(self, row: MaskRow) -> None:
        """Write a row's file, whole or not at all.

        There is no fsync: what a crash of the machine cuts short, `load` refuses.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        draft = self._folder / f".{uuid4().hex[:8]}"
        planes, height, width = row.planes.shape
        head = _HEAD.pack(_MAGIC, planes * height, width, row.unread_tiles)
        try:
            with draft.open("wb") as file:
                file.write(head)
                file.write(zlib.compress(np.ascontiguousarray(row.planes).data, level=1))
            draft.replace(self._file(row.number))
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def load(self, row: int) -> MaskRow | None:
        """Return a saved row; None where it is not saved, or broken and then removed."""
        file = self._file(row)
        try:
            data = file.read_bytes()
            magic, height, width, unread = _HEAD.unpack_from(data)
            if magic == _MAGIC:
                pixels = zlib.decompress(data[_HEAD.size :], bufsize=height * width)
                planes = np.frombuffer(pixels, np.uint8).reshape(self._planes, -1, width)
                return MaskRow(row, planes, unread)
        except FileNotFoundError:
            return None
        except (struct.error, zlib.error, ValueError, OverflowError, MemoryError):
            pass
        file.unlink(missing_ok=True)
        return None

    def _file(self, row: int) -> Path:
        return self._folder / f"{row:06d}{_ROW}"


_NAP = 0.1  # seconds


class SharedSlide:
    """The rows of tiles of a slide, each computed by the process that has its lease.

    Args:
        segmenter: The model; the same one in every process.
        plan: The slide's tiles; the same ones in every process.
        saved: The rows' files.
        leases: Those of this process.
        interruption: Asked after every tile, and between the network's layers.
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
        """(2) Yield every row from top to bottom: saved ones are loaded, free ones computed.

        For a row that another process is at, this one helps elsewhere, or waits.

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
        """(3) Compute and save rows, from the middle of the longest free stretch to its end.

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
        try:
            wanted = self._claimed(first, held)
            rows = self._segmenter.rows(self._plan, self._interruption, wanted)
            with closing(rows):
                for row in rows:
                    self._saved.save(row)
                    held.remove(row.number)
                    self._leases.release(self._saved.claim(row.number))
                    yield row
        finally:
            for number in held:
                self._leases.release(self._saved.claim(number))

    def _claimed(self, first: int, held: set[int]) -> Iterator[int]:
        """Lease the rows from `first` on, one by one as they are pulled, to the first not free."""
        for row in range(first, self._plan.grid.rows):
            if self._saved.has(row) or not self._leases.take(self._saved.claim(row)):
                return
            held.add(row)
            if self._saved.has(row):  # saved in between
                return
            yield row

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


_SLIDE_CLAIM = "claim"

Outcome = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class WorkerContext:
    """All that one process brings to its slides of a batch.

    Attributes:
        segmenter: The model.
        config: The options.
        out: The folder of the batch.
        leases: Those of this process.
        interruption: Asked after every tile, and between the network's layers.
        resume: Whether results and rows of earlier batches are taken over.
        since: The batch's start, by the clock of `leases`.
        provenance: The model and the options of `segmenter` and `config`.
        overwrite: Whether results of another provenance are replaced.
    """

    segmenter: Segmenter
    config: Config
    out: Path
    leases: Leases
    interruption: Interruption
    resume: bool
    since: float
    provenance: Provenance
    overwrite: bool = False


_PACKAGE = Path(__file__).parents[1]


def _told(raised: Exception, slide: Path) -> PathosegError:
    """Return what a slide failed with as an error to tell; the batch goes on with the next."""
    if isinstance(raised, PathosegError):
        return raised
    frames = traceback.extract_tb(raised.__traceback__)
    last = [each for each in frames if Path(each.filename).is_relative_to(_PACKAGE)][-1]
    what = " ".join(f"{type(raised).__name__}: {raised}".split())
    return PathosegError(
        f"{slide} cannot be segmented ({what}, in {Path(last.filename).name}:{last.lineno}).",
        "This is a fault of pathoseg, or memory is short: report it, or try fewer --readers.",
    )


class SlideJob:
    """One slide of a batch, as one process sees it.

    Args:
        name: The slide's name in the batch.
        slide: Its file.
        folder: The folder of its result, in the output folder.
        context: This process.
        annotation: The file of the slide's regions of interest, or None. No part of the key: a
            result that is there keeps the figures that it has.

    Attributes:
        slide: As given.
        folder: As given, until another slide turns out to have that folder.
    """

    def __init__(
        self,
        name: str,
        slide: Path,
        folder: Path,
        context: WorkerContext,
        annotation: Path | None = None,
    ) -> None:
        self.name, self.slide, self.folder, self._context = name, slide, folder, context
        self._annotation = annotation
        self._out = context.out
        self._outcome: Outcome | None = None
        self._plan: SlidePlan | None = None
        self._left = False  # to others, as this process cannot help

    @property
    def state(self) -> State | None:
        """The slide's state file; None if another slide has its folder, or there is none."""
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
        """(1) Make the result, unless another process is at it; a failure is written down.

        Returns:
            Whether this process has settled the slide: it is done, or failed.

        Raises:
            PathosegError: Not even the state can be written, or a call beside this one makes the
                same result with another model or other options.
            StoppedError: A signal came.
        """
        if self.outcome() is not None:
            return False
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            with self._context.leases.held(self._work / _SLIDE_CLAIM) as mine:
                if not self._context.overwrite:
                    self._refuse_others(mine)
                if not (mine and self._is_apart() and self._settled() is None):
                    return False
                try:
                    return self._attempt()
                finally:
                    with suppress(PathosegError, OSError):  # it holds something, or is gone
                        self._rows.rmdir()
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
        """(3) Compute rows for the process that leads.

        Returns:
            Whether there was anything to do.

        Raises:
            StoppedError: A signal came.
            RuntimeError: The device fails.
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
        except (StoppedError, GivenUpError, RuntimeError):
            raise  # as in `_attempt`
        except Exception as error:  # the process that leads meets the same, or goes on alone
            self._left = True
            if not isinstance(error, (PathosegError, OSError)):  # of these it tells
                reason = f"{type(error).__name__}: {error}"
                say(f"{self.name} is left to the process that leads it ({reason}).")
            return False

    def _attempt(self) -> bool:
        """Make the result; return False where another process took over and this one fell short."""
        context, began = self._context, time.monotonic()
        before = self.state or State(str(self.slide), "begun", "", 0, "")
        begun = replace(
            before,
            slide=str(self.slide),
            place=str(self.slide.absolute()),
            status="begun",
            attempts=before.attempts + 1,
            host=socket.gethostname(),
            problem="",
            hint="",
        )
        try:
            begun = replace(begun, key=self._key, provenance=context.provenance)
            self._write(begun)
            going_on = context.resume or (
                before.status == "begun" and before.written >= context.since
            )
            put_back(self.folder, self._work)
            self._clear(but=(_SLIDE_CLAIM, self._rows.name) if going_on else (_SLIDE_CLAIM,))
            self._rows.mkdir(exist_ok=True)
            with result_folder(self.folder, self._work, before.outputs) as partial:
                segmenter, config = context.segmenter, context.config
                with segmenter.spent.on("finding tissue"):
                    planned = plan_slide(self.slide, segmenter, config, self._annotation)
                rows = self._shared(planned.plan).rows()
                with segmenter.spent.on("joining and writing"):
                    publish(self.name, planned, rows, partial, segmenter, config)
                self._refuse_change()
                outputs = {path.name: stored_bytes(path) for path in sorted(partial.iterdir())}
        except (OSError, StoppedError, GivenUpError, RuntimeError):
            raise  # what torch or a device fails with, the next slide would meet, too
        except Exception as raised:
            # A fault of this package, or no memory: it ends this slide alone.
            error = _told(raised, self.slide)
            if isinstance(raised, UnreadableError):  # what is tried again is read again
                shutil.rmtree(self._rows, ignore_errors=True)
            # Another process that has taken the lease over removed our drafts: a consequence.
            if not context.leases.owns(self._work / _SLIDE_CLAIM):
                return False
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
        return True

    def _refuse_others(self, mine: bool) -> None:
        """Refuse to replace what another process makes, or has made meanwhile, of another slide or
        with another provenance.

        What was there when the batch began has been compared (`refuse_other_results`).
        """
        context, state = self._context, self.state
        refuse_namesakes(self._out, {self.slide: self.folder})
        if state is None or state.provenance is None or state.written < context.since:
            return
        if state.status == "done" or (state.status == "begun" and not mine):
            place = state_file(self._out, self.folder)
            refuse_difference(self._out, place, state.provenance, context.provenance)

    def _refuse_change(self) -> None:
        """Fail if the slide file changed while it was being read; saved rows are dropped too.

        Raises:
            PathosegError: It did.
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
        """Move on to the slide's whole name where a process beside this one took the stem."""
        state = read_state(state_file(self._out, self.folder))
        if state is None or Path(state.slide).name == self.slide.name:
            return True
        self.folder = self.folder.with_name(self.slide.name)
        refuse_strangers(self._out, {self.slide: self.folder})
        return False

    @property
    def _work(self) -> Path:
        return self._out / WORK / self.folder.relative_to(self._out)

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
            **key_options(config),
        }
        if tiling is not None:  # rows of earlier versions were all blended, and are still found
            told["tiling"] = dict(tiling)
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def _shared(self, plan: SlidePlan) -> SharedSlide:
        context = self._context
        rows = SavedRows(self._rows, context.segmenter.planes)
        return SharedSlide(context.segmenter, plan, rows, context.leases, context.interruption)

    def _clear(self, but: tuple[str, ...]) -> None:
        for path in self._work.iterdir():
            if path.name not in but:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, state: State) -> None:
        write_state(state_file(self._out, self.folder), state)
