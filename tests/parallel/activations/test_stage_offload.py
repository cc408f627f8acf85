"""Test that offload of idle stages' tensors frees device memory and leaves results equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pathoseg.parallel.activations import saved_tensor_hooks as keeping
from pathoseg.parallel.activations import stage_offload
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park, parked_bytes
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Stage, Training, edge_values
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement, Schedule, folded
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.computing_device import DEVICE, finish

SAMPLES, STEPS = 2, 3
ALL = frozenset(Park)
MODES = [OffloadMode.NAIVE, OffloadMode.OVERLAPPED]


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_offload, "SMALL", 1)
    monkeypatch.setattr(keeping, "SMALL", 1)


class Net(nn.Module):
    """A convolution that runs in the first and in the last third, norms, views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Conv2d(8, 8, 1)
        self.group = nn.GroupNorm(2, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        values = self.twice(F.relu(self.stem(images)))
        values = self.group(self.middle(F.relu(self.norm(values))))
        rows = torch.tanh(self.mix(self.frozen(values.permute(0, 2, 3, 1))))
        values = torch.tanh(self.twice(rows.permute(0, 3, 1, 2)))
        result: Tensor = self.head(values.flatten(2).mean(2))
        return result


def _loss(returned: Tensor, targets: Tensor) -> Tensor:
    return (returned.float() - targets).pow(2).flatten(1).sum(1)


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True)


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    flat = [each for each in parameters if each.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.ndim > 1]},
        {"params": flat, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, 0.02)


OPTIMIZERS = {"sgd": _sgd, "adamw": _adamw}
ORDERS: dict[str, Callable[[], Schedule]] = {
    "gpipe": lambda: gpipe(Placement(1, ((0, 0, 0),)), 3),
    "folded": lambda: gpipe(folded(2), 3, flush=2),
    "gems-master": lambda: gems(2, pairs=2, per_visit=2),
}


@dataclass(frozen=True)
class Case:
    """One way to train `Net`.

    Attributes:
        order: Of the schedule.
        optimizer: Its name.
        clip: Largest norm of the gradient, or 0.
        dtype: Autocast precision, or None.
        mixture: Whether layers are kept, offloaded and recomputed by turns.
        recompute: Whether stages run once more as a whole.
    """

    order: str
    optimizer: str = "adamw"
    clip: float = 0.5
    dtype: torch.dtype | None = None
    mixture: bool = False
    recompute: bool = False


Told = tuple[list[float], dict[str, Any], dict[int, Any]]


@cache
def _first() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


@cache
def _read() -> Traced:
    return Traced(deepcopy(_first()), torch.empty(SAMPLES, 3, 6, 6))


def _on_ranks(case: Case, memory: Memory, work: Callable[[Runner, Microbatches], Any]) -> list[Any]:
    """Run `work` on each rank of a case; the ranks are threads.

    Args:
        case: How `Net` is trained.
        memory: The mode of copies, and the tensors of idle stages that are offloaded; the layers
            to be recomputed are the case's.
        work: Called with the rank's runner and the microbatches of a step.

    Returns:
        By rank, what `work` returned.
    """
    whole = ORDERS[case.order]()
    traced = [_read().on(deepcopy(_first())) for _ in range(whole.ranks)]
    graph = traced[0].graph
    partition = even(graph, whole.stages)
    names = [[graph.layers[at].name for at in partition.layers(s)] for s in range(whole.stages)]
    offload, recomputed, twice = {}, {}, {}
    if case.mixture:
        offload = {stage: each[1::3] for stage, each in enumerate(names)}
        recomputed = {stage: each[2::3] for stage, each in enumerate(names)}
        twice = {stage: each[3::6] for stage, each in enumerate(names)}
    schedule = lower(
        whole,
        list(edge_values(partition)),
        recompute=range(whole.stages) if case.recompute else (),
        offload=offload,
        buckets=2,
    )
    memory = Memory(recomputed, twice, 2_000, memory.mode, parked=memory.parked)
    training = Training(_loss, OPTIMIZERS[case.optimizer], dtype=case.dtype, clip=case.clip)
    [name] = graph.inputs
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(schedule.microbatches, SAMPLES, 3, 6, 6, generator=seeded)
    parts = Microbatches(
        [SAMPLES] * schedule.microbatches,
        lambda at: {name: images[at]},
        lambda at: images[at].mean((2, 3))[:, :2].to(DEVICE),
    )

    def rank(transport: Transport) -> Any:
        runner = Runner(
            traced[transport.rank], partition, schedule, transport, DEVICE, training, memory
        )
        result = work(runner, parts)
        finish()
        return result

    return run_ranks(whole.ranks, rank)


