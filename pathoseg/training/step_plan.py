"""The plan of a run's step: its hardware, its prices, and whether the host can hold it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from socket import gethostname

import torch
from torch import nn

from pathoseg.config import Config, ParallelConfig
from pathoseg.device import (
    Precision,
    amp_dtype,
    choose_precision,
    device_name,
    memory_of,
    pick_device,
)
from pathoseg.errors import PathosegError
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.memory_size import memory_text, parse_memory
from pathoseg.models.build import check_tile, tile_multiple
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import CostModel, cost_model
from pathoseg.parallel.cost.device_hardware import roofline_of, shipped_name
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.cost.strip_costs import StripCosts
from pathoseg.parallel.cost.timing import Profiled
from pathoseg.parallel.fitting import agree, nothing_found
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.infeasibility import can_run
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace, workspace_of
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.planning.orders import AUTO, DATA_PARALLEL, SYNTHESISED
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan as find_plans
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.runtime.memory_check import too_small
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.shards.strip_graph import strip_graph
from pathoseg.platform_support import available_memory
from pathoseg.progress import progress_bar, say
from pathoseg.training.distributed import least_memory, own_device
from pathoseg.training.read_network import ReadNetwork

_SLOTS = {"adamw": 2, "sgd": 1}


def find_hardware(config: ParallelConfig) -> Hardware:
    """Load the hardware that is named, or that of this machine's device where none is.

    Raises:
        PathosegError: There is none, or nothing is known of this machine's accelerator.
    """
    if config.hardware is not None:
        return load_hardware(config.hardware)
    device = pick_device(config.device)
    if device.type == "cpu":
        return load_hardware("cpu")
    title = device_name(device)
    if (known := shipped_name(title)) is not None:
        hardware, memory = load_hardware(known), memory_of(device)
        # Cards of one name differ: an A100 has 40 or 80 GB.
        return replace(hardware, memory=min(hardware.memory, memory[1])) if memory else hardware
    if (roofline := roofline_of(device)) is not None:
        say(
            f"{title} is priced by its clock, cores and memory bus. `pathoseg calibrate --out "
            "FILE` measures it, which is better; name that file as [parallel] hardware."
        )
        return roofline
    raise PathosegError(
        f"Nothing is known of this machine's {title}.",
        "Measure it with `pathoseg calibrate --out FILE`; name that file as [parallel] hardware.",
    )


def with_wire(hardware: Hardware, reads: Container[str]) -> Hardware:
    """Return hardware with the links of the transport that a run uses.

    Args:
        hardware: Its links join devices directly.
        reads: Types of accelerators whose memory the transport sends, see `Transport`.
    """
    if hardware.device == "cpu" or hardware.device in reads:
        return hardware
    return hardware.through_hosts()


# Of an accelerator's free memory, what a plan leaves to what no model of memory knows: fragments,
# kernels that are loaded late, buffers of communication libraries.
_MARGIN_SHARE, _MARGIN = 0.1, 2**30


def memory_to_plan(config: ParallelConfig, free: int, device: str) -> int:
    """Return the bytes that a plan may fill on each rank.

    It is what the configuration names, as it is; else what is free, on an accelerator less a tenth
    and 1 GiB.

    Args:
        config: The options.
        free: Bytes that the rank with least has free.
        device: Type of the device, such as `cpu` or `cuda`.

    Raises:
        PathosegError: Less is free than is left to the margin.
    """
    if config.memory is not None:
        return parse_memory(config.memory)
    if device == "cpu":
        return free
    planned = int(free * (1 - _MARGIN_SHARE)) - _MARGIN
    if planned <= 0:
        raise PathosegError(
            f"{memory_text(free)} are free on a device, and a plan leaves a tenth and "
            f"{memory_text(_MARGIN)} of it alone.",
            "End what else fills the device, or name what a rank may take (--memory).",
        )
    return planned


def teams(config: ParallelConfig, ranks: int) -> int:
    """Return the number of teams of ranks that share tiles: of all ranks where none do.

    Raises:
        PathosegError: The ranks make no whole teams.
    """
    found, more = divmod(ranks, config.shards or 1)
    if more or not found:
        raise PathosegError(
            f"[parallel] shards = {config.shards} gives each tile to {config.shards} ranks, and "
            f"there {'is one rank' if ranks == 1 else f'are {ranks}'}.",
            f"Start {config.shards} ranks or a multiple (--ranks), or leave out shards.",
        )
    return found


def plan_request(config: Config, memory: int, ranks: int | None = None) -> PlanRequest:
    """Return the request to the planner that the configuration states.

    Args:
        config: The options.
        memory: Bytes of each rank (`memory_to_plan`).
        ranks: How many there are; None takes the configured number.

    Raises:
        PathosegError: An order, cut or size that there is not.
    """
    wanted = config.parallel
    return PlanRequest(
        teams(wanted, wanted.ranks if ranks is None else ranks),
        memory,
        config.train.batch,
        wanted.order,
        wanted.stages,
        wanted.cut,
        wanted.branches,
        ways=AllowedPolicies(wanted.offload != "none", wanted.recompute),
    )


def with_dtype(hardware: Hardware, dtype: torch.dtype | None) -> Hardware:
    """Return hardware that states a rate of the precision in which a run computes.

    Args:
        hardware: What a plan is priced by.
        dtype: Precision of the run's autocast, or None.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name in hardware.flops:
        return hardware
    say(
        f"The hardware {hardware.name} states no FLOP/s for {name}, in which this run computes: "
        "its layers are priced at the rate of float32."
    )
    return hardware.with_rate(name)


