"""Ranks meet although some have tried before, and none waits for a rank 0 that cannot listen."""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import gloo
from pathoseg.parallel.comm.gloo import GlooWire, join_gloo, keep_store
from pathoseg.parallel.comm.heartbeat import Heartbeat


def test_ranks_that_torchrun_starts_again_meet_though_not_all_had_come_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has died during its imports; torchrun's agents keep the store."""
    store, port = keep_store()

    def join(rank: int) -> GlooWire:
        return join_gloo(rank, 2, "127.0.0.1", port, local=True, hosted=True)

    def left_alone(*_: object) -> GlooWire:
        raise RuntimeError("rank 1 does not come")

    with monkeypatch.context() as patch:
        patch.setattr(gloo, "GlooWire", left_alone)
        with pytest.raises(PathosegError, match="cannot meet"):
            join(0)
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(gloo, "MEETING", 5.0)
    with ThreadPoolExecutor(2) as ranks:
        for wire in ranks.map(join, range(2)):
            wire.close(True)
    del store


def test_a_rank_0_that_cannot_listen_keeps_nobody_waiting() -> None:
    told: queue.Queue[str] = queue.Queue()

    def announced(text: str) -> str:
        if text:
            told.put(text)
        return text or told.get(timeout=10)

    with ThreadPoolExecutor(2) as ranks:
        lives = [
            ranks.submit(Heartbeat, rank, 2, "no.such.host.invalid", announced) for rank in (0, 1)
        ]
        for life in lives:
            with pytest.raises(PathosegError) as refused, closing(life.result(timeout=20)):
                pass
            assert "Rank" in refused.value.problem
