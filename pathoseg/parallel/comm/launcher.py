"""Finds who started this process, as which rank of how many, and joins these ranks."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from pathoseg.errors import PathosegError
from pathoseg.host_memory import keep_freed_memory
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.comm.transport import Transport
from pathoseg.platform_support import cores_to_use, usable_cores

Choice = Literal["auto", "mpi", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class World:
    """The rank, size and launcher of this process, as its environment states them.

    Attributes:
        launcher: "mpirun" stands for every launcher of an MPI (srun with PMIx or PMI too), "srun"
            for one without, "torchrun" for all that set its variables, None for nobody.
        rank: This rank.
        ranks: How many there are.
        host: Where the ranks meet, if not by MPI.
        port: The port there; 0 is any.
        local: Whether all ranks are on one machine, if not by MPI.
        hosted: Whether the launcher keeps the store at which they meet.
    """

    launcher: Literal["mpirun", "srun", "torchrun"] | None = None
    rank: int = 0
    ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    local: bool = True
    hosted: bool = False


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """Reads from the environment who started this process.

    Raises:
        PathosegError: A launcher's variables are incomplete or no numbers.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        ranks = _number(environment, "WORLD_SIZE")
        return World(
            "torchrun",
            _number(environment, "RANK"),
            ranks,
            environment.get("MASTER_ADDR", "127.0.0.1"),
            _number(environment, "MASTER_PORT"),
            local=_number(environment, "LOCAL_WORLD_SIZE") == ranks,
            hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    for mpi in ("OMPI_COMM_WORLD", "PMI"):
        if f"{mpi}_RANK" in environment and f"{mpi}_SIZE" in environment:
            rank, ranks = _number(environment, f"{mpi}_RANK"), _number(environment, f"{mpi}_SIZE")
            return World("mpirun", rank, ranks)
    # SLURM_NTASKS alone is the batch script's, which is none of the ranks.
    if "SLURM_STEP_NUM_TASKS" in environment and environment["SLURM_STEP_NUM_TASKS"] != "1":
        return _slurm_step(environment)
    return World()


def _slurm_step(environment: Mapping[str, str]) -> World:
    rank = _number(environment, "SLURM_PROCID")
    ranks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if "PMIX_RANK" in environment:
        return World("mpirun", rank, ranks)
    local = _number(environment, "SLURM_STEP_NUM_NODES") == 1
    # The first of "gpu[03-07,11],login1" is gpu03.
    names = re.match(r"([^,\[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    host = "127.0.0.1" if local or names is None else "".join(filter(None, names.groups()))
    # Steps that run at the same time on a node do not meet at the same port.
    step = _number(environment, "SLURM_JOB_ID") * 64 + _number(environment, "SLURM_STEP_ID")
    port = _number({"MASTER_PORT": str(20000 + step % 20000), **environment}, "MASTER_PORT")
    return World("srun", rank, ranks, environment.get("MASTER_ADDR", host), port, local)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError) as error:
        raise PathosegError(
            f"The launcher of this process set the variable {name} to "
            f"{environment.get(name, 'nothing')!r}, which is no whole number.",
            "Start with mpirun, srun, torchrun or --ranks, or unset RANK and WORLD_SIZE to run "
            "alone.",
        ) from error


def connect(choice: Choice = "auto", world: World | None = None) -> ProcessTransport:
    """Joins the ranks of this world, each with its share of the machine's cores.

    Under MPI a process can do so once. From then on it keeps what it frees (`keep_freed_memory`).

    Args:
        choice: The transport; "auto" is MPI under its launchers and gloo elsewhere.
        world: What the launcher said; None looks.

    Raises:
        PathosegError: The ranks cannot meet, or not by this transport.
    """
    world = find_world() if world is None else world
    if choice == "mpi" or (choice == "auto" and world.launcher == "mpirun"):
        from pathoseg.parallel.comm.mpi import connect_mpi

        transport = connect_mpi(world.ranks)
    elif world.launcher == "mpirun":
        raise PathosegError(
            f"Under the launcher of an MPI, {choice} is not told where its ranks meet.",
            "Use the transport 'mpi', or start the ranks by torchrun, srun or --ranks.",
        )
    else:
        if choice == "nccl":
            from pathoseg.parallel.comm.nccl import connect_nccl as join
        else:
            from pathoseg.parallel.comm.gloo import connect_gloo as join
        transport = join(
            world.rank, world.ranks, world.host, world.port, local=world.local, hosted=world.hosted
        )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(transport))
    keep_freed_memory()
    return transport


def share_of_cores(transport: Transport | None) -> int:
    """Return how many cores this rank may keep busy (`cores_to_use`): its share of the machine's.

    All ranks call it together.

    Args:
        transport: Joins the ranks; None where this process is alone.
    """
    if transport is None:
        return cores_to_use()
    # Under mpirun each rank is a task; others may be started several by one task.
    task = None if find_world().launcher == "mpirun" else os.environ.get("SLURM_PROCID")
    mine = {"host": socket.gethostname(), "cores": sorted(usable_cores()), "task": task}
    everyone = [json.loads(text) for text in transport.gather(json.dumps(mine))]
    here = [each for each in everyone if each["host"] == mine["host"]]
    cores = len(set().union(*(each["cores"] for each in here)))
    in_task = 1 if task is None else sum(each["task"] == task for each in here)
    return cores_to_use(cores, len(here), in_task)
