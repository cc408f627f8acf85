"""Simulates GEMS on up to 1,024 GPUs, with each assumption halved and doubled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.schedule.costs import Costs, Nodes, StageCost
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Schedule
from pathoseg.parallel.schedule.simulate import simulate

DEVICE = load_hardware("v100")
MEMORY = 16 * 2**30
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
PUBLISHED_EFFICIENCY, PUBLISHED_4, PUBLISHED_128 = 0.9732, 32 / 7.25, 32 * 60 / 27


@dataclass(frozen=True)
class Case:
    """One group's order, and what its stages and links cost."""

    order: Schedule
    costs: Costs

    def seconds(self, groups: int) -> float:
        """A step of so many groups."""
        return float(simulate(lower(replace(self.order, groups=groups)), self.costs).time)

    @property
    def alone(self) -> float:
        """The same microbatches on one GPU, were its memory large enough."""
        visits = sum(stage.forward + stage.backward for stage in self.costs.stages)
        return self.order.microbatches * visits + sum(stage.step for stage in self.costs.stages)

    def exposed(self, groups: int) -> float:
        """A step whose sums follow one another after everything else."""
        quiet = tuple(replace(stage, gradients=0) for stage in self.costs.stages)
        own = self.order.placement.ranks
        sums = [0.0] * own
        for number, stage in enumerate(self.costs.stages):
            holders = self.order.placement.holders(number)
            everyone = [rank + group * own for group in range(groups) for rank in holders]
            for rank in holders:
                sums[rank] += float(self.costs.network.all_reduce(everyone, stage.gradients))
        return Case(self.order, replace(self.costs, stages=quiet)).seconds(1) + max(sums)


def _network(case: Case, change: Callable[[Nodes], Nodes]) -> Case:
    assert isinstance(case.costs.network, Nodes)
    return replace(case, costs=replace(case.costs, network=change(case.costs.network)))


def _stages(case: Case, change: Callable[[StageCost], StageCost]) -> Case:
    return replace(case, costs=replace(case.costs, stages=tuple(map(change, case.costs.stages))))


