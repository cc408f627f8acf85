"""What must fit before ranks run: partition, schedule and transport, and what each rank has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.runtime.executor import refused
from pathoseg.parallel.runtime.stage import stage_edges
from pathoseg.parallel.schedule.schedule import Schedule
from pathoseg.parallel.schedule.validate import validate


def check_fit(partition: Partition, schedule: Schedule, transport: Transport) -> None:
    """Refuses a schedule that is for other stages or ranks.

    Raises:
        PathosegError: It is, or no rank can run it.
    """
    problem = refused(schedule)
    if problem is not None:
        raise problem
    if schedule.ranks != transport.ranks:
        raise PathosegError(
            f"The schedule {schedule.name} is for {schedule.ranks} ranks, not {transport.ranks}.",
            f"Start {schedule.ranks} ranks.",
        )
    edges = set(stage_edges(partition))
    if schedule.stages != partition.stages or set(schedule.edges) != edges:
        raise PathosegError(
            f"The schedule {schedule.name} is for other stages than these {partition.stages}.",
            "Lower it with the edges of the partition.",
        )
    validate(schedule)


def compare_ranks(transport: Transport, own: Mapping[str, str]) -> None:
    """Refuses ranks that would not run the same; all ranks call this.

    Args:
        transport: Joins the ranks.
        own: What must be the same, by what it is called.

    Raises:
        PathosegError: It is not; on all ranks.
    """
    digests = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in own.items()}
    told = [json.loads(text) for text in transport.gather(json.dumps(digests))]
    for rank, theirs in enumerate(told):
        for what, digest in told[0].items():
            if theirs.get(what) != digest:
                raise PathosegError(
                    f"Rank {rank} has not the {what} of rank 0.",
                    "Start all ranks with the same version, configuration and first weights.",
                )
