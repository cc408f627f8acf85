"""Hints where no plan fits: the changes that would, found by simulation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pathoseg.errors import PathosegError
from pathoseg.memory_size import memory_text
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.planning.orders import AUTO
from pathoseg.parallel.planning.partition import MemoryLimit
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.planning.planner import fits, plan
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.schedule.gpipe import mp_basic
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import linear
from pathoseg.parallel.schedule.simulate import simulate

# More ranks than these are not recommended.
_MOST_STAGES = 64
# Of the memory that is needed where all is kept, in how many parts less is looked for.
_SHARES = 16
_ROOMY = 2**60  # bytes that nothing fills


def can_run(priced: StageCosts, request: PlanRequest) -> bool:
    """Return True if an order that the request allows has a plan where memory is endless."""
    return fits(priced, replace(request, memory=_ROOMY))


def nothing_fits(
    priced: StageCosts,
    request: PlanRequest,
    smaller: Callable[[PlanRequest, int], Iterable[str]] = lambda _, needed: (),
) -> PathosegError:
    """Make the error that says why no plan fits, with hints at requests that would.

    Hints are another order, more ranks, more memory, fewer pixels, or a larger batch where the
    order cannot run so many microbatches. The memory is at most that of one microbatch at a time
    through the cut that needs least.

    Args:
        priced: The model with its smallest microbatch.
        request: The request that cannot be met.
        smaller: Finds smaller tiles that would fit a request, and names them; is given the bytes
            of a rank that these ones need.
    """
    if not can_run(priced, request):
        return _too_little_to_share(priced, replace(request, memory=_ROOMY))
    where = f"{count_ranks(request.ranks)} of {memory_text(request.memory)}"
    problem = f"No plan of {priced.graph.model} fits on {where}."
    try:
        stages = min(request.ranks, priced.cutter.most_stages)
        priced.cutter.balance(stages, "memory", MemoryLimit(request.memory))
    except PathosegError as error:
        problem += f" {error.problem}"
    return PathosegError(
        problem, f"What would fit: {'; or '.join(_changes(priced, request, smaller))}."
    )


def _too_little_to_share(priced: StageCosts, request: PlanRequest) -> PathosegError:
    """Return the error where memory is not what is missing."""
    batch = request.batch
    larger = [
        *(batch + more * priced.microbatch for more in (1, 2, 3)),
        *(batch * factor for factor in (2, 3, 4, 8)),
    ]
    tried = (replace(request, batch=each) for each in sorted(set(larger)))
    enough = next((each.batch for each in tried if fits(priced, each)), None)
    if enough is None and priced.cutter.most_stages == 1:
        return PathosegError(
            f"The order {request.order} needs several stages, and {priced.graph.model} is one "
            "layer, which cannot be cut.",
            " ".join(
                [*priced.graph.notes, "Leave out the order: data parallelism needs no stages."]
            ),
        )
    if enough is None:
        fixed = request.stages or (len(request.cut) + 1 if request.cut else None)
        stages = f" {fixed} stage{'s' * (fixed != 1)}" if fixed else ""
        return PathosegError(
            f"The order {request.order} has no way to run{stages} on {count_ranks(request.ranks)}.",
            "Give more ranks, or leave out order, cut and stages.",
        )
    count = request.batch // priced.microbatch
    return PathosegError(
        f"The order {request.order} cannot run a batch of {batch}, in {count} "
        f"microbatch{'es' * (count != 1)}, on {count_ranks(request.ranks)}.",
        f"A batch of {enough} would do, or another order.",
    )


def _changes(
    priced: StageCosts, request: PlanRequest, smaller: Callable[[PlanRequest, int], Iterable[str]]
) -> Iterator[str]:
    wanted, request = request, replace(request, order=AUTO, stages=None, cut=(), branches="auto")
    if wanted != request:
        free = plan([priced], request)
        if free:
            yield f"the order {free[0].order}, in {free[0].stages} stages that the planner cuts"
            return
    more = _enough_ranks(priced, request)
    if more:
        yield f"{count_ranks(more)} of {memory_text(request.memory)}"
    partition = _leanest(priced, request.ranks)
    need = max(_needs(priced, partition))
    leaner = replace(request, ranks=partition.stages)
    shares = [need * share // _SHARES for share in range(1, _SHARES)]
    first = bisect_left(shares, True, key=lambda size: fits(priced, replace(leaner, memory=size)))
    needed = [*shares, need][first]
    yield f"{count_ranks(partition.stages)} of {memory_text(needed)}"
    yield from smaller(request, needed)
    if request.ways != AllowedPolicies() and fits(priced, replace(request, ways=AllowedPolicies())):
        yield "offload and recomputation, which [parallel] offload and recompute forbid"


def _enough_ranks(priced: StageCosts, request: PlanRequest) -> int | None:
    caps = priced.cutter.least_caps(min(_MOST_STAGES, priced.cutter.most_stages))
    for ranks, cap in enumerate(caps, 1):
        if ranks <= request.ranks or cap > request.memory:
            continue
        if fits(priced, replace(request, ranks=ranks)):
            return ranks
    return None


def _leanest(priced: StageCosts, ranks: int) -> Partition:
    caps = priced.cutter.least_caps(min(ranks, _MOST_STAGES, priced.cutter.most_stages))
    return priced.cutter.balance(caps.index(min(caps)) + 1, "memory")


def _needs(priced: StageCosts, partition: Partition) -> tuple[int, ...]:
    """Bytes of each rank for one microbatch at a time; a second meets what is left of the first."""
    order = mp_basic(linear(partition.stages), 2)
    costs = priced.costs(partition, partition.stages)
    return simulate(lower(order, stage_edges(partition)), costs).peak_memory


def count_ranks(count: int) -> str:
    """Return "one rank" or "N ranks"."""
    return "one rank" if count == 1 else f"{count} ranks"
