"""The request to the planner, and its answer: a plan of one step on ranks, as plain data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import ClassVar, Literal

from pydantic import ConfigDict

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.hardware import read_versioned
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.planning.orders import AUTO, find_order, of_branches
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.retention.policy_options import AllowedPolicies
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Schedule
from pathoseg.parallel.schedule.validate import validate

BranchChoice = Literal["auto", "only", "none"]


@dataclass(frozen=True)
class PlanRequest:
    """The request: ranks, memory, batch, and what is settled already.

    Attributes:
        ranks: The most ranks.
        memory: Bytes of each.
        batch: Samples of a step.
        order: Name of an order, or `auto`.
        stages: Number of stages; None tries all.
        cut: The layers or modules before which the model is cut; empty leaves it to the planner.
        branches: Whether branches may run on several ranks at once; "only" wants nothing else.
        all_ranks: Whether every rank has to have work, as those of a job that has started do.
        ways: What of a layer's storages may be done where they do not all fit.
    """

    ranks: int
    memory: int
    batch: int
    order: str = AUTO
    stages: int | None = None
    cut: tuple[str, ...] = ()
    branches: BranchChoice = "auto"
    all_ranks: bool = False
    ways: AllowedPolicies = field(default_factory=AllowedPolicies)

    def __post_init__(self) -> None:
        for name in ("ranks", "memory", "batch", "stages"):
            value = getattr(self, name)
            is_count = isinstance(value, Integral) and int(value) > 0
            if not is_count and (name, value) != ("stages", None):
                raise PathosegError(f"{name} is {value!r}.", "Choose a whole number from 1.")
        find_order(self.order)
        if self.cut and self.stages not in (None, len(self.cut) + 1):
            raise PathosegError(
                f"{len(self.cut)} cuts make {len(self.cut) + 1} stages, not {self.stages}.",
                "Leave out the cuts or the number of stages.",
            )

        if self.branches == "only" and (self.cut or self.stages):
            raise PathosegError(
                "Plans of branches cut the model themselves.",
                "Leave out the cuts and the number of stages, or branches.",
            )
        if self.branches == "only" and not any(map(of_branches, find_order(self.order))):
            raise PathosegError(
                f"The order {self.order} runs the whole model on one rank, without branches.",
                "Choose another order, such as 1f1b, or auto.",
            )


FORMAT = 2
_AGAIN = (
    "Plan again for this model, tile and configuration: with `pathoseg plan`, or by a PlanRequest "
    "to `fit`."
)


@dataclass(frozen=True)
class Plan:
    """The stages and actions of every rank in a step, with their predicted time and memory.

    Attributes:
        model: Name of the model's class.
        digest: Of the model's layers and their shapes: what the bounds refer to.
        input: Shape of one microbatch, (samples, channels, height, width).
        order: Name of the order.
        placement: `linear`, `folded`, `mirrored`, `branched` or `branched-mirrored`.
        bounds: In the order in which the layers run, position of the first layer of each stage,
            and the number of layers at the end.
        starts: Name of the first layer of each stage.
        recompute: The stages that are recomputed.
        text: The order of one group's forwards and backwards: `Schedule.parse` reads it.
        hardware: Name of the hardware.
        note: The origin of the predicted times.
        seconds: Predicted time of a step.
        bubble: Share of the ranks' time in which they compute nothing.
        memory: By rank of a group, bytes at the worst moment.
        messages: By rank of a group, bytes of tensors that it sends to other stages in a step.
        sums: By rank of a group, bytes that it sends so that gradients are summed, in rings.
        retention: By stage, what waits in host memory or is recomputed layer by layer.
        window: Bytes of a device that may wait to be copied to the host, and as many that may be
            back ahead of their use.
        host_memory: By rank of a group, bytes in host memory at the worst moment.
        line: The layers in the order in which they run, by their positions in the model; empty
            where that is the model's own.
        shards: The ranks that share the tiles of each of the above, a strip of rows each; what is
            said of a rank is said of each of them.
    """

    model: str
    digest: str
    input: tuple[int, ...]
    order: str
    placement: str
    bounds: tuple[int, ...]
    starts: tuple[str, ...]
    recompute: tuple[int, ...]
    text: str
    hardware: str
    note: str
    seconds: float
    bubble: float
    memory: tuple[int, ...]
    messages: tuple[int, ...]
    sums: tuple[int, ...]
    retention: tuple[ActivationPolicy, ...]
    window: int
    host_memory: tuple[int, ...]
    line: tuple[int, ...] = ()
    shards: int = 1

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @cached_property
    def schedule(self) -> Schedule:
        """The lowered schedule of one group of ranks: messages, recomputation and sums included."""
        offload = {stage: each.offloaded for stage, each in enumerate(self.retention)}
        return lower(Schedule.parse(self.text), recompute=self.recompute, offload=offload)

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def groups(self) -> int:
        """The number of groups of ranks that run the same lists on parts of the batch."""
        return self.schedule.groups

    @property
    def ranks(self) -> int:
        """The number of ranks of all groups together, those that share tiles included."""
        return self.schedule.ranks * self.shards

    @property
    def microbatch(self) -> int:
        """The number of samples that go through a stage at once."""
        return self.input[0]

    @property
    def batch(self) -> int:
        """The number of samples of a step."""
        return self.microbatch * self.schedule.microbatches

    @property
    def images_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def sent(self) -> int:
        """The bytes sent in a step by the rank that sends most."""
        return max(map(sum, zip(self.messages, self.sums, strict=True)))

    def partition(self, graph: LayerGraph) -> Partition:
        """Cut a graph into the plan's stages.

        Args:
            graph: The model's layers in the order of the plan's `line`.

        Raises:
            PathosegError: It is the graph of another model, tile or microbatch.
        """
        if digest(graph) != self.digest or self.bounds[-1] != len(graph.layers):
            shape = input_shape(graph)
            own, other = map(_told, (self.input, shape))
            alike = ", which has other layers" if (self.model, own) == (graph.model, other) else ""
            raise PathosegError(
                f"The plan is for a {self.model} on microbatches of {own}, and not for this "
                f"{graph.model} on {other}{alike}.",
                _AGAIN,
            )
        return cut(graph, self.bounds)

    def in_strips(self, graph: LayerGraph, shards: int) -> Plan:
        """Return a plan that was made for one strip of a tile as that of ranks with all strips.

        Args:
            graph: The layers in the order of `line`, with the shapes of whole tiles.
            shards: The strips of a tile.

        Raises:
            PathosegError: A strip takes other layers than a whole tile.
        """
        names = [layer.name for layer in graph.layers]
        is_same = len(names) == self.bounds[-1] and self.starts == tuple(
            names[first] for first in self.bounds[:-1]
        )
        if not is_same:
            raise PathosegError(
                f"{self.model} has other layers for {shards} strips than for a whole tile, so its "
                "strips cannot be planned.",
                "Train it without [parallel] shards.",
            )
        return replace(self, digest=digest(graph), input=input_shape(graph), shards=shards)

    def to_json(self) -> str:
        """Return the plan as a text that `from_json` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "The plan") -> Plan:
        """Read a plan from JSON.

        Args:
            text: Made by `to_json`.
            name: The plan's name in errors.

        Raises:
            PathosegError: It is no plan, one of another version, or one that cannot run.
        """
        plan = read_versioned(text, cls, "plan", FORMAT, name, _AGAIN)
        plan._check(name)
        return plan

    def _check(self, name: str) -> None:
        order = Schedule.parse(self.text)
        validate(order)  # what is broken cannot be lowered
        ranks = order.placement.ranks
        by_rank = (self.memory, self.messages, self.sums, self.host_memory)
        if not (
            order.stages == self.stages == len(self.starts)
            and self.bounds[0] == 0
            and all(first < stop for first, stop in pairwise(self.bounds))
            and all(len(each) == ranks for each in by_rank)
            and len(self.retention) == self.stages
            and sorted(self.line) in ([], list(range(self.bounds[-1])))
            and self.window >= 0
            and set(self.recompute) <= set(range(self.stages))
            and self.input
            and min(self.input) > 0
            and self.seconds > 0
            and self.shards > 0
        ):
            raise PathosegError(f"The parts of {name} do not fit one another.", _AGAIN)
        validate(self.schedule)


def digest(graph: LayerGraph) -> str:
    """Return a hash of a graph's layers (names, kinds, shapes): equal where cuts mean the same."""
    inputs = [(name, value.shape) for name, value in graph.inputs.items()]
    layers = [
        (layer.name, layer.kind, [value.shape for value in layer.outputs]) for layer in graph.layers
    ]
    return hashlib.sha256(json.dumps([graph.model, inputs, layers]).encode()).hexdigest()[:16]


def _told(shape: tuple[int, ...]) -> str:
    """Return the shape of a microbatch in words."""
    return f"{shape[0]} × {shape[-2]}×{shape[-1]} px" if len(shape) > 2 else f"shape {shape}"


def input_shape(graph: LayerGraph) -> tuple[int, ...]:
    """Return the shape of the model's first input, such as (n, 3, height, width)."""
    return next(iter(graph.inputs.values())).shape
