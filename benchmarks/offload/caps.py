"""A step under caps of device memory: planned, offloaded, recomputed, and torch's own ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.offload.ours import everything, graph_of, ours
from benchmarks.offload.subject import (
    DEVICE,
    SHARES,
    MakeStep,
    Step,
    Subject,
    optimizer,
    peak_alone,
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
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.fitting import best, split
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import workspace_of
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.action import Kind

_IN_FLIGHT = 4
_TORCHS: dict[str, Way] = {"save_on_cpu": saved_on_cpu, "checkpoint": checkpointed}
_CHEAP = ("native_batch_norm", "relu")
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
            for figure in one_in_flight(name, Subject(make, side, dtype=dtype), hardware, rounds):
                if side == sides[0]:
                    yield figure
            several = Subject(make, side, _IN_FLIGHT, _IN_FLIGHT, dtype)
            for figure in _several_in_flight(name, several, rounds):
                if side == sides[0]:
                    yield figure


def one_in_flight(
    name: str, subject: Subject, hardware: Hardware, rounds: int
) -> Iterator[tuple[str, float]]:
    """Measure a step with everything kept, offloaded and recomputed, and under caps.

    Prints the peak GiB and the seconds of a step of each way, and what was planned for it in the
    precision of the run. Peaks are taken one way at a time; for the times, which take turns, the
    networks of all ways are on the device at once.

    Args:
        name: The network's name, for the title and the figures.
        subject: The network and its tile.
        hardware: By which the planner prices layers and copies.
        rounds: How often each way is timed, all in turn.

    Yields:
        `time_at_SHAREpct_NAME`: the seconds under a cap over those with everything kept.
        `vs_PEER_SHAREpct_NAME`: those of torch's own way under this cap over ours.
    """
    graph = graph_of(subject)
    names, blocks = everything(graph), _within_blocks(graph)
    whole: dict[str, MakeStep] = {
        "keep": lambda: ours(subject, ActivationPolicy()).step,
        "offload all": lambda: ours(subject, ActivationPolicy(offloaded=names)).step,
        "recompute all": lambda: ours(subject, ActivationPolicy(recomputed=blocks)).step,
    }
    priced = StageCosts(graph, cost_model(hardware), hardware, 0, workspace_of(hardware))
    roomy = max(_best(subject, priced, _ROOMY).memory)
    peaks = {way: peak_alone(make) for way, make in whole.items()}
    seconds = seconds_of({way: make() for way, make in whole.items()}, rounds)
    print(f"\n## {name}, {subject.side} px, one tile at a time\n")
    print("| cap | way | planned GiB | peak GiB | seconds | to keep |")
    print("|---|---|---|---|---|---|")
    for way in whole:
        planned = roomy if way == "keep" else 0
        _row("none", way, planned, peaks[way], seconds[way], seconds["keep"])
    for share in SHARES:
        cap = (peaks["keep"] or roomy) * share // 100
        ways = {"keep": whole["keep"]}
        planned = 0
        found = _planned(subject, priced, cap)
        if found is not None:
            ways["planned"] = partial(_run, subject, found)
            planned = max(found.memory)
        peers = _TORCHS if DEVICE.type != "cpu" else {}
        for peer, around in peers.items():
            make = _under(subject, around, cap)
            if make is not None:
                ways[peer] = make
        peaks = {way: peak_alone(make) for way, make in ways.items()}
        seconds = seconds_of({way: make() for way, make in ways.items()}, rounds)
        for way in ("planned", *peers):
            if way not in ways:
                print(f"| {share} % | {way} | – | does not fit | – | – |")
                continue
            prediction = planned if way == "planned" else 0
            _row(f"{share} %", way, prediction, peaks[way], seconds[way], seconds["keep"])
        if "planned" in ways:
            yield f"time_at_{share}pct_{name}", seconds["planned"] / seconds["keep"]
            for peer in peers:
                if peer in ways:
                    yield f"vs_{peer}_{share}pct_{name}", seconds[peer] / seconds["planned"]


def _planned(subject: Subject, priced: StageCosts, cap: int) -> Plan | None:
    """Return a plan of which a step takes at most `cap` bytes on the device; None without one.

    The planner is given the cap, less what the last step took beyond it, as long as it finds
    plans; and half of the way back up from where it finds none.
    """
    room, least, resolution = cap, 0, cap // 100
    most = cap  # a step of what is planned for so much takes too much
    while True:
        try:
            found = _best(subject, priced, room)
        except PathosegError:  # nothing fits
            least = room
            room = (least + most) // 2
        else:
            beyond = peak_alone(partial(_run, subject, found)) - cap
            if beyond <= 0:
                return found
            most = room
            room = max(room - max(beyond, resolution), (least + most) // 2)
        if most - least <= resolution:
            return None


def _best(subject: Subject, priced: StageCosts, memory: int) -> Plan:
    return best([priced], PlanRequest(1, memory, subject.batch, "sequential"))


def _run(subject: Subject, plan: Plan) -> Step:
    """Make the step of a plan."""
    training = Training(subject.loss, optimizer, dtype=subject.dtype)
    transport = connect("gloo", World())
    traced = Traced(subject.model(), subject.example(), subject.dtype)
    made = split(traced, plan, training, transport, DEVICE)
    return lambda number: made.step(number, subject.images, subject.targets).loss_sum


def _under(subject: Subject, way: Way, cap: int) -> MakeStep | None:
    """Torch's own way on as few blocks as the cap allows."""

    def on(count: int) -> Step:
        model = subject.model()
        put_around(blocks_of(model)[:count], way)
        return plain(subject, model)

    most = len(blocks_of(subject.model()))
    count = fewest(most, lambda count: peak_alone(partial(on, count)), cap)
    return None if count is None else partial(on, count)


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
    ways: dict[str, MakeStep] = {
        "keep": lambda: ours(subject, ActivationPolicy()).step,
        "recompute norms": lambda: ours(subject, ActivationPolicy((), cheap)).step,
        "and offload the rest": lambda: ours(subject, ActivationPolicy(rest, cheap)).step,
    }
    peaks = {way: peak_alone(make) for way, make in ways.items()}
    seconds = seconds_of({way: make() for way, make in ways.items()}, rounds)
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


def _row(cap: str, way: str, planned: int, peak: int, seconds: float, keep: float) -> None:
    sizes = f"{_gib(planned)} | {_gib(peak)}"
    print(f"| {cap} | {way} | {sizes} | {seconds:.4f} | {seconds / keep:.2f} |")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else "–"
