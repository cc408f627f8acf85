"""The state of a training run on disk: replaced whole, loaded without executing anything."""

from __future__ import annotations

import io
import pickle
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
    """Where a run stands; plain numbers, so that it loads with `weights_only=True`.

    Attributes:
        epoch: Epochs finished.
        epoch_step: Steps done in the epoch under way.
        step: Steps done in all.
        total_steps: Steps the learning rate is laid over; None until a time limit is translated.
        loss_sum: Sum of per-sample losses of the epoch under way.
        samples: Samples of the epoch under way.
        skipped_steps: Steps left out because a gradient was not finite.
        best: Best validation score so far.
        best_epoch: The epoch it was reached in.
        seconds: Time spent, all parts of the run together.
        rows: Rows of metrics.csv so far.
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    total_steps: int | None = None
    loss_sum: float = 0.0
    samples: int = 0
    skipped_steps: int = 0
    best: float = float("-inf")
    best_epoch: int = 0
    seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)


def save_checkpoint(path: Path, progress: Progress, state: dict[str, Any]) -> None:
    """Replaces the checkpoint at `path`: after this returns, or a crash, one is whole.

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
    """Restores what `save_checkpoint` wrote, on however many ranks.

    Raises:
        PathosegError: The file is cut short, is no checkpoint, or belongs to another model.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        engine.load(state)
        known = {entry.name for entry in fields(Progress)}
        return Progress(**{key: value for key, value in state["progress"].items() if key in known})
    except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PathosegError(
            f"The checkpoint {path} cannot be used ({reason}).",
            f"Delete {path.parent} to start this run again; its bundle in model/ is untouched.",
        ) from None
