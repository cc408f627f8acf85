"""Times the orders of a step on two ranks, beside one process, the simulator and torch's own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.steps.timed import Timed
from benchmarks.steps.ways import (
    COUNT,
    CPU,
    RANKS,
    TRAINING,
    in_turn,
    meet_by_torch,
    on_ranks,
    one_process,
    torch_gpipe,
)
from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.comm.launcher import connect
from pathoseg.parallel.comm.link_benchmark import measure_links
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.schedule.action import Edge, Kind
from pathoseg.parallel.schedule.costs import Costs, Link, StageCost
from pathoseg.parallel.schedule.event import Event, from_json, to_json
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import linear
from pathoseg.parallel.schedule.simulate import simulate

IDEAL = RANKS * COUNT / (COUNT + RANKS - 1)
ORDERS = {
    "mp-basic": mp_basic(linear(RANKS), COUNT),
    "gems-master": gems(RANKS, pairs=COUNT // 2),
    "gpipe": gpipe(linear(RANKS), COUNT),
    "1f1b": one_f_one_b(RANKS, COUNT),
}
ALONE, BOTH, PEER = "one process", "two processes at once", "torch's ScheduleGPipe"
EMPTY_COUNT = 64


@dataclass(frozen=True)
class Case:
    """A model and its microbatches."""

    name: str
    config: ModelConfig
    samples: int
    side: int


def cases(quick: bool) -> list[Case]:
    unet = ModelConfig("unet", "segment", 3, width=16)
    resnet = ModelConfig("resnet110_v2", "segment", 3)
    if quick:
        return [Case("unet", unet, 1, 160), Case("resnet110_v2", resnet, 1, 64)]
    return [Case("unet", unet, 1, 352), Case("resnet110_v2", resnet, 1, 128)]


@dataclass
class Times:
    """The times, events and losses of all ways to do a step of one model, as one rank knows them.

    Attributes:
        rounds: By way, seconds of each timed step, on its slowest rank.
        edges: The tensors that cross the cut.
        profiled: The costs of its stages, from this rank's times of their layers.
        events: By order, the timed actions of both ranks in all steps but the first.
        losses: By way, the mean loss of the first step.
    """

    rounds: dict[str, list[float]] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    profiled: Costs = field(default_factory=lambda: Costs(()))
    events: dict[str, list[Event]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def median(self, way: str) -> float:
        return median(self.rounds[way])

    def ratio(self, way: str, other: str) -> float:
        """Return the median over rounds of one way's seconds over those of another in that round.

        A machine whose speed changes within minutes has both alike.
        """
        pairs = zip(self.rounds[way], self.rounds[other], strict=True)
        return median(seconds / others for seconds, others in pairs)

    def share(self, order: str) -> float:
        """Return the speed-up of an order over one process, as a share of the ideal one."""
        return self.ratio(ALONE, order) / IDEAL

    def gain_share(self) -> float:
        """GEMS-MASTER's gain over MP-Basic, over what it is on paper with free links."""
        stages = tuple(map(self._cost, range(RANKS)))
        basic, master = (
            simulate(lower(ORDERS[name]), Costs(stages)).time
            for name in ("mp-basic", "gems-master")
        )
        return self.ratio("mp-basic", "gems-master") / (basic / master)

    def predicted(self, order: str) -> float:
        """Seconds by the simulator, at profiled costs that add up to what the stages took under
        MP-Basic: layers alone, ahead of all rounds, tell no more than how these compare."""
        stages = self.profiled.stages
        taken = map(self._cost, range(RANKS))
        scale = sum(each.forward + each.backward for each in taken) / sum(
            each.forward + each.backward for each in stages
        )
        scaled = tuple(
            replace(each, forward=each.forward * scale, backward=each.backward * scale)
            for each in stages
        )
        lowered = lower(ORDERS[order], self.edges)
        return float(simulate(lowered, replace(self.profiled, stages=scaled)).time)

    def error(self, order: str) -> float:
        return self.predicted(order) / self.median("mp-basic") * self.ratio("mp-basic", order) - 1

    def _cost(self, stage: int) -> StageCost:
        """Return the median seconds of a stage's forward and backward, where nothing else runs.

        They are those of MP-Basic, whose ranks compute one after the other.
        """

        def seconds(kind: Kind) -> float:
            return median(
                event.end - event.start
                for event in self.events["mp-basic"]
                if event.action.kind is kind and event.action.stage == stage
            )

        return StageCost(seconds(Kind.FORWARD), seconds(Kind.BACKWARD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller tiles and fewer rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        code = start_local(RANKS, [sys.executable, *sys.argv, "--rank"], "mpi")
        if not options.quick:
            print("", flush=True)
            subprocess.run([sys.executable, Path(__file__).with_name("limits.py")], check=True)
        sys.exit(code)
    figures = measure(options.quick)
    if figures and options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(quick: bool) -> dict[str, float | str]:
    """One rank's part; the figures, on rank 0."""
    torch.set_num_threads(1)
    transport = connect("mpi")
    meet_by_torch(transport)
    link = measure_links(transport)
    overhead = empty_actions(transport, 5 if quick else 20)
    times = {
        case.name: time_case(case, transport, link, 3 if quick else 9) for case in cases(quick)
    }
    dist.destroy_process_group()
    transport.close()
    if transport.rank:
        return {}
    figures: dict[str, float | str] = {"device": "cpu", "action_overhead_us": overhead * 1e6}
    for name, found in times.items():
        print(f"\n{name}\n\n{table(found)}")
        figures |= {
            f"gems_master_gain_share_{name}": found.gain_share(),
            f"gpipe_efficiency_share_{name}": found.share("gpipe"),
            f"one_f_one_b_efficiency_share_{name}": found.share("1f1b"),
            f"prediction_error_{name}": max(abs(found.error(order)) for order in ORDERS),
            f"vs_torch_gpipe_{name}": found.ratio(PEER, "gpipe"),
        }
    for what, worst in (
        ("gems_master_gain_share", min),
        ("gpipe_efficiency_share", min),
        ("one_f_one_b_efficiency_share", min),
        ("prediction_error", max),
        ("vs_torch_gpipe", min),
    ):
        figures[what] = worst(float(figures[f"{what}_{name}"]) for name in times)
    print("", *(f"{name:40} {value}" for name, value in figures.items()), sep="\n")
    return figures


def time_case(case: Case, transport: Transport, link: Link, rounds: int) -> Times:
    """All ways in turn, several times over; the first time does not count."""
    torch.manual_seed(0)
    model = build_model(case.config)
    images = torch.randn(COUNT * case.samples, 3, case.side, case.side)
    targets = torch.randint(0, case.config.classes, (len(images), case.side, case.side))
    example = images[: case.samples]
    times = Times()
    partition = choose_cut(case, model, images, targets, transport, link, times)
    ways: dict[str, Callable[[int], float]] = {}
    alone = one_process(deepcopy(model), images, targets)
    ways[ALONE] = lambda number: alone(number) if transport.rank == 0 else 0.0
    ways[BOTH] = one_process(deepcopy(model), images, targets)
    ways[PEER] = torch_gpipe(Traced(deepcopy(model), example), partition, images, targets)
    for name, order in ORDERS.items():
        traced = Traced(deepcopy(model), example)
        events = times.events.setdefault(name, [])
        ways[name] = on_ranks(traced, partition, order, transport, images, targets, events)
    times.rounds, times.losses = in_turn(ways, rounds, transport)
    check(times)
    for events in times.events.values():
        everyone = transport.gather(to_json(events))
        events[:] = [event for text in everyone for event in from_json(text)]
    return times


def choose_cut(
    case: Case,
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    transport: Transport,
    link: Link,
    times: Times,
) -> Partition:
    """The cut that balances what layers take; notes what its stages take.

    Both ranks time at once, as they will compute at once; rank 0's figures count.
    """
    own_images, own_targets = images[: case.samples], targets[: case.samples]
    traced = Traced(deepcopy(model), own_images)
    hardware = replace(load_hardware("cpu"), inside=link)
    transport.barrier()
    priced = StageCosts(traced.graph, Timed(traced, own_images, own_targets), hardware)
    partition = priced.cutter.balance(RANKS, priced.weights(), byte_cost=priced.byte_cost)
    partition = cut(traced.graph, json.loads(transport.gather(json.dumps(partition.bounds))[0]))
    times.edges, times.profiled = stage_edges(partition), priced.costs(partition, RANKS)
    return partition


class _Empty(nn.Module):
    """A number, so that there is a gradient, and stages that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.nothing = nn.Identity()

    def forward(self, numbers: Tensor) -> Tensor:
        passed: Tensor = self.nothing(numbers * self.factor)
        return passed


def empty_actions(transport: Transport, rounds: int) -> float:
    """Seconds for each action of a rank, messages included; the slower of GPipe and 1F1B."""
    numbers = torch.ones(EMPTY_COUNT, 1)
    microbatches = Microbatches(
        [1] * EMPTY_COUNT, lambda each: {"numbers": numbers[:1]}, lambda each: None
    )
    training = replace(TRAINING, loss=lambda returned, _: returned.sum(1))
    slowest = 0.0
    for order in (gpipe(linear(RANKS), EMPTY_COUNT), one_f_one_b(RANKS, EMPTY_COUNT)):
        traced = Traced(_Empty(), numbers[:1])
        partition = cut(traced.graph, [0, 1, len(traced.graph.layers)])
        lowered = lower(order, stage_edges(partition))
        runner = Runner(traced, partition, lowered, transport, CPU, training)
        seconds = []
        for number in range(rounds + 1):
            transport.barrier()
            begin = time.perf_counter()
            runner.step(number, microbatches)
            seconds.append(time.perf_counter() - begin)
        slowest = max(slowest, median(seconds[1:]) / len(lowered.lists[transport.rank]))
    return max(float(text) for text in transport.gather(str(slowest)))


def check(times: Times) -> None:
    """All ways have to compute the same."""
    expected = times.losses[ALONE]
    for name, loss in times.losses.items():
        if abs(loss - expected) > 1e-5 * abs(expected):
            raise AssertionError(f"{name} has a first loss of {loss}, one process {expected}")


def table(times: Times) -> str:
    rows = [
        "| | step, s | least to most | speed-up | of the ideal | predicted, s | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, seconds in times.rounds.items():
        speed = times.ratio(ALONE, way)
        row = f"| {way} | {times.median(way):.3f} | {min(seconds):.3f} to {max(seconds):.3f} "
        row += f"| {speed:.2f} | {speed / IDEAL:.3f} "
        if way in ORDERS:
            row += f"| {times.predicted(way):.3f} | {times.error(way):+.3f} |"
        else:
            row += "| | |"
        rows.append(row)
    return "\n".join(rows)


if __name__ == "__main__":
    main()
