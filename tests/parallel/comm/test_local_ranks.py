"""Ranks are started with one output and one end; each launcher's variables are understood."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pathoseg import platform_support
from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import launcher
from pathoseg.parallel.comm import local_ranks as launch
from pathoseg.parallel.comm.launcher import (
    Choice,
    HostShare,
    World,
    find_host_share,
    find_world,
    share_of_cores,
    use_host_share,
)
from pathoseg.parallel.comm.local_ranks import local_mpirun, start_local

LIBRARIES = ["gloo"]
if local_mpirun():
    LIBRARIES.append("mpi")
RANK = "rank=${OMPI_COMM_WORLD_RANK:-$RANK}; "


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", RANK + script]


@pytest.mark.process
@pytest.mark.parametrize("library", LIBRARIES)
def test_rank_0_has_the_output(library: Choice, capfd: pytest.CaptureFixture[str]) -> None:
    assert start_local(3, shell("echo I am $rank"), library) == 0
    assert capfd.readouterr() == ("I am 0\n", "")


@pytest.mark.process
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_first_rank_to_fail_gives_code_and_last_words(
    library: Choice, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "[ $rank = 2 ] && echo the glass broke >&2 && exit 7; sleep 1; exit 8"
    assert start_local(3, shell(script), library) == 7
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "Rank 2 failed first. Its last words:\nthe glass broke\n"


LEAVES_IT_TO_RANK_0 = """
from pathoseg.errors import PathosegError
from pathoseg.training.distributed import errors_left_to_rank_0

with errors_left_to_rank_0():
    raise PathosegError("The glass broke.", "Take another.")
"""


@pytest.mark.process
@pytest.mark.parametrize("hears", [True, False])
def test_an_error_that_rank_0_does_not_hear_in_time_is_told(
    hears: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Test a rank 0 whose layer computes longer than it is given to end."""
    monkeypatch.setattr(launch, "GRACE", 0.5)
    program = tmp_path / "rank.py"
    program.write_text(LEAVES_IT_TO_RANK_0)
    rank_0 = "exit 2" if hears else "sleep 60"
    script = f"[ $rank = 1 ] && exec {sys.executable} {program}; "
    script += f"until [ -e $0/failed.1 ]; do sleep 0.1; done; {rank_0}"
    script = script.replace("$0/failed.1", "$(dirname $PATHOSEG_LAST_WORDS)/failed.1")
    assert start_local(2, shell(script)) == 2
    told = "Rank 1 failed first. Its last words:\nThe glass broke. Take another.\n"
    assert capfd.readouterr().err == ("" if hears else told)


@pytest.mark.process
@pytest.mark.parametrize("words", ["Rank 0 ended without a word.", ""])
def test_where_rank_0_is_killed_rank_1_has_the_last_words(
    words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"[ $rank = 0 ] && kill -9 $$; printf '{words}' > $PATHOSEG_LAST_WORDS; sleep 0.5"
    assert start_local(2, shell(script), "gloo") == 137
    told = capfd.readouterr().err.splitlines()[-1]
    assert told == (words or "Rank 0 was ended by signal 9.")


@pytest.mark.process
@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_that_outlive_a_failure_are_ended(
    library: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.5)
    script = f"echo $$ > {tmp_path}/$rank; [ $rank = 1 ] && sleep 0.5 && kill -9 $$; sleep 300"
    assert start_local(2, shell(script), library) == 137
    other = int((tmp_path / "0").read_text())
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE


@pytest.mark.process
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank_once(
    library: Choice, number: int, code: int, tmp_path: Path
) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    script = f"trap 'echo {name} >> {tmp_path}/$rank.came; exit {code}' {name}; "
    script += f"touch {tmp_path}/$rank.ready; while true; do sleep 0.1; done"

    def send() -> None:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert start_local(2, shell(script), library) == code
    sender.join()
    assert [(tmp_path / f"{rank}.came").read_text() for rank in (0, 1)] == [f"{name}\n"] * 2


@pytest.mark.process
def test_each_rank_has_its_share_of_the_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setenv("LOCAL_RANK", "7")  # of the launcher that has started this process
    script = 'test "$LOCAL_RANK" = "$RANK" && echo $OMP_NUM_THREADS'
    assert start_local(2, shell(script), "gloo") == 0
    assert capfd.readouterr().out == "3\n"


def test_without_mpirun_mpi_is_refused_with_the_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PathosegError, match=r"There is no .*mpirun .* pip install"):
        start_local(2, shell("true"), "mpi")


