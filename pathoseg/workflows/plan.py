"""The plan of how ranks share a training step, before any of it runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pathoseg.config import Config, ParallelConfig
from pathoseg.config_file import load_config
from pathoseg.device import pick_device
from pathoseg.errors import PathosegError
from pathoseg.memory_size import memory_text
from pathoseg.models.build import build_model, tile_multiple
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.draw import adjacency, svg
from pathoseg.parallel.graph.fold import fold, folded_layers
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.planning.infeasibility import count_ranks, nothing_fits
from pathoseg.parallel.planning.orders import AUTO, DATA_PARALLEL, SEQUENTIAL
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import fits
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.schedule import timeline
from pathoseg.progress import answer, progress_bar, say
from pathoseg.training.encoder_training import prepare_encoder, with_low_rank
from pathoseg.training.first_weights import take_encoder
from pathoseg.training.read_network import ReadNetwork
from pathoseg.training.run_folder import PLAN, TIMELINE, refuse_unwritable
from pathoseg.training.step_plan import (
    Found,
    Prices,
    dtype_on,
    find,
    find_hardware,
    memory_to_plan,
    plan_request,
    teams,
    told_of_teams,
    with_dtype,
    with_wire,
)

_SHOWN = 10
_CLOSE = 1.02  # a tile is called the largest that fits if one of so many times its side does not

Level = Literal["layer", "block", "module"]
# Depth of the module calls that become one layer: the model's children, and theirs.
_DEPTHS = {"module": 1, "block": 2}


def plan(
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    out: Path,
    draw: Path | None,
    level: Level | None = None,
) -> Plan:
    """Find the fastest plan that fits, show it and its rivals, and write it.

    Args:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        out: Folder of the plan and its timeline.
        draw: File of the drawing of the model with its times and stages, or None.
        level: List the graph at this level, and draw it so; None draws all levels, foldable.

    Raises:
        PathosegError: Anything that cannot be planned, and what could.
        OSError: A file cannot be written.
    """
    config = with_low_rank(load_config(config_file, flags))
    if config.model.encoder_weights is not None:
        _, config = take_encoder(config)
    refuse_unwritable(out, "plan's folder")
    for folder in (out, *([] if draw is None else [draw.parent])):
        folder.mkdir(parents=True, exist_ok=True)
    hardware = find_hardware(config.parallel)
    dtype = dtype_on(hardware, config.train.amp)
    hardware = with_wire(with_dtype(hardware, dtype), _reads(config.parallel))
    memory = memory_to_plan(config.parallel, hardware.memory, hardware.device)
    teams(config.parallel, config.parallel.ranks)
    model = _build(config)
    prepare_encoder(model, config.train)
    profiled = pick_device(config.parallel.device) if config.parallel.profile else None
    kind = hardware.device if profiled is None else profiled.type
    prices = Prices(ReadNetwork(model, config, dtype, kind), hardware)
    with progress_bar("planning", None, "plans"):
        found = find(prices, memory)
    if not found.plans:
        raise _refusal(prices, memory, found)
    for line in _lines(prices, memory, found):
        answer(line)
    told = _written(out / PLAN, found.whole[0].to_json())
    write_text(out / TIMELINE, timeline.draw_svg({"planned": found.events(found.plans[0])}))
    say(f"Plan: {told}. Timeline: {out / TIMELINE}.")
    _show_graph(found, level, draw)
    return found.whole[0]


def _reads(config: ParallelConfig) -> Sequence[str]:
    """Return the accelerators whose memory the transport of a run sends, see `with_wire`."""
    return ["cuda"] if config.transport in ("auto", "nccl") else []


def _refusal(prices: Prices, memory: int, found: Found) -> PathosegError:
    """Return the error that says what would fit, where nothing does."""
    config, multiple = prices.config, tile_multiple(prices.network.model)
    sides = range(2 * multiple, config.tiles.side, multiple)

    def largest(shards: int, request: PlanRequest, guess: float) -> int | None:
        """Return the side of the largest tiles, in so many strips, that fit a request."""
        size = found.graphs[0].microbatch
        return largest_side(
            sides, lambda side: fits(prices.one(size, side, shards), request), guess
        )

    def smaller(request: PlanRequest, needed: int) -> Iterator[str]:
        # Most of what is needed grows with a tile's area.
        side = largest(found.shards, request, config.tiles.side * sqrt(request.memory / needed))
        if side is None:  # what does not shrink with tiles fills the memory, with strips too
            return
        yield f"tiles of {side} px"
        shards = max((many for many, whole in prices.gathered.items() if not whole), default=1)
        if shards == found.shards or config.parallel.shards is not None:
            return
        cut = replace(config.parallel, shards=shards)
        shared = plan_request(replace(config, parallel=cut), memory)
        side = largest(shards, shared, side * sqrt(shards))
        if side is not None:
            yield f"tiles of {side} px, each in {shards} strips of rows"

    with progress_bar("looking for what would fit", None, "plans"):
        refusal = nothing_fits(found.graphs[0], found.request, smaller)
    return told_of_teams(refusal, found.shards)


def largest_side(sides: Sequence[int], fit: Callable[[int], bool], guess: float) -> int | None:
    """Return about the largest of ascending sides that fits, None where the smallest does not.

    To try a side takes as long as to read the network. From the guess on, steps double until a side
    that fits and one that does not are found; then the gap is halved, until it is `_CLOSE`:

        |--------------- . x ---- x --o-?-|     o guess   x too large   . fits

    Args:
        sides: All of them smaller than one that does not fit.
        fit: Tries a side; raises `PathosegError` where strips of so small a tile are lower than a
            halo.
        guess: The answer, roughly.
    """
    too_low = set[int]()

    def fits_or_is_too_low(side: int) -> bool:
        try:
            return fit(side)
        except PathosegError:
            too_low.add(side)
            return True

    low, high, step, target = -1, len(sides), _CLOSE, guess
    while high - low > 1 and (low < 0 or sides[high - 1] >= _CLOSE * sides[low]):
        at = min(max(bisect_left(sides, target), low + 1), high - 1)
        if fits_or_is_too_low(sides[at]):
            low = at
        else:
            high = at
        if low >= 0 and high < len(sides):
            target = (sides[low] + sides[high]) / 2
        else:
            target = sides[high] / step if low < 0 else sides[low] * step
            step **= 2
    return None if low < 0 or sides[low] in too_low else sides[low]


def _lines(prices: Prices, memory: int, found: Found) -> Iterator[str]:
    """Lines that tell the fastest plan, its rivals and what they are priced by."""
    config, hardware, shards = prices.config, prices.hardware, found.shards
    best, ranks = found.whole[0], found.request.ranks * shards
    priced = found.priced(best)
    yield from priced.graph.notes
    has_margin = config.parallel.memory is None and memory < hardware.memory
    margin = f", {memory_text(hardware.memory)} less a margin" if has_margin else ""
    yield (
        f"{config.model.name}, tiles of {config.tiles.side} px, steps of {found.request.batch}, on "
        f"{count_ranks(ranks)} of {memory_text(memory)} ({hardware.name}{margin})."
    )
    if hardware.device != "cpu" and ranks > 1:
        way = "through host memory (gloo, most MPI)"
        if hardware.device in _reads(config.parallel):
            way = "from device to device, by NCCL"
        yield f"Messages are priced {way}."
    if shards > 1:
        reason = f": {found.reason}" if found.reason else ""
        yield f"Each tile is cut into {shards} strips of rows, on as many ranks{reason}."
    precision = (
        "float32"
        if prices.network.dtype is None
        else f"{str(prices.network.dtype)[6:]} by autocast"
    )
    yield f"Computed in {precision}. Times: {best.note}."
    yield ""
    yield from table(found.whole[:_SHOWN])
    yield ""
    yield _verdict(best, found.request)
    if shards > 1:
        yield f"A rank here stands for {shards} ranks that share each tile."
    yield from not_kept(best, priced, found.plans[0].partition(priced.graph))


def _show_graph(found: Found, level: Level | None, draw: Path | None) -> None:
    """List the graph of the fastest plan at a level, and draw it, where that is asked for."""
    plan = found.plans[0]
    if level in _DEPTHS and plan.line:  # modules run at once, so that none is a row of its own
        graph, times, stages = _at_level(found.of_microbatch(plan.microbatch), None, level)
    else:
        priced = found.priced(plan)
        graph, times, stages = _at_level(priced, plan.partition(priced.graph), level)
    if level is not None:
        answer("")
        answer(adjacency(graph))
    if draw is not None:
        told = _written(draw, svg(graph, seconds=times, partition=stages))
        say(f"Drawing: {told}.")
        if stages is None:
            say(f"It shows no stages: they begin inside of a {level}.")


def _written(path: Path, text: str) -> str:
    """Write a file; return its path as it is told, with whether an earlier one was replaced."""
    return f"{path}, in place of an earlier one" if write_text(path, text) else str(path)


def _at_level(
    priced: StageCosts, partition: Partition | None, level: Level | None
) -> tuple[LayerGraph, Mapping[str, tuple[float, float]], Partition | None]:
    """Return the graph, its layers' times and its stages, folded to a level.

    The stages are None where one of them begins inside of a folded module, and where the
    partition is.
    """
    depth = _DEPTHS.get(level or "layer")
    if depth is None:
        return priced.graph, priced.times, partition
    graph, groups = fold(priced.graph, depth), folded_layers(priced.graph, depth)
    times = {}
    for layer, group in zip(graph.layers, groups, strict=True):
        forwards, backwards = zip(
            *(priced.times[priced.graph.layers[position].name] for position in group), strict=True
        )
        times[layer.name] = sum(forwards), sum(backwards)
    begins = {group[0]: index for index, group in enumerate(groups)} | {
        len(priced.graph.layers): len(groups)
    }
    if partition is None or any(bound not in begins for bound in partition.bounds):
        return graph, times, None
    return graph, times, cut(graph, [begins[bound] for bound in partition.bounds])


def _build(config: Config) -> nn.Module:
    """The model without memory, unless it is to run; the user's own code may count on some."""
    classes = len(config.data.classes or ("foreground",)) + 1
    wanted = config.model.with_classes(classes)
    torch.manual_seed(config.seed)
    if wanted.is_factory:
        return build_model(wanted, wanted.name)
    with torch.device(pick_device(config.parallel.device) if config.parallel.profile else "meta"):
        return build_model(wanted)


