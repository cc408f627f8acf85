"""The heartbeat between two processes: a host that pauses as a whole loses nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pathoseg.parallel.comm import heartbeat

pytestmark = pytest.mark.process

_RANK = """
import sys, time
from pathlib import Path
from pathoseg.parallel.comm import heartbeat

rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
heartbeat.BEAT = 0.05

def announce(text):
    if rank == 0:
        draft = meeting.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(meeting)
    while not meeting.exists():
        time.sleep(0.01)
    return meeting.read_text()

life = heartbeat.Heartbeat(rank, 2, "127.0.0.1", announce)
print("met", flush=True)
sys.stdin.readline()
life.check(1)
life.close()
print("well", flush=True)
"""


def test_a_pause_of_all_ranks_loses_none(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "meeting")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "met\n"
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(4 * heartbeat.SILENCE * 0.05)
    assert [rank.communicate("\n")[0] for rank in ranks] == ["well\n"] * 2