def _steps(runner: Runner, parts: Microbatches, steps: range = range(STEPS)) -> list[float]:
    results = [runner.step(step, parts) for step in steps]
    assert all(result.finite for result in results)
    return [result.loss_sum for result in results]


def _train(runner: Runner, parts: Microbatches) -> Told:
    """Losses, state, predictions."""
    return _steps(runner, parts), runner.state(), runner.predict(parts)


@cache
def _unparked(case: Case) -> list[Told]:
    return _on_ranks(case, Memory(), _train)


def _equal(found: Any, expected: Any) -> None:
    """Bit by bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            _equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


CHOICES = [*(("adamw", {park}) for park in Park), ("adamw", ALL), ("sgd", ALL)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("optimizer", "parked"), CHOICES)
@pytest.mark.parametrize("order", ORDERS)
def test_training_is_the_same(
    order: str, optimizer: str, parked: Collection[Park], mode: OffloadMode
) -> None:
    case = Case(order, optimizer)
    found = _on_ranks(case, Memory(mode=mode, parked=frozenset(parked)), _train)
    _equal(found, _unparked(case))


@pytest.mark.parametrize("mode", [mode for mode in OffloadMode if mode not in MODES])
def test_all_modes_do_the_same(mode: OffloadMode) -> None:
    case = Case("gpipe")
    _equal(_on_ranks(case, Memory(mode=mode, parked=ALL), _train), _unparked(case))


@pytest.mark.parametrize(
    "case",
    [
        Case("gpipe", clip=0.0, mixture=True),
        Case("gems-master", mixture=True, recompute=True),
        Case("folded", recompute=True),
        # One rank: ranks that are threads share the cache of casts, and differ from run to run.
        Case("gpipe", dtype=torch.bfloat16, mixture=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_it_goes_with_offload_and_recomputation(case: Case, mode: OffloadMode) -> None:
    _equal(_on_ranks(case, Memory(mode=mode, parked=ALL), _train), _unparked(case))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gpipe", "gems-master"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_from_its_state(order: str, mode: OffloadMode) -> None:
    case, parked = Case(order), Memory(mode=mode, parked=ALL)
    [losses, state, _], *_ = _unparked(case)
    for first, second in ((Memory(), parked), (parked, Memory()), (parked, parked)):

        def begin(runner: Runner, parts: Microbatches) -> Any:
            _steps(runner, parts, range(2))
            return runner.state()

        kept = _on_ranks(case, first, begin)[0]

        def go_on(runner: Runner, parts: Microbatches, kept: Any) -> Any:
            runner.step(0, parts)  # something to be overwritten
            runner.load(kept)
            return _steps(runner, parts, range(2, STEPS)), runner.state()

        found = _on_ranks(case, second, partial(go_on, kept=kept))[0]
        _equal(found, (losses[2:], state))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_changes_nothing(mode: OffloadMode) -> None:
    def work(runner: Runner, parts: Microbatches) -> Any:
        wrong = Microbatches(
            parts.sizes,
            lambda at: {name: each * torch.inf for name, each in parts.inputs(at).items()},
            parts.targets,
        )
        assert not runner.step(0, wrong).finite
        return runner.state()["optimizer"], _steps(runner, parts)[0]

    case = Case("gpipe")
    kept, loss = _on_ranks(case, Memory(mode=mode, parked=ALL), work)[0]
    assert kept == {}
    assert loss == _on_ranks(case, Memory(), work)[0][1]


def _storages(runner: Runner, park: Park) -> dict[int, int]:
    """Bytes on the device, by storage."""
    found: list[Any] = [*runner._model.parameters()]
    if park is Park.GRADIENTS:
        found = [each.grad for each in found if each.grad is not None]
    elif park is Park.OPTIMIZER:
        assert runner.optimizer is not None
        found = [each for kept in runner.optimizer.state.values() for each in kept.values()]
        found = [each for each in found if each.ndim]
    storages = [each.untyped_storage() for each in found]
    return {each.data_ptr(): each.nbytes() for each in storages if each.nbytes() > 4}


@pytest.mark.parametrize("mode", MODES)
def test_only_the_stages_at_work_are_on_the_device(
    mode: OffloadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = 2 if mode is OffloadMode.OVERLAPPED else 1
    most: dict[Park, int] = dict.fromkeys(Park, 0)

    def work(runner: Runner, parts: Microbatches) -> None:
        sizes = sorted(
            parked_bytes({Park.PARAMETERS}, each.parameters(), _adamw)
            for each in _stages_of(runner)
        )

        def watch(name: str) -> None:
            plain = getattr(Stage, name)

            def watched(stage: Stage, *rest: Any) -> Any:
                result = plain(stage, *rest)
                for park in Park:
                    most[park] = max(most[park], sum(_storages(runner, park).values()))
                return result

            monkeypatch.setattr(Stage, name, watched)

        runner.step(0, parts)
        watch("forward")
        watch("backward")
        runner.step(1, parts)
        for park in (Park.PARAMETERS, Park.GRADIENTS):
            assert 0 < most[park] <= sum(sizes[-at_once:]) < sum(sizes)
            assert not _storages(runner, park)
        assert most[Park.OPTIMIZER] == 0

    _on_wide(mode, work)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_does_not_hold_on_to_parameters(
    mode: OffloadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer saves a view of its weight: its memory must go nevertheless."""

    def work(runner: Runner, parts: Microbatches) -> None:
        plain, seen = Stage.forward, []

        def watched(stage: Stage, *rest: Any) -> Any:
            result = plain(stage, *rest)
            if stage.number == 0:
                weight = next(_stages_of(runner)[0].parameters())
                assert weight.untyped_storage().nbytes() > 4
                seen.append(StorageWeakRef(weight.untyped_storage()))  # type: ignore[no-untyped-call]  # torch's
            elif stage.is_last:
                assert seen[-1].expired()  # type: ignore[no-untyped-call]  # torch's
            return result

        monkeypatch.setattr(Stage, "forward", watched)
        runner.step(0, parts)
        assert len(seen) == len(parts.sizes)

    _on_wide(mode, work)


