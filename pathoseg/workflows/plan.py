"""Plans how ranks share a training step, before any of it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from torch import nn

from pathoseg.config import Config, load_config
from pathoseg.device import pick_device
from pathoseg.errors import PathosegError
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.memory_size import memory_text, parse_memory
from pathoseg.models.build import build_model, check_tile, tile_multiple
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware, known_hardware, load_hardware
from pathoseg.parallel.cost.profiled import Profiled
from pathoseg.parallel.graph.activation_policy import Retention
from pathoseg.parallel.graph.draw import svg
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.cpu_workspace import cpu_workspace
from pathoseg.parallel.planning.infeasibility import count_ranks, nothing_fits
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.planning.orders import AUTO, DATA_PARALLEL, SEQUENTIAL
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.planning.planner import plan as find_plans
from pathoseg.parallel.planning.stage_costs import Priced
from pathoseg.parallel.planning.task import Task
from pathoseg.parallel.retention.policy_options import Ways
from pathoseg.parallel.runtime.available import available_memory, too_small
from pathoseg.parallel.schedule import timeline
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.progress import progress_bar, say

PLAN, TIMELINE = "plan.json", "timeline.svg"

# Sizes of microbatches that are tried where the model's norm does not forbid it.
_SIZES = (1, 2, 4)
_SLOTS = {"adamw": 2, "sgd": 1}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 10


def plan(
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    out: Path,
    draw: Path | None,
) -> Plan:
    """Finds the fastest plan that fits, shows it and its rivals, and writes it.

    Args:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        out: Folder of the plan and its timeline.
        draw: File of the drawing of the model with its times and stages, or None.

    Raises:
        PathosegError: Anything that cannot be planned, and what could.
        OSError: A file cannot be written.
    """
    config = load_config(config_file, flags)
    for folder in (out, *([] if draw is None else [draw.parent])):
        folder.mkdir(parents=True, exist_ok=True)
    hardware = find_hardware(config.parallel.hardware)
    task = make_task(config, hardware)
    model = _build(config)
    graphs = price(model, config, hardware)
    with progress_bar("planning", None, "plans"):
        plans = find_plans(graphs, task)
    if not plans:
        multiple = tile_multiple(model)
        sides = range(2 * multiple, config.tiles.tile, multiple)
        raise nothing_fits(
            graphs[0],
            task,
            sides,
            lambda side: _price(model, graphs[0].microbatch, side, config, hardware),
        )
    best = plans[0]
    [priced] = [each for each in graphs if each.microbatch == best.microbatch]
    for note in priced.graph.notes:
        say(note)
    say(
        f"{config.model.name}, tiles of {config.tiles.tile} px, steps of {task.batch}, on "
        f"{count_ranks(task.ranks)} of {memory_text(task.memory)} ({hardware.name})."
    )
    say(f"Times: {best.note}.")
    say("")
    for line in table(plans[:_SHOWN]):
        say(line)
    say("")
    say(_verdict(best, task))
    partition = best.partition(priced.graph)
    for line in not_kept(best, priced, partition):
        say(line)
    costs = priced.costs(partition, best.ranks, best.retention, best.window)
    events = simulate(best.schedule, costs).events
    write_text(out / PLAN, best.to_json())
    write_text(out / TIMELINE, timeline.draw_svg({"planned": events}))
    say(f"Plan: {out / PLAN}. Timeline: {out / TIMELINE}.")
    if draw is not None:
        write_text(draw, svg(priced.graph, seconds=priced.times, partition=partition))
        say(f"Drawing: {draw}.")
    return best


def find_hardware(name: str | None) -> Hardware:
    """The hardware of this name or file; of this machine's device where it is None.

    Raises:
        PathosegError: There is none, or nothing is known of this machine's GPU.
    """
    if name is not None:
        return load_hardware(name)
    if pick_device().type == "cpu":
        return load_hardware("cpu")
    title = torch.cuda.get_device_name()
    for known in known_hardware():
        if known in title.lower():
            return load_hardware(known)
    raise PathosegError(
        f"Nothing is known of this machine's {title}.",
        "Measure it with `pathoseg calibrate --out FILE`, and name that file with --hardware.",
    )


def make_task(config: Config, hardware: Hardware) -> Task:
    """What the configuration asks of the planner.

    Raises:
        PathosegError: An order, cut or size that there is not.
    """
    wanted = config.parallel
    memory = hardware.memory if wanted.memory is None else parse_memory(wanted.memory)
    return Task(
        wanted.ranks,
        memory,
        config.train.batch,
        wanted.order,
        wanted.stages,
        wanted.cut,
        ways=Ways(wanted.offload != "none", wanted.recompute),
    )


def price(model: nn.Module, config: Config, hardware: Hardware) -> list[Priced]:
    """The model for each size of microbatch that the planner may use, the smallest first.

    A configured size is kept. Else it is one sample, for batch norm takes its statistics over the
    microbatch: another size would be another training. Without batch norm several are tried.

    Raises:
        PathosegError: The tile does not fit the model, or the model cannot be read.
    """
    check_tile(model, config.tiles.tile)
    if config.train.microbatch is not None:
        sizes = [config.train.microbatch]
    elif any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        sizes = [1]
    else:
        sizes = [size for size in _SIZES if config.train.batch % size == 0]
    side, profile = config.tiles.tile, config.parallel.profile
    return [_price(model, size, side, config, hardware, profile) for size in sizes]


def _price(
    model: nn.Module,
    size: int,
    side: int,
    config: Config,
    hardware: Hardware,
    profile: bool = False,
) -> Priced:
    traced = Traced(model, torch.empty(size, 3, side, side, device="meta"))
    costs = cost_model(hardware)
    if profile:
        with progress_bar("timing layers", None, "visits") as bar:
            costs = Profiled(traced, costs, advance=bar.advance)
    slots = _SLOTS[config.train.optimizer]
    workspace = cpu_workspace(threads=hardware.threads or 1) if hardware.device == "cpu" else None
    return Priced(traced.graph, costs, hardware, slots, workspace)


def check_host(model: nn.Module, config: Config) -> None:
    """Makes sure that one process on the CPU can hold what a microbatch takes.

    Where it can twice over, the process keeps from then on what it frees: layers leave holes that
    no tensor fits into.

    Raises:
        PathosegError: The host has too little memory left.
    """
    side, size = config.tiles.tile, config.train.microbatch or config.train.batch
    try:
        graph = Traced(model, torch.empty(size, 3, side, side, device="meta")).graph
    except PathosegError:
        return  # what no graph can be made of trains in one process all the same
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


def _build(config: Config) -> nn.Module:
    """The model without memory, unless it is to run; the user's own code may count on some."""
    classes = len(config.data.classes or ("foreground",)) + 1
    wanted = config.model.with_classes(classes)
    torch.manual_seed(config.seed)
    if wanted.is_factory:
        return build_model(wanted, wanted.name)
    with torch.device(pick_device() if config.parallel.profile else "meta"):
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


