"""Runs the segments of a model one after the other, as ranks would, and their backward."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.stage import Pass, Stage, Training
from pathoseg.parallel.shards.sharding import Sharding


def run_stages(
    traced: Traced, bounds: Sequence[int], inputs: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run a model cut into stages, forwards and then backwards, each stage on copies of its inputs.

    Args:
        traced: The model.
        bounds: Where stages begin and end in the list of layers, one more than there are stages.
        inputs: By name, the inputs of the graph.

    Returns:
        What the model returns; and by parameter name, the gradients of the sum of that. Copies
        require gradients where the graph says so.
    """
    graph = traced.graph
    known: dict[str, torch.Tensor] = dict(inputs)
    stages = []
    for first, stop in pairwise(bounds):
        segment = traced.segment(range(first, stop))
        received = {
            name: _message(known[name], graph.made_by(name))
            for name in segment.inputs
            if name in known
        }
        sent = segment(received)
        known |= {name: value.detach() for name, value in sent.items()}
        stages.append((received, sent))
    owed = {
        name: torch.ones_like(known[name])
        for name in graph.outputs
        if name in known and graph.made_by(name)[0].gradient
    }
    for received, sent in reversed(stages):
        names = [name for name, value in sent.items() if value.requires_grad and name in owed]
        torch.autograd.backward([sent[name] for name in names], [owed[name] for name in names])
        for name, message in received.items():
            if message.grad is not None:
                owed[name] = owed[name] + message.grad if name in owed else message.grad
    gradients = {
        name: parameter.grad
        for name, parameter in traced.model.named_parameters()
        if parameter.grad is not None
    }
    return traced.assemble(known), gradients


def _message(value: torch.Tensor, kinds: Sequence[Any]) -> torch.Tensor:
    return value.clone().requires_grad_(kinds[0].gradient)


def cut_places(graph: LayerGraph) -> list[int]:
    """Positions at which the model may be cut."""
    return [
        position
        for position in range(1, len(graph.layers))
        if not any(tie.first < position <= tie.last for tie in graph.ties)
    ]


def allocated(do: Any) -> int:
    """Most bytes that torch's CPU allocator held for what `do` made."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.disable()  # else it may free, and count here, what an earlier call left in circles
    try:
        with torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile:
            do()
    finally:
        gc.enable()
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(events)
        if event.name() == "[memory]"
    )
    held = most = 0
    for _, _, change in changes:
        held += change
        most = max(most, held)
    return most


def allocated_by_stage(
    traced: Traced,
    policy: ActivationPolicy,
    shape: tuple[int, ...],
    sharding: Sharding | None = None,
) -> int:
    """Measure the most bytes that one microbatch takes on the CPU, forward and backward.

    Args:
        traced: The model, which is run as one stage.
        policy: The layers that are recomputed or offloaded.
        shape: Of the microbatch, or of this rank's strip of it.
        sharding: How layers run on strips; None runs them on whole tiles.
    """
    stage = Stage(
        traced,
        even(traced.graph, 1),
        number=0,
        training=Training(lambda logits, _: logits.flatten(1).sum(1), torch.optim.SGD),
        device=torch.device("cpu"),
        alone=True,
        policy=policy,
        copies=None,
        sharding=sharding,
    )

    def visit() -> None:
        stage.begin()
        stage.feed(0, {next(iter(traced.graph.inputs)): torch.ones(shape)})
        stage.compare(0, None)
        stage.forward(0, Pass(0, [shape[0]], 1.0, training=True), keep=True)
        stage.backward(0)

    return allocated(visit)


def saved_by_hooks(model: torch.nn.Module, example: torch.Tensor) -> int:
    """Bytes of the storages that a real forward saves, parameters and buffers aside."""
    own = [*model.parameters(), *model.buffers()]
    found = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(example)
    return sum(storage.nbytes() for storage in saved.values())


def run_on_messages(traced: Traced, layers: range, device: str = "cpu") -> None:
    """One forward and backward of a stage that holds what `MemoryModel` says it does."""
    segment = traced.segment(layers)
    received = {}
    for name in segment.inputs:
        (value,) = traced.graph.made_by(name)
        dtype = torch.int64 if value.dtype == "int" else getattr(torch, value.dtype)
        message = torch.ones(value.shape, dtype=dtype, device=device)
        received[name] = message.requires_grad_(value.gradient)
    sent = segment(received)
    roots = [value for value in sent.values() if value.requires_grad]
    edges = [get_gradient_edge(root) for root in roots]
    shapes = [(root.shape, root.dtype) for root in roots]
    # What was sent is gone; autograd's edges need none of it.
    del sent, roots
    given = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    torch.autograd.backward(edges, given)
