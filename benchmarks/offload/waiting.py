"""Count the bytes that offload of parameters, gradients and optimizer state saves and copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.networks.transformer import transformer
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.stage_costs import StageCosts, stage_edges
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Schedule, folded
from pathoseg.parallel.schedule.simulate import simulate
from tests.parallel.comm.thread_ranks import run_ranks

_COUNT = 4  # microbatches of one sample
# The layouts in which plans give a rank several stages, and one rank with the whole.
_LAYOUTS: dict[str, Callable[[], Schedule]] = {
    "one_rank": lambda: sequential(_COUNT),
    "gpipe_folded": lambda: gpipe(folded(2), _COUNT),
    "gems_master": lambda: gems(2, pairs=_COUNT // 2),
}
_KINDS: dict[str, frozenset[Park]] = {
    **{each.value: frozenset({each}) for each in Park},
    "all": frozenset(Park),
}


class _Network(NamedTuple):
    """A network; the shape of a sample as it is planned, and as it is run."""

    make: Callable[[], nn.Module]
    planned: tuple[int, ...]
    run: tuple[int, ...]


_NETWORKS = {
    "unet64": _Network(lambda: UNet(2, width=64), (3, 1024, 1024), (3, 64, 64)),
    "resnet110_v2": _Network(lambda: ResNetV2(2, depth=110), (3, 1024, 1024), (3, 64, 64)),
    "vit_b": _Network(lambda: transformer(768, 12, 12), (1024, 768), (16, 768)),
}
_QUICK = {
    "unet": _Network(lambda: UNet(2, width=8), (3, 256, 256), (3, 64, 64)),
    "transformer": _Network(lambda: transformer(64, 4, 4), (64, 64), (16, 64)),
}


def waiting(quick: bool, hardware: Hardware) -> Iterator[tuple[str, float]]:
    """Print a table; yield `saved_<kind>_<network>_<layout>` and `copied_…`, shares of the peak and
    of the step.

    Args:
        quick: Small networks.
        hardware: By which steps and copies are priced.
    """
    print(f"\n## Waiting stages ({_COUNT} microbatches, AdamW; planned for {hardware.name})\n")
    print("| network | layout | what waits | peak GiB | saved | copied GiB | of the step |")
    print("|---|---|---|---|---|---|---|")
    for name, network in (_QUICK if quick else _NETWORKS).items():
        with torch.device("meta"):
            graph = Traced(network.make(), torch.empty(1, *network.planned)).graph
        priced = StageCosts(graph, cost_model(hardware), hardware)
        for layout, make in _LAYOUTS.items():
            order = make()
            partition = priced.cutter.balance(order.stages, priced.weights())
            costs = priced.costs(partition, order.ranks)
            step = simulate(lower(order, stage_edges(partition)), costs)
            bare = _count(network, order, partition.bounds, frozenset())
            for kind, parked in _KINDS.items():
                counted = _count(network, order, partition.bounds, parked)
                peak = max(
                    planned - kept + held
                    for planned, (kept, _), (held, _) in zip(
                        step.peak_memory, bare, counted, strict=True
                    )
                )
                copied = max(each for _, each in counted)
                saved = 1 - peak / max(step.peak_memory)
                share = copied * hardware.host.beta / float(step.time)
                yield f"saved_{kind}_{name}_{layout}", saved
                yield f"copied_{kind}_{name}_{layout}", share
                print(
                    f"| {name} | {layout} | {kind} | {peak / 2**30:.2f} | {saved:.1%} "
                    f"| {copied / 2**30:.2f} | {share:.1%} |",
                    flush=True,
                )


def _count(
    network: _Network, order: Schedule, bounds: tuple[int, ...], parked: Collection[Park]
) -> list[tuple[int, int]]:
    """Return, for each rank, the most bytes of the three kinds that are on the device during a
    visit, and the bytes copied: of the second step, when there is state of the optimizer."""
    example = torch.empty(1, *network.run)
    traced = [_traced(network, example) for _ in range(order.ranks)]
    partition = cut(traced[0].graph, bounds)
    schedule = lower(order, stage_edges(partition))
    [name] = traced[0].graph.inputs
    parts = Microbatches(
        [1] * _COUNT, lambda at: {name: torch.ones_like(example)}, lambda at: torch.zeros(1)
    )
    training = Training(_loss, lambda parameters: torch.optim.AdamW(parameters, 1e-4))

    def rank(transport: Transport) -> tuple[int, int]:
        own, memory = traced[transport.rank], Memory(parked=frozenset(parked))
        device = torch.device("cpu")
        runner = Runner(own, partition, schedule, transport, device, training, memory)
        runner.step(0, parts)
        held: list[int] = []
        for stage in runner._stages.values():
            for which in ("forward", "backward"):
                setattr(stage, which, _watched(getattr(stage, which), runner, held))
        copies = runner._stage_offload.copies
        if copies is not None:
            copies.copied = []
        runner.step(1, parts)
        copied = [] if copies is None or copies.copied is None else copies.copied
        return max(held), sum(each.bytes for each in copied)

    return run_ranks(order.ranks, rank)


def _traced(network: _Network, example: Tensor) -> Traced:
    torch.manual_seed(0)
    return Traced(network.make(), example)


def _loss(returned: Tensor, targets: Tensor) -> Tensor:
    return returned.pow(2).flatten(1).mean(1)


def _watched(visit: Callable[..., Any], runner: Runner, held: list[int]) -> Callable[..., Any]:
    def watched(*given: Any, **named: Any) -> Any:
        result = visit(*given, **named)
        held.append(_on_device(runner))
        return result

    return watched


def _on_device(runner: Runner) -> int:
    """Bytes of the parameters, gradients and optimizer state of a rank, each storage once."""
    tensors: list[Tensor] = []
    for parameter in runner._rank_parameters.parameters.values():
        tensors.append(parameter)
        if parameter.grad is not None:
            tensors.append(parameter.grad)
    if runner.optimizer is not None:
        states = [*runner.optimizer.state.values()]
        tensors += [each for state in states for each in state.values()]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