def not_kept(plan: Plan, priced: Priced, partition: Partition) -> Iterator[str]:
    """Lines that say what of each stage is offloaded and recomputed; none where all is kept."""
    if all(each == Retention() for each in plan.retention):
        return
    rows: list[Sequence[str]] = [
        ("stage", "kept", "offloaded", "recomputed", "in host memory", "recomputing takes")
    ]
    home = plan.schedule.placement.homes[0]
    for stage, retention in enumerate(plan.retention):
        found = priced.retained(partition, stage, retention)
        rows.append(
            (
                f"{stage}",
                memory_text(found.kept),
                memory_text(found.offloaded),
                memory_text(found.recomputed),
                memory_text(plan.host_memory[home[stage]]),
                f"{found.again:.4g} s",
            )
        )
    yield "Of a microbatch's activations:"
    yield from _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _verdict(best: Plan, task: Task) -> str:
    if best.order == SEQUENTIAL:
        alone = "One rank alone" if task.order == AUTO else "One rank"
        return f"Best: {alone}, without cutting the model." + (
            " More ranks would only add messages." if task.ranks > 1 and task.order == AUTO else ""
        )
    if best.order == DATA_PARALLEL:
        return f"Best: plain data parallelism, {best.groups} ranks with the whole model each."
    placed = f"{best.stages} stages ({best.placement}) on {best.schedule.placement.ranks} ranks"
    groups = f" in each of {best.groups} groups" if best.groups > 1 else ""
    again = f" Recomputed stages: {', '.join(map(str, best.recompute))}." if best.recompute else ""
    return (
        f"Best: {best.order}, {placed}{groups}.{again} "
        f"The stages begin with {', '.join(best.starts)}."
    )
