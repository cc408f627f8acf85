"""A step under caps of device memory: planned, offloaded, recomputed, and torch's own ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.offload.ours import everything, graph_of, ours
from benchmarks.offload.subject import (
    DEVICE,
    SHARES,
    Step,
    Subject,
    optimizer,
    peak_of,
    plain,
    seconds_of,
)
from benchmarks.offload.torch_ways import (
    Way,
    blocks_of,
    checkpointed,
    fewest,
    put_around,
    saved_on_cpu,
)
from pathoseg.errors import PathosegError
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.fitting import Fit, fit
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.action import Kind

_IN_FLIGHT = 4
_TORCHS: dict[str, Way] = {"save_on_cpu": saved_on_cpu, "checkpoint": checkpointed}
_CHEAP = ("native_batch_norm", "relu")
_RETRIES = 4
_ROOMY = 2**50


def _networks(quick: bool) -> dict[str, Callable[[], nn.Module]]:
    if quick:
        return {"unet": lambda: UNet(2, width=8), "resnet110": lambda: ResNetV2(2, depth=20)}
    return {"unet": lambda: UNet(2, width=64), "resnet110": lambda: ResNetV2(2, depth=110)}


def caps(quick: bool, hardware: Hardware, only: int | None) -> Iterator[tuple[str, float]]:
    """Prints a table for each network and size; yields the figures of the smallest tile.

    Args:
        quick: Small networks and tiles, few steps.
        hardware: By which the planner prices layers and copies.
        only: Side of the tiles in pixels; None is all the usual ones.
    """
    dtype = torch.bfloat16 if DEVICE.type != "cpu" else None
    sides, rounds = ((192,), 1) if quick else ((1024, 2048), 10)
    if only is not None:
        sides = (only,)
    for name, make in _networks(quick).items():
        for side in sides:
            figures = dict(_one_in_flight(name, Subject(make, side, dtype=dtype), hardware, rounds))
            several = Subject(make, side, _IN_FLIGHT, _IN_FLIGHT, dtype)
            figures |= _several_in_flight(name, several, rounds)
            if side == sides[0]:
                yield from figures.items()


def _one_in_flight(
    name: str, subject: Subject, hardware: Hardware, rounds: int
) -> Iterator[tuple[str, float]]:
    graph = graph_of(subject)
    names = everything(graph)
    whole: dict[str, Step] = {
        "keep": ours(subject, ActivationPolicy()).step,
        "offload all": ours(subject, ActivationPolicy(offloaded=names)).step,
        "recompute all": ours(subject, ActivationPolicy(recomputed=_within_blocks(graph))).step,
    }
    peaks = {way: peak_of(step) for way, step in whole.items()}
    seconds = seconds_of(whole, rounds)
    print(f"\n## {name}, {subject.side} px, one tile at a time\n")
    print("| cap | way | peak GiB | seconds | to keep |")
    print("|---|---|---|---|---|")
    for way in whole:
        _row("none", way, peaks[way], seconds[way], seconds["keep"])
    del whole
    free = peaks["keep"] or max(_fitted(subject, _ROOMY, hardware).plan.memory)
    for share in SHARES:
        cap = free * share // 100
        ways = {"keep": ours(subject, ActivationPolicy()).step}
        found = _planned(subject, cap, hardware)
        if found is not None:
            ways["planned"] = found
        peers = _TORCHS if DEVICE.type == "cuda" else {}
        for peer, around in peers.items():
            step = _under(subject, around, cap)
            if step is not None:
                ways[peer] = step
        seconds = seconds_of(ways, rounds)
        for way in ("planned", *peers):
            if way not in ways:
                print(f"| {share} % | {way} | does not fit | – | – |")
                continue
            _row(f"{share} %", way, peak_of(ways[way]), seconds[way], seconds["keep"])
        if "planned" in ways:
            yield f"time_at_{share}pct_{name}", seconds["planned"] / seconds["keep"]
            for peer in peers:
                if peer in ways:
                    yield f"vs_{peer}_{share}pct_{name}", seconds[peer] / seconds["planned"]


def _planned(subject: Subject, cap: int, hardware: Hardware) -> Step | None:
    """The planner's choice; what the device takes beyond the prediction is taken off the cap."""
    room = cap
    for _ in range(_RETRIES):
        try:
            made = _fitted(subject, room, hardware)
        except PathosegError:  # nothing fits
            return None

        def step(number: int, made: Fit = made) -> float:
            return made.step(number, subject.images, subject.targets).loss_sum

        beyond = peak_of(step) - cap
        if beyond <= 0:
            return step
        room -= beyond
    return None


