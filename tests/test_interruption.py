"""A signal while the main thread is in a kernel: what may be left is left, and nothing else."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pathoseg import interruption
from pathoseg.interruption import Interruption


class _Ended(BaseException):
    """The process has ended."""


class _Exit:
    """Stands for `os._exit`; the thread that ends the process goes no further.

    Attributes:
        code: The exit code.
        came: Is set once there is one.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.came.set()
        raise _Ended


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> _Exit:
    exits = _Exit()
    monkeypatch.setattr(os, "_exit", exits)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    monkeypatch.setattr(interruption, "_PATIENCE", 0.05)
    monkeypatch.setattr(interruption, "_TURN", 0.02)
    return exits


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_leaves_what_it_may_leave(
    ended: _Exit, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    steps = []
    with Interruption("Go on with --resume.", ends_process=True) as work:
        work.leave = lambda: steps.append("leave")
        with work.abandonable(lambda: steps.append("tidy")):
            _signal(number)
            assert ended.came.wait(5)
            assert work.is_asked()
    assert ended.code == 128 + number
    assert steps == ["tidy", "leave"]
    said = capfd.readouterr().err
    assert said.count("Stopping, as soon as") == 1
    assert "Stopped. Go on with --resume." in said
    assert signal.set_wakeup_fd(-1) == -1


def test_what_must_be_whole_is_waited_for(ended: _Exit) -> None:
    with Interruption("", ends_process=True) as work:
        work.leave = lambda: None
        with work.abandonable() as commit:
            commit()
            _signal(signal.SIGTERM)
            assert not ended.came.wait(0.3)
        assert not ended.came.wait(0.1)
        with work.abandonable():
            assert ended.came.wait(5)


@pytest.mark.parametrize("in_time", [True, False])
def test_work_that_ends_by_itself_is_not_left(ended: _Exit, in_time: bool) -> None:
    with Interruption("", ends_process=True) as work:
        _signal(signal.SIGTERM)
        assert not ended.came.wait(0.01 if in_time else 0.2)
        assert work.number == signal.SIGTERM
    assert not ended.came.wait(0.2)


def test_where_nothing_can_be_saved_the_work_goes_on(ended: _Exit) -> None:
    tried = threading.Event()

    def leave() -> None:
        tried.set()
        raise OSError("The disk is full")

    with Interruption("", ends_process=True) as work:
        work.leave = leave
        with work.abandonable() as commit:
            _signal(signal.SIGTERM)
            assert tried.wait(5)
            commit()
    assert ended.code is None


def test_a_library_ends_no_process(ended: _Exit, capfd: pytest.CaptureFixture[str]) -> None:
    with Interruption("") as work, work.abandonable():
        _signal(signal.SIGTERM)
        assert not ended.came.wait(0.2)
        assert work.is_asked()
        assert signal.set_wakeup_fd(-1) == -1
    assert capfd.readouterr().err.count("Stopping, as soon as") == 1


def test_a_second_ctrl_c_ends_the_work_at_once() -> None:
    with Interruption("") as work:
        work.ask(signal.SIGTERM)  # as another rank does
        _signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            _signal(signal.SIGINT)
        assert work.number == signal.SIGTERM