def dtype_on(hardware: Hardware, wanted: Precision) -> torch.dtype | None:
    """Return the precision of autocast on hardware that need not be there, as `amp_dtype` would.

    By "auto" it is the better one of which the hardware states a rate.
    """
    both = (torch.bfloat16, torch.float16)
    return choose_precision(
        hardware.device,
        wanted,
        lambda: [dtype for dtype in both if str(dtype).removeprefix("torch.") in hardware.flops],
    )


class Prices:
    """Prices of the layers of a run's model, of whole tiles and of strips.

    Args:
        network: The model, and its graphs.
        hardware: By which layers are priced; it states a rate of the precision of the run.

    Attributes:
        network, hardware: As given.
        config: The options.
        gathered: By number of strips that was priced, the layers that take whole tiles all the
            same, each with its function.

    Raises:
        PathosegError: The tile does not fit the model.
    """

    def __init__(self, network: ReadNetwork, hardware: Hardware) -> None:
        check_tile(network.model, network.config.tiles.side)
        self.network, self.config, self.hardware = network, network.config, hardware
        self.gathered: dict[int, Mapping[str, str]] = {}

    def graphs(self, shards: int = 1) -> list[StageCosts]:
        """Price the layers for each size of microbatch that may be used, smallest first.

        Args:
            shards: Where it is above 1, the layers are those of the largest of so many strips.

        Raises:
            PathosegError: The model cannot be read, or not be cut into so many strips.
        """
        side, profile = self.config.tiles.side, self.config.parallel.profile
        return [self.one(size, side, shards, profile) for size in self.network.microbatches]

    def one(self, size: int, side: int, shards: int = 1, profile: bool = False) -> StageCosts:
        """Price the layers for one size of microbatch and tile.

        Args:
            size: Samples of the microbatch.
            side: Of a tile, in pixels.
            shards: As for `graphs`.
            profile: Whether the layers are timed on this machine.
        """
        config, hardware = self.config, self.hardware
        traced = whole = self.network.whole(size, side)
        if shards > 1:
            try:
                traced = self.network.strip(size, side, shards)
            except PathosegError as error:
                raise PathosegError(
                    f"Strips of {config.model.name} cannot be priced: {error.problem}",
                    "Leave [parallel] shards out, or let it take tiles of a strip's height.",
                ) from error
        costs: CostModel = cost_model(hardware)
        if profile:
            with progress_bar("timing layers", None, "visits") as bar:
                costs = Profiled(traced, costs, advance=bar.advance)
        slots, own = _SLOTS[config.train.optimizer], workspace_of(hardware)
        if shards == 1:
            return StageCosts(traced.graph, costs, hardware, slots, own)
        strip = strip_graph(whole, shards)
        self.gathered[shards] = strip.gathered
        cut = StripCosts(costs, hardware, shards, traced.graph)
        return StageCosts(strip.graph, cut, hardware, slots, own, shards=shards, heard=strip.heard)

    def of_whole_tiles(self, plans: Sequence[Plan], shards: int) -> list[Plan]:
        """Return plans that were made for one of so many strips as those of whole tiles."""
        if shards == 1:
            return [*plans]
        graphs = {size: self.network.whole(size) for size in {each.microbatch for each in plans}}
        return [
            each.in_strips(graphs[each.microbatch].reordered(each.line).graph, shards)
            for each in plans
        ]


