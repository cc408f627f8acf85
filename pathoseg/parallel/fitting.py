"""One call for anyone's model: plans it, cuts it, and trains it on the ranks of this job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.infeasibility import nothing_fits
from pathoseg.parallel.planning.kernel_workspace import workspace_of
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import RankStepResult, Runner
from pathoseg.parallel.runtime.stage import Training


@dataclass(frozen=True)
class Fit:
    """A model in training on the ranks of a job.

    Attributes:
        plan: The stages and actions of every rank.
        runner: This rank's part.
        inputs: Names of the model's inputs, in the order in which it takes them.
    """

    plan: Plan
    runner: Runner
    inputs: tuple[str, ...]

    def step(
        self,
        number: int,
        inputs: Tensor | Mapping[str, Tensor],
        targets: Tensor,
        trace: bool = False,
    ) -> RankStepResult:
        """Make one optimizer step on the mean loss of a batch; all ranks call it.

        Args:
            number: The run's step, from 0.
            inputs: The whole batch, of several inputs each by name; a rank reads only the
                microbatches that it needs (`runner.reads_inputs`), the others may hold anything.
                On any device: a microbatch is copied to this rank's when its turn comes.
            targets: Likewise (`runner.reads_targets`). Where ranks share tiles, those with as many
                rows as a tile are cut as it is, and images (n, channels, rows, columns) among the
                inputs in proportion; all else is whole on each rank.
            trace: Whether the result says what this rank did when.

        Raises:
            PathosegError: The batch is not of the planned size, whole targets cannot be told from
                strips of them, or a rank failed; of several ranks, all end.
        """
        named = self._named(inputs)
        with self.runner.failing() if self.plan.ranks > 1 else nullcontext():
            self._check(named, targets)
        microbatches = self._microbatches(
            named, lambda each: self._part(targets, each, False).to(self.runner.device)
        )
        return self.runner.step(number, microbatches, trace)

    def predict(self, inputs: Tensor | Mapping[str, Tensor]) -> dict[int, Any]:
        """Run the model on a batch in `eval` mode, without gradients; all ranks call it.

        Args:
            inputs: As for `step`.

        Returns:
            What the model returns, by microbatch: of those whose last stage is on this rank; where
            ranks share tiles, on the first of them.

        Raises:
            PathosegError: As `step`.
        """
        named = self._named(inputs)
        with self.runner.failing() if self.plan.ranks > 1 else nullcontext():
            self._check(named)
        return self.runner.predict(self._microbatches(named, lambda each: None))

    def _named(self, inputs: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.inputs[0]: inputs} if isinstance(inputs, Tensor) else inputs

    def _microbatches(
        self, named: Mapping[str, Tensor], targets: Callable[[int], Any]
    ) -> Microbatches:
        def inputs(microbatch: int) -> dict[str, Tensor]:
            return {name: self._part(each, microbatch, True) for name, each in named.items()}

        sizes = [self.plan.microbatch] * self.plan.schedule.microbatches
        return Microbatches(sizes, inputs, targets)

    def _part(self, given: Tensor, microbatch: int, is_input: bool) -> Tensor:
        """Return a microbatch of a batch; where ranks share tiles, this rank's rows of it."""
        size = self.plan.microbatch
        own = given[microbatch * size : (microbatch + 1) * size]
        if self.plan.shards == 1:
            return own
        # An image of another height than the tile's is cut in proportion.
        is_image = own.dim() > 2 and own.shape[-2] == self.plan.input[-2]
        is_image |= is_input and own.dim() > 3 and own.shape[-2] >= self.plan.shards
        return own[..., self.runner.rows(own.shape[-2]), :] if is_image else own

    def _check(self, named: Mapping[str, Tensor], targets: Tensor | None = None) -> None:
        if set(named) != set(self.inputs):
            raise PathosegError(
                f"The batch holds {', '.join(named)}, and the model takes "
                f"{', '.join(self.inputs)}.",
                "Give a dict of tensors by these names.",
            )
        told = {"inputs" if len(named) == 1 else name: each for name, each in named.items()}
        for name, given in (told if targets is None else {**told, "targets": targets}).items():
            if len(given) != self.plan.batch:
                raise PathosegError(
                    f"The batch has {len(given)} samples of {name}, and the plan is for "
                    f"batches of {self.plan.batch}.",
                    f"Give whole batches, or plan for batches of {len(given)}.",
                )

        if targets is not None and self.plan.shards > 1 and targets.dim() > 2:
            height, rows = self.plan.input[-2], targets.shape[-2]
            if rows != height and rows in self.runner.strip_heights:
                raise PathosegError(
                    f"The targets have {rows} rows, as many as a strip of the tiles of {height}.",
                    "Give targets of the tiles' height, or choose another number of shards.",
                )


