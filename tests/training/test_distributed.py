"""Ranks before they have met; a signal, and the error of another rank that comes with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast
from unittest import mock

import pytest
import torch

from pathoseg import device
from pathoseg.errors import LostRankError, PathosegError, StoppedError
from pathoseg.interruption import Interruption
from pathoseg.parallel.comm.launcher import World
from pathoseg.parallel.comm.local_ranks import LAST_WORDS
from pathoseg.parallel.comm.transport import Transport
from pathoseg.training import distributed
from pathoseg.training.distributed import Ranks, say_ranks, stopped_together


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the second of two ranks that torchrun has started."""
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (world | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize("name", ["train", "calibrate"])
def test_cuda_is_prepared_before_a_device_is_asked_for(
    name: str,
    command: Callable[..., tuple[int, str]],
    toy_slides: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variables of CUDA, wherever a command comes to its first device, which begins CUDA."""
    seen = []

    def begun() -> None:
        seen.append(os.environ.get("CUDA_MODULE_LOADING"))

    monkeypatch.setattr(device, "_accelerator", begun)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = ["--slides", toy_slides, "--config", "tiny.toml"] if name == "train" else []
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_MODULE_LOADING", None)
        assert command(name, *own, "--device", "cuda")[0] == 2
    assert {*seen} == {"EAGER"}


@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize("is_local", [False, True])
def test_an_error_before_ranks_have_met_is_told_by_its_rank(
    is_local: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A rank without the GPU that was asked for; where `--ranks` has started it, a file has it."""
    words = tmp_path / "words"
    if is_local:
        monkeypatch.setenv(LAST_WORDS, str(words))
    monkeypatch.setattr(device, "_accelerator", lambda: None)
    with (
        pytest.raises(SystemExit, match="2"),
        Ranks() as ranks,
        ranks.joined("gloo", device="cuda:7"),
    ):
        pytest.fail("no such device")
    told = "There is no device cuda:7 here. Name one of cpu, or none to take cpu.\n"
    if is_local:
        assert (words.read_text(), capfd.readouterr().err) == (told, "")
    else:
        assert capfd.readouterr().err == f"Rank 1 on {socket.gethostname()}: {told}"


@pytest.mark.usefixtures("as_rank_1")
def test_an_error_of_ranks_that_have_met_is_left_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Leave an error that all ranks raise, such as a GPU that two share, to rank 0."""

    def refused(*_: object) -> NoReturn:
        raise PathosegError("NCCL needs a GPU for each rank.", "")

    monkeypatch.setattr(distributed, "join_wire", lambda *_: SimpleNamespace())
    monkeypatch.setattr(distributed, "connect_on", refused)
    with pytest.raises(SystemExit, match="2"), Ranks() as ranks, ranks.joined("gloo", device="cpu"):
        pytest.fail("no transport")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize("lost", [0, 2])
def test_where_rank_0_is_lost_rank_1_tells_it(
    lost: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> NoReturn:
        raise LostRankError(f"Rank {lost} ended without a word.", "Mend it.", lost)

    monkeypatch.setattr(distributed, "join_wire", lambda *_: SimpleNamespace())
    monkeypatch.setattr(distributed, "connect_on", refused)
    with pytest.raises(SystemExit, match="2"), Ranks() as ranks, ranks.joined("gloo", device="cpu"):
        pytest.fail("no transport")
    told = f"Rank 1 on {socket.gethostname()}: Rank 0 ended without a word. Mend it.\n"
    assert capfd.readouterr() == ("", "" if lost else told)


@pytest.mark.parametrize(
    ("world", "told"),
    [
        (World(None), False),
        (World("mpirun", 0, 3), False),
        (World("mpirun", 0, 2), True),
    ],
)
def test_ranks_that_the_launcher_did_not_start_are_told(
    world: World, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    say_ranks(3, world)
    said = capsys.readouterr().err
    assert said == ("3 ranks are asked for, and mpirun has started 2.\n" if told else "")


def _signalled() -> None:
    raise StoppedError(15, "advice")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PathosegError("Rank 1: a tile cannot be read. (Rank 0 waited for rank 1.)", ""), True),
        (
            PathosegError("Rank 1 was stopped by a signal. (Rank 0 waited for all ranks.)", ""),
            False,
        ),
        (LostRankError("Rank 1 ended without a word: it was killed, or it crashed.", "", 1), False),
        (LostRankError("Rank 0 ended without a word: it was killed, or it crashed.", "", 0), True),
    ],
)
def test_what_a_rank_has_failed_at_is_told_though_a_signal_came(
    error: PathosegError, told: bool
) -> None:
    """torchrun signals the others as soon as a rank has failed."""
    interruption = cast(Interruption, SimpleNamespace(raise_if_asked=_signalled))
    transport = cast(Transport, SimpleNamespace())
    with (
        pytest.raises(PathosegError if told else StoppedError),
        stopped_together(interruption, transport),
    ):
        raise error