@dataclass(frozen=True)
class Found:
    """The plans of a run's step that were found, for one number of strips of a tile.

    Attributes:
        shards: The strips; 1 leaves tiles whole.
        request: The request to the planner, each of whose ranks is `shards` ranks.
        graphs: The priced layers.
        plans: Made for one strip, fastest first; empty where nothing fits.
        whole: The same plans, as those of whole tiles on all ranks.
        reason: Why tiles are cut, where the planner chose that; else empty.
    """

    shards: int
    request: PlanRequest
    graphs: Sequence[StageCosts]
    plans: Sequence[Plan]
    whole: Sequence[Plan]
    reason: str = ""

    def of_microbatch(self, size: int) -> StageCosts:
        """Return the priced layers of this size of microbatch, in the model's order."""
        [costs] = [each for each in self.graphs if each.microbatch == size]
        return costs

    def priced(self, plan: Plan) -> StageCosts:
        """Return the priced layers of a plan, in the order in which it runs them."""
        return self.of_microbatch(plan.microbatch).reordered(plan.line)

    def events(self, plan: Plan) -> Sequence[Event]:
        """Return what one of `plans` expects each rank of a group to do when."""
        priced = self.priced(plan)
        costs = priced.costs(plan.partition(priced.graph), plan.ranks, plan.retention, plan.window)
        return simulate(plan.schedule, costs).events


# Strips wait for one another at each layer, and predictions err by some per cent: they are chosen
# where they take less than this share of the time of whole tiles, or where those do not fit.
_GAIN = 0.9
_IN_VAIN = 2  # numbers of strips in a row that were no better, after which no more are looked at


def find(
    prices: Prices,
    memory: int,
    ranks: int | None = None,
    all_ranks: bool = False,
    began: int | None = None,
) -> Found:
    """Find plans for the configured number of strips, or for the best one where none is.

    Strips are looked at where the work, shared by all ranks alike, would take less than `_GAIN` of
    the best plan of whole tiles; in an order, or in stages, that the configuration names, where no
    plan of whole tiles fits. Networks of which a layer would take whole tiles all the same are not
    cut unless the configuration says so.

    Args:
        prices: The model.
        memory: As for `plan_request`.
        ranks: As for `plan_request`.
        all_ranks: Whether every rank has to have work.
        began: The strips with which a run began that goes on: they are kept if they fit.

    Raises:
        PathosegError: The model cannot be read, or not be cut as the configuration asks.
    """
    wanted = prices.config.parallel
    of_one = replace(prices.config, parallel=replace(wanted, shards=None))
    request = replace(plan_request(of_one, memory, ranks), all_ranks=all_ranks)
    if wanted.shards is not None:
        return _in_strips(prices, request, wanted.shards)
    if began is not None and request.ranks % began == 0:
        with suppress(PathosegError):
            before = _in_strips(prices, request, began)
            if before.plans:
                return before
    whole = _in_strips(prices, request, 1)
    return whole if _refuses_strips(wanted, whole) else _best_strips(prices, whole)


def _in_strips(
    prices: Prices, request: PlanRequest, shards: int, faster_than: float = inf
) -> Found:
    """Find plans for so many strips; none where even shared alike the work takes too long."""
    ranks = teams(replace(prices.config.parallel, shards=shards), request.ranks)
    request, graphs = replace(request, ranks=ranks), prices.graphs(shards)
    least = min(max(each.critical_seconds, _perfect_seconds(each, request)) for each in graphs)
    plans = find_plans(graphs, request) if least < faster_than else []
    return Found(shards, request, graphs, plans, prices.of_whole_tiles(plans, shards))


def _refuses_strips(config: ParallelConfig, whole: Found) -> bool:
    """Return True if an option excludes strips, or they could be no better than whole tiles."""
    if config.parked or config.profile or config.branches == "only":
        return True
    is_named = config.order != AUTO or config.stages is not None or bool(config.cut)
    if is_named and find_plans(whole.graphs, replace(whole.request, all_ranks=False)):
        return True
    if not whole.plans:
        return False
    fastest = whole.plans[0]
    # Strips share the same work and sums, and send halos beside.
    return (fastest.order, fastest.groups) == (DATA_PARALLEL, whole.request.ranks) and all(
        each == ActivationPolicy() for each in fastest.retention
    )


def _best_strips(prices: Prices, whole: Found) -> Found:
    """Return the plans for the best number of strips; those of whole tiles where none is better."""
    best, limit, failures_in_a_row, ranks = whole, inf, 0, whole.request.ranks
    reason = "whole tiles do not fit"
    if whole.plans:
        fastest = whole.plans[0]
        limit = _GAIN * fastest.seconds
        reason = f"whole tiles take {fastest.seconds:.4g} s a step ({fastest.order})"
    perfect_seconds = min(_perfect_seconds(each, whole.request) for each in whole.graphs)
    rows = prices.config.tiles.side // tile_multiple(prices.network.model)
    for shards in (many for many in range(min(rows, ranks), 1, -1) if ranks % many == 0):
        if perfect_seconds >= limit or failures_in_a_row == _IN_VAIN:
            break
        failures_in_a_row += 1
        if not whole.plans and not _may_run(whole, shards):
            continue
        with suppress(PathosegError):  # strips are lower than a halo, or have other layers
            found = _in_strips(prices, whole.request, shards, limit)
            if prices.gathered[shards]:
                break
            if found.plans and found.plans[0].seconds < limit:
                best, limit, failures_in_a_row = found, found.plans[0].seconds, 0
    return whole if best is whole else replace(best, reason=reason)


