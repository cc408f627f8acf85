"""Finds who started this process, as which rank of how many, and joins these ranks.

launcher   rank, ranks                            rank, ranks of the host
torchrun   RANK, WORLD_SIZE                       LOCAL_RANK, LOCAL_WORLD_SIZE
Open MPI   OMPI_COMM_WORLD_RANK, …_SIZE           OMPI_COMM_WORLD_LOCAL_RANK, …_LOCAL_SIZE
MPICH      PMI_RANK, PMI_SIZE                     MPI_LOCALRANKID, MPI_LOCALNRANKS
Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS     SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pathoseg.errors import PathosegError
from pathoseg.host_memory import keep_freed_memory
from pathoseg.platform_support import cores_to_use, usable_cores

if TYPE_CHECKING:  # torch, which a command that is refused does not wait for
    import torch

    from pathoseg.parallel.comm.gloo import GlooWire
    from pathoseg.parallel.comm.mpi import MpiWire
    from pathoseg.parallel.comm.process_transport import ProcessTransport
    from pathoseg.parallel.comm.transport import Transport

Choice = Literal["auto", "mpi", "gloo", "nccl"]

# Variables of this process's rank on its host, and of their number: the nearest launcher first.
_OF_HOST = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


@dataclass(frozen=True, slots=True)
class World:
    """The rank, size and launcher of this process, as its environment states them.

    Attributes:
        launcher: "mpirun" stands for every launcher of an MPI (srun with PMIx or PMI too), "srun"
            for one without, "torchrun" for all that set its variables, None for nobody.
        rank: This rank.
        ranks: Number of ranks.
        host: The address at which the ranks meet, if not by MPI.
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


def one_process_error(ranks: int, command: str) -> PathosegError:
    """Make the error where a program that is one process asks for several ranks.

    Args:
        ranks: How many it asks for.
        command: Name of pathoseg's command that starts them itself.
    """
    return PathosegError(
        f"[parallel] ranks = {ranks} asks for ranks, and this program is one process.",
        f"Use the command `pathoseg {command}`, or start the program by mpirun, srun or torchrun.",
    )


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read from the environment who started this process, and as which rank of how many.

    Args:
        environment: The process's variables.

    Raises:
        PathosegError: A launcher's variables are incomplete or no whole numbers.
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


class HostShare(NamedTuple):
    """The part of its host that a launcher means for this process.

    Attributes:
        rank: Number of this process among the ranks of its host, from 0.
        ranks: Number of ranks on the host.
        cores: Cores of the host that these ranks have together; None where the launcher does not
            say.
        in_task: How many of them share this process's Slurm task.
    """

    rank: int
    ranks: int
    cores: int | None = None
    in_task: int = 1


def find_host_share(world: World, environment: Mapping[str, str] = os.environ) -> HostShare:
    """Read from the environment which of the ranks of its host this process is.

    Nothing is asked of the other ranks. Where the launcher does not tell, all ranks are taken to
    be on one host.

    Args:
        world: From `find_world` of the same environment.
        environment: The process's variables.

    Raises:
        PathosegError: A variable is no whole number.
    """
    if world.launcher is None:
        return HostShare(0, 1)
    for rank, ranks in _OF_HOST:
        if rank in environment and ranks in environment:
            count = _number(environment, ranks)
            # Under mpirun each rank is a task; torchrun is one task with all its ranks.
            in_task = count if world.launcher == "torchrun" else 1
            return HostShare(_number(environment, rank), count, in_task=in_task)
    # "2(x3),1": two tasks on each of the first three nodes, one on the fourth.
    tasks = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(times or 1))
    ]
    if not tasks or "SLURM_LOCALID" not in environment:
        return HostShare(world.rank, world.ranks)
    node = _number({"SLURM_NODEID": "0", **environment}, "SLURM_NODEID")
    cores = (
        _number(environment, "SLURM_CPUS_ON_NODE") if "SLURM_CPUS_ON_NODE" in environment else None
    )
    return HostShare(_number(environment, "SLURM_LOCALID"), tasks[node % len(tasks)], cores)


