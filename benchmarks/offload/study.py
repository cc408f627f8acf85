"""The offload study's table: four classic networks, six forms, what they cost in a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from torch import nn

from benchmarks.networks.alexnet import alexnet
from benchmarks.networks.inception import InceptionV3
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.vgg import vgg19
from benchmarks.offload.ours import Ours, everything, graph_of, ours
from benchmarks.offload.subject import Subject, seconds_of
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.schedule.action import Kind
from pathoseg.parallel.schedule.event import Event

# By name: the network of a width, and the side of its images.
_NETWORKS: dict[str, tuple[Callable[[float], nn.Module], int]] = {
    "vgg19": (lambda width: vgg19(width=width), 224),
    "alexnet": (lambda width: alexnet(width=width), 224),
    "resnet50": (lambda width: resnet50(width=width), 224),
    "inception_v3": (lambda width: InceptionV3(width=width), 299),
}
BATCH, STEPS = 32, 160  # 20 epochs of 8 steps
_PUBLISHED = "1.7–5.0"  # times the baseline, over the study's networks and forms


_STAGES = 8  # the network's parts, of which all but one or two wait


def study(quick: bool, steps: int) -> Iterator[tuple[str, float]]:
    """Prints a table for activations and one for parameters; yields the figures.

    Args:
        quick: A small part of each network, two images, one step.
        steps: Timed steps of each form, where not quick.
    """
    yield from _table("activations", _activations, quick, steps)
    for name, ratio in _table("parameters", _parameters, quick, steps):
        yield name, ratio
        if "_overlapped_" in name:
            yield name.replace("_parameters", ""), ratio


# Makes a network's run in a mode; told whether its steps are traced.
_Run = Callable[[OffloadMode, bool], Ours]


def _activations(subject: Subject) -> _Run:
    policy = ActivationPolicy(offloaded=everything(graph_of(subject)))
    return lambda mode, trace: ours(subject, policy, mode, trace=trace)


def _parameters(subject: Subject) -> _Run:
    def run(mode: OffloadMode, trace: bool) -> Ours:
        parked = {Park.PARAMETERS}
        return ours(subject, ActivationPolicy(), mode, trace=trace, stages=_STAGES, parked=parked)

    return run


def _table(
    what: str, ways: Callable[[Subject], _Run], quick: bool, steps: int
) -> Iterator[tuple[str, float]]:
    batch, rounds, width = (2, 1, 1 / 16) if quick else (BATCH, steps, 1.0)
    print(f"\n## Forms of offload, {what} ({batch} images, {rounds} steps; median step)\n")
    print("| network | form | seconds | to none | published | ms out (min, max) | ms back |")
    print("|---|---|---|---|---|---|---|")
    for name, (make, side) in _NETWORKS.items():
        run = ways(Subject(partial(make, width), side, batch, dense=False))
        runs = {mode: run(mode, False) for mode in OffloadMode}
        seconds = seconds_of({mode.value: each.step for mode, each in runs.items()}, rounds)
        del runs
        for mode in OffloadMode:
            traced = run(mode, True)
            for number in range(2):
                traced.step(number)
            ratio = seconds[mode.value] / seconds[OffloadMode.NONE.value]
            out, back = (_range(traced.events, kind) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
            published = (
                "1"
                if mode is OffloadMode.NONE
                else "–"
                if mode is OffloadMode.OVERLAPPED
                else _PUBLISHED
            )
            print(
                f"| {name} | {mode.value} | {seconds[mode.value]:.4f} | {ratio:.2f} "
                f"| {published} | {out} | {back} |"
            )
            if mode is not OffloadMode.NONE:
                key = mode.value.replace("-", "_")
                yield f"overhead_{what}_{key}_{name}", ratio


def _range(events: list[Event], kind: Kind) -> str:
    """Median, least and most milliseconds of the copies in one direction."""
    taken = [1e3 * (each.end - each.start) for each in events if each.action.kind is kind]
    return f"{median(taken):.2f} ({min(taken):.2f}, {max(taken):.2f})" if taken else "–"
