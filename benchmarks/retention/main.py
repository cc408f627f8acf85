"""Asks how far from the least the choice of what is kept is, and what a greedy one would lose."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.offload.subject import DEVICE, SHARES
from benchmarks.retention.greedy import Greedy
from benchmarks.retention.measured import measured
from pathoseg.device import device_name
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.retention.policy_options import AllowedPolicies, retain
from pathoseg.parallel.retention.policy_search import Chooser
from pathoseg.parallel.retention.stage_liveness import StageFacts, stage_facts
from pathoseg.parallel.schedule.costs import Link

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "unet64": (lambda: UNet(2, width=64), 1024),
    "resnet110_v2": (lambda: ResNetV2(2, depth=110), 1024),
    "resnet1001_v2": (lambda: ResNetV2(2, depth=1001), 512),
}
QUICK: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "unet64": (lambda: UNet(2, width=8), 1024),
    "resnet110_v2": (lambda: ResNetV2(2, depth=20), 1024),
}
WAYS = {"both": AllowedPolicies(), "recompute": AllowedPolicies(offload=False)}
BELOW_A_TENTH = (10, 8, 5, 3, 2)


class _Once(Chooser):
    """The same choice where no layer may be recomputed twice."""

    def _prepare(self) -> None:
        super()._prepare()
        self._options = [[each for each in some if not each.twice] for some in self._options]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--hardware", default="h200", help="by which layers and copies are priced")
    parser.add_argument("--network", choices=NETWORKS, help="this one alone")
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--measure", action="store_true", help="run what is recomputed, on this device, instead"
    )
    part.add_argument(
        "--greedy", action="store_true", help="set a greedy choice beside the program's, instead"
    )
    part.add_argument(
        "--twice", action="store_true", help="ask what recomputing twice is worth, instead"
    )
    options = parser.parse_args()
    figures: dict[str, float | str] = {"device": "cpu"}
    if options.measure:
        figures = {"device": device_name(DEVICE)} | dict(measured(options.quick))
    else:
        way = _beside_greedy if options.greedy else _twice if options.twice else _predicted
        known = QUICK if options.quick else NETWORKS
        names = [options.network] if options.network else [*known]
        figures = _of_all(way, {name: known[name] for name in names}, options.hardware)
    print("", *(f"{name:28} {value}" for name, value in figures.items()), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _of_all(
    way: Callable[[str, StageFacts, Link], Iterator[tuple[str, float]]],
    networks: dict[str, tuple[Callable[[], nn.Module], int]],
    name_of_hardware: str,
) -> dict[str, float | str]:
    hardware = load_hardware(name_of_hardware)
    print(f"By the figures of {hardware.name}, float32, one tile a microbatch.\n")
    figures: dict[str, float | str] = {"hardware": hardware.name}
    for name, (make, side) in networks.items():
        with torch.device("meta"):
            graph = Traced(make(), torch.empty(1, 3, side, side)).graph
        costs = cost_model(hardware)
        times = [costs.time(layer) for layer in graph.layers]
        layers = range(len(graph.layers))
        seconds = [each.forward for each in times], [each.backward for each in times]
        facts = stage_facts(graph, layers, MemoryModel(graph).by_layer(layers), seconds)
        for figure, value in way(name, facts, hardware.host):
            worst = ("largest_", "slowest_", "no_")
            known = figures.get(figure, value)
            assert isinstance(known, float)
            figures[figure] = max(known, value) if figure.startswith(worst) else value
    return figures


def _predicted(name: str, facts: StageFacts, host: Link) -> Iterator[tuple[str, float]]:
    print("| network | in flight | cap | time to keep all | bound | above it | chosen in |")
    print("|---|---|---|---|---|---|---|")
    chooser = Chooser(facts, host, AllowedPolicies())
    keep = _seconds(facts)
    for in_flight in (1, 4):
        for share in SHARES:
            begin = time.perf_counter()
            cap = _need(facts, in_flight) * share // 100
            choice = chooser.choose(cap, in_flight)
            taken = time.perf_counter() - begin
            yield "slowest_choice_s", taken
            row = f"| {name} | {in_flight} | {share} % |"
            if choice is None:
                print(f"{row} none fits | | | {taken:.1f} s |", flush=True)
                continue
            chosen = chooser.seconds(choice, in_flight) / keep
            bound = chooser.bound(cap, in_flight) / keep
            yield f"time_{name}_{in_flight}_{share}pct", chosen
            yield "largest_gap", chosen / bound - 1
            print(
                f"{row} {chosen:.3f} | {bound:.3f} | {chosen / bound - 1:.1%} | {taken:.1f} s |",
                flush=True,
            )


def _beside_greedy(name: str, facts: StageFacts, host: Link) -> Iterator[tuple[str, float]]:
    print("| network | ways | in flight | cap | program | greedy | it is longer by | chosen in |")
    print("|---|---|---|---|---|---|---|---|")
    keep = _seconds(facts)
    for ways, allowed in WAYS.items():
        chooser = Chooser(facts, host, allowed)
        greedy = Greedy(facts, host, allowed, chooser)
        for in_flight in (1, 4):
            for share in SHARES:
                cap = _need(facts, in_flight) * share // 100
                begin = time.process_time()
                ours = chooser.choose(cap, in_flight)
                between = time.process_time()
                other = greedy.choose(cap, in_flight)
                end = time.process_time()
                row = f"| {name} | {ways} | {in_flight} | {share} % |"
                taken = f"{between - begin:.1f} and {end - between:.1f} s |"
                yield "slowest_program_s", between - begin
                yield "slowest_greedy_s", end - between
                times = [
                    choice and chooser.seconds(choice, in_flight) / keep for choice in (ours, other)
                ]
                said = [f"{each:.3f}" if each else "none fits" for each in times]
                yield "no_greedy_where_the_program_has_one", float(bool(times[0] and not times[1]))
                if not times[0] or not times[1]:
                    print(f"{row} {said[0]} | {said[1]} | – | {taken}", flush=True)
                    continue
                longer = times[1] / times[0] - 1
                yield f"greedy_longer_{ways}_{name}_{in_flight}_{share}pct", longer
                yield "largest_greedy_longer", longer
                print(f"{row} {said[0]} | {said[1]} | {longer:+.1%} | {taken}", flush=True)


def _twice(name: str, facts: StageFacts, host: Link) -> Iterator[tuple[str, float]]:
    print("| network | in flight | cap | time to keep all | without twice |")
    print("|---|---|---|---|---|")
    keep = _seconds(facts)
    choosers = [kind(facts, host, AllowedPolicies()) for kind in (Chooser, _Once)]
    for in_flight in (1, 4):
        for share in BELOW_A_TENTH:
            cap = _need(facts, in_flight) * share // 100
            said = []
            for which, chooser in zip(("with", "without"), choosers, strict=True):
                choice = chooser.choose(cap, in_flight)
                said.append("none fits")
                if choice is not None:
                    value = chooser.seconds(choice, in_flight) / keep
                    said[-1] = f"{value:.3f}"
                    yield f"time_{which}_twice_{name}_{in_flight}_{share}pct", value
            print(f"| {name} | {in_flight} | {share} % | {said[0]} | {said[1]} |", flush=True)


def _seconds(facts: StageFacts) -> float:
    return sum(facts.forward.values()) + sum(facts.backward.values())


def _need(facts: StageFacts, in_flight: int) -> int:
    everything = retain(facts, ActivationPolicy())
    return everything.peak + (in_flight - 1) * everything.kept


if __name__ == "__main__":
    main()