def use_host_share(share: HostShare) -> int:
    """Compute with this process's part of its host, as `connect` has it without any message.

    PyTorch's threads are its share of the cores (`cores_to_use`); a set `OMP_NUM_THREADS` is left
    as it is. Accelerators are dealt out to the ranks in turn.

    Returns:
        The number of cores that this process may keep busy.
    """
    import torch

    from pathoseg.device import pick_device, share_devices

    # A launcher that binds leaves each rank its cores, one that does not leaves it all.
    whole = share.cores or len(usable_cores(os.getppid()))
    whole = min(whole, len(usable_cores()) * share.ranks)
    cores = cores_to_use(whole, share.ranks, share.in_task)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    share_devices(pick_device(), share.rank)
    return cores


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


def connect(
    choice: Choice = "auto", world: World | None = None, device: torch.device | None = None
) -> ProcessTransport:
    """Join the ranks of this world, each with its share of the machine's cores.

    The transport is a context: an error in it ends the other ranks, too. From then on the process
    keeps what it frees (`keep_freed_memory`).

    Args:
        choice: The transport. "auto" is MPI under its launchers and gloo elsewhere, and NCCL on top
            where each rank has a GPU of its own; "nccl" is the same or an error.
        world: From `find_world`; None calls it.
        device: The accelerator on which this rank is to compute, as from `pick_device`, or the CPU.
            None is the CPU, or a GPU where NCCL is asked for.

    Raises:
        PathosegError: The ranks cannot meet, or not by this transport.
    """
    import torch

    if device is None:
        device = torch.device("cuda" if choice == "nccl" else "cpu")
    return connect_on(join_wire(choice, find_world() if world is None else world), choice, device)


def join_wire(choice: Choice, world: World) -> MpiWire | GlooWire:
    """Join the ranks of a world by MPI or gloo.

    Args:
        choice, world: As for `connect`.

    Raises:
        PathosegError: As `connect`.
    """
    if choice in ("auto", "nccl"):
        from pathoseg.parallel.comm.nccl import prepare_cuda, refuse_without_gpus

        if choice == "nccl":
            refuse_without_gpus(1)
        prepare_cuda(find_host_share(world).ranks)
    if choice == "mpi" or (choice != "gloo" and world.launcher == "mpirun"):
        from pathoseg.parallel.comm.mpi import join_mpi

        return join_mpi(world.ranks)
    if world.launcher == "mpirun":
        raise PathosegError(
            f"Under the launcher of an MPI, {choice} is not told where its ranks meet.",
            "Use the transport 'mpi', or start the ranks by torchrun, srun or --ranks.",
        )
    from pathoseg.parallel.comm.gloo import join_gloo

    return join_gloo(
        world.rank, world.ranks, world.host, world.port, local=world.local, hosted=world.hosted
    )


def connect_on(wire: MpiWire | GlooWire, choice: Choice, device: torch.device) -> ProcessTransport:
    """Make the transport of ranks that a wire joins, as `connect`; all of them call it.

    Args:
        wire: From `join_wire`, or one that has joined them again.
        choice, device: As for `connect`.

    Raises:
        PathosegError: As `connect`.
    """
    import torch

    from pathoseg.parallel.comm.heartbeat import Heartbeat
    from pathoseg.parallel.comm.process_transport import ProcessTransport

    heartbeat = Heartbeat(wire.rank, wire.ranks, wire.host, wire.announce)
    if choice == "nccl" or (choice == "auto" and wire.ranks > 1):
        from pathoseg.parallel.comm.nccl import by_nccl

        transport = by_nccl(wire, heartbeat, device, asked=choice == "nccl")
    else:
        transport = ProcessTransport(wire, heartbeat)
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
