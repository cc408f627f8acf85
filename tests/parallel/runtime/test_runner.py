"""Test a runner's predictions, state, precision, errors, memory checks and events."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pathoseg import gradient_step
from pathoseg.errors import PathosegError
from pathoseg.gradient_step import LossScale, load_by_name, state_by_name
from pathoseg.parallel.activations import saved_tensor_hooks as keeping
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime import executor
from pathoseg.parallel.runtime import memory_check as memory_module
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.rng import WholeModel
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training, edge_values
from pathoseg.parallel.schedule.action import COMPUTE, Kind
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule
from pathoseg.training.one_device import train_step
from tests.parallel.comm.thread_ranks import ThreadPending, ThreadTransport, run_ranks
from tests.parallel.networks.runtime_models import MODELS, per_sample_loss
from tests.parallel.runtime.cases import (
    PLANS,
    Case,
    judged,
    microbatches,
    prepare,
    reset,
    start,
    traced,
    training_of,
)
from tests.parallel.runtime.judge import STEPS, optimizer

CPU = torch.device("cpu")


def ranks_of(
    case: Case, body: Callable[[Runner], Any], training: Training | None = None
) -> list[Any]:
    """Runs `body` on a fresh runner of each rank."""
    prepare(case)
    return run_ranks(case.ranks, lambda transport: body(start(case, transport, training)))


def whole(case: Case) -> nn.Module:
    """The model of the case at its first weights."""
    return deepcopy(reset(traced(case.model, case.dtype, "judge")).model)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", ["data-parallel", "gpipe-folded", "1f1b", "gems-master"])
def test_a_prediction_is_that_of_the_whole_model_in_eval_mode(model: str, plan: str) -> None:
    case = Case(model, plan, 3)

    def body(runner: Runner) -> object:
        runner.step(0, microbatches(case, 0))
        found = runner.predict(microbatches(case, 1))
        state = runner.state()
        runner.step(1, microbatches(case, 1))  # in training mode again
        return found, state, runner.state()

    parts = ranks_of(case, body)
    alone = whole(case).eval()
    alone.load_state_dict(parts[0][1]["model"])
    batch = microbatches(case, 1)
    returned = {index: output for found, *_ in parts for index, output in found.items()}
    assert sorted(returned) == list(range(len(batch.sizes)))
    with torch.no_grad():
        for index, output in returned.items():
            expected = alone(**batch.inputs(index))
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
    first, second = (parts[0][at]["model"] for at in (1, 2))
    learnt = [name for name, each in alone.named_parameters() if each.requires_grad]
    same = [name for name in learnt if torch.equal(first[name], second[name])]
    assert len(same) < len(learnt) / 10  # a gradient may be too small to change a weight of 1


@pytest.mark.parametrize(
    "cases",
    [
        (Case("unet", "gpipe", 3), Case("unet", "data-parallel", 2)),
        (Case("unet", "data-parallel", 2), Case("unet", "1f1b-recomputed", 3)),
    ],
    ids=lambda cases: " to ".join(map(str, cases)),
)
def test_a_state_goes_on_with_another_number_of_ranks(cases: tuple[Case, Case]) -> None:
    first, second = cases

    def train(runner: Runner, case: Case, steps: range) -> dict:
        for step in steps:
            runner.step(step, microbatches(case, step))
        return runner.state()

    state, *others = ranks_of(first, lambda runner: train(runner, first, range(2)))
    assert not any(others)

    def go_on(runner: Runner) -> dict:
        runner.load(state)
        return train(runner, second, range(2, STEPS))

    final = ranks_of(second, go_on)[0]["model"]
    expected = judged("unet", torch.float32, tuple(first.sizes()), 0.0).state
    for name, value in final.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_a_state_is_that_of_one_device() -> None:
    case = Case("unet", "gems-master", 3)

    def body(runner: Runner) -> dict:
        runner.step(0, microbatches(case, 0))
        return runner.state()

    state = ranks_of(case, body)[0]
    alone = whole(case)
    alone.load_state_dict(state["model"])
    steps = optimizer([*alone.parameters()])
    names = {parameter: name for name, parameter in alone.named_parameters()}
    load_by_name(steps, names, state["optimizer"])
    assert state_by_name(steps, names).keys() == state["optimizer"].keys()


def test_a_state_of_another_model_is_refused() -> None:
    state = ranks_of(Case("dropout", "1f1b", 2), lambda runner: runner.state())[0]
    with pytest.raises(KeyError):
        ranks_of(Case("unet", "1f1b", 2), lambda runner: runner.load(state))


@pytest.mark.parametrize("plan", ["gems-master", "bidirectional", "hybrid-gems-mast"])
@pytest.mark.parametrize("model", ["unet", "dropout"])
def test_copies_of_a_stage_stay_equal_to_the_bit(model: str, plan: str) -> None:
    case = Case(model, plan, 4)
    for step in range(STEPS):

        def body(runner: Runner, steps: int = step + 1) -> None:
            for number in range(steps):
                runner.step(number, microbatches(case, number))

        ranks_of(case, body)
        first: dict[str, Tensor] = {}
        copies = 0
        for rank in range(case.ranks):
            for name, value in traced(model, case.dtype, rank).model.state_dict().items():
                if not value.is_meta:
                    copies += name in first
                    assert torch.equal(first.setdefault(name, value), value), (name, rank)
        assert copies >= len(first)


def test_a_message_of_another_size_is_refused() -> None:
    case = Case("unet", "1f1b", 3)

    def body(runner: Runner) -> None:
        batch = microbatches(case, 0)
        runner.step(0, batch)

        def larger(index: int) -> dict[str, Tensor]:
            images = batch.inputs(index)["images"]
            return {"images": images.repeat(1, 1, 2, 2) if index == 2 else images}

        runner.step(1, replace(batch, inputs=larger))

    with pytest.raises(PathosegError, match="Give the model inputs of one size"):
        ranks_of(case, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("plan", ["gpipe", "1f1b-recomputed"])
@pytest.mark.parametrize("model", ["unet-group-norm", "dropout"])
def test_a_step_is_that_of_one_device(model: str, plan: str, dtype: torch.dtype | None) -> None:
    """Precision, loss scaling, clipping and random layers, against training without ranks."""
    case = Case(model, plan, 3)
    training = Training(_weighted_loss, optimizer, seed=7, dtype=dtype, clip=0.02)
    numbers = range(4)

    def body(runner: Runner) -> object:
        results = [runner.step(step, _bold(case, step)) for step in numbers]
        return results, runner.state()

    results, state = ranks_of(case, body, training)[0]
    alone = reset(traced(model, case.dtype, "judge"))
    steps, scale = optimizer([*alone.model.parameters()]), LossScale(dtype is torch.float16)
    forward = WholeModel(alone.model, alone, training.seed, CPU).forward
    for step, result in zip(numbers, results, strict=True):
        batch = _bold(case, step)
        parts = [(batch.inputs(i)["images"], batch.targets(i)) for i in range(len(batch.sizes))]
        expected = train_step(
            alone.model,
            partial(forward, step),
            training.loss,
            parts,
            sum(batch.sizes),
            steps,
            scale,
            dtype,
            training.clip,
        )
        assert (result.loss_sum, result.finite) == (expected.loss_sum, expected.finite)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(state["model"][name], value), name
    assert state["scaler"] == scale.state_dict()
    # Nothing overflows but what is meant to.
    overflows = dtype is torch.float16
    assert [result.finite for result in results] == [True, not overflows, True, True]


def _weighted_loss(returned: Any, targets: Tensor) -> Tensor:
    """Targets of `_weighted`, shape (n, 2, h, w), to losses of shape (n,)."""
    classes, weights = targets.unbind(1)
    return weights[:, 0, 0] * per_sample_loss(returned, classes.long())


def _weighted(classes: Tensor, weight: float) -> Tensor:
    return torch.stack([classes, torch.full_like(classes, weight, dtype=torch.float32)], 1)


def _bold(case: Case, step: int) -> Microbatches:
    """Samples of which one step's gradient overflows half precision at the first loss scale."""
    batch = microbatches(case, step)
    weight = 1e5 if step == 1 else 1.0
    return replace(batch, targets=lambda index: _weighted(batch.targets(index), weight))


