"""A signal, and the error of another rank that comes with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pathoseg.errors import PathosegError, StoppedError
from pathoseg.interruption import Interruption
from pathoseg.parallel.comm.transport import Transport
from pathoseg.training.distributed import stopped_together


def _signalled() -> None:
    raise StoppedError(15, "advice")


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("Rank 1: a tile cannot be read. (Rank 0 waited for rank 1 to take message 3.)", True),
        ("Rank 1 was stopped by a signal. (Rank 0 waited for all ranks.)", False),
        ("Rank 1 ended without a word: it was killed, or it crashed.", False),
    ],
)
def test_what_a_rank_has_failed_at_is_told_though_a_signal_came(problem: str, told: bool) -> None:
    """torchrun signals the others as soon as a rank has failed."""
    interruption = cast(Interruption, SimpleNamespace(raise_if_asked=_signalled))
    transport = cast(Transport, SimpleNamespace())
    with (
        pytest.raises(PathosegError if told else StoppedError),
        stopped_together(interruption, transport),
    ):
        raise PathosegError(problem, "")
