"""One slide of a batch: where it stands, and this process's part in it, leading or helping."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.inference.leases import Claims
from pathoseg.inference.publish import publish
from pathoseg.inference.result_folder import result_folder
from pathoseg.inference.saved_rows import SavedRows
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.inference.shared_slide import SharedSlide
from pathoseg.inference.states import State, read_state, state_file, write_state
from pathoseg.interruption import Interruption
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.fingerprint import Fingerprint

WORK = ".work"  # in the output folder: what is not whole, a folder for each slide
_CLAIM = "claim"

Outcome = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class Hand:
    """A process that works on a batch.

    Attributes:
        segmenter: The model.
        config: The options.
        claims: What it has taken.
        interruption: What stops it.
        resume: Whether results and rows of earlier batches are taken over.
        since: When this batch began, by the clock of `claims`.
    """

    segmenter: Segmenter
    config: Config
    claims: Claims
    interruption: Interruption
    resume: bool
    since: float


class SlideWork:
    """What there is to do for one slide.

    Args:
        slide: Its file.
        folder: Of its result, in the output folder.
        hand: This process.
    """

    def __init__(self, slide: Path, folder: Path, hand: Hand) -> None:
        self.slide, self.folder, self._hand = slide, folder, hand
        self._out = folder.parent
        self._outcome: Outcome | None = None
        self._plan: SlidePlan | None = None
        self._left = False  # to others, as this process cannot help

    @property
    def state(self) -> State | None:
        """Where the slide stands; None where another slide has its folder, or nothing is known."""
        state = read_state(state_file(self._out, self.folder))
        return state if state is not None and Path(state.slide).name == self.slide.name else None

    def outcome(self) -> Outcome | None:
        """What came of the slide in this batch, whoever did it; None while it is open.

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
            with self._hand.claims.held(self._work / _CLAIM) as mine:
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
        hand, state = self._hand, self.state
        try:
            if self._left or state is None or state.status != "begun" or state.key != self._key:
                return False
            if not self._rows.exists():
                return False
            if self._plan is None:
                with open_slide(self.slide, hand.config.data.assume_mpp) as opened:
                    self._plan = hand.segmenter.plan(opened)
            return self._shared(self._plan).help()
        except FileNotFoundError:
            return False  # it is done
        except (PathosegError, OSError):
            self._left = True  # the process that leads meets the same, and says so
            return False

    def _attempt(self) -> None:
        hand, began = self._hand, time.monotonic()
        before = self.state or State(str(self.slide), "begun", "", 0, "")
        begun = replace(
            before,
            slide=str(self.slide),
            status="begun",
            attempts=before.attempts + 1,
            host=socket.gethostname(),
            outputs={},
            problem="",
            mend="",
        )
        try:
            begun = replace(begun, key=self._key)
            self._write(begun)
            going_on = hand.resume or (before.status == "begun" and before.written >= hand.since)
            self._clear(but=(_CLAIM, self._rows.name) if going_on else (_CLAIM,))
            self._rows.mkdir(exist_ok=True)
            with result_folder(self.folder, self._work) as partial:
                publish(self.slide, partial, hand.segmenter, hand.config, self._all_rows)
                self._refuse_change()
                outputs = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        except PathosegError as error:
            if self._settled() is None:  # else another took over, and has done it
                seconds = (*begun.seconds, round(time.monotonic() - began, 3))
                failed = replace(
                    begun, status="failed", seconds=seconds, problem=error.problem, mend=error.mend
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
        """What was read of a file that is another by now is no result, nor are rows of it.

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
        state, since = self.state, self._hand.since
        if state is None or state.status == "begun":
            return None
        if state.status == "failed":
            return "failed" if state.written >= since else None
        if not (self._hand.resume or state.written >= since):
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
        """Of the file as it was when this process first looked."""
        return Fingerprint.of(self.slide)

    @cached_property
    def _key(self) -> str:
        """A hash of all that the result depends on."""
        config = self._hand.config
        infer = asdict(config.infer)
        del infer["readers"]
        told = {
            "slide": asdict(self._fingerprint),
            "model": self._hand.segmenter.model_id,
            "assume_mpp": config.data.assume_mpp,
            "tissue": asdict(config.tissue),
            "infer": infer,
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def _all_rows(self, plan: SlidePlan) -> Generator[MaskRow]:
        return self._shared(plan).rows()

    def _shared(self, plan: SlidePlan) -> SharedSlide:
        hand = self._hand
        rows = SavedRows(self._rows)
        return SharedSlide(hand.segmenter, plan, rows, hand.claims, hand.interruption)

    def _clear(self, but: tuple[str, ...]) -> None:
        for path in self._work.iterdir():
            if path.name not in but:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, state: State) -> None:
        write_state(state_file(self._out, self.folder), state)