def _fitted(subject: Subject, memory: int, hardware: Hardware) -> Fit:
    size = subject.batch // subject.microbatches
    return fit(
        subject.model(),
        torch.empty((size, *subject.images.shape[1:])),
        Training(subject.loss, optimizer, dtype=subject.dtype),
        PlanRequest(1, memory, subject.batch, "sequential"),
        hardware,
        connect("gloo", World()),
        DEVICE,
        optimizer_slots=0,
    )


def _under(subject: Subject, way: Way, cap: int) -> Step | None:
    """Torch's own way on as few blocks as the cap allows."""

    def on(count: int) -> Step:
        model = subject.model()
        put_around(blocks_of(model)[:count], way)
        return plain(subject, model)

    count = fewest(len(blocks_of(subject.model())), lambda count: peak_of(on(count)), cap)
    return None if count is None else on(count)


def _several_in_flight(name: str, subject: Subject, rounds: int) -> Iterator[tuple[str, float]]:
    """Measure the share of copies that compute hides, with several microbatches in flight.

    Norms and activations are recomputed in two of three ways, and in the third all other layers
    that save are offloaded. Prints the peak GiB and the seconds of a step of each way.

    Args:
        name: The network's name, for the title and the figure.
        subject: The network, its tiles and its microbatches.
        rounds: How often each way is timed, all in turn.

    Yields:
        `hidden_share_NAME`: 1 less the seconds that offloading adds to a step, over the seconds of
        all copies in a traced step.
    """
    cheap, rest = recomputed_and_rest(graph_of(subject))
    ways = {
        "keep": ours(subject, ActivationPolicy()).step,
        "recompute norms": ours(subject, ActivationPolicy((), cheap)).step,
        "and offload the rest": ours(subject, ActivationPolicy(rest, cheap)).step,
    }
    peaks = {way: peak_of(step) for way, step in ways.items()}
    seconds = seconds_of(ways, rounds)
    del ways
    traced = ours(subject, ActivationPolicy(rest, cheap), trace=True)
    for number in range(2):
        traced.step(number)
    copies = (Kind.OFFLOAD, Kind.PREFETCH)
    copying = sum(e.end - e.start for e in traced.events if e.action.kind in copies)
    exposed = seconds["and offload the rest"] - seconds["recompute norms"]
    print(f"\n## {name}, {subject.side} px, {subject.microbatches} microbatches in flight\n")
    print("| way | peak GiB | seconds | to keep |")
    print("|---|---|---|---|")
    for way, taken in seconds.items():
        print(f"| {way} | {_gib(peaks[way])} | {taken:.4f} | {taken / seconds['keep']:.2f} |")
    hidden = 1 - max(0.0, exposed) / copying
    print(f"\nOf {copying:.3f} s of copies, {hidden:.0%} are hidden.")
    yield f"hidden_share_{name}", hidden


def recomputed_and_rest(graph: LayerGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers that are cheap to run again, norms and activations, and all others that save."""
    kinds = {layer.name: layer.kind for layer in graph.layers}
    cheap = tuple(each for each in everything(graph) if kinds[each] in _CHEAP)
    return cheap, tuple(each for each in everything(graph) if kinds[each] not in _CHEAP)


def _within_blocks(graph: LayerGraph) -> tuple[str, ...]:
    """All layers but those whose values leave their innermost block: checkpointing by blocks."""
    blocks = {layer.name: layer.scope[:2] for layer in graph.layers}
    leaving = {
        name for layer in graph.layers for name in layer.inputs
        if name in blocks and blocks[name] != blocks[layer.name]
    }  # fmt: skip
    return tuple(name for name in everything(graph) if name not in leaving)


def _row(cap: str, way: str, peak: int, seconds: float, keep: float) -> None:
    print(f"| {cap} | {way} | {_gib(peak)} | {seconds:.4f} | {seconds / keep:.2f} |")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else "–"
