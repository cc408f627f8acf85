"""The check that hosts have the memory that a plan says each rank will take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from socket import gethostname

import torch

from pathoseg.device import memory_that_fits, peak_memory
from pathoseg.errors import MemoryExhaustedError, PathosegError
from pathoseg.memory_size import memory_text
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.schedule.action import Kind
from pathoseg.parallel.schedule.schedule import Schedule, visit_of
from pathoseg.platform_support import available_memory


def too_small(
    hosts: Iterable[tuple[str, int, int | None]], computes: bool = False
) -> PathosegError | None:
    """Return the refusal of a host whose ranks will take more memory than it has, or None.

    Args:
        hosts: By rank, the name of its host, the bytes that the rank will take, and the bytes that
            the host has left, or None where that is unknown.
        computes: Whether ranks compute on the CPU, so that the bytes are all they hold; else they
            are offloaded tensors alone.
    """
    needed: dict[str, int] = {}
    ranks = Counter[str]()
    left: dict[str, int] = {}
    for host, own, found in hosts:
        needed[host] = needed.get(host, 0) + own
        ranks[host] += 1
        if found is not None:
            left[host] = min(found, left.get(host, found))
    for host, found in left.items():
        if needed[host] > found:
            return _refusal(host, needed[host], found, ranks[host], computes)
    return None


def _refusal(host: str, needed: int, found: int, ranks: int, computes: bool) -> PathosegError:
    if computes:
        share = memory_text(found // ranks * 9 // 10)
        return PathosegError(
            f"Training takes about {memory_text(needed)} of the memory of host {host}, which has "
            f"{memory_text(found)} left.",
            "Lower [train] microbatch or --tile, or name what one process may take, as [parallel] "
            f'memory = "{share}": then what does not fit is recomputed. Or give the job more '
            "memory, or start fewer ranks on a host.",
        )
    return PathosegError(
        f"The plan keeps {memory_text(needed)} of tensors in the memory of host {host}, which has "
        f"{memory_text(found)} left for it.",
        "Give the job more host memory, start fewer ranks on a host, or give a device more memory "
        "(--memory, or memory in [parallel]).",
    )


@dataclass(frozen=True)
class Memory:
    """The memory plan of a run besides what the schedule offloads; the same on all ranks.

    Attributes:
        recomputed: By stage, the names of the layers whose storages the backward makes again.
        twice: By stage, the layers whose storages are recomputed twice.
        window: Bytes on a device that may wait to be copied to the host, and as many that may be
            back ahead of their use.
        mode: The mode of the copies to the host.
        device_bytes: By rank of the schedule, the predicted peak of device memory; empty where
            none is.
        host_bytes: Likewise, the predicted peak of host memory; empty where none is.
        parked: The kinds of a stage's tensors that are offloaded while it is not at work. No
            prediction counts them.
    """

    recomputed: Mapping[int, Sequence[str]] = field(default_factory=dict)
    twice: Mapping[int, Sequence[str]] = field(default_factory=dict)
    window: int = 0
    mode: OffloadMode = OffloadMode.OVERLAPPED
    device_bytes: tuple[int, ...] = ()
    host_bytes: tuple[int, ...] = ()
    parked: Set[Park] = frozenset()

    def on_host(self, rank: int) -> int:
        """Return the planned bytes of a rank's offloaded activations; 0 without a plan."""
        if not self.host_bytes or self.mode is OffloadMode.NONE:
            return 0
        return self.host_bytes[rank]

    def on_device(self, rank: int) -> int:
        """Return the planned peak bytes of a rank's device; 0 without a plan."""
        return self.device_bytes[rank] if self.device_bytes else 0

    def policies(self, schedule: Schedule) -> dict[int, ActivationPolicy]:
        """Return the activation policy of each stage of a schedule.

        Raises:
            PathosegError: Visits of one stage offload different layers.
        """
        offloaded = _offloaded(schedule)
        return {
            stage: ActivationPolicy(
                offloaded.get(stage, ()),
                tuple(self.recomputed.get(stage, ())),
                tuple(self.twice.get(stage, ())),
            )
            for stage in range(schedule.stages)
        }

    def exhausted(
        self, error: BaseException, rank: int, shown: int, device: torch.device, doing: str
    ) -> PathosegError:
        """Return the error of a rank whose device, or host, has no memory left.

        Args:
            error: What was raised, while tensors that it found are still held.
            rank: The rank of the schedule, as in `device_bytes`.
            shown: The rank of the job, which differs where ranks share tiles.
            device: The rank's.
            doing: What the rank was at, as "in the forward of microbatch 3 of stage 2".
        """
        is_accelerator = device.type != "cpu"
        if is_accelerator and (isinstance(error, MemoryError) or "bad_alloc" in str(error)):
            planned = self.on_host(rank)
            told = f": {memory_text(planned)} were planned" if planned else ""
            return PathosegError(
                f"Rank {shown} ran out of host memory {doing}{told}.",
                "Give the job more host memory, or start fewer ranks on a host.",
            )
        planned = self.on_device(rank)
        figures = [f"{memory_text(planned)} were planned"] if planned else []
        if is_accelerator and (taken := peak_memory(device)) is not None:
            figures.append(f"{memory_text(taken)} were taken at the peak")
        told = f"{': ' if figures else ''}{', '.join(figures)}"
        where = "device " if is_accelerator else ""
        problem = f"Rank {shown} ran out of {where}memory {doing}{told}."
        fits = memory_that_fits(error, device, planned)
        size = "" if fits is None else f" {fits // 2**20}MiB"
        hint = (
            f"Plan with less memory (--memory{size}, or memory in [parallel]), or use smaller "
            "tiles or microbatches."
        )
        if fits is None:
            return PathosegError(problem, hint)
        return MemoryExhaustedError(problem, hint, fits)


def compare_hosts(transport: Transport, own: int, computes: bool) -> None:
    """Refuse hosts with less memory than their ranks will take; all ranks call this.

    Args:
        transport: Joins the ranks.
        own: Bytes of host memory that this rank will take.
        computes: Whether that is all that it will hold, its device being the CPU.

    Raises:
        PathosegError: A host has less; on all ranks.
    """
    told = transport.gather(json.dumps([gethostname(), own, available_memory()]))
    refusal = too_small((json.loads(text) for text in told), computes)
    if refusal is not None:
        raise refusal


def _offloaded(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    visits: dict[tuple[int, int, int], list[str]] = {}
    for action in schedule:
        if action.kind is Kind.FORWARD:
            visits.setdefault(visit_of(action), [])
        elif action.kind is Kind.OFFLOAD:
            assert action.tensor is not None
            visits.setdefault(visit_of(action), []).append(action.tensor)
    found: dict[int, tuple[str, ...]] = {}
    for (_, stage, _), names in visits.items():
        if set(found.setdefault(stage, tuple(names))) != set(names):
            raise PathosegError(
                f"The schedule {schedule.name} offloads other layers of stage {stage} for one "
                "microbatch than for another.",
                "Lower it with one list for the stage.",
            )
    return found
