"""Measures memory and time of strips of one tile on two ranks, beside the whole tile on one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pathoseg.models.build import build_model
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig, ModelConfig, Norm
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.comm.link_benchmark import measure_links
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.subgroup import Subgroup
from pathoseg.parallel.comm.transport import Pending, Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.cost.strip_costs import StripCosts
from pathoseg.parallel.cost.timing import Profiled
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gpipe import sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.shards.strip_graph import strip_graph

SHARDS, CLASSES = 2, 3
CPU = torch.device("cpu")
# One rank with whole tiles; two with a strip each; two with a tile of half the height each, which
# exchange nothing: the time that strips would take if nothing had to be sent. Then one rank with
# the tile and all kernels upside down, whose gradients are the same sums in another order; and the
# times of layers and of the link, which predict a step of strips.
WHOLE, STRIPS, HALVES, TURNED, LAYERS = "whole", "strips", "halves", "turned", "layers"


@dataclass(frozen=True)
class Task:
    """The work of one process."""

    network: str
    norm: Norm
    width: int
    side: int
    steps: int
    way: str
    double: bool


class Counting:
    """Counts what is sent: implements Transport."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.ranks, self.reads = transport.rank, transport.ranks, transport.reads
        self.messages = self.bytes = self.sums = self.summed = 0
        self._transport = transport
        self.receive, self.gather = transport.receive, transport.gather
        self.prepare = transport.prepare
        self.barrier, self.abort, self.close = transport.barrier, transport.abort, transport.close

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        self.messages, self.bytes = self.messages + 1, self.bytes + tensor.nbytes
        return self._transport.send(tensor, to, tag)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        self.sums, self.summed = self.sums + 1, self.summed + tensor.nbytes
        return self._transport.sum(tensor, ranks)


def work(task: Task, folder: Path) -> None:
    """Trains as one rank; writes its times, bytes and gradients."""
    torch.set_num_threads(1)
    world = connect("gloo", World()) if task.way in (WHOLE, TURNED) else connect("gloo")
    counting = Counting(world)
    transport: Transport = counting
    if task.way == HALVES:
        transport = Subgroup(counting, [world.rank])
    dtype = torch.float64 if task.double else torch.float32
    torch.manual_seed(0)
    config = ModelConfig(task.network, "segment", CLASSES, width=task.width, norm=task.norm)
    model = build_model(config).to(dtype)
    if task.way == LAYERS:
        steps = predicted(model, task, world)
        (folder / f"{task.way}-{world.rank}.json").write_text(json.dumps(steps))
        world.close()
        return
    if task.way == TURNED:
        turn(model.parameters())
    rows = task.side // SHARDS if task.way == HALVES else task.side
    traced = Traced(model, torch.empty(1, 3, rows, task.side, device="meta", dtype=dtype))
    partition = cut(traced.graph, (0, len(traced.graph.layers)))
    loss = build_loss(LossConfig())
    training = Training(loss, lambda parameters: torch.optim.SGD(parameters, 0.01))
    shards = SHARDS if task.way == STRIPS else 1
    schedule = lower(sequential(1), [])
    runner = Runner(traced, partition, schedule, transport, CPU, training, shards=shards)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, rows, task.side, generator=generator).to(dtype)
    labels = torch.randint(0, CLASSES, (1, rows, task.side), generator=generator)
    own = runner.rows(rows)
    images, labels = images[:, :, own].clone(), labels[:, own].clone()
    if task.way == TURNED:
        images, labels = images.flip(2), labels.flip(1)
    [name] = traced.graph.inputs
    microbatches = Microbatches([1], lambda _: {name: images}, lambda _: labels)
    peak = _peak(lambda: runner.step(0, microbatches))
    gradients = {key: p.grad for key, p in runner.own.items() if p.grad is not None}
    if task.way == TURNED:
        turn(gradients.values())
    torch.save(gradients, folder / f"{task.way}-{world.rank}.pt")
    seconds, losses = [], []
    for step in range(1, task.steps):
        counting.messages = counting.bytes = counting.sums = counting.summed = 0
        world.barrier()
        start = time.perf_counter()
        losses.append(runner.step(step, microbatches).loss_sum)
        seconds.append(time.perf_counter() - start)
    told = {
        "seconds": median(seconds) if seconds else 0.0,
        "peak": peak,
        "messages": counting.messages,
        "sent": counting.bytes,
        "sums": counting.sums,
        "summed": counting.summed,
        "losses": losses,
    }
    (folder / f"{task.way}-{world.rank}.json").write_text(json.dumps(told))
    world.close()


def turn(kernels: Iterable[Tensor]) -> None:
    """Turns kernels (out, in, height, width) upside down, and leaves other tensors as they are."""
    for each in kernels:
        if each.dim() == 4:
            each.data = each.data.flip(2).contiguous()