@pytest.mark.process
def test_the_mpirun_of_another_mpi_is_not_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would not know the options of Open MPI 5, as a conda environment's MPICH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch, "distributions", lambda name: iter(()))
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "mpirun").chmod(0o700)
    assert start_local(2, shell("true")) == 0  # by gloo


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[03-07,11],login1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, World()),  # a batch script's
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, World("mpirun", 1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, World("mpirun", 2, 3)),
        (STEP | {"PMIX_RANK": "5"}, World("mpirun", 5, 8)),
        (STEP, World("srun", 5, 8, "gpu03", 20449, local=False)),
        (STEP | {"MASTER_ADDR": "ib0", "MASTER_PORT": "9"}, World("srun", 5, 8, "ib0", 9, False)),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, World("srun", 5, 8, "127.0.0.1", 20449)),
        (TORCHRUN, World("torchrun", 3, 8, "node1", 29500, local=False)),
        (
            # torchrun, started on each node by srun, is the nearer launcher
            STEP | TORCHRUN | {"LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            World("torchrun", 3, 8, "node1", 29500, hosted=True),
        ),
    ],
)
def test_a_world_is_read_from_the_environment(environment: dict[str, str], world: World) -> None:
    assert find_world(environment) == world


ON_HOST = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}
ONE_OF_4 = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        (ON_HOST, HostShare(0, 1)),  # left behind by another launcher
        (ONE_OF_4, HostShare(1, 4)),
        (ONE_OF_4 | OPEN_MPI | ON_HOST, HostShare(0, 2)),
        (MPICH, HostShare(1, 2)),
        (TORCHRUN | {"LOCAL_RANK": "3"} | STEP | ON_HOST, HostShare(3, 4, in_task=4)),
        (STEP | ON_HOST, HostShare(1, 2)),
        (STEP | ON_HOST | {"SLURM_NODEID": "1"}, HostShare(1, 3)),
        (STEP | ON_HOST | {"SLURM_CPUS_ON_NODE": "16", "PMIX_RANK": "5"}, HostShare(1, 2, 16)),
    ],
)
def test_a_rank_finds_its_part_of_its_host(environment: dict[str, str], share: HostShare) -> None:
    assert find_host_share(find_world(environment), environment) == share


@pytest.mark.parametrize("value", [None, "", "many"])
def test_a_broken_environment_is_refused(value: str | None) -> None:
    environment = {name: text for name, text in TORCHRUN.items() if name != "MASTER_PORT"}
    if value is not None:
        environment["MASTER_PORT"] = value
    with pytest.raises(PathosegError, match=r"MASTER_PORT to .* no whole number"):
        find_world(environment)


class Gathering:
    """A stand-in for a transport that answers `gather` with this rank's and given other texts."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self._others = others

    def gather(self, text: str) -> list[str]:
        mine = json.loads(text)
        return [text, *(json.dumps({**mine, **other}) for other in self._others)]


@pytest.mark.parametrize(
    ("others", "cores"),
    [
        ([], 8),
        ([{}], 4),  # both on the same eight cores
        ([{"cores": [*range(8, 16)]}], 8),  # bound to eight cores each
        ([{"host": "elsewhere"}], 8),
        ([{}] * 20, 1),
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, others: list[dict[str, Any]], cores: int
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(launcher, "usable_cores", lambda: set(range(8)))
    monkeypatch.setattr(platform_support, "_processor_quotas", lambda root: [])
    transport: Any = Gathering(*others)
    assert share_of_cores(transport) == cores


@pytest.mark.parametrize(("procid", "cores"), [("0", 3), ("1", 6)])
def test_ranks_that_a_slurm_task_started_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, procid: str, cores: int
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setattr(launcher, "usable_cores", lambda: set(range(64)))
    monkeypatch.setattr(platform_support, "_processor_quotas", lambda root: [])
    transport: Any = Gathering({"task": procid})
    assert share_of_cores(transport) == cores


@pytest.mark.parametrize(
    ("own", "launchers", "share", "cores"),
    [
        (16, 16, HostShare(1, 4), 4),  # no rank is bound
        (4, 16, HostShare(1, 4), 4),  # each is, to cores of its own
        (8, 16, HostShare(1, 4), 4),  # two are bound to the same
        (8, 64, HostShare(1, 4, cores=8), 2),  # all of the step's cores, which Slurm tells
        (1, 16, HostShare(0, 32), 1),
    ],
)
def test_without_a_message_a_rank_finds_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, own: int, launchers: int, share: HostShare, cores: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # left as it is
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    counts = {0: own, os.getppid(): launchers}
    monkeypatch.setattr(launcher, "usable_cores", lambda process=0: set(range(counts[process])))
    monkeypatch.setattr(platform_support, "_processor_quotas", lambda root: [])
    assert use_host_share(share) == cores
