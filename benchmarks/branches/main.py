"""Compares plans of branches side by side with the best chain of stages, on paper and measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.networks.amoebanet import AmoebaNetD
from benchmarks.networks.branched import FourResolutions, SplitTransformer, ThreeDecoders
from benchmarks.networks.inception import InceptionV3
from benchmarks.steps.timed import Timed
from benchmarks.steps.ways import CPU, LOSS, TRAINING, Way, in_turn, one_process
from pathoseg.models.hooknet import HookNet
from pathoseg.parallel.comm.launcher import connect
from pathoseg.parallel.comm.link_benchmark import measure_links
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.orders import DATA_PARALLEL
from pathoseg.parallel.planning.plan import BranchChoice, Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.visit_time import measure_visit, pipelines

RANKS = 2  # that are measured
_UPDATES = 9
HARDWARE = "a100"
ALONE, BOTH, CHAIN = "one process", "two processes at once", "best chain"
BRANCHES, DATA = "branches", "data parallel"
FEW, MANY = "few visits", "many visits"
SLOW = ("hrnet", "inception_v3", "amoebanet_d")  # left out by --quick
# Everything is kept, in the chains as in the branches, so that what differs is the cut.
KEPT = AllowedPolicies(offload=False, recompute=False)


@dataclass(frozen=True)
class Network:
    """A network, the tile on paper, and the smaller one that is measured.

    Attributes:
        make: Builds it at a width, for paper and for the CPU.
        width: On paper.
        side: On paper, in pixels.
        small: The width that is measured.
        small_side: Likewise.
        channels: Of its input.
        labels_tiles: Whether it answers each tile, and not each pixel.
    """

    make: Callable[[float], nn.Module]
    width: float
    side: int
    small: float
    small_side: int
    channels: int = 3
    labels_tiles: bool = False


class _StackedInputs(nn.Module):
    """A `hooknet` whose tile and context, as many pixels of either, come as one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = HookNet(3, width, depth=4)

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.network(image=inputs[:, :3], context=inputs[:, 3:])
        logits: Tensor = made[0] if self.training else made  # the tile's alone
        return logits


class _JoinedHeads(InceptionV3):
    """An Inception-v3 whose two heads are added, so that one loss trains both.

    It drops nothing: ranks draw other random numbers than a plain loop.
    """

    def __init__(self, width: float) -> None:
        super().__init__(width=width)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, images: Tensor) -> Tensor:
        features = self.grid17(self.grid35(self.stem(images)))
        logits: Tensor = self.head(self.grid8(features)) + self.auxiliary(features)
        return logits


