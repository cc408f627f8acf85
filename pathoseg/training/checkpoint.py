"""The checkpoints of a run: written whole or not at all, read by any number of ranks."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from pathoseg.errors import PathosegError
from pathoseg.outputs.atomic import replaced
from pathoseg.training.engine import Engine

LAST = "last.pt"
BEST = "best.pt"


@dataclass
class Progress:
    """The progress of a run in plain numbers, which load with `weights_only=True`.

    Attributes:
        epoch: Epochs finished.
        epoch_step: Steps done in the epoch under way.
        step: Steps done in all.
        total_steps: Steps the learning rate is laid over; None until a time limit is translated.
        loss_sum: Sum of per-sample losses of the epoch under way.
        samples: Samples of the epoch under way.
        timed_steps: Steps of this epoch that `timed_seconds` covers.
        timed_seconds: Seconds that these took, with the wait for their tiles.
        skipped_steps: Steps left out because a gradient was not finite.
        best: Best validation score so far, -inf where no epoch was judged.
        best_epoch: The epoch it was reached in.
        seconds: Time spent, all parts of the run together.
        rows: Rows of metrics.csv so far.
        prolonged: Epochs finished when the run was last given other limits; 0 where it never was.
        validation_seconds: Seconds that the last validation took, or a guess ahead of the first.
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    total_steps: int | None = None
    loss_sum: float = 0.0
    samples: int = 0
    timed_steps: int = 0
    timed_seconds: float = 0.0
    skipped_steps: int = 0
    best: float = float("-inf")
    best_epoch: int = 0
    seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)
    prolonged: int = 0
    validation_seconds: float = 0.0

    @property
    def score(self) -> float | None:
        """The best validation score; None where no epoch was judged."""
        return self.best if math.isfinite(self.best) else None


def save_checkpoint(path: Path, progress: Progress, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`: after this returns, or a crash, one is whole.

    Args:
        path: The file.
        progress: Where the run stands.
        state: The engine's.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    # Through memory: on a full disk torch.save itself says no more than "unexpected pos 576".
    buffer = io.BytesIO()
    torch.save({"progress": asdict(progress), **state}, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_bytes(buffer.getbuffer())


def load_checkpoint(path: Path, engine: Engine) -> Progress:
    """Load what `save_checkpoint` wrote into an engine of any number of ranks.

    Args:
        path: The checkpoint.
        engine: Gets weights, optimizer state and loss scale.

    Returns:
        The progress of the run.

    Raises:
        PathosegError: The file is cut short, is no checkpoint, or belongs to another model.
    """
    with _checkpoint_errors(path):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        engine.load(state)
        return _progress(state)


def compare_checkpoints(own: Progress, path: Path, engine: Engine) -> None:
    """Refuse ranks that have read different checkpoints, as of folders copied from host to host."""
    steps = [json.loads(text) for text in engine.gather(json.dumps([own.step, own.seconds]))]
    if any(each != steps[0] for each in steps):
        told = ", ".join(f"rank {rank}: step {step}" for rank, (step, _) in enumerate(steps))
        raise PathosegError(
            f"The ranks read different checkpoints as {path} ({told}).",
            "Put the run's folder where all hosts see the same files.",
        )


def read_progress(path: Path) -> Progress:
    """Read the progress of a checkpoint without its weights; zero progress where there is none.

    Raises:
        PathosegError: The file is cut short, or is no checkpoint.
    """
    if not path.exists():
        return Progress()
    with _checkpoint_errors(path):
        return _progress(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _progress(state: Mapping[str, Any]) -> Progress:
    known = {entry.name for entry in fields(Progress)}
    return Progress(**{key: value for key, value in state["progress"].items() if key in known})


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading `path` as one PathosegError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise PathosegError(
            f"The checkpoint {path} does not fit into the device's memory.",
            "Free the device, or go on with --ranks or a lower [parallel] memory.",
        ) from None
    except OSError as error:
        raise PathosegError(
            f"The checkpoint {path} cannot be read ({error.strerror or error}).",
            "Make the file readable, and start the same command again.",
        ) from None
    except (EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PathosegError(
            f"The checkpoint {path} cannot be used ({reason}).",
            f"Delete {path.parent} to start this run again; its bundle in model/ is untouched.",
        ) from None