def table(plans: Sequence[Plan]) -> Iterator[str]:
    """Lines that compare plans."""
    rows: list[Sequence[str]] = [
        (
            "order",
            "stages",
            "groups",
            "ranks",
            "microbatches",
            "step",
            "images/s",
            "bubble",
            "memory",
            "sent",
        )
    ]
    for each in plans:
        schedule = each.schedule
        rows.append(
            (
                f"{each.order}",
                f"{each.stages} {each.placement}" if each.stages > 1 else "1",
                f"{each.groups}",
                f"{each.ranks}",
                f"{len(schedule.replica_of)} × {each.microbatch}",
                f"{each.seconds:.4g} s",
                f"{each.images_per_second:.4g}",
                f"{each.bubble:.1%}",
                memory_text(max(each.memory)),
                memory_text(each.sent),
            )
        )
    yield from _columns(rows)


def not_kept(plan: Plan, priced: StageCosts, partition: Partition) -> Iterator[str]:
    """Lines that say what of each stage is offloaded and recomputed; none where all is kept."""
    if all(each == ActivationPolicy() for each in plan.retention):
        return
    rows: list[Sequence[str]] = [
        ("stage", "kept", "offloaded", "recomputed", "in host memory", "recomputing takes")
    ]
    home = plan.schedule.placement.homes[0]
    for stage, policy in enumerate(plan.retention):
        found = priced.retained(partition, stage, policy)
        rows.append(
            (
                f"{stage}",
                memory_text(found.kept),
                memory_text(found.offloaded),
                memory_text(found.recomputed),
                memory_text(plan.host_memory[home[stage]]),
                f"{found.recompute_seconds:.4g} s",
            )
        )
    yield "Of a microbatch's activations:"
    yield from _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _verdict(best: Plan, request: PlanRequest) -> str:
    if best.order == SEQUENTIAL:
        alone = "One rank alone" if request.order == AUTO else "One rank"
        alone = "Strips" if best.shards > 1 else alone
        return f"Best: {alone}, without cutting the model." + (
            " More ranks would only add messages."
            if request.ranks > 1 and request.order == AUTO
            else ""
        )
    if best.order == DATA_PARALLEL:
        idle, all_of_them = request.ranks - best.groups, request.ranks * best.microbatch
        more = f" Idle: {count_ranks(idle)}; --batch {all_of_them} would use all." if idle else ""
        return f"Best: plain data parallelism, {best.groups} ranks with the whole model each.{more}"
    placed = f"{best.stages} stages ({best.placement}) on {best.schedule.placement.ranks} ranks"
    groups = f" in each of {best.groups} groups" if best.groups > 1 else ""
    again = f" Recomputed stages: {', '.join(map(str, best.recompute))}." if best.recompute else ""
    starts = ", ".join(best.starts[:_SHOWN])
    if best.stages > _SHOWN:
        starts += f" and {best.stages - _SHOWN} more ({PLAN})"
    return f"Best: {best.order}, {placed}{groups}.{again} The stages begin with {starts}."
