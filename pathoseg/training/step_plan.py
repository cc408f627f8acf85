"""The plan of a run's step: its hardware, its prices, and whether the host can hold it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from socket import gethostname

import torch
from torch import nn

from pathoseg.config import Config, ParallelConfig
from pathoseg.device import Inputs, Precision, amp_dtype, choose_precision, device_name, pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.memory_size import memory_text, parse_memory
from pathoseg.models.build import check_tile, declared_inputs, lay_out, tile_multiple
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import CostModel, cost_model
from pathoseg.parallel.cost.device_hardware import roofline_of, shipped_name
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.cost.strip_costs import StripCosts
from pathoseg.parallel.cost.timing import Profiled
from pathoseg.parallel.fitting import agree, best
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace, workspace_of
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.runtime.memory_check import too_small
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.shards.rows import Split, strips
from pathoseg.platform_support import available_memory
from pathoseg.progress import progress_bar, say
from pathoseg.training.distributed import least_memory, own_device

# Sizes of microbatches that are tried where the model's norm does not forbid it.
_SIZES = (1, 2, 4)
_SLOTS = {"adamw": 2, "sgd": 1}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        return load_hardware(known)
    if (roofline := roofline_of(device)) is not None:
        say(
            f"{title} is priced by its clock, cores and memory bus. `pathoseg calibrate --out "
            "FILE` measures it, which is better; name that file with --hardware."
        )
        return roofline
    raise PathosegError(
        f"Nothing is known of this machine's {title}.",
        "Measure it with `pathoseg calibrate --out FILE`, and name that file with --hardware.",
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
    found, more = divmod(ranks, config.shards)
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
    # Strips keep all, or recompute whole stages: halos are sent in the order of the forward.
    is_whole = wanted.shards == 1
    return PlanRequest(
        teams(wanted, wanted.ranks if ranks is None else ranks),
        memory,
        config.train.batch,
        wanted.order,
        wanted.stages,
        wanted.cut,
        wanted.branches,
        ways=AllowedPolicies(wanted.offload != "none" and is_whole, wanted.recompute and is_whole),
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
    return replace(hardware, flops={name: hardware.flops["float32"], **hardware.flops})


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


def price(
    model: nn.Module, config: Config, hardware: Hardware, dtype: torch.dtype | None
) -> list[StageCosts]:
    """Price the layers for each size of microbatch that the planner may use, smallest first.

    Where ranks share tiles the layers are those of the largest strip.

    A configured size is kept. Else it is one sample, for batch norm takes its statistics over the
    microbatch: another size would be another training. Without batch norm several are tried.

    Args:
        model: The network.
        config: The options.
        hardware: By which layers are priced; it states a rate of `dtype`.
        dtype: Precision of the run's autocast, or None.

    Raises:
        PathosegError: The tile does not fit the model, or the model cannot be read.
    """
    check_tile(model, config.tiles.side)
    if config.train.microbatch is not None:
        sizes = [config.train.microbatch]
    elif any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        sizes = [1]
    else:
        sizes = [size for size in _SIZES if config.train.batch % size == 0]
    side, profile = config.tiles.side, config.parallel.profile
    return [price_one(model, size, side, config, hardware, dtype, profile) for size in sizes]


def price_one(
    model: nn.Module,
    size: int,
    side: int,
    config: Config,
    hardware: Hardware,
    dtype: torch.dtype | None,
    profile: bool = False,
) -> StageCosts:
    if profile:
        lay_out(model, config.model.with_classes(2))  # as it will be trained
    shards = config.parallel.shards
    example = like_microbatch(model, config.tiles.mpp, side, size, shards)
    traced = _trace(model, example, dtype)
    costs: CostModel = cost_model(hardware)
    if profile:
        with progress_bar("timing layers", None, "visits") as bar:
            costs = Profiled(traced, costs, advance=bar.advance)
    if shards > 1:
        costs = StripCosts(costs, hardware, shards)
    slots = _SLOTS[config.train.optimizer]
    return StageCosts(traced.graph, costs, hardware, slots, workspace_of(hardware))


def like_microbatch(model: nn.Module, mpp: float, side: int, size: int, shards: int = 1) -> Inputs:
    """Return a microbatch without memory, as `Traced` takes it: its only input, or each by name.

    Args:
        model: The network.
        mpp: Microns per pixel of its tiles.
        side: Side of a tile in pixels.
        size: Number of tiles.
        shards: Strips of a tile; the microbatch has the largest of them, up to what the network
            divides by.
    """
    multiple = tile_multiple(model)

    def rows(height: int) -> int:
        if shards == 1:
            return height
        largest = max(one.height for one in strips(Split.even(height, shards).bounds))
        return -(-largest // multiple) * multiple

    shapes = {
        each.name: (size, 3, rows(each.size), each.size)
        for each in declared_inputs(model, mpp, side)
    }
    seen = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return seen if len(seen) > 1 else seen[IMAGE]


def _trace(model: nn.Module, example: Inputs, dtype: torch.dtype | None = None) -> Traced:
    """Trace a model whose several inputs, if it has them, are arguments by their own names."""
    traced = Traced(model, example, dtype)
    if isinstance(example, dict) and set(example) != set(traced.graph.inputs):
        raise PathosegError(
            f"{type(model).__name__}.forward takes {', '.join(traced.graph.inputs)}, and its "
            f"inputs are {', '.join(example)}.",
            "Let it have an argument of the name of each input.",
        )
    return traced


@contextmanager
def told_of_teams(config: ParallelConfig) -> Iterator[None]:
    """Make a context in which an error that counts ranks says that teams share tiles."""
    try:
        yield
    except PathosegError as error:
        if config.shards == 1:
            raise
        teams_told = f"Each rank of that is {config.shards} ranks, which share its tiles."
        raise PathosegError(error.problem, f"{error.hint} {teams_told}") from error


def of_whole_tiles(plans: Sequence[Plan], model: nn.Module, config: Config) -> list[Plan]:
    """Return plans of one strip (`price`) as those of whole tiles; others as they are.

    Raises:
        PathosegError: A strip takes other layers than a whole tile.
    """
    if config.parallel.shards == 1:
        return [*plans]
    tiles, traced = config.tiles, dict[int, Traced]()
    for size in {each.microbatch for each in plans}:
        traced[size] = _trace(model, like_microbatch(model, tiles.mpp, tiles.side, size))
    return [
        each.in_strips(traced[each.microbatch].reordered(each.line).graph, config.parallel.shards)
        for each in plans
    ]


def read_model(model: nn.Module, config: Config) -> Traced | None:
    """Trace a model on the microbatch of a run in one process.

    Returns:
        None if no graph can be made of it, in which case it trains in one process all the same.
    """
    size = config.train.microbatch or config.train.batch
    try:
        return _trace(model, like_microbatch(model, config.tiles.mpp, config.tiles.side, size))
    except PathosegError:
        return None


def check_host(graph: LayerGraph, config: Config) -> None:
    """Make sure that one process on the CPU can hold what a microbatch takes.

    Where it can twice over, the process keeps from then on what it frees: layers leave holes that
    no tensor fits into.

    Raises:
        PathosegError: The host has too little memory left.
    """
    workspace = cpu_workspace(threads=torch.get_num_threads())
    memory = MemoryModel(graph, _SLOTS[config.train.optimizer], workspace=workspace)
    needed = memory.stage(range(len(graph.layers)))
    more = needed.peak() - needed.parameters - needed.buffers  # which the model has already
    room = available_memory()
    refusal = too_small([(gethostname(), more, room)], computes=True)
    if refusal is not None:
        raise refusal
    if room is not None and 2 * more <= room:
        keep_freed_memory(LARGE)


def agreed_plan(
    model: torch.nn.Module, config: Config, transport: Transport
) -> tuple[Plan, Sequence[Event]]:
    """Find the fastest plan on rank 0, and tell it to all ranks of the job, which all call this.

    Returns:
        The plan, and on rank 0 what it expects each rank of a group to do when.

    Raises:
        PathosegError: Nothing fits; it says what would.
    """
    device = own_device(transport, config.parallel.device)
    free = least_memory(transport, device)
    planned: list[Event] = []

    def choose() -> Plan:
        dtype = amp_dtype(device, config.train.amp)
        hardware = with_dtype(find_hardware(config.parallel), dtype)
        hardware = with_wire(hardware, transport.reads)
        memory = memory_to_plan(config.parallel, free, device.type)
        if config.parallel.memory is None and device.type != "cpu":
            say(
                f"{memory_text(free)} are free on the fullest device, {memory_text(memory)} are "
                "planned with."
            )
        request = replace(plan_request(config, memory, transport.ranks), all_ranks=True)
        graphs = {each.microbatch: each for each in price(model, config, hardware, dtype)}
        with told_of_teams(config.parallel):
            plan = best([*graphs.values()], request)
        priced = graphs[plan.microbatch].reordered(plan.line)
        partition = plan.partition(priced.graph)
        costs = priced.costs(partition, plan.ranks, plan.retention, plan.window)
        planned.extend(simulate(plan.schedule, costs).events)
        return of_whole_tiles([plan], model, config)[0]

    return agree(choose, transport), planned
