"""The ranks of a command: started, joined, and silent but for rank 0."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pathoseg.errors import LostRankError, PathosegError, StoppedError
from pathoseg.interruption import Interruption
from pathoseg.parallel.comm.launcher import (
    Choice,
    World,
    connect_on,
    find_host_share,
    find_world,
    join_wire,
)
from pathoseg.parallel.comm.local_ranks import LAST_WORDS, start_local
from pathoseg.platform_support import physical_memory
from pathoseg.progress import say

if TYPE_CHECKING:  # torch, which a command that is refused does not wait for
    import torch

    from pathoseg.parallel.comm.gloo import GlooWire
    from pathoseg.parallel.comm.mpi import MpiWire
    from pathoseg.parallel.comm.process_transport import ProcessTransport
    from pathoseg.parallel.comm.transport import Transport

# Seconds that rank 0 has, after a signal to all, to leave what ranks do together and save.
_HEAD_START = 0.5


def start_ranks(
    ranks: int,
    arguments: Sequence[str],
    choice: Choice,
    variables: Mapping[str, str] | None = None,
) -> int | None:
    """Run this command on ranks of this machine.

    Args:
        ranks: How many.
        arguments: The command line's, without the program.
        choice: The transport.
        variables: Their environment's, beside those of this process.

    Returns:
        The exit code, or None where this process is to do the work itself: one rank is asked for,
        or a launcher (mpirun, srun, torchrun) has started this process as one of several.
    """
    if ranks == 1 or find_world().launcher is not None:
        return None
    command = [sys.executable, "-m", "pathoseg", *arguments]
    return start_local(ranks, command, choice, variables)


def say_ranks(asked: int, world: World) -> None:
    """Say that the launcher decides how many ranks there are, where `--ranks` asks for others."""
    if world.launcher is not None and asked not in (1, world.ranks):
        say(f"{asked} ranks are asked for, and {world.launcher} has started {world.ranks}.")


class Ranks:
    """The ranks of this job, joined for one attempt after the other; all but rank 0 are silent.

    A context: in it an error of one rank is told by rank 0 alone; by the rank itself where it is
    raised before the ranks have met, as rank 0 cannot hear of it; by rank 1 where rank 0 is lost.
    """

    def __init__(self) -> None:
        self.world = find_world()
        self._silence = ExitStack()
        self._wire: MpiWire | GlooWire | None = None  # of the attempt before

    def __enter__(self) -> Self:
        if self.world.rank:
            self._silence.enter_context(silent())
            self._silence.enter_context(errors_left_to_rank_0())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if _is_lost(0, error):
            is_told = self.world.rank != 1
        else:
            is_told = not self.world.rank or self._wire is not None
        # `start_local` shows the last words of the ranks that it has started.
        is_told |= LAST_WORDS in os.environ
        if isinstance(error, PathosegError) and not is_told:
            place = f"Rank {self.world.rank} on {socket.gethostname()}"
            print(f"{place}: {error}", file=sys.__stderr__, flush=True)
        return self._silence.__exit__(kind, error, trace)

    @contextmanager
    def joined(
        self, choice: Choice, alone: bool = False, device: str | None = None
    ) -> Iterator[ProcessTransport | None]:
        """Make a context with a transport between the ranks, all of which enter it.

        An error of one rank ends the context on all. Each rank's device is the current one before
        the ranks meet: an MPI that knows accelerators takes the one that it finds then. No device
        is asked for ahead of it: CUDA reads its variables once.

        Args:
            choice: The transport.
            alone: Whether one rank gets a transport too, to run a plan.
            device: As for `pick_device`.

        Yields:
            The transport; None where there is one rank alone.

        Raises:
            PathosegError: There is no such device, or the ranks do not meet; where they have met
                before, within a minute.
        """
        from pathoseg.device import pick_device, share_devices

        choice, world = ("gloo", World()) if self.world.ranks == 1 else (choice, self.world)
        share = find_host_share(world)
        if choice in ("auto", "nccl"):
            from pathoseg.parallel.comm.nccl import prepare_cuda

            prepare_cuda(share.ranks)
        wanted = pick_device(device)
        if world.ranks == 1 and not alone:
            yield None
            return
        share_devices(wanted, share.rank)
        self._wire = join_wire(choice, world) if self._wire is None else self._wire.again()
        transport = connect_on(self._wire, choice, wanted)
        with transport:
            try:
                yield transport
            except StoppedError:
                if transport.rank:
                    time.sleep(_HEAD_START)
                transport.abort(f"Rank {transport.rank} was stopped by a signal.")
                raise


@contextmanager
def stopped_together(interruption: Interruption, transport: Transport | None) -> Iterator[None]:
    """Make a context in which the end of another rank after a signal raises StoppedError here."""
    try:
        yield
    except PathosegError as error:
        # Some launchers signal all ranks as soon as one has failed: then its error is to be told.
        has_failed = re.match(r"Rank \d+: ", error.problem) is not None or _is_lost(0, error)
        if transport is not None and not has_failed:
            interruption.raise_if_asked()
        raise


def _is_lost(rank: int, error: BaseException | None) -> bool:
    return isinstance(error, LostRankError) and error.rank == rank


@contextmanager
def silent() -> Iterator[None]:
    """Make a context in which standard output and standard error go nowhere."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def errors_left_to_rank_0(head_start: float = 0.0) -> Iterator[None]:
    """Turn an error of this context, which rank 0 meets too and tells, into a silent exit.

    It is left in the file that `start_local` names, should rank 0 be ended before it hears of it.

    Args:
        head_start: Seconds ahead of the exit, in which rank 0 may tell it: some launchers end all
            ranks as soon as one has failed.

    Raises:
        SystemExit: Code 2 for a PathosegError, that of the signal for a StoppedError.
    """
    try:
        yield
    except PathosegError as error:
        if place := os.environ.get(LAST_WORDS):
            with suppress(OSError):  # the disk is full
                Path(place).write_text(f"{error}\n", encoding="utf-8")
        time.sleep(head_start)
        raise SystemExit(2) from None
    except StoppedError as stopped:
        raise SystemExit(stopped.exit_code) from None


