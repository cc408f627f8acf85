"""A graph with the price of each layer: what any cut of it costs on some hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate

from pathoseg.device import updates_at_once
from pathoseg.parallel.cost.cost_model import CostModel
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.graph.reorder import reordered
from pathoseg.parallel.planning.branches import BranchCut, Branches
from pathoseg.parallel.planning.memory_model import MemoryModel, Row, StageMemory, Workspace
from pathoseg.parallel.planning.partition import Cutter
from pathoseg.parallel.retention.policy_options import AllowedPolicies, Retained, retain
from pathoseg.parallel.retention.policy_search import Choice, Chooser
from pathoseg.parallel.retention.stage_liveness import StageFacts, stage_facts
from pathoseg.parallel.schedule.action import Edge, numbered
from pathoseg.parallel.schedule.costs import Costs, Network, StageCost, Teams

# Of more places to cut than these, only narrow ones are looked at.
_PLACES = 300
# A model whose longest chain of layers takes such a share of the time has no branches.
_CHAIN = 0.98


class StageCosts:
    """Prices the stages of one graph.

    Args:
        graph: The model's layers, traced with one microbatch.
        model: Predicts the seconds of a layer.
        hardware: The device and its links.
        optimizer_slots: Tensors that the optimizer keeps for each parameter: 2 for AdamW, 1 for
            SGD with momentum.
        workspace: Returns the bytes that a device's kernels take for a layer's forward and
            backward.
        firsts: Positions of the first layers of the stages that will be asked for; None where
            these are any that the cutter makes.
        shards: Ranks that share the tiles of each rank; the layers are those of one strip.
        heard: By layer, bytes that stay for its forward to run once more: what other ranks told it.

    Attributes:
        graph: The layers.
        cutter: Cuts them.
        hardware: The device and its links.
        note: The origin of the times, for the reader of a plan.
        seconds: Time of one microbatch's forward and backward through all layers.
        critical_seconds: Of those along the longest chain of layers that wait for one another.
        times: Seconds of the forward and the backward of each layer, by its name.
    """

    def __init__(
        self,
        graph: LayerGraph,
        model: CostModel,
        hardware: Hardware,
        optimizer_slots: int = 2,
        workspace: Workspace | None = None,
        firsts: Sequence[int] | None = None,
        shards: int = 1,
        heard: Mapping[str, int] | None = None,
    ) -> None:
        self.graph = graph
        self.hardware = hardware
        self.note = model.note
        self._known, self._workspace, self._firsts = model, workspace, firsts
        self._slots, self._shards, self._heard = optimizer_slots, shards, heard or {}
        self._memory = MemoryModel(graph, optimizer_slots, workspace=workspace)
        self.cutter = Cutter(graph, self._memory, _PLACES)
        found = [model.time(layer) for layer in graph.layers]
        self._branch_cuts = cache(self._find_branch_cuts)
        self._forwards = [time.forward for time in found]
        self._backwards = [time.backward for time in found]
        self.times = {
            layer.name: (time.forward, time.backward)
            for layer, time in zip(graph.layers, found, strict=True)
        }
        # Running sums, so that a stage's time is a difference.
        self._forward = [0.0, *accumulate(self._forwards)]
        self._backward = [0.0, *accumulate(self._backwards)]
        self.seconds = self._forward[-1] + self._backward[-1]
        self.critical_seconds = self._critical_seconds()
        self._facts = cache(self._find_facts)
        self._chooser = cache(
            lambda first, stop, ways: Chooser(self._facts(first, stop), hardware.host, ways)
        )
        self._choice = cache(
            lambda first, stop, ways, cap, count: self._chooser(first, stop, ways).choose(
                cap, count
            )
        )

    @property
    def microbatch(self) -> int:
        """The number of samples of one microbatch."""
        return next(iter(self.graph.inputs.values())).shape[0]

    @property
    def byte_cost(self) -> float:
        """Seconds that a byte takes on its way, where nothing hides it."""
        return self.hardware.inside.beta

    @property
    def longest_chain(self) -> float:
        """Share of the time of all layers that the longest chain of them takes."""
        return self._branches.longest

    @property
    def has_branches(self) -> bool:
        """Return True if some layers could run beside the longest chain."""
        # Of the layers alone it is faster to see that there are none.
        alone = self.critical_seconds < _CHAIN * self.seconds
        return alone and self.longest_chain < _CHAIN

    def branch_cuts(self, ranks: int, microbatches: int, memory: int) -> list[BranchCut]:
        """Return cuts that run branches on several ranks at once, the shortest step first.

        Args:
            ranks: Of one group.
            microbatches: Of its part of a step.
            memory: Bytes of a rank.
        """
        return self._branch_cuts(ranks, microbatches, memory)

    def reordered(self, order: Sequence[int], firsts: Sequence[int] | None = None) -> StageCosts:
        """Return the prices of the same layers in another order of execution.

        Args:
            order: As for `graph.reorder.reordered`.
            firsts: The places, in that order, of the first layers of stages; None for any.
        """
        if not order:
            return self
        graph = reordered(self.graph, order)
        return StageCosts(
            graph,
            self._known,
            self.hardware,
            self._slots,
            self._workspace,
            firsts,
            self._shards,
            self._heard,
        )

    def weights(self, recompute: bool = False) -> list[float]:
        """Return the seconds of each layer's passes for one microbatch: forward and backward.

        Args:
            recompute: Whether the forward runs twice.
        """
        return [
            (1 + recompute) * forward + backward
            for forward, backward in zip(self._forwards, self._backwards, strict=True)
        ]

    def choose(
        self, partition: Partition, stage: int, memory: int, in_flight: int, ways: AllowedPolicies
    ) -> Choice | None:
        """Choose the fastest activation policy of a stage that fits into so many bytes.

        Args:
            partition: The stages.
            stage: The stage's number.
            memory: Bytes for its weights and all that so many microbatches hold.
            in_flight: Microbatches between their forward and backward.
            ways: Whether layers may be offloaded, recomputed, or both.
        """
        first, stop = partition.bounds[stage : stage + 2]
        room = memory - self._always(first, stop, in_flight, ways)
        return self._choice(first, stop, ways, room, in_flight) if room > 0 else None

    def taken(
        self,
        partition: Partition,
        stage: int,
        choice: Choice,
        in_flight: int,
        ways: AllowedPolicies,
    ) -> int:
        """Return the bytes that a stage takes under what `choose` chose for it."""
        first, stop = partition.bounds[stage : stage + 2]
        return self._always(first, stop, in_flight, ways) + choice.need(in_flight)

    def retained(self, partition: Partition, stage: int, policy: ActivationPolicy) -> Retained:
        """Return the memory, copies and recomputation of a stage under an activation policy."""
        return retain(self._facts(*partition.bounds[stage : stage + 2]), policy)

    def costs(
        self,
        partition: Partition,
        ranks: int,
        policies: Sequence[ActivationPolicy] = (),
        window: int = 0,
    ) -> Costs:
        """Return the costs of these stages on so many ranks, for the simulator.

        The optimizer's step reads and writes its state, the parameters and, reading only, the
        gradients, all at the memory's bandwidth; where it takes one parameter after the other, each
        costs what a pass of a layer costs at least. A value that several stages read comes back as
        one gradient from each.

        Args:
            partition: The stages.
            ranks: Number of ranks, or of teams that share tiles.
            policies: By stage, what is not kept; empty where all is.
            window: Bytes of the staging buffer of copies to the host.
        """
        edges = stage_edges(partition)
        stages = [self._stage(partition, stage) for stage in range(partition.stages)]
        for stage, each in enumerate(policies):
            if each != ActivationPolicy():
                stages[stage] = self._less(partition, stage, stages[stage], each)
        network: Network = self.hardware.network(ranks * self._shards)
        return Costs(
            tuple(stages),
            {edge: sent.bytes for edge, sent in zip(edges, partition.edges, strict=True)},
            network if self._shards == 1 else Teams(network, self._shards),
            self.hardware.host,
            window,
            self._shards,
            {edge for edge, sent in zip(edges, partition.edges, strict=True) if not sent.gradient},
        )

    @cached_property
    def _branches(self) -> Branches:
        hardware, slots = self.hardware, self._slots + 1  # and the gradient
        times = self._forwards, self._backwards
        return Branches(self.graph, *times, hardware.inside, slots, hardware.visit)

    def _find_branch_cuts(self, ranks: int, microbatches: int, memory: int) -> list[BranchCut]:
        # What fills the ranks once all are busy, and what is fastest where each microbatch waits
        # for the one before it.
        both = {microbatches, 1}
        every = (self._branches.cuts(ranks, count, memory) for count in sorted(both, reverse=True))
        return list(dict.fromkeys(cut for cuts in every for cut in cuts))

    def _critical_seconds(self) -> float:
        position = {layer.name: at for at, layer in enumerate(self.graph.layers)}
        edges = [
            (position[name], position[layer.name])
            for layer in self.graph.layers
            for name in layer.inputs
            if name in position
        ]
        before = longest_chains(self._forwards, edges)
        after = longest_chains(self._backwards, edges)
        return max(map(sum, zip(before, self._forwards, self._backwards, after, strict=True)))

    def _less(
        self, partition: Partition, stage: int, whole: StageCost, policy: ActivationPolicy
    ) -> StageCost:
        """The stage's cost with less kept."""
        bounds = partition.bounds[stage : stage + 2]
        memory = self._stage_memory(*bounds)
        retained = self.retained(partition, stage, policy)
        heard = self._heard_by(*bounds) * policy.runs_again
        # What both count: gradients that leave are the simulator's.
        leaving = memory.backward_workspace - whole.backward_workspace
        return replace(
            whole,
            backward=whole.backward + retained.recompute_seconds,
            activations=whole.activations - memory.activations + retained.kept + heard,
            forward_workspace=retained.forward_peak - retained.kept,
            backward_workspace=retained.backward_peak - retained.kept - leaving,
            tensors=retained.tensors,
        )

    def _always(self, first: int, stop: int, in_flight: int, ways: AllowedPolicies) -> int:
        """The bytes that a stage holds under any activation policy: weights, and what it is given
        for so many microbatches."""
        need = self._stage_memory(first, stop)
        held = need.received + self._heard_by(first, stop) * ways.recompute
        return need.weights + in_flight * held

    def _heard_by(self, first: int, stop: int) -> int:
        """The bytes of `heard` of a stage whose layers run once more, at most."""
        return sum(self._heard.get(layer.name, 0) for layer in self.graph.layers[first:stop])

    def _find_facts(self, first: int, stop: int) -> StageFacts:
        layers = range(first, stop)
        peaks = self._memory.by_layer(layers)
        return stage_facts(self.graph, layers, peaks, (self._forwards, self._backwards))

    def _stage(self, partition: Partition, stage: int) -> StageCost:
        first, stop = partition.bounds[stage : stage + 2]
        memory = self._stage_memory(first, stop)
        entering = sum(edge.bytes for edge in partition.edges if edge.target == stage)
        returning = {
            edge.value: edge.bytes
            for edge in partition.edges
            if edge.source == stage and edge.gradient
        }
        # The simulator adds the tensors that stages send one another; the rest is the batch.
        batch = memory.received - entering
        return StageCost(
            forward=self._forward[stop] - self._forward[first] + self.hardware.visit,
            backward=self._backward[stop] - self._backward[first] + self.hardware.visit,
            activations=memory.activations + batch,
            weights=memory.weights,
            gradients=memory.gradients,
            forward_workspace=memory.forward_workspace,
            backward_workspace=memory.backward_workspace - sum(returning.values()),
            checkpoint=batch,
            # AdamW's roots of the second moments; SGD's gradients with weight decay. One of each.
            update_workspace=memory.gradients * updates_at_once(self.hardware.device),
            step=self._update(first, stop, memory.gradients),
        )

    def _update(self, first: int, stop: int, gradients: int) -> float:
        """Return the seconds of the optimizer's step of a stage with so many bytes of gradients."""
        used = {name for layer in self.graph.layers[first:stop] for name in layer.parameters}
        calls = sum(self.graph.parameters[name].trained for name in used)
        if updates_at_once(self.hardware.device):
            calls = min(calls, 1)
        moved = (3 + 2 * self._slots) * gradients / self.hardware.bandwidth
        return moved + calls * self.hardware.overhead

    def _stage_memory(self, first: int, stop: int) -> StageMemory:
        row = self._rows.get(first)  # missing where the user's cut is none of the cutter's places
        return row.stage(stop) if row else self._memory.stage(range(first, stop))

    @cached_property
    def _rows(self) -> dict[int, Row]:
        """By first layer, the memory of all stages that the cutter may make."""
        firsts = self.cutter.places[:-1] if self._firsts is None else self._firsts
        return {row.first: row for row in self._memory.rows(firsts)}


def longest_chains(times: Sequence[float], edges: Iterable[tuple[int, int]]) -> list[float]:
    """Return, for each node of a graph, the time of the longest chain of nodes that leads to it.

    Args:
        times: Of each node.
        edges: From a node to a later one.
    """
    found = [0.0] * len(times)
    for source, target in sorted(edges):  # by source: what leads to it is known by then
        found[target] = max(found[target], found[source] + times[source])
    return found


def stage_edges(partition: Partition) -> tuple[Edge, ...]:
    """Return the schedule's edge for each value that stages send, in the same order."""
    return numbered((sent.source, sent.target) for sent in partition.edges)