NETWORKS = {
    "hooknet": Network(lambda width: _StackedInputs(int(width)), 32, 1024, 8, 192, channels=6),
    "three_decoders": Network(lambda width: ThreeDecoders(int(width)), 64, 1024, 16, 192),
    "hrnet": Network(lambda width: FourResolutions(int(width)), 48, 1024, 16, 192),
    "inception_v3": Network(
        lambda width: _JoinedHeads(width=width), 1, 2048, 0.25, 427, labels_tiles=True
    ),
    "amoebanet_d": Network(
        lambda width: AmoebaNetD(cells=18, filters=int(width)),
        *(256, 1024, 32, 192),
        labels_tiles=True,
    ),
    "split_transformer": Network(
        lambda width: SplitTransformer(int(width), 12, 2, 16), 1024, 1024, 256, 256
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measured(options.quick, options.json)
        return
    figures = on_paper(options.quick)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(start_local(RANKS, [sys.executable, *sys.argv, "--rank"], "mpi"))


def on_paper(quick: bool) -> dict[str, float | str]:
    """Print the simulated steps; the figures."""
    hardware = load_hardware(HARDWARE)
    figures: dict[str, float | str] = {"device": "cpu", "simulated_device": HARDWARE}
    print(f"Simulated on {HARDWARE}, float32.\n")
    print("| network | batch | ranks | GiB | best chain | s | branches | s | speed-up | data, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, network in NETWORKS.items():
        if quick and name in SLOW:
            continue
        with torch.device("meta"):
            tile = torch.empty(1, network.channels, network.side, network.side)
            graph = Traced(network.make(network.width), tile).graph
        priced = StageCosts(graph, cost_model(hardware), hardware)
        [whole] = plan([priced], PlanRequest(1, 2**50, 1, "sequential"))
        for ranks in (2, 4):
            for batch, share in ((1, 1.0), (4, 0.8)):
                memory = int(share * max(whole.memory))
                request = PlanRequest(ranks, memory, batch, ways=KEPT)
                chain, branches = (_best(priced, request, how) for how in ("none", "only"))
                # It takes the memory of the whole model on each rank, and a tile for each.
                large = replace(request, memory=2**50, order=DATA_PARALLEL)
                data = plan([priced], large)[0] if batch > 1 else None
                speed_up = chain.seconds / branches.seconds if chain and branches else None
                print(
                    f"| {name} | {batch} | {ranks} | {memory / 2**30:.1f} | {_told(chain)} "
                    f"| {_told(branches)} | {'' if speed_up is None else f'{speed_up:.2f}'} "
                    f"| {'' if data is None else f'{data.seconds:.4f}'} |",
                    flush=True,
                )
                if data is not None and branches is not None:
                    vs_data = data.seconds / branches.seconds
                    figures[f"paper_vs_data_parallel_{name}_{ranks}_ranks"] = vs_data
                if speed_up is not None:
                    kind = "" if batch == 1 else "_pipelined"
                    figures[f"branch_speedup_{name}{kind}_{ranks}_ranks"] = speed_up
        figures[f"branch_speedup_{name}"] = figures[f"branch_speedup_{name}_4_ranks"]
    return figures


def _best(priced: StageCosts, request: PlanRequest, branches: BranchChoice) -> Plan | None:
    """The fastest plan whose ranks share one model: data parallelism is another question."""
    found = plan([priced], replace(request, branches=branches))
    return next((each for each in found if each.order != DATA_PARALLEL), None)


def _told(found: Plan | None) -> str:
    if found is None:
        return "nothing fits |"
    return f"{found.order}, {found.stages} stages, {found.ranks} ranks | {found.seconds:.4f}"


@dataclass
class Times:
    """Seconds of steps by way, round by round, and what the simulator says of them.

    Attributes:
        rounds: By way, seconds of the steps.
        planned: By way, the step by the visit that was timed ahead of the plans.
        predicted: Likewise by the visit that was timed in the rounds.
        losses: By way, of the first step.
        told: By way, its plan.
    """

    rounds: dict[str, list[float]] = field(default_factory=dict)
    planned: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)

    def ratio(self, way: str, other: str) -> float:
        """Return the median over rounds of one way's seconds over another's in that round."""
        pairs = zip(self.rounds[way], self.rounds[other], strict=True)
        return median(one / two for one, two in pairs)

    @property
    def takes_branches(self) -> bool:
        """Return True if the planner takes branches to be faster than every other way."""
        return min(self.planned, key=self.planned.__getitem__) == BRANCHES

    def error(self, way: str) -> float:
        """The predicted step over the measured one, less 1.

        Layers were timed ahead of the rounds, on both ranks at once: so both are taken as shares of
        what a process takes for the whole model while the other does the same.
        """
        return self.predicted[way] / self.predicted[BOTH] / self.ratio(way, BOTH) - 1


def measured(quick: bool, file: Path | None) -> None:
    """One rank's part of the measurement."""
    torch.set_num_threads(1)
    transport = connect("mpi")
    link = measure_links(transport)
    found: dict[str, Times] = {}
    for name, network in NETWORKS.items():
        if quick and name in SLOW:
            continue
        for count in (1, 4):
            # Plans need it ahead of the rounds, in which it is timed again.
            visit = measure_visit(transport, CPU)
            joined = replace(load_hardware("cpu"), inside=link, visit=visit, memory=2**40)
            times = _time(network, count, transport, joined, 3 if quick else 9)
            found[f"{name} × {count}"] = times
            if transport.rank == 0:
                title = f"{name}, {count} microbatches of 1 × {network.small_side}²"
                _print(f"{title}; planned with {visit * 1e3:.3f} ms a visit", times)
    transport.close()
    if transport.rank == 0:
        figures = _figures(found)
        print("", *(f"{name:44} {value}" for name, value in figures.items()), sep="\n")
        if file:
            known = json.loads(file.read_text())
            file.write_text(json.dumps({**known, **figures}, indent=2) + "\n")


def _figures(found: Mapping[str, Times]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, times in found.items():
        own = name.replace(" × ", "_")
        fastest = min(times.rounds.keys() & {ALONE, CHAIN}, key=lambda way: times.ratio(way, ALONE))
        figures[f"measured_speedup_{own}"] = times.ratio(fastest, BRANCHES)
        figures[f"predicted_speedup_{own}"] = times.predicted[fastest] / times.predicted[BRANCHES]
        figures[f"prediction_error_{own}"] = abs(times.error(BRANCHES))
        if DATA in times.rounds:
            figures[f"vs_data_parallel_{own}"] = times.ratio(DATA, BRANCHES)
    once = [
        value for key, value in figures.items() if key.startswith("measured") and key[-1] == "1"
    ]
    figures["measured_speedup"] = median(once)
    # Of the plans that `auto` would take, and of all.
    taken = [times for times in found.values() if times.takes_branches]
    figures["prediction_error"] = max(abs(times.error(BRANCHES)) for times in taken)
    figures["prediction_error_all"] = max(abs(each.error(BRANCHES)) for each in found.values())
    return figures


def _time(
    network: Network, count: int, transport: Transport, joined: Hardware, rounds: int
) -> Times:
    """All ways in turn, several times over; the first time does not count."""
    torch.manual_seed(0)
    model = network.make(network.small)
    pixels = (network.small_side, network.small_side)
    images = torch.randn(count, network.channels, *pixels)
    shape = (count,) if network.labels_tiles else (count, *pixels)
    targets = torch.randint(0, 2 if network.labels_tiles else 3, shape)
    times = Times()
    traced = Traced(deepcopy(model), images[:1])
    transport.barrier()
    layers = Timed(traced, images[:1], targets[:1])
    priced = StageCosts(traced.graph, layers, joined)
    plans = _plans(priced, count, transport, times)
    ways: dict[str, Way] = {}
    alone = one_process(deepcopy(model), images, targets, count)
    ways[ALONE] = lambda number: alone(number) if transport.rank == 0 else 0.0
    ways[BOTH] = one_process(deepcopy(model), images, targets, count)
    for name, chosen in plans.items():
        ways[name] = _on_ranks(deepcopy(model), chosen, images, targets, transport)
    visits = pipelines(transport, CPU)
    ways |= {FEW: visits.few, MANY: visits.many}
    times.rounds, times.losses = in_turn(ways, rounds, transport)
    pairs = zip(times.rounds.pop(FEW), times.rounds.pop(MANY), strict=True)
    visit = median(many - few for few, many in pairs) / visits.visits
    for name, chosen in plans.items():
        times.told[name] += f", {visit * 1e3:.2f} ms a visit"
        again = StageCosts(
            traced.reordered(chosen.line).graph, layers, replace(joined, visit=visit)
        )
        costs = again.costs(chosen.partition(again.graph), RANKS)
        times.predicted[name] = simulate(chosen.schedule, costs).time
    del times.losses[FEW], times.losses[MANY]
    update = _update_time(deepcopy(model), images[:1], targets[:1])
    times.predicted[ALONE] = times.predicted[BOTH] = count * priced.seconds + update
    expected = times.losses[ALONE]
    for name, loss in times.losses.items():
        if abs(loss - expected) > 1e-5 * abs(expected):
            raise AssertionError(f"{name} has a first loss of {loss}, one process {expected}")
    return times


def _update_time(model: nn.Module, image: Tensor, target: Tensor) -> float:
    """Return the seconds of the update of a plain loop, which finds no norms."""
    optimizer = TRAINING.optimizer([*model.parameters()])
    torch.autograd.backward(LOSS(model(image), target).sum())
    seconds = []
    for _ in range(_UPDATES):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def _plans(priced: StageCosts, count: int, transport: Transport, times: Times) -> dict[str, Plan]:
    """The plans of rank 0, by layers that both ranks time at once, as they will compute at once."""
    request = PlanRequest(RANKS, 2**40, count, all_ranks=True, ways=KEPT)
    told: dict[str, str] = {}
    if transport.rank == 0:
        for name, best in (
            (CHAIN, _best(priced, request, "none")),
            (BRANCHES, _best(priced, request, "only")),
        ):
            assert best is not None, f"no plan of {name}"
            told[name] = best.to_json()
        if count > 1:
            told[DATA] = plan([priced], replace(request, order=DATA_PARALLEL))[0].to_json()
    told = json.loads(transport.gather(json.dumps(told))[0])
    plans = {name: Plan.from_json(text) for name, text in told.items()}
    times.planned = {name: each.seconds for name, each in plans.items()}
    times.planned[ALONE] = count * priced.seconds
    times.told = {name: f"{each.order}, {each.stages} stages" for name, each in plans.items()}
    return plans


def _on_ranks(
    model: nn.Module, chosen: Plan, images: Tensor, targets: Tensor, transport: Transport
) -> Way:
    traced = Traced(model, images[:1]).reordered(chosen.line)
    partition = chosen.partition(traced.graph)
    runner = Runner(traced, partition, chosen.schedule, transport, CPU, TRAINING)
    [name] = traced.graph.inputs
    inputs, wanted = images.chunk(len(images)), targets.chunk(len(images))
    microbatches = Microbatches(
        [1] * len(images), lambda each: {name: inputs[each]}, wanted.__getitem__
    )
    return lambda number: runner.step(number, microbatches).loss_sum / len(images)


def _print(title: str, times: Times) -> None:
    print(f"\n{title}\n")
    print("| way | plan | step, s | least to most | speed-up | predicted | error |")
    print("|---|---|---|---|---|---|---|")
    for way, seconds in times.rounds.items():
        row = f"| {way} | {times.told.get(way, '')} | {median(seconds):.3f} "
        row += f"| {min(seconds):.3f} to {max(seconds):.3f} | {times.ratio(ALONE, way):.2f} "
        predicted = times.predicted[ALONE] / times.predicted[way]
        print(row + f"| {predicted:.2f} | {times.error(way):+.3f} |", flush=True)


if __name__ == "__main__":
    main()
