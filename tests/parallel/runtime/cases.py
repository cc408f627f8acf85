"""The cases that the runtime is judged by, on any transport: `run_case` on each rank, `compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.cost_model import Roofline
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.graph.reorder import reordered
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import balance, even
from pathoseg.parallel.planning.plan import Plan as PlannedStep
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training, edge_values
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, Link
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded, linear, mirrored
from pathoseg.parallel.schedule.synthesise import synthesise
from tests.parallel.computing_device import DEVICE, HAS_OWN_KERNELS
from tests.parallel.networks.runtime_models import (
    ALL_MODELS,
    SIDE,
    per_sample_loss,
    samples,
)
from tests.parallel.runtime.judge import STEPS, Verdict, judge, optimizer

Order = Callable[[int], Schedule]
# Fast links beside its arithmetic, so that small branches pay.
_TOY = Hardware(
    "toy",
    "cpu",
    2**40,
    {"float32": 1e9},
    1e9,
    per_node=8,
    inside=Link(1e-7, 1e-12),
    between=Link(1e-7, 1e-12),
    host=Link(1e-6, 1e-10),
)
JUDGE = "judge"  # whose model the serial step trains


def _synthesised(mirror: bool) -> Order:
    def order(ranks: int) -> Schedule:
        placement = mirrored(ranks) if mirror else linear(ranks)
        return synthesise(placement, Costs.equal(ranks, 1, 2), 4, 3 * ranks)

    return order


@dataclass(frozen=True)
class Plan:
    """An order with all that is decided beside it.

    Attributes:
        order: Makes the order for so many ranks.
        groups: How many groups of ranks run it.
        naive: Whether the model is cut evenly, not balanced.
        recompute: Whether all stages are recomputed.
        buckets: In how many parts gradients are summed.
        one_rank: Whether a group is a rank alone.
        branched: The named order that the planner builds on branches side by side, in place of
            `order`, and its microbatches.
    """

    order: Order | None = None
    groups: int = 1
    naive: bool = False
    recompute: bool = False
    buckets: int = 1
    one_rank: bool = False
    branched: tuple[str, int] | None = None


PLANS = {
    "data-parallel": Plan(lambda ranks: sequential(2), groups=0, one_rank=True, buckets=3),
    "mp-basic-naive": Plan(lambda ranks: mp_basic(linear(ranks), 3), naive=True),
    "mp-basic": Plan(lambda ranks: mp_basic(linear(ranks), 3)),
    "gpipe": Plan(lambda ranks: gpipe(linear(ranks), 4)),
    "gpipe-folded": Plan(lambda ranks: gpipe(folded(ranks), 3, flush=2)),
    "1f1b": Plan(lambda ranks: one_f_one_b(ranks, 5)),
    "1f1b-recomputed": Plan(lambda ranks: one_f_one_b(ranks, 4), recompute=True),
    "gems-mast": Plan(lambda ranks: gems(ranks), buckets=2),
    "gems-master": Plan(lambda ranks: gems(ranks, pairs=2, per_visit=2)),
    "gems-master-recomputed": Plan(lambda ranks: gems(ranks, pairs=2, per_visit=2), recompute=True),
    "bidirectional": Plan(lambda ranks: bidirectional(ranks, 5), buckets=2),
    "synthesised": Plan(_synthesised(mirror=False)),
    "synthesised-mirrored": Plan(_synthesised(mirror=True)),
}
BRANCHED = {
    "branched-gpipe": Plan(branched=("gpipe", 3)),
    "branched-1f1b": Plan(branched=("1f1b", 4)),
    "branched-recomputed": Plan(branched=("1f1b-recompute", 4), recompute=True),
    "branched-gems-mast": Plan(branched=("gems-mast", 4), buckets=2),
    "branched-bidirectional": Plan(branched=("bidirectional", 4)),
    "branched-synthesised": Plan(branched=("synthesised", 4)),
    "branched-hybrid": Plan(branched=("gpipe", 4), groups=2),
}
HYBRIDS = {
    f"hybrid-{name}": replace(PLANS[name], groups=2) for name in ("mp-basic", "gems-mast", "gpipe")
} | {"hybrid-gems-master": replace(PLANS["gems-master"], groups=2, buckets=3)}


@dataclass(frozen=True)
class Case:
    """One model under one plan on so many ranks.

    Attributes:
        model: Name of it.
        plan: Name of it.
        ranks: Of all groups together.
        dtype: Of parameters and samples.
        clip: Largest norm of the gradient, or 0.
        last: Samples of the last microbatch; the others have 2.
        offload: By stage, the layers whose storages wait in host memory.
    """

    model: str
    plan: str
    ranks: int
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    last: int = 1
    offload: Mapping[int, Sequence[str]] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        name = f"{self.model}-{self.plan}-{self.ranks}"
        name += f"-last-{self.last}" if self.last != 1 else ""
        name += "-clipped" if self.clip else ""
        return name + ("-double" if self.dtype is torch.float64 else "")

    @property
    def setting(self) -> Plan:
        setting = (PLANS | HYBRIDS | BRANCHED)[self.plan]
        return replace(setting, groups=self.ranks) if setting.one_rank else setting

    @property
    def keeps_order(self) -> bool:
        """True if every sum is in one process's order, so that results are equal to the bit."""
        if self.plan == "branched-synthesised":  # may take microbatches in any order
            return False
        replicas = self.schedule()[0].placement.replicas * self.setting.groups
        return ALL_MODELS[self.model].keeps_order and replicas == 1

    def schedule(self) -> tuple[Schedule, Partition]:
        """Return the lowered schedule, its groups not written out, and the cut of the model."""
        return _lowered(self)

    @property
    def line(self) -> tuple[int, ...]:
        """The order of the model's layers; empty where it is the model's own."""
        return _planned(self.model, self.plan, self.ranks).line if self.setting.branched else ()

    def graph(self) -> LayerGraph:
        """The layers of the model; branches are planned by the toy's single precision."""
        dtype = torch.float32 if self.setting.branched else self.dtype
        return traced(self.model, dtype, JUDGE).graph

    def sizes(self) -> list[int]:
        """Samples of each microbatch."""
        count = self.schedule()[0].microbatches
        return [2] * (count - 1) + [self.last]


