"""Compares what recomputation is predicted to take, in time and memory, with steps that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.offload.ours import ours
from benchmarks.offload.subject import DEVICE, SHARES, Step, Subject, peak_of, seconds_of
from benchmarks.steps.timed import Timed
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import (
    cpu_workspace,
    cuda_workspace,
    vector_lanes,
)
from pathoseg.parallel.planning.memory_model import MemoryModel, Workspace
from pathoseg.parallel.retention.policy_options import AllowedPolicies, retain
from pathoseg.parallel.retention.policy_search import Choice, Chooser
from pathoseg.parallel.retention.stage_liveness import stage_facts
from tests.parallel.networks.stages import allocated


def measured(quick: bool) -> Iterator[tuple[str, float]]:
    """Prints a table for each network; yields the figures.

    Nothing is offloaded: on a CPU copies hide behind nothing, and `benchmarks/offload` has GPUs.
    """
    networks: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "unet": (lambda: UNet(2, width=8 if quick else 16), 128 if quick else 352),
        "resnet110_v2": (lambda: ResNetV2(2, depth=20 if quick else 110), 64 if quick else 256),
    }
    for name, (make, side) in networks.items():
        yield from _network(name, Subject(make, side), 2 if quick else 5)


def _network(name: str, subject: Subject, rounds: int) -> Iterator[tuple[str, float]]:
    traced = Traced(subject.model(), subject.images)
    graph, layers = traced.graph, range(len(traced.graph.layers))
    timed = Timed(traced, subject.images, subject.targets)
    prices = [timed.time(each) for each in graph.layers]
    seconds = [each.forward for each in prices], [each.backward for each in prices]
    memory = MemoryModel(graph, workspace=_workspace())
    facts = stage_facts(graph, layers, memory.by_layer(layers), seconds)
    chooser = Chooser(facts, load_hardware("cpu").host, AllowedPolicies(offload=False))
    keep = Choice(ActivationPolicy(), 0, retain(facts, ActivationPolicy()))
    choices = {"all": keep}
    for share in SHARES:
        found = chooser.choose(keep.need(1) * share // 100)
        if found is not None:
            choices[f"{share} %"] = found
    steps = {cap: ours(subject, choice.policy).step for cap, choice in choices.items()}
    taken = seconds_of(steps, rounds)
    print(f"\n## {name}, {subject.side} px\n")
    print(
        "| cap | time, predicted | measured | error | MiB, predicted | with gradients | measured |"
    )
    print("|---|---|---|---|---|---|---|")
    # Of the weights' gradients, which plans count whole, some are there at the peak.
    gradients = sum(each.nbytes for each in subject.model().parameters())
    errors, beyond = [], []
    for cap, choice in choices.items():
        predicted = chooser.seconds(choice) / chooser.seconds(keep)
        ratio = taken[cap] / taken["all"]
        need, held = choice.need(1), _held(steps[cap])
        errors.append(predicted / ratio - 1)
        beyond.append(max(need / held - 1, 1 - (need + gradients) / held, 0.0))
        print(
            f"| {cap} | {predicted:.3f} | {ratio:.3f} | {errors[-1]:+.3f} "
            f"| {need / 2**20:.1f} | {(need + gradients) / 2**20:.1f} | {held / 2**20:.1f} |"
        )
    yield f"time_error_{name}", max(errors, key=abs)
    yield f"memory_error_{name}", max(beyond)


def _workspace() -> Workspace | None:
    if DEVICE.type != "cpu":
        return cuda_workspace if DEVICE.type == "cuda" else None
    lanes = vector_lanes()
    if lanes is None:
        raise SystemExit("What kernels take is known for CPUs with AVX2 and AVX-512.")
    return cpu_workspace(lanes, torch.get_num_threads())


def _held(step: Step) -> int:
    """Most bytes that a step holds at once of what it makes, gradients of weights included."""
    if DEVICE.type == "cpu":
        return allocated(lambda: step(0))
    before = torch.accelerator.memory_allocated(DEVICE)
    return peak_of(step) - before
