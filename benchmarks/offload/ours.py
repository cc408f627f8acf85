"""The same step on our runtime: one rank, under a policy, with its copies told."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from benchmarks.offload.subject import DEVICE, Step, Subject, optimizer
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training, edge_values
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement


@dataclass(frozen=True)
class Ours:
    """A network on our runtime.

    Attributes:
        runner: The one rank.
        step: Runs a step.
        events: What the last step that was traced did.
    """

    runner: Runner
    step: Step
    events: list[Event]


def graph_of(subject: Subject) -> LayerGraph:
    """The layers for one microbatch, in the precision of the run."""
    with torch.device("meta"):
        model = subject.make()
    return Traced(model, subject.example(), subject.dtype).graph


def ours(
    subject: Subject,
    policy: ActivationPolicy,
    mode: OffloadMode = OffloadMode.OVERLAPPED,
    window: int | None = None,
    host_bytes: int = 0,
    trace: bool = False,
    stages: int = 1,
    parked: Set[Park] = frozenset(),
) -> Ours:
    """A step of the whole network on one rank, all forwards first.

    Args:
        subject: The network.
        policy: What it does not keep; of the first stage alone.
        mode: How what is offloaded is copied.
        window: Bytes; None is what two of the largest storages take.
        host_bytes: Host memory that is taken ahead of the first step.
        trace: Whether steps say what they did.
        stages: Into how many even stages it is cut.
        parked: What of the stages that are not at work waits in host memory.
    """
    traced = Traced(subject.model(), subject.example(), subject.dtype)
    partition = even(traced.graph, stages)
    schedule = lower(
        gpipe(Placement(1, ((0,) * stages,)), subject.microbatches),
        list(edge_values(partition)),
        offload={0: policy.offloaded if mode is not OffloadMode.NONE else ()},
    )
    largest = max(storage.bytes for storage in traced.graph.storages)
    memory = Memory(
        {0: policy.recomputed},
        {0: policy.twice},
        2 * largest if window is None else window,
        mode,
        host_bytes=(host_bytes,),
        parked=parked,
    )
    training = Training(subject.loss, optimizer, dtype=subject.dtype)
    transport = connect("gloo", World())
    runner = Runner(traced, partition, schedule, transport, DEVICE, training, memory)
    [name] = traced.graph.inputs
    images = subject.images.chunk(subject.microbatches)
    targets = subject.targets.chunk(subject.microbatches)
    parts = Microbatches(
        [len(each) for each in images], lambda at: {name: images[at]}, targets.__getitem__
    )
    events: list[Event] = []

    def step(number: int) -> float:
        result = runner.step(number, parts, trace)
        events[:] = result.events
        return result.loss_sum

    return Ours(runner, step, events)


def everything(graph: LayerGraph) -> tuple[str, ...]:
    """All layers that make something which a backward needs."""
    saved = {at for layer in graph.layers for at in layer.saved}
    makers = {graph.storages[at].layer for at in saved} - {-1}
    return tuple(graph.layers[at].name for at in sorted(makers))
