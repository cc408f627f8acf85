"""Times the step of `pathoseg train` beside plain PyTorch, its DDP and its own pipelining."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.steps.ways import COUNT, LOSS, RANKS, meet_by_torch, torch_gpipe
from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config, TrainConfig
from pathoseg.device import (
    MEAN,
    STD,
    amp_dtype,
    device_name,
    pick_device,
    synchronize,
    to_input,
)
from pathoseg.models.build import build_model, lay_out
from pathoseg.models.bundle import Bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.comm.launcher import connect
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.rng import WholeModel
from pathoseg.tiles.dataset import Batch
from pathoseg.training.engine import Engine
from pathoseg.training.one_device import OneDevice
from pathoseg.training.pipeline_engine import PipelineEngine
from pathoseg.training.tasks import make_task

CLASSES = ClassTable(("gland", "tumour"), ((0, 150, 0), (200, 0, 0)))
RATE = 1e-4
NETWORKS = {
    "unet64": ModelConfig("unet64", "segment", 3),
    "resnet110_v2": ModelConfig("resnet110_v2", "segment", 3),
}
SIDE, SIDE_ON_CPU = 1024, 128
ROUNDS = 7

# Makes the step of a number.
Way = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """A network with a batch of pixels and classes."""

    name: str
    config: ModelConfig
    batch: Batch

    @classmethod
    def of(cls, name: str, side: int) -> Case:
        drawn = np.random.default_rng(0)
        shape = (COUNT, side, side)
        images = drawn.integers(0, 256, (*shape, 3), np.uint8)
        masks = drawn.integers(0, len(CLASSES), shape, np.uint8)
        return cls(name, NETWORKS[name], Batch(images, masks, ()))

    @property
    def side(self) -> int:
        return int(self.batch.masks.shape[-1])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return build_model(self.config)

    def card(self) -> Bundle:
        return Bundle(
            *(self.config, CLASSES.names, CLASSES.colours, 0.5, self.side, 0, MEAN, STD, 1)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, help="of a tile; left out: 128, on a GPU 1,024")
    parser.add_argument("--network", choices=NETWORKS, help="this one alone")
    parser.add_argument("--compile", action="store_true", help="ours and plain compiled, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = pick_device()
    side = options.side or (SIDE_ON_CPU if device.type == "cpu" else SIDE)
    torch.backends.cudnn.benchmark = True  # as `train` has it where memory is not limited
    cases = [Case.of(name, side) for name in NETWORKS if options.network in (None, name)]
    figures = on_two_ranks(cases) if options.rank else on_one_device(cases, device, options.compile)
    if options.json and figures:
        before = (
            json.loads(options.json.read_text())
            if options.rank
            else {"device": device_name(device)}
        )
        options.json.write_text(json.dumps(before | figures, indent=2) + "\n")
    if not options.rank and device.type == "cpu":
        sys.exit(start_local(RANKS, [sys.executable, *sys.argv, "--rank"], "gloo"))


def on_one_device(cases: list[Case], device: torch.device, compiles: bool) -> dict[str, float]:
    """Compare one process of `pathoseg train` with plain loops over the same batch."""
    figures: dict[str, float] = {}
    train = TrainConfig(batch=COUNT, microbatch=1)
    for case in cases:
        model = case.model().to(device)
        task = make_task("segment", CLASSES, 0.5)
        whole = WholeModel(model, traced_of(model, case), 0, device)
        engine = OneDevice(model, whole.forward, LOSS, task, case.card(), train)
        ways = {
            "ours": stepping(engine, case.batch),
            "plain": plain(case.model(), case, train, device, torch.contiguous_format),
            "channels_last": plain(case.model(), case, train, device, torch.channels_last),
        }
        if compiles:
            compiled = case.model().to(device)
            compiled.compile()
            ways["compiled"] = plain(compiled, case, train, device, torch.channels_last)
            own = case.model().to(device)
            whole = WholeModel(own, traced_of(own, case), 0, device, compiles=True)
            own_train = replace(train, compile=True)
            engine = OneDevice(own, whole.forward, LOSS, task, case.card(), own_train)
            ways["ours_compiled"] = stepping(engine, case.batch)
        found = compared(case, in_turn(ways, device, None))
        print(*(f"{name:44} {value}" for name, value in found.items()), sep="\n", flush=True)
        figures |= found
    return figures


def traced_of(model: nn.Module, case: Case) -> Traced:
    return Traced(model, torch.empty(1, 3, case.side, case.side, device="meta"))


def on_two_ranks(cases: list[Case]) -> dict[str, float]:
    """Compare two ranks of `pathoseg train` with DDP, and with GPipe at the same cut."""
    transport = connect("gloo")
    meet_by_torch(transport)
    device = torch.device("cpu")
    figures: dict[str, float] = {}
    for case in cases:
        replicas, stages = planned(case, "data-parallel", 1), planned(case, "gpipe", RANKS)
        half = replace_batch(case, slice(transport.rank, None, RANKS))
        train = TrainConfig(batch=COUNT, microbatch=1)
        model = DistributedDataParallel(case.model())
        images = to_input(case.batch.images, MEAN, STD, device)  # gloo refuses channels-last ones
        targets = torch.from_numpy(case.batch.masks).long()
        traced = Traced(case.model(), images[:1])
        partition = stages.partition(traced.graph)
        ways = {
            "ours_data_parallel": stepping(joined(case, replicas, transport), case.batch),
            "ddp": plain(model, half, train, device, torch.channels_last),
            "ours_gpipe": stepping(joined(case, stages, transport), case.batch),
            "torch_pipelining": torch_gpipe(traced, partition, images, targets),
        }
        figures |= compared(case, in_turn(ways, device, transport))
    dist.destroy_process_group()
    transport.close()
    if transport.rank:
        return {}
    print("", *(f"{name:44} {value}" for name, value in figures.items()), sep="\n")
    return figures


def replace_batch(case: Case, part: slice) -> Case:
    batch = case.batch
    return replace(case, batch=replace(batch, images=batch.images[part], masks=batch.masks[part]))


def planned(case: Case, order: str, stages: int) -> Plan:
    hardware = load_hardware("cpu")
    with torch.device("meta"):
        graph = Traced(build_model(case.config), torch.empty(1, 3, case.side, case.side)).graph
    priced = StageCosts(graph, cost_model(hardware), hardware)
    return plan([priced], PlanRequest(RANKS, 2**40, COUNT, order, stages))[0]


def joined(case: Case, chosen: Plan, transport: Transport) -> PipelineEngine:
    """The engine of a run on ranks."""
    task = make_task("segment", CLASSES, 0.5)
    config = replace(Config(), train=TrainConfig(batch=COUNT))
    model = case.model()
    lay_out(model, case.config, "cpu")
    traced = traced_of(model, case)
    return PipelineEngine(transport, chosen, traced, LOSS, task, case.card(), config, None)


def stepping(engine: Engine, batch: Batch) -> Way:
    rows = [*engine.rows]
    own = replace(batch, images=batch.images[rows], masks=batch.masks[rows])
    return lambda number: engine.step(number, own, RATE)


def plain(
    model: nn.Module,
    case: Case,
    train: TrainConfig,
    device: torch.device,
    layout: torch.memory_format,
) -> Way:
    """A plain training step: autocast, fused AdamW, clipping; gradients accumulate over tiles.

    DDP adds the gradients of the ranks in the last backward.
    """
    model.to(device, memory_format=layout)  # type: ignore[call-overload]  # not in its stub
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    dtype = amp_dtype(device, "auto")
    replicated = model if isinstance(model, DistributedDataParallel) else None
    count = len(case.batch.images)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        for at in range(count):
            part = slice(at, at + 1)
            images = to_input(case.batch.images[part], MEAN, STD, device, layout)
            targets = torch.from_numpy(case.batch.masks[part]).long().to(device)
            if replicated is not None:
                replicated.require_backward_grad_sync = at == count - 1
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = LOSS(model(images), targets).sum() / count
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        torch.stack(losses).sum().item()

    return step


def in_turn(
    ways: Mapping[str, Way], device: torch.device, transport: Transport | None
) -> dict[str, list[float]]:
    """Return the seconds of each way's steps, on the slowest rank; the first does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, step in ways.items():
            if transport is not None:
                transport.barrier()
            begin = time.perf_counter()
            step(number)
            if device.type != "cpu":
                synchronize(device)
            seconds = time.perf_counter() - begin
            if transport is not None:
                seconds = max(float(text) for text in transport.gather(str(seconds)))
            if number:
                taken[name].append(seconds)
    return taken


def compared(case: Case, taken: Mapping[str, list[float]]) -> dict[str, float]:
    """Tiles a second of each way, and the peers' seconds over ours in the same round, medians."""
    figures = {
        f"tiles_per_s_{name}_{case.name}": COUNT / median(seconds)
        for name, seconds in taken.items()
    }
    ours = [name for name in taken if name.startswith("ours")]
    rivals = {
        "ours": ["plain", "channels_last"],
        "ours_compiled": ["compiled"],
        "ours_data_parallel": ["ddp"],
        "ours_gpipe": ["torch_pipelining"],
    }
    for mine in ours:
        for peer in rivals[mine]:
            pairs = zip(taken[peer], taken[mine], strict=True)
            figures[f"vs_{peer}_{case.name}"] = median(theirs / own for theirs, own in pairs)
    return figures


if __name__ == "__main__":
    main()
