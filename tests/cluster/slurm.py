"""A real Slurm on the hosts of a test: a controller on the head, a daemon on each node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.cluster.hosts import ADDRESSES, HEAD, NODES, Hosts

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PATIENCE = 300  # seconds

# One job after the other on one processor a node; a job is sent SIGTERM when it is requeued.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0
"""


def missing() -> str | None:
    """Return the reason why Slurm cannot be started on this machine, or None where it can."""
    if all(shutil.which(name) for name in _PROGRAMS):
        return None
    return "needs Debian packages: apt-get install slurm-wlm munge"


class Slurm:
    """Slurm's daemons, from `with` to its end.

    Args:
        hosts: Where they run.
        folder: Where they keep their files.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}

    def __enter__(self) -> Self:
        folder = self._folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        text = _CONFIGURATION.format(head=HEAD, address=ADDRESSES[HEAD], folder=folder)
        for node in NODES:
            text += f"NodeName={node} NodeAddr={ADDRESSES[node]} CPUs=1 RealMemory=2000\n"
        text += f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE\n"
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        own = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
        own |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
        self._run("munged", "--force", *(f"--{name}={path}" for name, path in own.items()))
        self._run(*self._hosts.command(HEAD, "slurmctld", "-i"))
        for node in NODES:
            self._run(*self._hosts.command(node, "slurmd", "-N", node))
        self._until(self._is_up)
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        self._until(lambda: not list(self._folder.glob("slurm*.pid")))

    def submit(self, directory: Path, *words: str) -> str:
        """Hands in a batch script, with options before and arguments behind it; its number."""
        return self._tell("sbatch", "--parsable", *words, directory=directory)

    def state(self, job: str) -> str:
        """As Slurm calls it: PENDING, RUNNING, COMPLETED, ..."""
        return self._shown(job, "JobState")

    def signal(self, job: str, name: str) -> None:
        """Sends a signal to the steps of a job, as Slurm does ahead of the time limit."""
        self._tell("scancel", f"--signal={name}", job)

    def requeue(self, job: str) -> None:
        """Puts a running job back into the queue, as Slurm does for one that preempts it."""
        self._tell("scontrol", "requeue", job)

    def cancel(self, job: str) -> None:
        self._tell("scancel", job)

    def wait(self, job: str, *states: str) -> None:
        """Returns once a job is in one of these states."""
        self._until(lambda: self.state(job) in states)

    def wait_for_requeue(self, job: str) -> None:
        """Waits until a job is back in the queue, and lets it start soon.

        Slurm itself waits for two minutes. A node refuses a job ("credential revoked") that starts
        in the very second in which it ended there.
        """
        self._until(lambda: self._shown(job, "Restarts") != "0" and self.state(job) == "PENDING")
        self._tell("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def _is_up(self) -> bool:
        with suppress(AssertionError):  # the controller does not answer yet
            return self._tell("sinfo", "-h", "-o", "%D %T") == f"{len(NODES)} idle"
        return False

    def _shown(self, job: str, key: str) -> str:
        words = self._tell("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def _tell(self, *words: str, directory: Path | None = None) -> str:
        return self._run(*self._hosts.command(HEAD, *words), directory=directory)

    def _run(self, *words: str, directory: Path | None = None) -> str:
        done = subprocess.run(
            words, cwd=directory, env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def _until(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not met():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.2)

    def _logs(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in logs)