def predicted(model: torch.nn.Module, task: Task, world: Transport) -> dict[str, float]:
    """Times the layers of half a tile on both ranks at once, and their link.

    Returns:
        The step that the planner predicts of a strip, and of half a tile that exchanges nothing.
    """
    hardware = replace(load_hardware("cpu"), inside=measure_links(world))
    whole, half = (
        Traced(model, torch.empty(1, 3, rows, task.side, device="meta"))
        for rows in (task.side, task.side // SHARDS)
    )
    world.barrier()
    alone = Profiled(half, cost_model(hardware), rounds=3)
    cut_costs = StripCosts(alone, hardware, SHARDS, half.graph)
    schedule = lower(sequential(1), [])
    told = {}
    for way, graph, costs, shards in (
        (HALVES, half.graph, alone, 1),
        (STRIPS, strip_graph(whole, SHARDS).graph, cut_costs, SHARDS),
    ):
        priced = StageCosts(graph, costs, hardware, 1, shards=shards)
        partition = cut(graph, (0, len(graph.layers)))
        told[way] = float(simulate(schedule, priced.costs(partition, 1)).time)
    return told


def _peak(do: Callable[[], object]) -> int:
    """The most bytes that torch's allocator had given out at once, parameters aside."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        do()
    events = profile.profiler.kineto_results.events()
    taken = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(accumulate(size for _, size in taken)))


def run(task: Task, folder: Path) -> list[dict[str, float]]:
    """Starts the ranks of a task; returns what each measured."""
    command = [sys.executable, __file__, "--work", json.dumps(asdict(task)), str(folder)]
    ranks = 1 if task.way in (WHOLE, TURNED) else SHARDS
    if ranks == 1:
        one = {**os.environ, "OMP_NUM_THREADS": "1"}  # as ranks have; kernels take memory by it
        code = subprocess.run(command, check=False, env=one).returncode
    else:
        code = start_local(ranks, command, "gloo")
    if code:
        raise SystemExit(f"{task.way} failed")
    return [json.loads((folder / f"{task.way}-{rank}.json").read_text()) for rank in range(ranks)]


def gradient_error(folder: Path, way: str = STRIPS) -> float:
    """The worst tensor's distance from that of the whole tile, as a share of it."""
    whole = torch.load(folder / f"{WHOLE}-0.pt", weights_only=True)
    worst = 0.0
    for file in folder.glob(f"{way}-*.pt"):
        own = torch.load(file, weights_only=True)
        for name, gradient in whole.items():
            share = (own[name].double() - gradient.double()).norm() / gradient.double().norm()
            worst = max(worst, float(share))
    return worst


def measure(title: str, task: Task, rounds: int, figures: dict[str, float]) -> None:
    """Measures one network; adds figures that end with its title."""
    found: dict[str, list[list[dict[str, float]]]] = {WHOLE: [], STRIPS: [], HALVES: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way, each in found.items():
                each.append(run(Task(**{**asdict(task), "way": way}), Path(folder)))
        single = gradient_error(Path(folder))
        planned = run(Task(**{**asdict(task), "way": LAYERS}), Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        for way in (WHOLE, STRIPS, TURNED):
            exact = {**asdict(task), "way": way, "double": True, "side": 256, "steps": 1}
            run(Task(**exact), Path(folder))
        double = gradient_error(Path(folder))
        reordered = gradient_error(Path(folder), TURNED)
    peak = {way: median(max(r["peak"] for r in each) for each in found[way]) for way in found}
    seconds = {way: median(max(r["seconds"] for r in e) for e in found[way]) for way in found}
    last = found[STRIPS][-1]
    step, ideal = (max(each[way] for each in planned) for way in (STRIPS, HALVES))
    # Layers were timed at another moment: both are taken as shares of a step of half tiles.
    time_share = seconds[STRIPS] / seconds[HALVES]
    figures |= {
        f"memory_share_{title}": peak[STRIPS] * SHARDS / peak[WHOLE],
        f"peak_whole_mib_{title}": peak[WHOLE] / 2**20,
        f"peak_strip_mib_{title}": peak[STRIPS] / 2**20,
        f"seconds_whole_{title}": seconds[WHOLE],
        f"seconds_strips_{title}": seconds[STRIPS],
        f"seconds_halves_{title}": seconds[HALVES],
        f"time_share_{title}": time_share,
        f"predicted_seconds_strips_{title}": step,
        f"predicted_time_share_{title}": step / ideal,
        f"prediction_error_{title}": abs(step / ideal / time_share - 1),
        f"prediction_error_unscaled_{title}": step / seconds[STRIPS] - 1,
        f"speed_up_{title}": seconds[WHOLE] / seconds[STRIPS],
        f"halo_mib_{title}": max(each["sent"] for each in last) / 2**20,
        f"messages_{title}": max(each["messages"] for each in last),
        f"sums_{title}": max(each["sums"] for each in last),
        f"gradient_error_{title}": double,
        f"reordered_error_{title}": reordered,
        f"gradient_error_float32_{title}": single,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller tile, one round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Task(**json.loads(given.work[0])), Path(given.work[1]))
        return
    cases = {
        "unet": Task("unet", "batch", 16, 1024, 3, WHOLE, False),
        "unet_group_norm": Task("unet", "group", 16, 1024, 3, WHOLE, False),
    }
    if given.quick:
        cases = {"unet": Task("unet", "batch", 8, 512, 2, WHOLE, False)}
    figures: dict[str, float] = {}
    for title, task in cases.items():
        measure(title, task, 1 if given.quick else given.rounds, figures)
    for name, value in figures.items():
        print(f"{name:40} {value:.4g}")
    if given.json:
        given.json.write_text(json.dumps({"device": "cpu", **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
