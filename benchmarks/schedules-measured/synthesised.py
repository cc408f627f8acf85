"""Times the synthesised orders that `auto` picks beside the best named order in the same memory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.steps.ways import COUNT, CPU, RANKS, TRAINING
from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.comm.launcher import connect
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.fitting import split
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace
from pathoseg.parallel.planning.orders import SYNTHESISED
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.retention.policy_options import AllowedPolicies

NETWORKS = {
    "unet": (ModelConfig("unet", "segment", 3, width=16), 352),
    "resnet110_v2": (ModelConfig("resnet110_v2", "segment", 3), 128),
}
WAYS = {
    "keep": AllowedPolicies(offload=False, recompute=False),
    "recompute": AllowedPolicies(offload=False),
}
SHARES = (100, 90, 80, 70, 60, 50, 40, 30)  # of what one rank needs with everything kept
MEASURED, ROUNDS = 3, 7


@dataclass(frozen=True)
class Picked:
    """A case in which `auto` picks a synthesised order.

    Attributes:
        network: Of `NETWORKS`.
        ways: Of `WAYS`.
        share: The cap.
        synthesised: The plan that is picked.
        named: The best plan of a named order.
    """

    network: str
    ways: str
    share: int
    synthesised: Plan
    named: Plan

    @property
    def predicted(self) -> float:
        """The simulated step of the named order over that of the synthesised one, less 1."""
        return self.named.seconds / self.synthesised.seconds - 1

    @property
    def label(self) -> str:
        return f"{self.network}_{self.ways}_{self.share}pct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find", type=Path, metavar="FILE", help="write the plans of all cases")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="time those of such a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.find:
        found = []
        for each in find():
            plans = each.synthesised.to_json(), each.named.to_json()
            found.append([each.network, each.ways, each.share, *plans])
            options.find.write_text(json.dumps(found))
    elif not options.rank:
        sys.exit(start_local(RANKS, [sys.executable, *sys.argv, "--rank"], "mpi"))
    else:
        figures = measure(_read(options.plans))
        if figures and options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


def find() -> Iterator[Picked]:
    """Plan every case by `auto`; yield those whose fastest plan is synthesised."""
    hardware = load_hardware("cpu")
    print("| network | ways | cap | fastest plan | s | synthesised, s | best named | s |")
    print("|---|---|---|---|---|---|---|---|")
    graphs = {}
    for name, (config, side) in NETWORKS.items():
        with torch.device("meta"):
            graph = Traced(build_model(config), torch.empty(1, 3, side, side)).graph
        graphs[name] = StageCosts(
            graph, cost_model(hardware), hardware, 2, cpu_workspace(threads=1)
        )
    for (ways, allowed), (name, priced) in product(WAYS.items(), graphs.items()):
        [whole] = plan([priced], PlanRequest(1, 2**50, COUNT, "sequential"))
        for share in SHARES:
            memory = max(whole.memory) * share // 100
            plans = plan([priced], PlanRequest(RANKS, memory, COUNT, ways=allowed))
            made = [each for each in plans if each.order == SYNTHESISED]
            named = [each for each in plans if each.order != SYNTHESISED]
            said = [f"{plans[0].order} | {plans[0].seconds:.3f}" if plans else "none fits |"]
            said.append(f"{made[0].seconds:.3f}" if made else "–")
            said.append(f"{named[0].order} | {named[0].seconds:.3f}" if named else "– |")
            print(f"| {name} | {ways} | {share} % | {' | '.join(said)} |", flush=True)
            if made and named and plans[0] == made[0]:
                yield Picked(name, ways, share, made[0], named[0])


def _read(path: Path) -> list[Picked]:
    """Return the cases with the greatest predicted gain."""
    found = [
        Picked(network, ways, share, Plan.from_json(made), Plan.from_json(named))
        for network, ways, share, made, named in json.loads(path.read_text())
    ]
    return sorted(found, key=lambda each: -each.predicted)[:MEASURED]


def measure(cases: list[Picked]) -> dict[str, float | str]:
    """One rank's part; the figures, on rank 0."""
    torch.set_num_threads(1)
    transport = connect("mpi")
    figures: dict[str, float | str] = {"device": "cpu"}
    for case in cases:
        gain = _time(case, transport)
        figures |= {f"predicted_gain_{case.label}": case.predicted, f"gain_{case.label}": gain}
    transport.close()
    if transport.rank:
        return {}
    print("", *(f"{name:44} {value}" for name, value in figures.items()), sep="\n")
    return figures


def _time(case: Picked, transport: Transport) -> float:
    """Return how much longer a step of the named order takes, less one: the median of rounds."""
    config, side = NETWORKS[case.network]
    torch.manual_seed(0)
    model = build_model(config)
    images = torch.randn(COUNT, 3, side, side)
    targets = torch.randint(0, config.classes, (COUNT, side, side))
    fits = [
        split(Traced(deepcopy(model), images[:1]), chosen, TRAINING, transport, CPU)
        for chosen in (case.synthesised, case.named)
    ]
    ratios, rounds = [], []
    for number in range(ROUNDS + 1):
        taken = []
        for fit in fits:
            transport.barrier()
            begin = time.perf_counter()
            fit.step(number, images, targets)
            own = time.perf_counter() - begin
            taken.append(max(float(text) for text in transport.gather(str(own))))
        if number:  # the first one warms up
            rounds.append(taken)
            ratios.append(taken[1] / taken[0] - 1)
    if transport.rank == 0:
        ours, theirs = (median(each) for each in zip(*rounds, strict=True))
        print(
            f"| {case.network} | {case.ways} | {case.share} % | {case.synthesised.placement} "
            f"{case.synthesised.stages} | {ours:.3f} | {case.named.order} | {theirs:.3f} "
            f"| {median(ratios):+.3f} | {case.predicted:+.3f} |",
            flush=True,
        )
    return median(ratios)


if __name__ == "__main__":
    main()
