"""Ranks meet although some have tried before, and none waits for a rank 0 that cannot listen."""

from __future__ import annotations

import os
import queue
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import gloo
from pathoseg.parallel.comm.gloo import GlooWire, join_gloo, keep_store
from pathoseg.parallel.comm.heartbeat import Heartbeat, meet


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


def test_strangers_on_the_network_end_no_meeting() -> None:
    """They hang up, reset the connection, or say something else."""
    told: queue.Queue[str] = queue.Queue()

    def announced(text: str) -> str:
        if text:
            told.put(text)
            return text
        host, port, _ = (text := told.get(timeout=10)).split()
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n", b"x" * 40):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)  # rank 0 has hung up: no more wait to be accepted than it lets
        with socket.create_connection((host, int(port))) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return text

    with ThreadPoolExecutor(2) as ranks:
        met = [ranks.submit(meet, rank, 2, "127.0.0.1", announced) for rank in (0, 1)]
        found = [each.result(timeout=20) for each in met]
    assert [[*each] for each in found] == [[1], [0]]
    found[1][0].sendall(b"here")
    assert found[0][1].recv(4) == b"here"
    for each in found:
        for connection in each.values():
            connection.close()


def _listening() -> set[str]:
    """The local addresses, in the kernel's notation, at which some process listens."""
    tables = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
    rows = [row.split() for row in tables]
    return {row[1] for row in rows if row[3] == "0A"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_ranks_of_one_machine_meet_on_the_loopback_interface_alone() -> None:
    before = _listening()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def join(rank: int) -> GlooWire:
        return join_gloo(rank, 2, "no.such.host.invalid", port, local=True)

    with ThreadPoolExecutor(2) as ranks:
        wires = [*ranks.map(join, range(2))]
    opened = _listening() - before
    for wire in wires:
        wire.close(True)
    assert f"0100007F:{port:04X}" in opened
