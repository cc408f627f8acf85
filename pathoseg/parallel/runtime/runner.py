"""Trains a model that is cut over ranks, as one process would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pathoseg.errors import MemoryExhaustedError, PathosegError, is_out_of_memory
from pathoseg.giving_up import (
    Commit,
    GivenUpError,
    IsGivenUp,
    asking,
    at_any_time,
    buffers_kept,
    never,
    put_back,
)
from pathoseg.gradient_step import LossScale, load_by_name
from pathoseg.parallel.activations.offload import Copies, OffloadMode, copies_of
from pathoseg.parallel.activations.stage_offload import Park, StageOffload, parked_bytes
from pathoseg.parallel.activations.streams import Streams, streams_of
from pathoseg.parallel.comm.subgroup import Subgroup
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import Partition
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.executor import (
    Executor,
    Microbatches,
    RankSetup,
    check_fit,
    compare_ranks,
)
from pathoseg.parallel.runtime.grad_clip import ClippedStep, GradientNorm
from pathoseg.parallel.runtime.memory_check import Memory, compare_hosts
from pathoseg.parallel.runtime.messages import MessageRoute
from pathoseg.parallel.runtime.reduction import GradientReduction
from pathoseg.parallel.runtime.stage import Pass, Stage, Training
from pathoseg.parallel.runtime.state import (
    RankParameters,
    State,
    gather,
    load_tensors,
)
from pathoseg.parallel.schedule.action import Kind
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.schedule import Schedule, visit_of
from pathoseg.parallel.schedule.simulate import take_turns
from pathoseg.parallel.shards.rows import strips
from pathoseg.parallel.shards.sharding import Sharding


@dataclass(frozen=True)
class RankStepResult:
    """The outcome of one optimizer step; the same on all ranks but for the events.

    Attributes:
        loss_sum: Sum of the losses of all samples.
        finite: True if every gradient was finite; else neither parameters nor buffers were updated.
        events: This rank's actions with their times in seconds; empty without a trace.
    """

    loss_sum: float
    finite: bool
    events: tuple[Event, ...] = ()


class Runner:
    """One rank of a model in training. All ranks make the same calls in the same order.

    The model is changed: its stages that are on this rank move to the device, and the memory of
    all others is let go. Its modules and the names of its parameters stay as they are.

    Args:
        traced: The whole model, with the same values on every rank.
        partition: Its stages.
        schedule: Validated, lowered from the edges of these stages (`edge_values`).
        world: Joins all ranks, `shards` of them for each of the schedule's.
        device: The device on which this rank computes.
        training: Loss, optimizer, seed, precision and clipping.
        memory: What is not kept on the devices between forward and backward; None keeps all but
            what the schedule offloads.
        shards: How many consecutive ranks share the tiles of one of the schedule's ranks, a strip
            of rows each. Inputs and targets are then those of this rank's strip (`rows`).

    Attributes:
        device: The device on which this rank computes.
        own: The trained parameters on this rank, by name. A parked one keeps its shape.
        optimizer: Updates this rank's parameters (set the learning rate in its groups), or None
            where there are none.
        reads_inputs: Microbatches whose inputs this rank needs.
        reads_targets: Microbatches whose targets it needs.

    Raises:
        PathosegError: Stages, schedule and transport do not fit, or ranks differ in what they run.
    """

    def __init__(
        self,
        traced: Traced,
        partition: Partition,
        schedule: Schedule,
        world: Transport,
        device: torch.device,
        training: Training,
        memory: Memory | None = None,
        shards: int = 1,
    ) -> None:
        self.device, self._model, self._training = device, traced.model, training
        self._world, self._shards, self._memory = world, shards, memory or Memory()
        # What has to precede what:
        # (1) Ranks agree while each still has the whole model, whose weights are compared, and
        #     before any of it is changed.
        # (2) The model settles: stages of other ranks lose their memory. Optimizer, sums and stages
        #     take the parameters that are then on the device.
        # (3) Sums read the layouts of parameters, which parked ones no longer have.
        # (4) Hosts are compared before memory is taken for copies; then stages are parked.
        # (5) Stages are given the copies of activations, and the executor all of the above.
        whole = self._agree(traced, partition, schedule)  # (1)
        rank = self._transport.rank
        self._rank_parameters.settle(device)  # (2)
        policies = {
            stage: policy
            for stage, policy in self._memory.policies(whole).items()
            if rank in whole.placement.holders(stage)
        }
        trained = {
            name: parameter
            for name, parameter in self._rank_parameters.parameters.items()
            if parameter.requires_grad
        }
        mine = set(self._rank_parameters.own)
        self.own = {name: parameter for name, parameter in trained.items() if name in mine}
        self.optimizer = _optimizer_of([*self.own.values()], training.optimizer)
        reductions = self._make_reductions(whole, policies)  # (3)
        streams = streams_of(device)
        copies, self._stage_offload = self._make_copies(whole, policies, streams)  # (4)
        self._stages = self._make_stages(traced, partition, whole, policies, copies)  # (5)
        counted = [name for name in self._rank_parameters.told if name in trained]
        norm = GradientNorm(trained, counted, self._transport, device, self._stage_offload)
        self._scale = LossScale(training.dtype is torch.float16)
        self._begun: dict[str, torch.Tensor] = {}  # what is held, ahead of the step under way
        self._executor = Executor(
            RankSetup(
                transport=self._transport,
                schedule=whole,
                stages=self._stages,
                reductions=reductions,
                update=ClippedStep(
                    norm, self._scale, self.optimizer, self._stage_offload, training.clip
                ),
                device=device,
                streams=streams,
                copies=copies,
                stage_offload=self._stage_offload,
                strips=shards > 1,
            )
        )
        visits = [visit_of(each) for each in whole.lists[rank] if each.kind is Kind.FORWARD]
        self.reads_inputs = frozenset(m for _, stage, m in visits if partition.inputs[stage])
        self.reads_targets = frozenset(m for _, stage, m in visits if self._stages[stage].is_last)

    def _agree(self, traced: Traced, partition: Partition, schedule: Schedule) -> Schedule:
        """Compare what the ranks run; return the schedule with its copies in all groups.

        Raises:
            PathosegError: Stages, schedule and transport do not fit, or ranks differ.
        """
        self._transport = self._world
        self._sharding: Sharding | None = None
        if self._shards > 1:
            self._transport, self._sharding = _in_strips(
                traced, schedule, self._world, self._shards, self._memory
            )
        check_fit(partition, schedule, self._transport)
        whole = schedule.expanded()
        self._placement = whole.placement
        self._rank_parameters = RankParameters(
            traced.model, traced.graph, partition, whole.placement, self._transport.rank
        )
        training = self._training
        compared = {
            "model": traced.graph.structure,
            "stages": str(partition.bounds),
            "schedule": str(schedule),
            "precision, clipping or seed": f"{training.dtype} {training.clip} {training.seed}",
            "weights": self._rank_parameters.digest(),
        }
        compare_ranks(self._transport, compared)
        self._prepare(whole)
        return whole

    def _make_copies(
        self, schedule: Schedule, policies: Mapping[int, ActivationPolicy], streams: Streams
    ) -> tuple[Copies | None, StageOffload]:
        """Make the copies of activations, None where none leave, and park what waits of stages.

        Raises:
            PathosegError: A host has less memory than its ranks will take.
        """
        memory, device, rank = self._memory, self.device, self._transport.rank
        stages = {stage: self._rank_parameters.of(stage) for stage in policies}
        parked = memory.parked if memory.mode is not OffloadMode.NONE else frozenset()
        sizes = [parked_bytes(parked, each, self._training.optimizer) for each in stages.values()]
        host_bytes = memory.on_host(rank)
        computes = device.type == "cpu" and bool(memory.device_bytes)
        taken = host_bytes + sum(sizes) + computes * memory.on_device(rank)
        compare_hosts(self._world, taken, computes)
        copies: Copies | None = None
        if any(policy.offloaded for policy in policies.values()):
            shares_window = take_turns(schedule.lists[rank])
            copies = copies_of(
                memory.mode, streams, device, memory.window, host_bytes, shares_window
            )
        stage_copies: Copies | None = None
        if parked:
            most = max(sizes, default=0)
            stage_copies = copies_of(memory.mode, streams, device, most, sum(sizes))
        return copies, StageOffload(parked, stages, self.optimizer, stage_copies)

    def _make_stages(
        self,
        traced: Traced,
        partition: Partition,
        schedule: Schedule,
        policies: Mapping[int, ActivationPolicy],
        copies: Copies | None,
    ) -> dict[int, Stage]:
        recomputed = {stage for _, stage, _ in schedule.setting.recomputed}
        is_single = schedule.placement.replicas == 1
        return {
            number: Stage(
                traced,
                partition,
                number,
                self._training,
                self.device,
                alone=is_single and number not in recomputed and _in_order(schedule, number),
                policy=policy,
                copies=copies,
                parks=self._stage_offload.parks_parameters,
                sharding=self._sharding,
            )
            for number, policy in policies.items()
        }

    def _make_reductions(
        self, schedule: Schedule, held: Iterable[int]
    ) -> dict[int, GradientReduction]:
        return {
            stage: GradientReduction(
                self._rank_parameters.trained(stage),
                max(1, schedule.setting.buckets[stage]),
                self._world,
                self._holders_of_strips(stage),
            )
            for stage in held
        }

    def rows(self, height: int) -> slice:
        """Return the rows of an input, or of labels, of this height that this rank is given."""
        if self._sharding is None:
            return slice(0, height)
        return slice(*self._sharding.rows(height))

    @property
    def strip_heights(self) -> frozenset[int]:
        """Return the numbers of rows that the strips of a tile have; of whole tiles, none."""
        if self._sharding is None:
            return frozenset()
        return frozenset(rows.height for rows in strips(self._sharding.team.split.bounds))

    @property
    def gathered(self) -> Mapping[str, str]:
        """Return, by layer, the functions that took whole tiles so far though they are cut."""
        return {} if self._sharding is None else self._sharding.gathered

    @property
    def doing(self) -> str:
        """Return the action that is under way as part of a sentence, for error messages."""
        action = self._executor.doing
        if action is None:
            return "between steps"
        work = action.kind.name.lower().replace("_", " ")
        of = "" if action.microbatch is None else f" of microbatch {action.microbatch}"
        return f"in the {work}{of} of stage {action.stage}"

    def step(
        self,
        number: int,
        microbatches: Microbatches,
        trace: bool = False,
        is_given_up: IsGivenUp = never,
        commit: Commit = at_any_time,
    ) -> RankStepResult:
        """Make one optimizer step on the mean loss of all samples; all ranks call it.

        Args:
            number: The run's step, from 0; with seed and microbatch the seed of what layers draw.
            microbatches: As many as the schedule has, in all groups together.
            trace: Whether the result has events.
            is_given_up: Asked between layers and visits until the last backward of this rank.
            commit: Called ahead of the first change for good, once no rank has given up; where
                parameters are parked, and come and go in the step, at its start.

        Returns:
            The loss over all ranks, and this rank's events.

        Raises:
            PathosegError: Something failed here or on another rank; all ranks end.
            GivenUpError: A rank has given up, on all ranks: parameters, buffers and optimizer are
                as before the step. `state` can be called still, and no other step.
        """
        if self._stage_offload.active:
            commit()
        this = Pass(number, microbatches.sizes, self._scale.scale, training=True)
        self._stage_offload.forget_gradients(self.own.values())
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        held = self._rank_parameters.tensors()
        buffers = {name: t for name, t in held.items() if not isinstance(t, nn.Parameter)}
        with self.failing(), buffers_kept(buffers) as before:
            self._begun = {**held, **before}
            with ExitStack() as stack:
                for stage in self._stages.values():
                    stack.enter_context(stage.statistics.kept())
                is_given_up = self._agreed(is_given_up, stack)
                done = self._executor.step(this, microbatches, trace, is_given_up, commit)
            verdict, events = done
            if verdict.finite:
                for stage_number, stage in self._stages.items():
                    holders = self._holders(stage_number)
                    stage.statistics.apply(microbatches.sizes, partial(self._sum, holders))
            else:
                put_back(buffers, before)
        self._begun = {}
        self._scale.update(verdict)  # raises on all ranks alike, so nothing is to be aborted
        return RankStepResult(verdict.loss_sum, verdict.finite, events)

    def _sum(self, holders: tuple[int, ...], rows: torch.Tensor) -> None:
        if len(holders) > 1:
            self._transport.sum(rows, holders).wait()

    def predict(self, microbatches: Microbatches, is_given_up: IsGivenUp = never) -> dict[int, Any]:
        """Run the model in `eval` mode, without gradients; all ranks call it.

        Args:
            microbatches: As many as the schedule has; targets are not asked for.
            is_given_up: Asked between layers and visits.

        Returns:
            The model's output by microbatch, of those whose last stage is on this rank; where
            ranks share tiles, on the first of them.

        Raises:
            PathosegError: As `step`.
            GivenUpError: A rank has given up; raised on all ranks.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self.failing(), ExitStack() as stack:
                is_given_up = self._agreed(is_given_up, stack)
                this = Pass(0, microbatches.sizes, 1.0, training=False)
                found = self._executor.predict(this, microbatches, is_given_up)
                return found if self._has_first_strip else {}
        finally:
            for module, mode in modes:
                module.training = mode

    def state(self) -> dict[str, Any]:
        """Gather the training state of all ranks on rank 0, for a checkpoint; all ranks call it.

        Returns:
            On rank 0, in host memory: `model`, the model's state dict; `optimizer`, by parameter
            name the optimizer's state of it; `scaler`, the state of a `torch.amp.GradScaler`. An
            empty dict on the others.

        Raises:
            PathosegError: Something failed here or on another rank; all ranks end.
        """
        with self.failing():
            told = self._told(self._rank_parameters.tensors())
            whole = gather(told, self._transport, self.device)
        return {} if self._world.rank else self.joined(whole)

    def begun(self) -> State:
        """Return what `state` gathers of this rank, as it was ahead of the step under way.

        Called by another thread than that which is at the step, until `commit`. It says nothing to
        other ranks.
        """
        return self._told(self._begun or self._rank_parameters.tensors())

    def joined(self, whole: State) -> dict[str, Any]:
        """Return as `state` does what all ranks hold together."""
        values = {name: entries[""] for name, entries in whole.items()}
        kept = {
            name: {key: value for key, value in entries.items() if key}
            for name, entries in whole.items()
        }
        return {
            "model": {key: values[name] for key, name in self._rank_parameters.keys.items()},
            "optimizer": {name: entries for name, entries in kept.items() if entries},
            "scaler": self._scale.state_dict(),
        }

    def _told(self, held: Mapping[str, torch.Tensor]) -> State:
        """Return the part of the state that this rank sends; of strips, the first alone."""
        names_told = self._rank_parameters.told if self._has_first_strip else []
        told: State = {name: {"": held[name]} for name in names_told}
        kept = {} if self.optimizer is None else self.optimizer.state
        names = {parameter: name for name, parameter in self._rank_parameters.parameters.items()}
        for parameters in self._stage_offload.in_turn(Park.PARAMETERS, Park.OPTIMIZER):
            for parameter in parameters:
                if names[parameter] in told:
                    entries = {"": parameter, **kept.get(parameter, {})}
                    told[names[parameter]] = self._stage_offload.lasting(entries)
        return told

    def load(self, state: dict[str, Any]) -> None:
        """Load this rank's parameters, buffers and optimizer state.

        Args:
            state: A whole `state`, written by any number of ranks.

        Raises:
            KeyError, ValueError: It is the state of another model or optimizer.
        """
        held = self._rank_parameters.tensors()
        own = {key: held[name] for key, name in self._rank_parameters.keys.items() if name in held}
        changed = Park.PARAMETERS, Park.OPTIMIZER
        names = {parameter: name for name, parameter in self.own.items()}
        for parameters in self._stage_offload.in_turn(*changed, changed=changed):
            here = {id(each) for each in parameters}
            load_tensors({key: t for key, t in own.items() if id(t) in here}, state["model"])
            if self.optimizer is not None:
                with self._stage_offload.alone(parameters) as optimizer:
                    load_by_name(optimizer, names, state["optimizer"])
        buffers = {key: t for key, t in own.items() if not isinstance(t, nn.Parameter)}
        load_tensors(buffers, state["model"])
        self._scale.load_state_dict(state["scaler"])

    def _agreed(self, is_given_up: IsGivenUp, stack: ExitStack) -> IsGivenUp:
        """Return the question to ask before each visit; without strips also between layers.

        Ranks that share a tile wait for each other's rows, so they ask together, before a visit.
        Compiled layers are not left before the visit ends.
        """
        sharding = self._sharding
        if sharding is None:
            between = never if self._training.compiles else is_given_up
            stack.enter_context(asking(self._model, self.device, between))
            return is_given_up

        def any_gives_up() -> bool:
            own = torch.tensor([float(is_given_up())], device=self.device)
            return bool(sharding.team.total(own))

        return any_gives_up

    def _prepare(self, schedule: Schedule) -> None:
        """Name the messages and sums of a step: of stages, gradients, norms and strips."""
        rank = self._transport.rank
        route = MessageRoute.of(schedule, rank)
        peers = {*route.receives, *route.receivers.values()}
        self._transport.prepare(peers, [tuple(range(schedule.ranks))])
        every = map(self._holders_of_strips, range(schedule.stages))
        self._world.prepare([], [each for each in every if self._world.rank in each])
        if self._sharding is not None:
            self._sharding.team.prepare()

    @property
    def _has_first_strip(self) -> bool:
        return self._sharding is None or not self._sharding.team.rank

    def _holders(self, stage: int) -> tuple[int, ...]:
        return tuple(self._placement.holders(stage))

    def _holders_of_strips(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of the world that hold a copy of a stage, for any strip."""
        shards = range(self._shards)
        return tuple(
            holder * self._shards + shard for holder in self._holders(stage) for shard in shards
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Make a context whose error ends all ranks."""
        rank = self._world.rank
        try:
            yield
        except GivenUpError:  # all ranks raise it together
            raise
        except PathosegError as error:
            self._transport.abort(f"Rank {rank}, {self.doing}: {error.problem} {error.hint}")
            raise
        except Exception as error:  # whatever the user's model or loss raises: the others wait
            first = str(error).split("\n")[0]
            failure = PathosegError(
                f"Rank {rank} failed {self.doing} ({type(error).__name__}: {first}).",
                "Run it on one rank to see whether the model itself fails."
                if self._world.ranks > 1
                else "Look at the model, the loss, and what they are given.",
            )
            if is_out_of_memory(error):
                planned = self._transport.rank
                failure = self._memory.exhausted(error, planned, rank, self.device, self.doing)
            fits = failure.fits if isinstance(failure, MemoryExhaustedError) else None
            self._transport.abort(failure.problem, fits)
            raise failure from error
        except BaseException:
            self._transport.abort(f"Rank {rank} was stopped {self.doing}.")
            raise


def _in_strips(
    traced: Traced, schedule: Schedule, world: Transport, shards: int, memory: Memory
) -> tuple[Transport, Sharding]:
    """The transport of the ranks with the same strip as this one, and its strip.

    Raises:
        PathosegError: The ranks are too few, or something is parked.
    """
    if schedule.ranks * shards != world.ranks:
        raise PathosegError(
            f"{shards} strips of each tile, on the {schedule.ranks} ranks of the schedule, take "
            f"{schedule.ranks * shards} ranks, not {world.ranks}.",
            f"Start {schedule.ranks * shards} ranks.",
        )
    if memory.parked:
        raise PathosegError(
            "Nothing is parked where tiles are cut into strips.",
            "Leave out [parallel] parked, or shards.",
        )
    lane, strip = divmod(world.rank, shards)
    team = Subgroup(world, range(lane * shards, (lane + 1) * shards))
    return Subgroup(world, range(strip, world.ranks, shards)), Sharding(team, traced.graph)


def _optimizer_of(
    own: Sequence[nn.Parameter], make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """Make the optimizer of a rank's parameters; None where it has none.

    Raises:
        PathosegError: It is no optimizer, or not of these parameters.
    """
    if not own:
        return None
    hint = "Let `optimizer` of the training take the parameters that it is given, and return it."
    made: Any = make(own)
    if not isinstance(made, torch.optim.Optimizer):
        raise PathosegError(f"The training's optimizer is {made!r}.", hint)
    updated = {id(each) for group in made.param_groups for each in group["params"]}
    if missing := sum(id(each) not in updated for each in own):
        told = f"{missing} of {len(own)} parameters of the model"
        raise PathosegError(f"The training's optimizer does not update {told}.", hint)
    return made


def _in_order(schedule: Schedule, stage: int) -> bool:
    """Return True if the forwards of a stage's copies run in the order of the microbatches."""
    forwards = [
        visit_of(each)[2] for each in schedule if each.kind is Kind.FORWARD and each.stage == stage
    ]
    return forwards == sorted(forwards)
