"""Checkpoints: what all ranks must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pathoseg.errors import PathosegError
from pathoseg.training.checkpoint import Progress, compare_checkpoints
from pathoseg.training.engine import Engine


@pytest.mark.parametrize("other", [[7, 1.0], [8, 2.0], [0, 0.0]])
def test_ranks_that_read_different_checkpoints_are_refused(other: list[float]) -> None:
    own = Progress(step=8, seconds=1.0)

    def compare(theirs: list[float]) -> None:
        engine = SimpleNamespace(gather=lambda text: [text, json.dumps(theirs)])
        compare_checkpoints(own, Path("run/checkpoints/last.pt"), cast(Engine, engine))

    compare([8, 1.0])
    with pytest.raises(PathosegError, match=rf"run/.*rank 0: step 8, rank 1: step {other[0]}\)"):
        compare(other)