@cache
def _lowered(case: Case) -> tuple[Schedule, Partition]:
    order, partition = _cut(case.model, case.plan, case.ranks, case.dtype)
    lowered = lower(
        order,
        list(edge_values(partition)),
        recompute=range(order.stages) if case.setting.recompute else (),
        offload=case.offload,
        buckets=case.setting.buckets,
    )
    return lowered, partition


@cache
def _cut(model: str, name: str, ranks: int, dtype: torch.dtype) -> tuple[Schedule, Partition]:
    case = Case(model, name, ranks, dtype)
    if case.setting.branched:
        found = _planned(model, name, ranks)
        return Schedule.parse(found.text), found.partition(reordered(case.graph(), found.line))
    order = _order(name, ranks // case.setting.groups)
    partition = (even if case.setting.naive else balance)(case.graph(), order.stages)
    return replace(order, groups=case.setting.groups), partition


@cache
def _order(name: str, ranks: int) -> Schedule:
    make = (PLANS | HYBRIDS)[name].order
    assert make is not None
    return make(ranks)


@cache
def _planned(model: str, name: str, ranks: int) -> PlannedStep:
    """The fastest plan of branches on a toy device."""
    case = Case(model, name, ranks)
    assert case.setting.branched
    order, microbatches = case.setting.branched
    priced = StageCosts(case.graph(), Roofline(_TOY), _TOY)
    batch = 2 * microbatches * case.setting.groups
    request = PlanRequest(ranks, 2**40, batch, order, branches="only", all_ranks=True)
    plans = [each for each in plan([priced], request) if each.groups == case.setting.groups]
    assert plans, f"{case}: no plan of branches"
    return plans[0]


@cache
def traced(model: str, dtype: torch.dtype, whose: object) -> Traced:
    """A seeded model, one for each that asks; `reset` brings it back to its first weights."""
    found = _read(model, dtype).on(deepcopy(_read(model, dtype).model))
    found.first = deepcopy(found.model.state_dict())
    return found


@cache
def _read(model: str, dtype: torch.dtype) -> Traced:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kind = ALL_MODELS[model]
        made = kind.make()
        for parameter in made.parameters():
            if parameter.ndim == 1:  # zeros would leave nothing but their gradients to compare
                nn.init.normal_(parameter, parameter.mean().item(), 0.1)
        made = made.to(dtype)  # last: the first weights are the same in every precision
    return Traced(made, kind.inputs(torch.empty(2, 3, SIDE, SIDE, dtype=dtype)))


def reset(found: Traced) -> Traced:
    """Gives a model that was cut its memory and its first weights back."""
    found.model.to_empty(device="cpu")
    found.model.load_state_dict(found.first)
    found.model.zero_grad()
    return found


def training_of(case: Case) -> Training:
    """Return the loss, the optimizer and the clipping by which a case is trained."""
    return Training(per_sample_loss, optimizer, clip=case.clip)


def microbatches(case: Case, step: int) -> Microbatches:
    """The samples of one step."""
    sizes = case.sizes()
    kind = ALL_MODELS[case.model]

    def part(index: int) -> tuple[Tensor, Tensor]:
        return samples(step, index, sizes[index], case.dtype)

    return Microbatches(
        sizes, lambda index: kind.inputs(part(index)[0]), lambda index: part(index)[1].to(DEVICE)
    )


def start(
    case: Case,
    transport: Transport,
    training: Training | None = None,
    memory: Memory | None = None,
    whose: object = None,
) -> Runner:
    """The runner of one rank, at the first weights of a model of its own, or of `whose`."""
    schedule, partition = case.schedule()
    whole = reset(traced(case.model, case.dtype, transport.rank if whose is None else whose))
    training = training or training_of(case)
    whole = whole.reordered(case.line)
    return Runner(whole, partition, schedule, transport, DEVICE, training, memory)


def prepare(case: Case) -> None:
    """Traces the models of ranks that are threads: torch.fx patches torch for all threads."""
    case.schedule()
    for rank in range(case.ranks):
        traced(case.model, case.dtype, rank)


def run_case(
    case: Case, transport: Transport, memory: Memory | None = None, whose: object = None
) -> Verdict:
    """Three steps on one rank; gradients are those of its own parameters."""
    verdict = Verdict()
    runner = start(case, transport, memory=memory, whose=whose)
    for step in range(STEPS):
        result = runner.step(step, microbatches(case, step))
        assert result.finite
        verdict.losses.append(result.loss_sum)
        if step == 0:
            verdict.gradients = {name: p.grad.cpu().clone() for name, p in runner.own.items()}
    verdict.state = runner.state().get("model", {})
    return verdict


@cache
def judged(model: str, dtype: torch.dtype, sizes: tuple[int, ...], clip: float) -> Verdict:
    return judge(ALL_MODELS[model], reset(traced(model, dtype, JUDGE)), sizes, clip)


def judged_case(case: Case) -> Verdict:
    """Return what one process finds."""
    return judged(case.model, case.dtype, tuple(case.sizes()), case.clip)


def save_verdicts(cases: Sequence[Case], path: Path) -> None:
    """Judges cases for ranks that are processes, which then need not each do so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: others would add in another order
    found = {str(case): asdict(judged_case(case)) for case in cases}
    torch.set_num_threads(threads)
    torch.save(found, path)


def load_verdicts(path: Path) -> dict[str, Verdict]:
    """By the cases' names."""
    return {name: Verdict(**each) for name, each in torch.load(path, weights_only=True).items()}


_ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}
_OTHER_KERNELS = {torch.float32: 1e-4, torch.float64: 1e-11}


