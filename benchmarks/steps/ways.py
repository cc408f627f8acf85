"""Ways to do the same step: one process, ranks under a schedule, torch's own pipelining."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.stage_costs import stage_edges
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Schedule

RANKS, COUNT = 2, 8  # COUNT microbatches a step
CPU = torch.device("cpu")
LOSS = build_loss(LossConfig())
# Updates are fused, as those of `pathoseg train`.
TRAINING = Training(LOSS, lambda own: torch.optim.AdamW(own, 1e-4, fused=True))

# Does a step, of which it is told the number, and returns the loss where it is known.
Way = Callable[[int], float]


def one_process(model: nn.Module, images: Tensor, targets: Tensor, count: int = COUNT) -> Way:
    """A plain loop over `count` microbatches; a step returns the loss."""
    optimizer = TRAINING.optimizer([*model.parameters()])

    def step(number: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        parts = zip(images.chunk(count), targets.chunk(count), strict=True)
        for own_images, own_targets in parts:
            loss = LOSS(model(own_images), own_targets).sum() / len(images)
            torch.autograd.backward(loss)
            total += loss.item()
        optimizer.step()
        return total

    return step


def in_turn(
    ways: Mapping[str, Way], rounds: int, transport: Transport
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run all ways in turn, `rounds` times after one to warm up; every rank calls it.

    Returns:
        By way, the seconds of each round on the slowest rank, and the loss of the first step.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses = dict[str, float]()
    for number in range(rounds + 1):
        for name, step in ways.items():
            transport.barrier()
            begin = time.perf_counter()
            loss = step(number)
            seconds = time.perf_counter() - begin
            told = [json.loads(text) for text in transport.gather(json.dumps([seconds, loss]))]
            if number:
                times[name].append(max(each[0] for each in told))
            else:
                losses[name] = max(each[1] for each in told)
    return times, losses


def on_ranks(
    traced: Traced,
    partition: Partition,
    order: Schedule,
    transport: Transport,
    images: Tensor,
    targets: Tensor,
    events: list[Event],
) -> Way:
    """Our runtime; `events` gains what this rank does after the first step."""
    lowered = lower(order, stage_edges(partition))
    runner = Runner(traced, partition, lowered, transport, CPU, TRAINING)
    [name] = traced.graph.inputs
    inputs, wanted = images.chunk(COUNT), targets.chunk(COUNT)
    sizes = [len(each) for each in inputs]
    microbatches = Microbatches(sizes, lambda each: {name: inputs[each]}, wanted.__getitem__)

    def step(number: int) -> float:
        result = runner.step(number, microbatches, trace=number > 0)
        events.extend(result.events)
        return result.loss_sum / len(images)

    return step


def torch_gpipe(traced: Traced, partition: Partition, images: Tensor, targets: Tensor) -> Way:
    """The same stages under torch's own pipelining."""
    rank = dist.get_rank()
    stage = PipelineStage(_Part(traced, partition, rank), rank, RANKS, CPU)
    schedule = ScheduleGPipe(stage, COUNT, lambda found, wanted: LOSS(found, wanted).mean())
    parameters = {
        name for at in partition.layers(rank) for name in traced.graph.layers[at].parameters
    }
    known = dict(traced.model.named_parameters())
    optimizer = TRAINING.optimizer([known[name] for name in known if name in parameters])

    def step(number: int) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(images, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        return sum(loss.item() for loss in losses) / COUNT

    return step


class _Part(nn.Module):
    """One of two stages; what the first makes for the second are its outputs."""

    def __init__(self, traced: Traced, partition: Partition, number: int) -> None:
        super().__init__()
        self.model = traced.model
        self._traced, self._last = traced, number == RANKS - 1
        self._segment = traced.segment(partition.layers(number))
        self._sent = [edge.value for edge in partition.edges]
        self._reads = self._sent if self._last else [*traced.graph.inputs]

    def forward(self, *given: Tensor) -> object:
        made = self._segment(dict(zip(self._reads, given, strict=True)))
        if self._last:
            return self._traced.assemble(made)
        return tuple(made[name] for name in self._sent)


def meet_by_torch(transport: Transport) -> None:
    """Sets up torch.distributed's own group, by gloo over the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with TemporaryDirectory() as folder:
        store = f"file://{transport.gather(folder)[0]}/store"
        dist.init_process_group("gloo", init_method=store, rank=transport.rank, world_size=RANKS)
        transport.barrier()