def own_device(transport: Transport, name: str | None = None) -> torch.device:
    """Choose this rank's device, the accelerators of a host in turn; all ranks call it.

    Args:
        transport: Joins the ranks.
        name: As for `pick_device`; with a number all ranks take that device.

    Raises:
        PathosegError: There is no such device, or several ranks would share one without streams.
    """
    from pathoseg.device import has_streams, pick_device, share_devices

    hosts = [json.loads(text) for text in transport.gather(json.dumps(socket.gethostname()))]
    wanted = pick_device(name)
    if transport.ranks > 1 and wanted.type != "cpu" and not has_streams(wanted):
        raise PathosegError(
            f"{wanted} is for one rank: its messages would wait for what it computes.",
            "Train with one rank, or add --device cpu.",
        )
    return share_devices(wanted, hosts[: transport.rank].count(hosts[transport.rank]))


def least_memory(transport: Transport, device: torch.device) -> int:
    """Return the bytes that each rank may fill: the least of what any has; all ranks call it.

    Ranks with one device share what it has free; ranks that compute on CPUs share all memory of
    their host.

    Args:
        transport: Joins the ranks.
        device: This rank's (`own_device`).
    """
    from pathoseg.device import device_identity, memory_of

    own = (socket.gethostname(), "cpu" if device.type == "cpu" else device_identity(device))
    transport.gather("")  # the device has the context of every rank: it was asked its name
    memory = None if device.type == "cpu" else memory_of(device)
    if memory is None:  # a device that does not tell is taken to use its host's
        own, memory = (own[0], "cpu"), (physical_memory(), 0)
    told = [json.loads(text) for text in transport.gather(json.dumps([*own, memory[0]]))]
    sharing = Counter((host, place) for host, place, _ in told)
    return min(int(free) // sharing[host, place] for host, place, free in told)


def agree_on(place: Path, identity: str, transport: Transport | None) -> None:
    """Check that all ranks have read the same weights; they call it together.

    Args:
        place: The file or folder of the weights.
        identity: Of what this rank has read.
        transport: Joins the ranks; None where this process is alone.

    Raises:
        PathosegError: They were replaced meanwhile.
    """
    if transport is not None:
        seen = {json.loads(text) for text in transport.gather(json.dumps(identity))}
        if len(seen) > 1:
            raise PathosegError(
                f"{place} changed while it was read.", "Start the same command again."
            )