@pytest.mark.parametrize("plan", ["1f1b", "gems-master", "data-parallel"])
@pytest.mark.parametrize("model", ["unet", "unet-group-norm"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(model: str, plan: str) -> None:
    case = Case(model, plan, 3)

    def body(runner: Runner) -> object:
        batch = microbatches(case, 0)
        broken = replace(
            batch,
            inputs=lambda index: {
                name: value * (math.nan if index == 1 else 1)
                for name, value in batch.inputs(index).items()
            },
        )
        before = runner.state()
        result = runner.step(0, broken)
        return result.finite, before, runner.state()

    for finite, before, after in ranks_of(case, body):
        assert not finite
        assert before.keys() == after.keys()
        for name in before.get("model", ()):
            assert torch.equal(before["model"][name], after["model"][name])
        assert not after.get("optimizer")


def test_a_loss_that_is_a_mean_is_told_on_every_rank() -> None:
    case = Case("unet-group-norm", "1f1b", 3)
    training = Training(lambda *given: per_sample_loss(*given).mean(), optimizer)
    told = _what_ranks_hear(case, training, lambda: microbatches(case, 0), steps=1)
    assert len(told) == 3
    for text in told:
        assert "gave a tensor of shape () for 2 samples, not one number a sample" in text
        assert "shape (n,), not a mean over all" in text


@pytest.mark.parametrize(
    ("dtype", "problem"),
    [(None, "The last 3 steps changed nothing"), (torch.float16, "The loss scale has fallen")],
)
@pytest.mark.parametrize("plan", ["1f1b", "data-parallel"])
def test_what_is_not_finite_on_one_rank_ends_all_with_one_error(
    plan: str, dtype: torch.dtype | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_step, "_MOST_SKIPPED", 3)
    monkeypatch.setattr(gradient_step, "_LEAST_SCALE", 2.0**14)
    case = Case("unet-group-norm", plan, 3)

    def broken() -> Microbatches:
        batch = microbatches(case, 0)
        weights = {1: math.nan}
        return replace(batch, targets=lambda at: _weighted(batch.targets(at), weights.get(at, 1.0)))

    training = Training(_weighted_loss, optimizer, dtype=dtype)
    told = _what_ranks_hear(case, training, broken, steps=3)
    assert len(told) == 3
    assert len(set(told)) == 1
    assert problem in told[0]
    assert "the loss of microbatch 1 is nan" in told[0]


def _what_ranks_hear(
    case: Case, training: Training, batch: Callable[[], Microbatches], steps: int
) -> list[str]:
    """The errors of steps of which the last fails."""
    heard: list[str] = []

    def body(runner: Runner) -> None:
        for step in range(steps - 1):
            runner.step(step, batch())
        try:
            runner.step(steps - 1, batch())
        except PathosegError as error:
            heard.append(str(error))

    ranks_of(case, body, training)
    return heard


@pytest.mark.parametrize("plan", ["1f1b", "gems-master", "data-parallel"])
def test_an_output_that_the_loss_ignores_leaves_its_layers_alone(plan: str) -> None:
    case = Case("branches", plan, 3)

    def first_output(returned: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return per_sample_loss(returned[0], targets)

    # It shrinks whatever has a gradient, be it zero.
    shrinking = Training(first_output, lambda own: torch.optim.AdamW(own, 0.1, weight_decay=0.5))

    def body(runner: Runner) -> dict:
        for step in range(2):
            runner.step(step, microbatches(case, step))
        return runner.state()

    state = ranks_of(case, body, shrinking)[0]
    first = whole(case).state_dict()
    kept = {name for name, value in state["model"].items() if torch.equal(value, first[name])}
    assert kept == {"aside.weight", "aside.bias"}


@pytest.mark.slow
def test_tensors_are_freed_as_the_order_says() -> None:
    """A microbatch's input lives from its forward to its backward, on the first stage's rank."""
    for plan, most in (("1f1b", 3), ("mp-basic", 1), ("gems-master", 2), ("gpipe", 4)):
        case = Case("unet", plan, 3)

        def body(runner: Runner, case: Case = case) -> int:
            batch, alive, held = microbatches(case, 0), [], []

            def inputs(index: int) -> dict[str, Tensor]:
                found = batch.inputs(index)
                alive.append(weakref.ref(found["images"]))
                held.append(sum(each() is not None for each in alive))
                return found

            runner.step(0, replace(batch, inputs=inputs))
            assert not any(each() is not None for each in alive)
            return max(held, default=0)

        assert max(ranks_of(case, body)) == most, plan


@pytest.mark.parametrize("plan", ["1f1b-recomputed", "gems-master", "gpipe-folded"])
def test_events_are_the_actions_of_the_schedule(plan: str) -> None:
    case = Case("unet", plan, 3)
    schedule, _ = case.schedule()
    traces = ranks_of(case, lambda runner: runner.step(0, microbatches(case, 0), trace=True))
    for rank, result in enumerate(traces):
        seen = {event.action for event in result.events}
        assert len(seen) == len(result.events)
        gone = {each for each in schedule.lists[rank] if each not in seen}
        # Of an edge without gradient nothing is sent back.
        assert all(each.kind is Kind.SEND for each in gone)
        assert all(event.rank == rank and 0 <= event.start <= event.end for event in result.events)


@pytest.mark.parametrize("plan", ["data-parallel", "gems-mast", "bidirectional"])
def test_sums_begin_within_the_last_backward_in_one_order(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check when sums begin: after all that computes in the first step, within a backward later."""
    case, sums = Case("unet", plan, 2), ThreadTransport.sum
    begun: dict[int, list[tuple[str, int]]] = {0: [], 1: []}
    first: dict[int, list[tuple[str, int]]] = {}
    runners: dict[int, Runner] = {}

    def recorded(self: ThreadTransport, tensor: Tensor, ranks: tuple[int, ...]) -> ThreadPending:
        begun[self.rank].append((runners[self.rank].doing, tensor.numel()))
        return sums(self, tensor, ranks)

    def body(transport: ThreadTransport) -> None:
        runners[transport.rank] = start(case, transport)
        runners[transport.rank].step(0, microbatches(case, 0))
        first[transport.rank], begun[transport.rank] = begun[transport.rank], []
        runners[transport.rank].step(1, microbatches(case, 1))

    prepare(case)
    monkeypatch.setattr(ThreadTransport, "sum", recorded)
    run_ranks(2, body)
    assert [size for _, size in begun[0]] == [size for _, size in begun[1]]
    for rank in begun:
        assert begun[rank][0][0].startswith("in the backward of microbatch"), begun[rank]
        assert [size for _, size in first[rank]] == [size for _, size in begun[rank]]
        assert all("B" not in doing for doing, _ in first[rank]), first[rank]


@pytest.mark.parametrize("plan", PLANS)
def test_what_computes_comes_ahead_of_sums_that_begin_last(plan: str) -> None:
    """Check that `_sums_last` moves sums behind what computes and keeps their order."""
    for actions in Case("unet", plan, 3).schedule()[0].expanded().lists:
        late = executor._sums_last(actions)
        kinds = [each.kind for each in late]
        assert sorted(late, key=str) == sorted(actions, key=str)
        of_sums = [[each for each in some if each.kind is Kind.REDUCE] for some in (late, actions)]
        assert of_sums[0] == of_sums[1]
        if Kind.REDUCE in kinds:
            assert not COMPUTE & {*kinds[kinds.index(Kind.REDUCE) :]}


def test_a_rank_that_fails_names_itself_to_all() -> None:
    case = Case("unet", "gems-master", 3)
    heard: list[str] = []

    def body(runner: Runner) -> None:
        batch = microbatches(case, 0)

        def targets(index: int) -> Tensor:
            if index == 3:
                raise RuntimeError("the disk is gone")
            return batch.targets(index)

        try:
            runner.step(0, replace(batch, targets=targets))
        except PathosegError as error:
            heard.append(str(error))
            raise

    with pytest.raises(
        PathosegError, match="Rank 0 failed in the forward of microbatch 3 of stage 2"
    ):
        ranks_of(case, body)
    assert len(heard) == 3
    assert all("Rank 0" in text and "the disk is gone" in text for text in heard)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("std::bad_alloc"), MemoryError()],
)
def test_a_device_without_memory_names_what_was_planned(error: Exception) -> None:
    case = Case("unet", "1f1b", 2)
    prepare(case)
    memory = Memory(device_bytes=(3 * 2**29, 2**30))

    def body(transport: ThreadTransport) -> None:
        def targets(index: int) -> Tensor:
            raise error

        batch = replace(microbatches(case, 0), targets=targets)
        start(case, transport, memory=memory).step(0, batch)

    with pytest.raises(
        PathosegError, match="ran out of memory in the forward of microbatch 0 of stage 1"
    ) as told:
        run_ranks(2, body)
    assert "1 GiB were planned" in told.value.problem
    assert "--memory" in told.value.hint


def test_a_host_without_memory_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("unet", "1f1b", 2)
    prepare(case)
    monkeypatch.setattr(memory_module, "available_memory", lambda: 5 * 2**29)
    fitting, large = Memory(host_bytes=(2**30, 2**30)), Memory(host_bytes=(2**30, 2**31))
    run_ranks(2, lambda transport: start(case, transport, memory=fitting))
    with pytest.raises(PathosegError, match=r"keeps 3 GiB .* which has 2\.5 GiB left"):
        run_ranks(2, lambda transport: start(case, transport, memory=large))


def test_on_a_cpu_what_a_rank_computes_with_counts_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("unet", "1f1b", 2)
    prepare(case)
    monkeypatch.setattr(memory_module, "available_memory", lambda: 5 * 2**29)
    memory = Memory(host_bytes=(2**30, 2**30), device_bytes=(2**28, 2**29))
    with pytest.raises(PathosegError, match=r"takes about 2\.75 GiB .* which has 2\.5 GiB left"):
        run_ranks(2, lambda transport: start(case, transport, memory=memory))


def test_copies_to_the_host_are_events_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALL", 1)
    case = Case("unet", "1f1b", 2)
    layers = case.graph().layers
    _, partition = case.schedule()
    names = {
        stage: [
            layers[at].name
            for at in partition.layers(stage)
            if layers[at].name.endswith(("conv1", "conv2"))
        ]
        for stage in range(2)
    }
    case = replace(case, offload=names)
    schedule, _ = case.schedule()
    traces = ranks_of(case, lambda runner: runner.step(0, microbatches(case, 0), trace=True))
    for rank, result in enumerate(traces):
        times = {event.action: (event.start, event.end) for event in result.events}
        moves = [each for each in schedule.lists[rank] if each.tensor is not None]
        assert moves
        assert set(moves) <= set(times)
        for move in moves:
            forward = times[move._replace(kind=Kind.FORWARD, tensor=None)]
            backward = times[move._replace(kind=Kind.BACKWARD, tensor=None)]
            begin, end = times[move]
            assert begin <= end
            if move.kind is Kind.OFFLOAD:
                assert forward[0] <= begin <= end <= forward[1]
            else:
                assert forward[1] <= begin <= end <= backward[1]


def test_ranks_that_differ_are_refused() -> None:
    case = Case("unet", "1f1b", 2)
    prepare(case)
    schedule, partition = case.schedule()

    def body(transport: ThreadTransport) -> Runner:
        model = reset(traced(case.model, case.dtype, transport.rank))
        with torch.no_grad():
            next(model.model.parameters())[0] += transport.rank
        return Runner(model, partition, schedule, transport, CPU, training_of(case))

    with pytest.raises(PathosegError, match="Rank 1 and rank 0 differ in: weights"):
        run_ranks(2, body)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    case, other = Case("unet", "1f1b", 2), Case("unet", "1f1b", 3)
    prepare(other)
    for schedule, message in (
        (other.schedule()[0], "is for 3 ranks, not 2"),
        (one_f_one_b(2, 4), "no messages and steps"),
        (lower(one_f_one_b(2, 4)), "for other stages"),
    ):
        with pytest.raises(PathosegError, match=message):
            run_ranks(2, lambda transport, s=schedule: _runner(case, s, transport))


def _runner(case: Case, schedule: Schedule, transport: ThreadTransport) -> Runner:
    model = reset(traced(case.model, case.dtype, transport.rank))
    return Runner(model, case.schedule()[1], schedule, transport, CPU, training_of(case))


class Counting(nn.Module):
    """A running state that is no norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.calls.add_(1)
        scaled: Tensor = self.layer(values)
        return scaled


@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_running_state_of_other_kinds_needs_one_copy_that_runs_once(
    recompute: tuple[int, ...],
) -> None:
    wholes = [
        Traced(nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4)), torch.ones(2, 4))
        for _ in range(2)
    ]
    wholes[1].model.load_state_dict(wholes[0].model.state_dict())
    partition = even(wholes[0].graph, 2)
    edges = list(edge_values(partition))
    batch = Microbatches([2] * 4, lambda index: {"input": torch.ones(2, 4)}, lambda index: None)

    def step(schedule: Schedule) -> None:
        training = Training(lambda returned, targets: returned.sum(1), optimizer)

        def body(transport: ThreadTransport) -> None:
            runner = Runner(wholes[transport.rank], partition, schedule, transport, CPU, training)
            runner.step(0, batch)

        run_ranks(2, body)

    order = one_f_one_b(2, 4) if recompute else gems(2, pairs=2)
    with pytest.raises(PathosegError, match="no norm's running statistic"):
        step(lower(order, edges, recompute=recompute))
