"""NCCL is refused where there are too few GPUs; where there are two, it joins ranks as all do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.launcher import Choice, World, connect
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.nccl import shared_gpu
from pathoseg.parallel.comm.transport import Transport
from tests.parallel.comm import transport_conformance
from tests.parallel.comm.joined import OnDevice
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.runtime.cases import save_verdicts
from tests.parallel.runtime.judged_ranks import cases_of_processes

_TESTS = Path(__file__).resolve().parents[1]
NAMES = [case.__name__ for case in transport_conformance.CASES]
TOO_FEW = "(has no NCCL|needs a GPU for each rank).*gloo"
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes a GPU a rank"
)


def _start(ranks: int, script: str, library: str, choice: Choice, *more: str) -> int:
    command = [sys.executable, str(_TESTS / script), library, *more]
    return start_local(ranks, command, choice)


def test_too_few_gpus_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(PathosegError, match=TOO_FEW):
        start_local(ranks, ["touch", str(tmp_path / "started")], "nccl")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU says")
def test_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(PathosegError, match=TOO_FEW):
        connect("nccl", World("torchrun", 0, 2, port=1))


def test_ranks_that_share_a_gpu_are_refused() -> None:
    assert shared_gpu(["a 1", "a 2", "b 1"]) is None
    shared = shared_gpu(["a 1", "b 1", "a 2", "b 1"])
    assert shared is not None
    assert "ranks 1 and 3 have the same" in shared.problem
    many = shared_gpu([str(rank) for rank in range(18)])
    assert many is not None
    assert "at most 17 ranks" in many.problem


def test_the_suite_runs_on_tensors_of_a_device() -> None:
    def body(transport: Transport) -> list[str]:
        return transport_conformance.run_all(OnDevice(transport, torch.device("cpu")))

    assert run_ranks(2, body) == [NAMES] * 2


@pytest.mark.process
def test_the_calls_to_nccl_are_right_where_gloo_answers_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert _start(3, "comm/transport_conformance.py", "imitated", "gloo") == 0
    assert capfd.readouterr().out.split() == ["passed:", *NAMES]


@pytest.mark.process
def test_a_lost_rank_aborts_every_communicator(capfd: pytest.CaptureFixture[str]) -> None:
    assert _start(3, "comm/faults.py", "imitated", "gloo", "kill") in (2, 137)
    out = capfd.readouterr().out
    assert "rank 0 waited: Rank 2 ended without a word" in out
    assert out.count("aborted") == 4  # rank 0's, to and from two others


@pytest.mark.cuda
@two_gpus
@pytest.mark.parametrize("script", ["comm/transport_conformance.py", "runtime/judged_ranks.py"])
def test_nccl_joins_ranks_as_all_transports_do(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verdicts = tmp_path / "verdicts.pt"
    save_verdicts(cases_of_processes(2, "nccl"), verdicts)
    code = _start(2, script, "nccl", "nccl", *([str(verdicts)] if "judged" in script else []))
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.startswith("passed:")


@pytest.mark.cuda
@two_gpus
def test_a_rank_that_is_lost_ends_nccl(capfd: pytest.CaptureFixture[str]) -> None:
    assert _start(2, "comm/faults.py", "nccl", "nccl", "kill") in (2, 137)
    assert "Rank 1 ended without a word" in capfd.readouterr().out
