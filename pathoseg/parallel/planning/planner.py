"""Searches cuts, placements, orders, microbatches and groups for the fastest step that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.planning.orders import (
    AUTO,
    DATA_PARALLEL,
    LINEAR,
    PLACEMENTS,
    SEQUENTIAL,
    SYNTHESISED,
    Order,
    OrderSetting,
    branch_placement,
    find_order,
    of_branches,
)
from pathoseg.parallel.planning.partition import MemoryLimit, custom, cut
from pathoseg.parallel.planning.plan import Plan, PlanRequest, digest, input_shape
from pathoseg.parallel.planning.stage_costs import StageCosts, longest_chains, stage_edges
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement, Schedule
from pathoseg.parallel.schedule.simulate import Simulation, simulate, step_memory, weights_by_rank

# Ranks of a group that are tried: each number up to the first, then times the second.
_EVERY, _GROWTH = 8, 1.5
_GROUPS = 3  # data-parallel widths that are tried for one number of stages, the widest first
_BRANCH_RANKS = 8  # ranks of a group that are given branches, at most
# Caps on the memory of a stage, from a rank's memory down to the least that any cut needs.
_CAPS = 5
# Forwards and backwards of one group beyond which an order that has a plan is not looked at.
_VISITS = 2048
_HOPE = 8  # candidates of an order that are simulated before the first that fits
_PATIENCE = 4  # and after its last improvement
_SETTINGS = 3  # cuts for which orders are synthesised
_BRANCH_SETTINGS = 2  # the same, of stages that are branches
_CHOICES = 24  # stages for which a policy is chosen, in all
_GAIN = 0.98  # synthesised orders and branches are tried if they may take less than this share


class Candidate(NamedTuple):
    """A point of the search: all of a plan but the cut.

    Attributes:
        priced: The graph.
        order: The order.
        placement: Name of the placement.
        width: Ranks of a group.
        groups: How many.
        microbatches: Of one group.
        least: A lower bound of its time.
        home: The rank of each stage where stages are branches.
    """

    priced: StageCosts
    order: Order
    placement: str
    width: int
    groups: int
    microbatches: int
    least: float
    home: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        if self.home:
            return len(self.home)
        return self.width * (2 if self.placement == "folded" else 1)

    @property
    def ranks(self) -> int:
        return self.width * self.groups

    def place(self) -> Placement:
        """The ranks of the stages."""
        if self.home:
            return branch_placement(self.placement, self.width, self.home)
        return PLACEMENTS[self.placement](self.width)


def candidates(priced: StageCosts, request: PlanRequest) -> Iterator[Candidate]:
    """Yield the candidates of each order that the request allows.

    Raises:
        PathosegError: The model cannot be cut into as many stages as the request wants.
    """
    fixed = request.stages or (len(request.cut) + 1 if request.cut else None)
    most = priced.cutter.most_stages
    if fixed is not None:
        priced.cutter.check(fixed)
    for order in find_order(request.order):
        for placement in order.placements:
            chunks = 2 if placement == "folded" else 1
            for width in _widths(request, fixed, chunks) if order.staged else (1,):
                stages = width * chunks
                if stages > most or fixed not in (None, stages):
                    continue
                yield from _in_groups(priced, request, order, placement, width)


def _in_groups(
    priced: StageCosts, request: PlanRequest, order: Order, placement: str, width: int
) -> Iterator[Candidate]:
    microbatches = request.batch // priced.microbatch
    for groups in _groups(order, request.ranks // width, microbatches):
        if request.all_ranks and width * groups != request.ranks:
            continue
        own = microbatches // groups
        least = max(priced.critical_seconds, own / width * priced.seconds)
        yield Candidate(priced, order, placement, width, groups, own, least)


def _branched(priced: StageCosts, request: PlanRequest) -> Iterator[Candidate]:
    """Yield the candidates whose stages are branches, whose cuts are still to be found."""
    if request.branches == "none" or request.cut or request.stages or not priced.has_branches:
        return
    for order in find_order(request.order):
        for placement in of_branches(order):
            for width in _widths(request, None, 1):
                if width <= _BRANCH_RANKS:
                    yield from _in_groups(priced, request, order, placement, width)


def _widths(request: PlanRequest, stages: int | None, chunks: int) -> list[int]:
    """Return the sizes of a group to try: those that leave no rank idle, and some between."""
    if stages is not None:
        return [stages // chunks] if 2 * chunks <= stages <= request.ranks * chunks else []
    widths = {width for width in range(2, request.ranks + 1) if request.ranks % width == 0}
    width = 2.0
    while width <= request.ranks:
        widths.add(int(width))
        width = width + 1 if width < _EVERY else width * _GROWTH
    return sorted(widths)


def _groups(order: Order, most: int, microbatches: int) -> list[int]:
    if order.name == SEQUENTIAL:
        return [1]
    fitting = [count for count in range(min(most, microbatches), 0, -1) if not microbatches % count]
    if order.name == DATA_PARALLEL:
        return [count for count in fitting if count > 1]
    return fitting[:_GROUPS]


def least_seconds(setting: OrderSetting, groups: int) -> float:
    """Return a lower bound of a step's time, by the critical path of the stage graph.

    A rank computes all visits of its stages. Its first visit waits for the longest chain of
    forwards that leads to it; after its last one come the backwards of that chain, or its own
    stage's sum over the copies and the optimizer's step. Two replicas share the work as they like.

        rank of stage s   ├ before[s] ┤ F…B of all its microbatches ├ after[s], or sum and step ┤

    Args:
        setting: One group's, its costs being those on the network of all groups.
        groups: How many groups.
    """
    placement, microbatches, costs, edges = setting[:4]
    stages = costs.stages
    before, after = (
        longest_chains(times, [(edge.source, edge.target) for edge in edges])
        for times in ([each.forward for each in stages], [each.backward for each in stages])
    )
    visits = [each.forward + each.backward for each in stages]
    least: float = max(map(sum, zip(before, visits, after, strict=True)))
    if placement.replicas > 1:
        return max(least, microbatches * sum(visits) / placement.ranks)
    [home] = placement.homes
    for rank in range(placement.ranks):
        own = [stage for stage, at in enumerate(home) if at == rank]
        busy = microbatches * sum(visits[stage] for stage in own)
        copies = range(rank, rank + placement.ranks * groups, placement.ranks)
        ending = [
            max(
                after[stage],
                stages[stage].step
                + float(costs.network.all_reduce(copies, stages[stage].gradients)),
            )
            for stage in own
        ]
        least = max(least, min(before[stage] for stage in own) + busy + min(ending))
    return least


def least_bytes(setting: OrderSetting) -> int:
    """A lower bound of the most loaded rank's memory: one microbatch in one of its stages."""
    weights = weights_by_rank(setting.placement, setting.costs)
    most = [0] * setting.placement.ranks
    for home in setting.placement.homes:
        for stage, rank in enumerate(home):
            most[rank] = max(most[rank], setting.taken(stage, in_flight=1))
    return max(map(sum, zip(weights, most, strict=True)))


