"""Cases of the runtime with tiles in strips: `run_strips` on each rank, `compare` with a judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from tests.parallel.computing_device import DEVICE
from tests.parallel.networks.runtime_models import ALL_MODELS, SIDE, samples
from tests.parallel.runtime.cases import Case, reset, traced, training_of
from tests.parallel.runtime.judge import STEPS, Verdict


@dataclass(frozen=True)
class Sharded:
    """A case of the runtime, whose every rank is several ranks with a strip each.

    Attributes:
        case: The model, plan and ranks of whole tiles.
        shards: The strips of a tile.
    """

    case: Case
    shards: int

    def __str__(self) -> str:
        return f"{self.case}-in-{self.shards}"

    @property
    def ranks(self) -> int:
        return self.case.schedule()[0].ranks * self.shards


def prepare(sharded: Sharded) -> None:
    """Traces the models of ranks that are threads: torch.fx patches torch for all threads."""
    case = sharded.case
    case.schedule()
    for rank in range(sharded.ranks):
        traced(case.model, case.dtype, rank)


def microbatches(case: Case, step: int, runner: Runner) -> Microbatches:
    """The rows of one rank of a step's samples."""
    sizes, rows = case.sizes(), runner.rows(SIDE)
    kind = ALL_MODELS[case.model]

    def of(microbatch: int) -> tuple[Tensor, Tensor]:
        return samples(step, microbatch, sizes[microbatch], case.dtype)

    def inputs(microbatch: int) -> dict[str, Tensor]:
        whole = kind.inputs(of(microbatch)[0])
        return {name: images[:, :, rows] for name, images in whole.items()}

    return Microbatches(sizes, inputs, lambda each: of(each)[1][:, rows])


def start_strips(
    sharded: Sharded, transport: Transport, whose: object = None, memory: Memory | None = None
) -> Runner:
    """The runner of one rank, at the first weights of a model of its own, or of `whose`."""
    case = sharded.case
    schedule, partition = case.schedule()
    model = reset(traced(case.model, case.dtype, transport.rank if whose is None else whose))
    training = training_of(case)
    return Runner(
        model, partition, schedule, transport, DEVICE, training, memory, shards=sharded.shards
    )


def run_strips(
    sharded: Sharded, transport: Transport, whose: object = None, memory: Memory | None = None
) -> Verdict:
    """Three steps on one rank; gradients are those of its own parameters."""
    runner, verdict = start_strips(sharded, transport, whose, memory), Verdict()
    for step in range(STEPS):
        result = runner.step(step, microbatches(sharded.case, step, runner))
        assert result.finite
        verdict.losses.append(result.loss_sum)
        if step == 0:
            for name, parameter in runner.own.items():
                assert parameter.grad is not None, name
                verdict.gradients[name] = parameter.grad.cpu().clone()
    verdict.state = runner.state().get("model", {})
    return verdict


_ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}


def compare(
    sharded: Sharded,
    rank: int,
    verdict: Verdict,
    expected: Verdict,
    exact: Verdict | None = None,
) -> None:
    """Fails where a rank differs from the judge by more than rounding, each tensor for itself.

    The gradient of a bias ahead of a norm is 0 but for rounding: no gradient counts as smaller than
    a tenth of the mean one.

    Args:
        sharded: The case.
        rank: The rank.
        verdict: What it found.
        expected: What the judge found.
        exact: What the judge found in double precision, of a case in single precision. Gradients of
            the judge itself are 1e-6 to 6e-6 off there: a rank may be twice as far off.
    """
    most, where = _ROUNDING[sharded.case.dtype], f"{sharded}, rank {rank}"
    for found, loss in zip(verdict.losses, expected.losses, strict=True):
        assert abs(found - loss) <= most * abs(loss), f"{where}: loss {found}, not {loss}"
    norms = [float(gradient.double().norm()) for gradient in expected.gradients.values()]
    least = sum(norms) / len(norms) / 10
    allowed, truth = most, expected
    if exact is not None:
        truth = exact
        shares = [_share(each, truth.gradients[n], least) for n, each in expected.gradients.items()]
        allowed = max(most, 2 * max(shares))
        assert allowed <= 12 * most, f"{sharded}: rounding turns over a ReLU or pooling"
    for name, gradient in verdict.gradients.items():
        share = _share(gradient, truth.gradients[name], least)
        assert share <= allowed, f"{where}: gradient of {name} differs by {share:.2g}"
    assert set(verdict.state) == (set() if rank else set(expected.state)), where
    for name, value in verdict.state.items():
        share = _share(value, expected.state[name], 1e-30)
        assert share <= most, f"{where}: {name} differs by {share:.2g}"


def _share(found: Tensor, expected: Tensor, least: float) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=least))