def _may_run(whole: Found, shards: int) -> bool:
    """Return False if the wanted order, stages or cut leave no plan for so many strips, whatever
    memory there is: whole tiles tell, for strips run the same layers."""
    request = replace(whole.request, ranks=whole.request.ranks // shards)
    if request.order == SYNTHESISED:  # to try takes longer than to read strips
        return True
    return any(can_run(each, request) for each in whole.graphs)


def _perfect_seconds(priced: StageCosts, request: PlanRequest) -> float:
    """The seconds of a step whose work all ranks share alike, and send nothing."""
    return request.batch / priced.microbatch * priced.seconds / request.ranks


def told_of_teams(error: PathosegError, shards: int) -> PathosegError:
    """Return an error that counts ranks with a hint that each stands for those that share tiles."""
    if shards == 1:
        return error
    told = f"A rank here stands for {shards} ranks that share each tile."
    return PathosegError(error.problem, f"{error.hint} {told}")


def check_host(graph: LayerGraph, config: Config) -> None:
    """Make sure that one process on the CPU can hold what a microbatch takes.

    Where it can twice over, the process keeps from then on what it frees: layers leave holes that
    no tensor fits into.

    Raises:
        PathosegError: The host has too little memory left.
    """
    workspace = cpu_workspace(threads=torch.get_num_threads())
    microbatch, batch = config.train.microbatch, config.train.batch
    memory = MemoryModel(
        graph,
        _SLOTS[config.train.optimizer],
        fresh_gradients=microbatch is None or microbatch >= batch,
        workspace=workspace,
    )
    needed = memory.stage(range(len(graph.layers)))
    more = needed.peak() - needed.parameters - needed.buffers  # which the model has already
    room = available_memory()
    refusal = too_small([(gethostname(), more, room)], computes=True)
    if refusal is not None:
        raise refusal
    if room is not None and 2 * more <= room:
        keep_freed_memory(LARGE)


@dataclass(frozen=True)
class AgreedPlan:
    """The plan of a run's step, the same on all ranks.

    Attributes:
        plan: The stages and actions of every rank.
        expected: On rank 0, what it expects each rank of a group to do when.
        traced: The network, as it is to be cut.
    """

    plan: Plan
    expected: Sequence[Event]
    traced: Traced


def agreed_plan(
    model: nn.Module, config: Config, transport: Transport, before: Plan | None = None
) -> AgreedPlan:
    """Find the fastest plan on rank 0, and tell it to all ranks of the job, which all call this.

    Args:
        model: The network; its weights are laid out as for training.
        config: The options.
        transport: Joins the ranks.
        before: On rank 0, the plan by which a run began that goes on; on as many ranks it keeps
            the number of strips, if that is left to the planner.

    Raises:
        PathosegError: Nothing fits; it says what would.
    """
    device = own_device(transport, config.parallel.device)
    free = least_memory(transport, device)
    dtype = amp_dtype(device, config.train.amp)
    network = ReadNetwork(model, config, dtype, device.type)
    planned: list[Event] = []

    def choose() -> Plan:
        hardware = with_dtype(find_hardware(config.parallel), dtype)
        hardware = with_wire(hardware, transport.reads)
        memory = memory_to_plan(config.parallel, free, device.type)
        if config.parallel.memory is None and device.type != "cpu":
            say(
                f"{memory_text(free)} are free on the fullest device, {memory_text(memory)} are "
                "planned with."
            )
        began = None if before is None or before.ranks != transport.ranks else before.shards
        prices = Prices(network, hardware)
        found = find(prices, memory, transport.ranks, all_ranks=True, began=began)
        if not found.plans:
            raise told_of_teams(nothing_found(found.graphs, found.request), found.shards)
        if found.reason:
            say(f"Each tile is cut into {found.shards} strips of rows: {found.reason}.")
        planned.extend(found.events(found.plans[0]))
        return found.whole[0]

    if transport.rank and len(network.microbatches) == 1:
        with suppress(PathosegError):  # which rank 0 meets as well, and tells
            network.whole(*network.microbatches)  # while rank 0 plans
    plan = agree(choose, transport)
    return AgreedPlan(plan, planned, network.whole(plan.microbatch))