def compare(case: Case, rank: int, verdict: Verdict, expected: Verdict | None = None) -> None:
    """Fails where a rank differs from the judge by more than the order of sums explains."""
    if expected is None:
        expected = judged_case(case)
    most = _ROUNDING[case.dtype]
    if HAS_OWN_KERNELS:
        most = _OTHER_KERNELS[case.dtype]
    elif case.keeps_order:
        most = 0.0
    where = f"{case}, rank {rank}"
    for found, loss in zip(verdict.losses, expected.losses, strict=True):
        assert abs(found - loss) <= most * abs(loss), f"{where}: loss {found}, not {loss}"
    for name, gradient in verdict.gradients.items():
        _close(gradient, expected.gradients[name], most, f"{where}: gradient of {name}")
    assert set(verdict.state) == (set() if rank else set(expected.state)), where
    # Statistics that are kept and applied later are those of torch's own kernel to rounding.
    later = (
        most
        if case.keeps_order and not case.setting.recompute
        else max(most, _ROUNDING[case.dtype])
    )
    for name, value in verdict.state.items():
        allowed = later if "running_" in name else most
        _close(value, expected.state[name], allowed, f"{where}: {name}")


def _close(found: Tensor, expected: Tensor, most: float, what: str) -> None:
    difference = (found.double() - expected.double()).norm()
    share = float(difference / expected.double().norm().clamp(min=1e-30))
    assert share <= most, f"{what} differs by {share:.2g}"