def _images(case: Case, factor: float) -> Case:
    pairs = max(1, round(case.order.microbatches // 2 * factor))
    order = gems(case.order.placement.ranks, pairs)
    return replace(case, order=replace(order, edges=case.order.edges))


def _faster(stage: StageCost, factor: float) -> StageCost:
    return replace(
        stage,
        forward=stage.forward / factor,
        backward=stage.backward / factor,
        step=stage.step / factor,
    )


# Name -> the case with that assumption times a factor.
ASSUMPTIONS: Mapping[str, Callable[[Case, float], Case]] = {
    "GPUs a node (4)": lambda case, x: _network(
        case, lambda net: replace(net, per_node=round(net.per_node * x))
    ),
    "NVLink's bandwidth (50 GB/s)": lambda case, x: _network(
        case, lambda net: replace(net, inside=replace(net.inside, beta=net.inside.beta / x))
    ),
    "InfiniBand's bandwidth (12.5 GB/s)": lambda case, x: _network(
        case, lambda net: replace(net, between=replace(net.between, beta=net.between.beta / x))
    ),
    "latencies (1.5 µs)": lambda case, x: _network(
        case,
        lambda net: replace(
            net,
            inside=replace(net.inside, alpha=net.inside.alpha * x),
            between=replace(net.between, alpha=net.between.alpha * x),
        ),
    ),
    "the GPU's speed": lambda case, x: _stages(case, lambda stage: _faster(stage, x)),
    "bytes of gradients": lambda case, x: _stages(
        case, lambda stage: replace(stage, gradients=round(stage.gradients * x))
    ),
    "bytes of activations sent": lambda case, x: replace(
        case,
        costs=replace(
            case.costs, sizes={edge: round(size * x) for edge, size in case.costs.sizes.items()}
        ),
    ),
    "images a group, one a visit": _images,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the assumptions as they are")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"Times: {cost_model(DEVICE).note}.\n")
    figures = {**_efficiency(options.quick), **_speedups(options.quick)}
    if options.json:
        named = {**figures, "device": f"simulated {DEVICE.name}"}
        options.json.write_text(json.dumps(named, indent=2) + "\n")


def _efficiency(quick: bool) -> dict[str, float]:
    """Weak scaling: every group of 8 takes 8 images a step, in 4 pairs of visits."""
    priced = _read("resnet1001_v2", 512)
    partition = _best(priced, PlanRequest(8, MEMORY, 8, "gems-master", 8)).partition(priced.graph)
    order = replace(gems(8, 4), edges=stage_edges(partition))
    case = Case(order, priced.costs(partition, 1024))

    def efficiency(case: Case, ranks: int = 1024) -> float:
        return case.seconds(1) / case.seconds(ranks // 8)

    print("ResNet-1001-v2, 512², GEMS-MASTER of 8 stages in groups of 8 ranks\n")
    print("| ranks | step, s | images/s | efficiency |\n|---|---|---|---|")
    for ranks in RANKS:
        step = case.seconds(ranks // 8)
        print(f"| {ranks:,} | {step:.3f} | {ranks / step:.1f} | {efficiency(case, ranks):.2%} |")
    print(f"| 1,024, published | | | {PUBLISHED_EFFICIENCY:.2%} |\n")
    if not quick:
        _vary(case, ("efficiency at 1,024",), lambda case: (efficiency(case),))
        exposed = case.exposed(1) / case.exposed(128)
        print(f"Were no sum overlapped: {exposed:.2%}.\n")
    return {"efficiency_1024": efficiency(case)}


def _speedups(quick: bool) -> dict[str, float]:
    """Images a second of 1, 4 and 128 GPUs, each group of 4 taking 16 images a step."""
    priced = _read("resnet110_v2", 1024)

    def case(memory: int) -> tuple[Plan, Case]:
        best = _best(priced, PlanRequest(4, memory, 16, "gems-master", 4))
        costs = priced.costs(best.partition(priced.graph), 128)
        return best, Case(Schedule.parse(best.text), costs)

    def speedups(case: Case) -> tuple[float, float]:
        return case.alone / case.seconds(1), 32 * case.alone / case.seconds(32)

    best, base = case(MEMORY)
    pairs = f"{len(best.schedule.replica_of)} microbatches a group"
    print(f"ResNet-110-v2, 1,024², against one GPU; {pairs}, {max(best.memory) / 2**30:.1f} GiB\n")
    print("| | 4 GPUs | 128 GPUs |\n|---|---|---|")
    found = speedups(base)
    print(f"| GEMS-MASTER, 4 stages | {found[0]:.2f} | {found[1]:.1f} |")
    if not quick:
        rates = [
            _best(priced, PlanRequest(ranks, MEMORY, 4 * ranks)).images_per_second * base.alone / 16
            for ranks in (4, 128)
        ]
        print(f"| the planner's choice | {rates[0]:.2f} | {rates[1]:.1f} |")
    print(f"| published | {PUBLISHED_4:.2f} | {PUBLISHED_128:.1f} |\n")
    if not quick:
        _vary(base, ("4 GPUs", "128 GPUs"), speedups)
        for memory in (MEMORY // 2, MEMORY * 2):
            four, many = speedups(case(memory)[1])
            print(f"With {memory / 2**30:.0f} GiB a GPU: {four:.2f} and {many:.1f}.")
    return {"speedup_4": found[0], "speedup_128": found[1]}


def _vary(base: Case, names: tuple[str, ...], measure: Callable[[Case], tuple[float, ...]]) -> None:
    """A table of what is measured with each assumption halved and doubled."""
    heads = [f"{name}, {change}" for name in names for change in ("halved", "doubled")]
    print(f"| assumption | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
    for name, change in ASSUMPTIONS.items():
        halved, doubled = (measure(change(base, factor)) for factor in (0.5, 2))
        pairs = zip(halved, doubled, strict=True)
        cells = " | ".join(f"{value:.4g}" for pair in pairs for value in pair)
        print(f"| {name} | {cells} |")
    print()


def _read(name: str, side: int) -> StageCosts:
    with torch.device("meta"):
        model = build_model(ModelConfig(name, "segment", 2))
    graph = Traced(model, torch.empty(1, 3, side, side, device="meta")).graph
    return StageCosts(graph, cost_model(DEVICE), DEVICE)


def _best(priced: StageCosts, task: PlanRequest) -> Plan:
    return plan([priced], task)[0]


if __name__ == "__main__":
    main()
