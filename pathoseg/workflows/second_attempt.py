"""The second attempt of a run whose accelerator had no memory left: once, by a plan with less.

    attempt 1    step, step, MemoryExhaustedError: how much fits
    attempt 2    goes on from the last checkpoint, or begins, as --resume --memory SIZE would

One process makes both. So do ranks of mpirun, srun or torchrun, whom nobody would start again: they
drop what is under way, join once more and go on. Ranks that this command has started end together,
as after any error, and free all their memory; each has left a file (1) for the process that started
them, which starts them again (2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pathoseg.device import let_go_of_memory
from pathoseg.errors import MemoryExhaustedError
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.comm.launcher import Choice
from pathoseg.progress import say
from pathoseg.training.distributed import start_ranks

if TYPE_CHECKING:
    from pathoseg.parallel.comm.transport import Transport

# An environment variable of ranks that are started again; empty once they have been.
_FOLDER = "PATHOSEG_SECOND_ATTEMPT"
_MIB = 2**20
# Options of the first attempt that the second is given otherwise: with a value, and without.
_REPLACED, _DROPPED = ("--out", "--memory"), ("--overwrite", "--resume")


@dataclass(frozen=True)
class SecondAttempt:
    """The run and the memory of the attempt that follows an out-of-memory error.

    Attributes:
        run: The folder of the run.
        memory: Whole MiB that its plan may fill on each rank.
    """

    run: Path
    memory: int

    @classmethod
    def after(cls, error: MemoryExhaustedError) -> SecondAttempt | None:
        """Return the attempt after an error; None where there is no run yet or no memory fits."""
        if error.run is None or error.fits < _MIB:
            return None
        return cls(error.run, error.fits // _MIB)

    @classmethod
    def in_this_process(cls, error: MemoryExhaustedError) -> SecondAttempt | None:
        """Return the attempt that this process makes itself, as `after`.

        Returns:
            None also where the process that has started this rank starts it again, or has.
        """
        return None if _FOLDER in os.environ else cls.after(error)

    @property
    def size(self) -> str:
        """The value of --memory."""
        return f"{self.memory}MiB"

    def flags(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return options by table and key with the memory among them."""
        return {**given, "parallel": {**given.get("parallel", {}), "memory": self.size}}

    def arguments(self, given: Sequence[str]) -> list[str]:
        """Return a command line that goes on with the run in its memory."""
        kept, values = list[str](), iter(given)
        for each in values:
            if each in _REPLACED:
                next(values, None)
            elif each not in _DROPPED and each.partition("=")[0] not in _REPLACED:
                kept.append(each)
        return [*kept, "--resume", "--out", str(self.run), "--memory", self.size]

    def begun(self, transport: Transport | None) -> SecondAttempt:
        """Free the memory of the first attempt and tell of this one; all ranks call it.

        Args:
            transport: Joins the ranks; None where this process is alone.

        Returns:
            The attempt with the least memory that any rank knows of.
        """
        let_go_of_memory()
        own = str(self.memory)
        told = [own] if transport is None else transport.gather(own)
        attempt = replace(self, memory=min(map(int, told)))
        attempt.tell()
        return attempt

    def tell(self) -> None:
        say(f"Once more, with a plan of {self.size} a rank: {self.run}")


def leave_word(error: MemoryExhaustedError, rank: int) -> None:
    """Tell the process that has started this rank, if one has, of another attempt (1)."""
    folder, attempt = os.environ.get(_FOLDER), SecondAttempt.after(error)
    if folder and attempt is not None:
        told = json.dumps([str(attempt.run), attempt.memory])
        write_text(Path(folder) / f"{rank}.json", told)


def start_ranks_twice(ranks: int, arguments: Sequence[str], choice: Choice) -> int | None:
    """Start ranks as `start_ranks`, and once more where one of them has left word (2).

    Of several words the one with least memory counts.
    """
    with TemporaryDirectory(prefix="pathoseg-attempt-") as folder:
        code = start_ranks(ranks, arguments, choice, {_FOLDER: folder})
        told = [json.loads(each.read_text()) for each in Path(folder).glob("*.json")]
    if not code or not told:
        return code
    run, memory = min(told, key=lambda each: each[1])
    attempt = SecondAttempt(Path(run), memory)
    attempt.tell()
    return start_ranks(ranks, attempt.arguments(arguments), choice, {_FOLDER: ""})