def plan(graphs: Sequence[StageCosts], request: PlanRequest) -> list[Plan]:
    """The plans that fit, fastest first: of each order the best, or of one order the best of each
    number of stages and placement.

    Everything is judged by `simulate`. Candidates whose lower bound (`least_seconds`) is no better
    than what was found are left out; so are most numbers of stages above 8, all but the widest data
    parallelism for a number of stages, and for each order all cuts after the first that fits, from
    the best balanced to the one that needs least memory. Where no cut fits, layers of the balanced
    one are offloaded and recomputed until it does, if that may be the fastest plan of all. Groups
    of ranks that do the same are simulated once. Stages that are branches are tried last.

    Args:
        graphs: The model, once for each size of microbatch that may be used.
        request: The model's step, ranks and memory.

    Returns:
        Nothing where nothing fits.

    Raises:
        PathosegError: A microbatch does not divide the batch, the cut names no node, the model
            cannot be cut into so many stages, or has no branches where they are asked for.
    """
    for priced in graphs:
        if request.batch % priced.microbatch:
            raise PathosegError(
                f"A batch of {request.batch} is no multiple of a microbatch of "
                f"{priced.microbatch}.",
                f"Choose a batch of {-(-request.batch // priced.microbatch) * priced.microbatch}, "
                "or a microbatch that divides it.",
            )
        if request.cut:
            custom(priced.graph, request.cut)  # refuses a name that is none, whatever fits
        if request.branches == "only" and not priced.has_branches:
            raise _without_branches(priced)
    search = _Search(request)
    named, measured = _sorted_out(graphs, request)
    for candidate in named:
        search.look_at(candidate)
    # Made to measure first where named orders did best.
    rank = {(each.ranks, each.groups): each.seconds for each in search.best.values()}
    for candidate in sorted(
        measured,
        key=lambda each: (rank.get((each.ranks, each.groups), inf), each.least, each.stages),
    ):
        search.look_at(candidate)
    # Last, so that what they find leaves out nothing else.
    branched = [each for priced in graphs for each in _branched(priced, request)]
    for candidate in sorted(
        branched, key=lambda each: (each.order.name == SYNTHESISED, each.least, each.ranks)
    ):
        search.look_at_branches(candidate)
    return sorted(search.best.values(), key=lambda each: (each.seconds, each.ranks))


