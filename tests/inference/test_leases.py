"""Leases: one owner at a time, and none for long after its owner's end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pathoseg.inference.leases import LEASE, Leases


def test_a_claim_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "piece"
    with Leases(tmp_path) as one, Leases(tmp_path) as other:
        assert one.take(path)
        assert other.is_taken(path)
        assert not other.take(path)
        other.release(path)  # not its own
        assert not other.take(path)
        one.release(path)
        assert not other.is_taken(path)
        assert other.take(path)
    assert not path.exists()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        hands = [Leases(tmp_path) for _ in range(8)]
        for number in range(50):
            path = tmp_path / str(number)
            taken = list(pool.map(lambda each, path=path: each.take(path), hands))
            assert taken.count(True) == 1
        for hand in hands:
            hand.__exit__(None, None, None)


@pytest.mark.process
def test_a_killed_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "piece"
    code = (
        "import os, sys; from pathlib import Path; from pathoseg.inference.leases import Leases\n"
        "folder = Path(sys.argv[1])\n"
        "assert Leases(folder).take(folder / 'piece')\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert path.exists()
    with Leases(tmp_path) as mine:
        assert not mine.is_taken(path)
        assert mine.take(path)
        assert mine.is_taken(path)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="asks for an end and leaves it")
def test_an_ended_process_that_nobody_waited_for_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from pathoseg.inference.leases import Leases\n"
        "assert Leases(Path()).take(Path('piece'))\n"
        "os._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with Leases(tmp_path) as mine:
            assert not mine.is_taken(tmp_path / "piece")


@pytest.mark.parametrize("text", ["", "{}", "[]", None])
def test_elsewhere_silence_beyond_the_lease_is_the_end(tmp_path: Path, text: str | None) -> None:
    """An owner on another host, or one that was cut short while it wrote."""
    path = tmp_path / "piece"
    owner = {"host": "elsewhere", "boot": "b", "pids": "p", "pid": os.getpid(), "born": 0.0}
    path.write_text(json.dumps(owner) if text is None else text)
    with Leases(tmp_path) as mine:
        now = mine.now()
        os.utime(path, (now, now - LEASE + 20))
        assert not mine.take(path)
        for touched in (now - LEASE - 1, now + LEASE + 20):  # the second by a clock since set back
            path.write_text("" if text is None else text)
            os.utime(path, (now, touched))
            assert mine.take(path)
            assert path.read_text() != text
            mine.release(path)


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("text", ["", "dead"])
def test_who_is_late_to_bury_a_lease_takes_none_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has_links: bool
) -> None:
    """Let another process take over, or its owner wake, between the look and the rename."""

    def refuse(*_: object) -> None:
        raise PermissionError

    def rename_late(source: Path, target: Path) -> Path:
        with monkeypatch.context() as once:
            once.setattr(Path, "rename", rename)
            meanwhile()
        return rename(source, target)

    def wake() -> None:
        os.utime(path)

    path, rename = tmp_path / "piece", Path.rename
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with Leases(tmp_path) as one, Leases(tmp_path) as other:
        for meanwhile in (lambda: other.take(path), wake):
            path.write_text(text)
            os.utime(path, (0, 0))
            monkeypatch.setattr(Path, "rename", rename_late)
            assert not one.take(path)
            assert other.owns(path) == (meanwhile is not wake)
            assert {file.name for file in tmp_path.iterdir()} == {".clock", "piece"}
            other.release(path)
        os.utime(path, (0, 0))
        monkeypatch.setattr(Path, "rename", rename)
        assert one.take(path)


def test_a_lease_that_is_taken_while_another_is_put_back_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a third process come in the moment in which there is no file."""

    def rename_late(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        assert second.take(path)
        moved = rename(source, target)
        assert third.take(path)
        return moved

    path, rename = tmp_path / "piece", Path.rename
    with Leases(tmp_path) as first, Leases(tmp_path) as second, Leases(tmp_path) as third:
        path.touch()
        os.utime(path, (0, 0))
        monkeypatch.setattr(Path, "rename", rename_late)
        assert not first.take(path)
        assert third.owns(path)
        second.release(path)
        assert third.owns(path)


def test_an_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathoseg.inference.leases.BEAT", 0.02)
    path = tmp_path / "piece"
    with Leases(tmp_path) as mine:
        mine.take(path)
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            pass
    with Leases(tmp_path) as later:  # and one that lost its claim lives on without it
        later.take(path)
        path.unlink()
        assert not later.is_taken(path)