def fit(
    model: nn.Module,
    example: Tensor | Mapping[str, Tensor],
    training: Training,
    request: PlanRequest | Plan,
    hardware: Hardware | str,
    transport: Transport,
    device: torch.device,
    optimizer_slots: int = 2,
) -> Fit:
    """Find the fastest way to train a model on the ranks of this job, and set it up.

    All ranks make the same call, with models of the same values.

    Args:
        model: Any module; it is changed, see `Runner`.
        example: One microbatch of its input, or of each by name; only shapes and dtypes count.
        training: Loss, optimizer, seed, precision and clipping.
        request: Ranks, memory and batch, and what of the plan is settled already; or a plan that
            was made before (`Plan.from_json`), of which rank 0's counts.
        hardware: By which layers are priced, or its name (`load_hardware`); in a precision of which
            it states no rate, by that of float32. A plan that was made before needs none.
        transport: Joins the ranks (`connect`).
        device: The device on which this rank computes.
        optimizer_slots: Tensors that the optimizer keeps for each parameter.

    Raises:
        PathosegError: The model cannot be read or cut, or is TorchScript; or nothing fits; or the
            plan is another model's, microbatch's or number of ranks'.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise PathosegError(
            "The model is TorchScript, whose layers cannot be lent to ranks.",
            "Give the module that was scripted, or make it a part of another module.",
        )
    traced = Traced(model, example, training.dtype)

    def choose() -> Plan:
        if isinstance(request, Plan):
            return request
        rated = load_hardware(hardware) if isinstance(hardware, str) else hardware
        made = {value.dtype for layer in traced.graph.layers for value in layer.outputs}
        for dtype in sorted(each for each in made if "float" in each):
            rated = rated.with_rate(dtype)
        own = workspace_of(rated)
        priced = StageCosts(traced.graph, cost_model(rated), rated, optimizer_slots, own)
        return best([priced], request)

    return split(traced, agree(choose, transport), training, transport, device)


def best(graphs: Sequence[StageCosts], request: PlanRequest) -> Plan:
    """Find the fastest plan.

    Args:
        graphs: The model, once for each size of microbatch that may be used, smallest first.
        request: The step, ranks and memory to plan for.

    Raises:
        PathosegError: Nothing fits; it says what would.
    """
    plans = plan(graphs, request)
    if plans:
        return plans[0]
    raise nothing_found(graphs, request)


def nothing_found(graphs: Sequence[StageCosts], request: PlanRequest) -> PathosegError:
    """Return the error where nothing fits the ranks of a job; it says what would."""
    if request.all_ranks:
        idle = plan(graphs, replace(request, all_ranks=False))
        if idle:
            return PathosegError(
                f"No plan of {graphs[0].graph.model} gives all {request.ranks} ranks work in a "
                f"batch of {request.batch}.",
                f"Start {idle[0].ranks} ranks ({idle[0].order} fits), or choose a batch that more "
                "ranks can share.",
            )
    return nothing_fits(graphs[0], request)


def agree(choose: Callable[[], Plan], transport: Transport) -> Plan:
    """Return the plan that rank 0 chooses, on every rank.

    Raises:
        PathosegError: Rank 0 can choose nothing; all ranks raise it, and may ask again.
    """
    told: dict[str, str] = {}
    if transport.rank == 0:
        try:
            told = {"plan": choose().to_json()}
        except PathosegError as error:
            told = {"problem": error.problem, "hint": error.hint}
    told = json.loads(transport.gather(json.dumps(told))[0])
    if "problem" in told:
        raise PathosegError(told["problem"], told["hint"])
    return Plan.from_json(told["plan"])


def split(
    traced: Traced,
    plan: Plan,
    training: Training,
    transport: Transport,
    device: torch.device,
    mode: OffloadMode = OffloadMode.OVERLAPPED,
    parked: Set[Park] = frozenset(),
) -> Fit:
    """Set up a planned model; all ranks make the same call.

    Args:
        traced: The model, read with one microbatch; it is changed, see `Runner`.
        plan: The stages and actions of every rank.
        training: As for `fit`.
        transport: As for `fit`.
        device: As for `fit`.
        mode: The mode of copies to the host.
        parked: The kinds of tensors that are offloaded while their stage is not at work; no plan
            counts them.

    Raises:
        PathosegError: The plan is for another model or microbatch, nothing of the model is trained,
            or the training computes in another precision than the model was read in.
    """
    if not any(parameter.requires_grad for parameter in traced.model.parameters()):
        raise PathosegError(
            f"No parameter of {traced.graph.model} is trained.",
            "Let some require gradients (`requires_grad_`).",
        )
    if traced.autocast != training.dtype:
        raise PathosegError(
            f"The model was read for {traced.autocast or 'float32'}, and trains in "
            f"{training.dtype or 'float32'}.",
            "Give Traced the precision of the training as its autocast.",
        )
    traced = traced.reordered(plan.line)
    partition = plan.partition(traced.graph)
    memory = Memory(
        {stage: each.recomputed for stage, each in enumerate(plan.retention)},
        {stage: each.twice for stage, each in enumerate(plan.retention)},
        plan.window,
        mode,
        plan.memory * plan.groups,
        plan.host_memory * plan.groups,
        parked,
    )
    runner = Runner(
        traced, partition, plan.schedule, transport, device, training, memory, plan.shards
    )
    return Fit(plan, runner, tuple(traced.graph.inputs))