def fits(priced: StageCosts, request: PlanRequest) -> bool:
    """Return True if the order that the request names, or any named order, has a plan.

    Orders made to measure take minutes to try at many sizes, and hardly ever need less memory.

    Raises:
        PathosegError: As `plan`.
    """
    if request.order == SYNTHESISED:
        return bool(plan([priced], request))
    search = _Search(request)
    for candidate in _sorted_out([priced], request)[0]:
        search.look_at(candidate)
        if search.best:
            return True
    for candidate in _branched(priced, request):
        search.look_at_branches(candidate)
        if search.best:
            return True
    return False


def _without_branches(priced: StageCosts) -> PathosegError:
    """The error where branches are asked for and there are none."""
    graph = priced.graph
    longest = max(graph.ties, key=lambda tie: tie.last - tie.first, default=None)
    would = longest is not None and priced.critical_seconds < 0.9 * priced.seconds
    reason = f" (what branches has to stay together: {longest.reason})" if longest and would else ""
    return PathosegError(
        f"{graph.model} has no branches to run side by side: the longest chain of its layers takes "
        f"{priced.longest_chain:.0%} of the time of all{reason}.",
        'Leave out branches = "only": stages one after the other are planned without it.',
    )


def _sorted_out(
    graphs: Sequence[StageCosts], request: PlanRequest
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates of named orders, the fastest at best first, and of orders made to measure."""
    if request.branches == "only":
        return [], []
    found = [each for priced in graphs for each in candidates(priced, request)]
    named = [each for each in found if each.order.name != SYNTHESISED]
    named.sort(key=lambda each: (each.least, each.ranks, each.stages))
    return named, [each for each in found if each.order.name == SYNTHESISED]


class _Search:
    """The state of the search.

    Attributes:
        best: Plans by what tells them apart.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.best: dict[tuple[object, ...], Plan] = {}
        self._request = request
        self._fastest: dict[str, float] = {}  # by order
        self._vain: Counter[str] = Counter()  # candidates of an order since that was found
        self._settings: Counter[bool] = Counter()  # for which orders were made to measure
        self._choices = 0  # stages whose policy was chosen
        self._digest = cache(lambda priced: digest(priced.graph))
        self._balanced = cache(_balanced)
        self._reordered = cache(lambda priced, line, firsts: priced.reordered(line, firsts))
        self._least_cap = cache(
            lambda priced, stages, limit: priced.cutter.least_caps(stages, limit)[-1]
        )

    def look_at(self, candidate: Candidate) -> None:
        """Simulate what of a candidate may be better than what was found."""
        name = candidate.order.name
        known = self._fastest.get(name)
        if self._vain[name] == (_HOPE if known is None else _PATIENCE):
            return
        if known is not None and 2 * candidate.stages * candidate.microbatches > _VISITS:
            return
        simulated = fitted = False
        for partitions in self._cuts(candidate):
            found = [
                fit
                for partition in partitions
                for fit in self._try(candidate, self._setting(candidate, partition), partition)
            ]
            simulated |= bool(found)
            fitted |= any(found)
            if found and all(found):
                break
        if not fitted and candidate.order.may_keep_less:
            simulated |= self._keep_less(candidate)
        if self._fastest.get(name) != known:
            self._vain[name] = 0
        else:
            self._vain[name] += simulated

    def look_at_branches(self, candidate: Candidate) -> None:
        """Simulate what of a candidate whose stages are branches may be better than what was found.

        All of its cuts are looked at, for which is fastest depends on the order.
        """
        name = candidate.order.name
        known = self._fastest.get(name)
        vain = f"{name} {candidate.placement}"
        # It takes long to find them, and where all ranks are busy already they gain nothing.
        hoped = _GAIN * min(self._fastest.values(), default=inf)
        if self._vain[vain] == _PATIENCE or candidate.least >= min(hoped, self._limit(name)):
            return
        for found in candidate.priced.branch_cuts(
            candidate.width, candidate.microbatches, self._request.memory
        ):
            visits = 2 * len(found.home) * candidate.microbatches
            if known is not None and visits > _VISITS:
                continue
            own = candidate._replace(
                priced=self._reordered(candidate.priced, found.line, found.bounds[:-1]),
                home=found.home,
            )
            partition = cut(own.priced.graph, found.bounds)
            self._try(own, self._setting(own, partition), partition)
        self._vain[vain] = 0 if self._fastest.get(name) != known else self._vain[vain] + 1

    def _cuts(self, candidate: Candidate) -> Iterator[list[Partition]]:
        """Cuts, from the best balanced to those that need least memory."""
        priced, request = candidate.priced, self._request
        if request.cut:
            yield [custom(priced.graph, request.cut)]
            return
        in_flight = candidate.order.in_flight(candidate.stages, candidate.microbatches)
        limit = MemoryLimit(None, in_flight, candidate.order.recompute)
        least = self._least_cap(priced, candidate.stages, limit)
        if least > request.memory:
            return
        seen: set[Partition] = set()
        for step in range(_CAPS, -1, -1):
            if candidate.least >= self._limit(candidate.order.name):
                return
            cap = int(least + (request.memory - least) * step / _CAPS)
            cuts = dict.fromkeys(
                self._balanced(priced, candidate.stages, replace(limit, cap=cap), byte_cost)
                for byte_cost in (priced.byte_cost, 0.0)
            )
            yield [partition for partition in cuts if partition not in seen]
            seen.update(cuts)

    def _setting(
        self,
        candidate: Candidate,
        partition: Partition,
        policies: tuple[ActivationPolicy, ...] = (),
        window: int = 0,
    ) -> OrderSetting:
        return OrderSetting(
            candidate.place(),
            candidate.microbatches,
            candidate.priced.costs(partition, candidate.ranks, policies, window),
            stage_edges(partition),
            self._request.memory,
        )

    def _limit(self, name: str) -> float:
        """The time that a candidate of this order has to be below."""
        if name == SYNTHESISED:
            return _GAIN * min(self._fastest.values(), default=inf)
        return self._fastest.get(name, inf)

    def _try(self, candidate: Candidate, setting: OrderSetting, partition: Partition) -> list[bool]:
        """Try the families of an order on one cut, and keep the fastest plan that fits.

        Returns:
            By family, whether one of its variants fits: the first that does is tried. Empty where
            no order could be fast enough, and one False where no order could fit.
        """
        name = candidate.order.name
        if least_seconds(setting, candidate.groups) >= self._limit(name):
            return []
        if least_bytes(setting) > setting.memory:
            return [False]
        if name == SYNTHESISED:
            branched = bool(candidate.home)
            if self._settings[branched] == (_BRANCH_SETTINGS if branched else _SETTINGS):
                return []
            self._settings[branched] += 1
        fit = list[bool]()
        for family in candidate.order.families(setting):
            for variant in family:
                order = replace(variant.order, name=name, groups=candidate.groups)
                schedule = lower(order, setting.edges, variant.recompute)
                simulation = simulate(schedule, setting.costs)
                if max(simulation.peak_memory) <= setting.memory:
                    recompute = variant.recompute
                    self._keep(candidate, partition, setting, order, simulation, recompute)
                    fit.append(True)
                    break
            else:
                fit.append(False)
        return fit

    def _keep_less(self, candidate: Candidate) -> bool:
        """Fit the balanced cut by offloading and recomputing layers, if that may be best of all;
        whether it was tried to the end."""
        priced, request, stages = candidate.priced, self._request, candidate.stages
        if not (request.ways.offload or request.ways.recompute) or candidate.placement != LINEAR:
            return False
        fastest = min(self._fastest.values(), default=inf)
        if candidate.least >= fastest:
            return False
        if request.cut:
            partition = custom(priced.graph, request.cut)
        else:
            partition = self._balanced(priced, stages, MemoryLimit(), priced.byte_cost)
        setting = self._setting(candidate, partition)
        if least_seconds(setting, candidate.groups) >= fastest:
            return False
        # Copies and recomputation only add to the step that keeps everything, which the simulator
        # prices in milliseconds; a choice for one stage takes seconds.
        order = _first_order(candidate, setting)
        if simulate(lower(order, setting.edges), setting.costs).time >= fastest:
            return False
        in_flight = candidate.order.in_flight(stages, candidate.microbatches)
        # What a rank holds beside what its stage takes by itself: tensors between stages, and a
        # window as large as any stage's.
        beside = [0] * stages
        while self._choices < _CHOICES:
            self._choices += stages
            fitting = []
            for stage in range(stages):
                room = request.memory - beside[stage]
                choice = priced.choose(partition, stage, room, in_flight[stage], request.ways)
                if choice is None:
                    return True
                fitting.append(choice)
            policies = tuple(choice.policy for choice in fitting)
            window = max(choice.window for choice in fitting)
            setting = self._setting(candidate, partition, policies, window)
            order = _first_order(candidate, setting)
            offload = {stage: each.offloaded for stage, each in enumerate(policies)}
            schedule = lower(order, setting.edges, offload=offload)
            if max(step_memory(schedule, setting.costs)) > request.memory:
                return True
            simulation = simulate(schedule, setting.costs)
            if max(simulation.peak_memory) <= request.memory:
                self._keep(candidate, partition, setting, order, simulation, policies=policies)
                return True
            taken = [
                priced.taken(partition, stage, choice, in_flight[stage], request.ways)
                for stage, choice in enumerate(fitting)
            ]
            found = zip(beside, simulation.peak_memory, taken, strict=True)
            beside = [max(known, peak - own) for known, peak, own in found]
        return False

    def _keep(
        self,
        candidate: Candidate,
        partition: Partition,
        setting: OrderSetting,
        order: Schedule,
        simulation: Simulation,
        recompute: tuple[int, ...] = (),
        policies: tuple[ActivationPolicy, ...] = (),
    ) -> None:
        kind: tuple[object, ...] = (order.name,)
        if self._request.order != AUTO:
            kind = (candidate.placement, candidate.stages)
        self._fastest[order.name] = min(simulation.time, self._fastest.get(order.name, inf))
        known = self.best.get(kind)
        if known is not None and known.seconds <= simulation.time:
            return
        priced = candidate.priced
        graph = priced.graph
        self.best[kind] = Plan(
            model=graph.model,
            digest=self._digest(priced),
            input=input_shape(graph),
            order=order.name,
            placement=candidate.placement,
            bounds=partition.bounds,
            starts=tuple(graph.layers[first].name for first in partition.bounds[:-1]),
            recompute=recompute,
            text=str(replace(order, edges=setting.edges)),
            hardware=priced.hardware.name,
            note=priced.note,
            seconds=float(simulation.time),
            bubble=float(simulation.bubble),
            memory=simulation.peak_memory,
            messages=simulation.bytes_sent,
            sums=_sums(order, setting.costs),
            retention=policies or (ActivationPolicy(),) * partition.stages,
            window=setting.costs.window,
            host_memory=simulation.host_memory,
            line=graph.order,
        )


def _first_order(candidate: Candidate, setting: OrderSetting) -> Schedule:
    """The schedule of the first variant of a candidate's order."""
    variant = next(next(candidate.order.families(setting)))
    return replace(variant.order, name=candidate.order.name, groups=candidate.groups)


def _balanced(priced: StageCosts, stages: int, limit: MemoryLimit, byte_cost: float) -> Partition:
    weights = priced.weights(limit.recompute)
    return priced.cutter.balance(stages, weights, limit, byte_cost)


def _sums(order: Schedule, costs: Costs) -> tuple[int, ...]:
    """By rank of a group, what it sends in rings that sum the gradients of its stages."""
    sent = [0] * order.placement.ranks
    for stage, cost in enumerate(costs.stages):
        holders = order.placement.holders(stage)
        copies = len(holders) * order.groups * costs.shards
        for rank in holders:
            sent[rank] += 2 * (copies - 1) * cost.gradients // copies
    return tuple(sent)