def test_a_trace_has_the_copies() -> None:
    def work(runner: Runner, parts: Microbatches) -> set[tuple[str, str, int]]:
        runner.step(0, parts)
        events = runner.step(1, parts, trace=True).events
        return {
            (each.action.kind.value, each.action.tensor, each.action.stage)
            for each in events
            if each.action.tensor
        }

    [found] = _on_ranks(Case("gpipe"), Memory(parked=ALL), work)
    for stage in range(3):
        assert ("PREFETCH", "parameters", stage) in found
        assert ("OFFLOAD", "gradients", stage) in found
        assert ("OFFLOAD", "optimizer", stage) in found


def _stages_of(runner: Runner) -> list[nn.Module]:
    return [*runner._model.children()]


def _on_wide(mode: OffloadMode, work: Callable[[Runner, Microbatches], None]) -> None:
    """Four linear layers, each a stage of one rank."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    traced = Traced(model, torch.empty(SAMPLES, 16))
    schedule = lower(gpipe(Placement(1, ((0,) * 4,)), 2), list(edge_values(even(traced.graph, 4))))
    [name] = traced.graph.inputs
    parts = Microbatches(
        [SAMPLES] * 2, lambda at: {name: torch.ones(SAMPLES, 16)}, lambda at: torch.zeros(())
    )
    training = Training(_loss, _adamw)

    def rank(transport: Transport) -> None:
        memory = Memory(mode=mode, parked=ALL)
        partition = even(traced.graph, 4)
        runner = Runner(traced, partition, schedule, transport, DEVICE, training, memory)
        work(runner, parts)
        finish()

    run_ranks(1, rank)
