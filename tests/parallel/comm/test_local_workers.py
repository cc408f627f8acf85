"""Processes that share work: one that is killed ends no other, a signal reaches all."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pathoseg.parallel.comm.local_ranks import start_workers

pytestmark = pytest.mark.process


def workers(ranks: int, script: str) -> int:
    return start_workers(ranks, ["/bin/sh", "-c", script])


def test_the_best_code_counts_and_all_speak(capfd: pytest.CaptureFixture[str]) -> None:
    assert workers(3, "echo I am $RANK of $WORLD_SIZE; exit $((3 - RANK))") == 1
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"I am {rank} of 3" for rank in range(3)]
    assert err == ""


def test_a_killed_rank_ends_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"[ $RANK = 0 ] && kill -9 $$; sleep 0.3; touch {tmp_path}/$RANK"
    assert workers(2, script) == 0
    assert (tmp_path / "1").exists()
    assert capfd.readouterr().err == "Rank 0 was killed; the others did its share.\n"
    assert workers(2, "kill -9 $$") == 137
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'touch {tmp_path}/$RANK.came; exit {128 + number}' {name}; "
    script += f"touch {tmp_path}/$RANK.ready; while true; do sleep 0.05; done"

    def send() -> None:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert workers(2, script) == 128 + number
    sender.join()
    assert len(list(tmp_path.glob("*.came"))) == 2
