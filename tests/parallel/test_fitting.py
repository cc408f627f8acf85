"""The program of docs/own-models.md, run on ranks, trains what a plain loop trains."""

from __future__ import annotations

import math
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.parallel import Plan, PlanRequest, Training, fit, fitting, load_hardware
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.fitting import Fit
from pathoseg.parallel.graph.layer_graph import Work
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.stage import Loss
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks
from tests.two_inputs import TwoFields

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-models.md"


@pytest.mark.process
def test_the_documented_program_trains_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    program = tmp_path / "own.py"
    program.write_text(found[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_local(2, [sys.executable, str(program)]) == 0
    own = runpy.run_path(str(program), run_name="own")
    model, threads = own["make_model"](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizer = own["make_optimizer"](model.parameters())
        losses = [_step(own, model, optimizer, step) for step in range(3)]
    finally:
        torch.set_num_threads(threads)
    printed = [f"step {step}: loss {loss / 8:.4f}" for step, loss in enumerate(losses)]
    assert capfd.readouterr().out.splitlines() == printed
    trained = torch.load("own.pt", weights_only=True)
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (".mean((1, 2))", ".mean()", "not one number a sample"),
        (
            "torch.randn(8, 3",
            "torch.randn(12, 3",
            "has 12 samples of inputs, and the plan is for",
        ),
    ],
)
def test_what_would_train_something_else_is_refused(
    right: str,
    wrong: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert right in found[1]
    program = tmp_path / "own.py"
    program.write_text(found[1].replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_local(2, [sys.executable, str(program)]) != 0
    assert said in "".join(capfd.readouterr())
    assert not Path("own.pt").exists()


def test_a_model_of_several_inputs_takes_them_by_name() -> None:
    torch.manual_seed(0)
    model = TwoFields(2)
    alone = deepcopy(model)
    size = (2, 3, 32, 32)
    request = PlanRequest(1, 2**30, 4, "sequential")
    batch = {"image": torch.rand(4, *size[1:]), "context": torch.rand(4, *size[1:])}
    targets = torch.zeros(4, dtype=torch.long)

    def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.mean((2, 3)), targets, reduction="none")

    def body(transport: ThreadTransport) -> Fit:
        example = {name: torch.empty(size) for name in batch}
        training = Training(losses, partial(torch.optim.SGD, lr=0.1))
        hardware = load_hardware("cpu")
        run = fit(model, example, training, request, hardware, transport, torch.device("cpu"))
        for given in (batch["image"], {"image": batch["image"]}, {**batch, "more": targets}):
            with pytest.raises(PathosegError, match="and the model takes image, context"):
                run.step(0, given, targets)
        with pytest.raises(PathosegError, match="has 3 samples of image, and the plan"):
            run.predict({name: each[:3] for name, each in batch.items()})
        predicted.update(run.predict(batch))
        run.step(0, batch, targets)
        return run

    predicted: dict[int, torch.Tensor] = {}
    [run] = run_ranks(1, body)
    expected = deepcopy(alone).eval()(**batch).detach()
    torch.testing.assert_close(torch.cat([predicted[0], predicted[1]]), expected)
    assert run.inputs == ("image", "context")
    losses(alone(**batch), targets).mean().backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(mine, other - 0.1 * other.grad)


class _Recurrent(nn.Module):
    """A model with an LSTM over the pixels of a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        made = self.first(images)
        told, _ = self.recurrent(made.flatten(2).transpose(1, 2))
        classes: torch.Tensor = self.last(told.transpose(1, 2).reshape(made.shape))
        return classes


def test_ranks_that_price_one_model_otherwise_train_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    alone = _Recurrent()
    models = [deepcopy(alone) for _ in range(2)]
    example, batch, targets = torch.empty(2, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.zeros(4)
    known = {id(model): Traced(model, example) for model in models}
    graph = known[id(models[1])].graph
    layers = tuple(replace(layer, backward=Work(read=1), saved=()) for layer in graph.layers)
    known[id(models[1])].graph = replace(graph, layers=layers)
    monkeypatch.setattr(fitting, "Traced", lambda model, *_: known[id(model)])

    def losses(returned: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return returned.pow(2).flatten(1).mean(1)

    def body(transport: ThreadTransport) -> Fit:
        run = fit(
            models[transport.rank],
            example,
            Training(losses, partial(torch.optim.SGD, lr=0.1)),
            PlanRequest(2, 2**30, 4, "1f1b", all_ranks=True),
            load_hardware("cpu"),
            transport,
            torch.device("cpu"),
        )
        run.step(0, batch, targets)
        return run

    runs = run_ranks(2, body)
    losses(alone(batch), targets).mean().backward()
    trained = {name: own for run in runs for name, own in run.runner.own.items()}
    expected = dict(alone.named_parameters())
    assert trained.keys() == expected.keys()
    for name, parameter in expected.items():
        assert parameter.grad is not None
        torch.testing.assert_close(trained[name], parameter - 0.1 * parameter.grad)


class _Boxes(nn.Module):
    """A model that returns two boxes a tile, of four numbers each, moved by a known offset."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Linear(4, 8)

    def forward(self, images: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        pooled = self.first(images).relu().mean((2, 3))
        boxes: torch.Tensor = self.last(pooled).view(-1, 2, 4) + offset
        return boxes


def _in_strips(models: list[_Boxes], batch: dict[str, torch.Tensor]) -> Callable[..., Fit]:
    """Return what sets up each of two ranks, which share the tiles of one sequential schedule."""
    traced = [Traced(model, batch) for model in models]
    graph, hardware = traced[0].graph, load_hardware("cpu")
    priced = StageCosts(graph, cost_model(hardware), hardware, 0)
    plan = fitting.best([priced], PlanRequest(1, 2**30, 4, "sequential")).in_strips(graph, 2)

    def start(transport: ThreadTransport, losses: Loss) -> Fit:
        training = Training(losses, partial(torch.optim.SGD, lr=0.1))
        return fitting.split(traced[transport.rank], plan, training, transport, torch.device("cpu"))

    return start


def test_strips_cut_what_has_the_rows_of_a_tile_alone() -> None:
    torch.manual_seed(0)
    alone = _Boxes()
    models = [deepcopy(alone) for _ in range(2)]
    batch = {"images": torch.randn(4, 3, 8, 8), "offset": torch.randn(4, 1, 4)}
    targets = torch.randn(4, 2, 4)
    start = _in_strips(models, batch)

    def losses(returned: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (returned - targets).pow(2).flatten(1).mean(1)

    def body(transport: ThreadTransport) -> float:
        run = start(transport, losses)
        loss = run.step(0, batch, targets).loss_sum
        with pytest.raises(PathosegError, match="4 rows, as many as a strip"):
            run.step(1, batch, torch.randn(4, 4, 4))
        return loss

    losses(alone(**batch), targets).mean().backward()
    loss = losses(alone(**batch), targets).sum().item()
    assert run_ranks(2, body) == [pytest.approx(loss)] * 2
    for model in models:
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert other.grad is not None
            torch.testing.assert_close(mine, other - 0.1 * other.grad)


def test_a_rank_of_strips_without_memory_says_what_was_planned() -> None:
    """The plan has the memory of one rank, which two ranks take for their strips."""
    batch = {"images": torch.randn(4, 3, 8, 8), "offset": torch.randn(4, 1, 4)}
    start = _in_strips([_Boxes(), _Boxes()], batch)

    def body(transport: ThreadTransport) -> None:
        def losses(returned: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if transport.rank:
                raise MemoryError
            return (returned - targets).pow(2).flatten(1).mean(1)

        told = r"Rank 1 ran out of memory in the forward of microbatch 0 of stage 0: .* planned"
        with pytest.raises(PathosegError, match=told):
            start(transport, losses).step(0, batch, torch.zeros(4, 2, 4))

    run_ranks(2, body)


def _fitted(transport: ThreadTransport, **changed: Any) -> Fit:
    given = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "dtype": None,
        "memory": 2**30,
        "trained": True,
        "hardware": "cpu",
        "plan": None,
        "model": nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)),
    } | changed
    model, example = given["model"], torch.zeros(2).long()
    if not given["trained"]:
        model.requires_grad_(False)
    training = Training(
        lambda returned, _: returned.flatten(), given["optimizer"], 0, given["dtype"]
    )
    request = given["plan"] or PlanRequest(1, given["memory"], 2, "sequential")
    device = torch.device("cpu")
    return fit(model, example, training, request, given["hardware"], transport, device)


def _trains(run: Fit) -> bool:
    return math.isfinite(run.step(0, torch.arange(2), torch.zeros(2)).loss_sum)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_samples_without_dimensions_train_in_any_precision(dtype: torch.dtype | None) -> None:
    assert run_ranks(1, lambda transport: _trains(_fitted(transport, dtype=dtype))) == [True]


def test_a_model_trains_in_a_precision_of_which_no_rate_is_known() -> None:
    """The shipped A10 states none of float64; a model of its own dtype has no autocast."""

    def body(transport: ThreadTransport) -> bool:
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)).double()
        return _trains(_fitted(transport, model=model, hardware="a10"))

    assert run_ranks(1, body) == [True]


def test_a_plan_that_was_made_before_is_taken() -> None:
    def body(transport: ThreadTransport) -> bool:
        made = _fitted(transport).plan
        again = Plan.from_json(made.to_json())
        run = _fitted(transport, plan=again, hardware="none is needed")
        other = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
        with pytest.raises(PathosegError, match="The plan is for"):
            _fitted(transport, plan=again, model=other)
        return run.plan == made and _trains(run)

    assert run_ranks(1, body) == [True]


def test_torchscript_is_refused_as_a_whole_and_trains_as_a_part() -> None:
    def body(transport: ThreadTransport) -> bool:
        scripted = torch.jit.script(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1)))
        with pytest.raises(PathosegError, match="The model is TorchScript"):
            _fitted(transport, model=scripted)
        return _trains(_fitted(transport, model=nn.Sequential(scripted)))

    with warnings.catch_warnings():  # torch.jit is deprecated, and used all the same
        warnings.simplefilter("ignore", DeprecationWarning)
        assert run_ranks(1, body) == [True]


def test_a_model_without_trained_parameters_is_refused() -> None:
    def body(transport: ThreadTransport) -> None:
        with pytest.raises(PathosegError, match="No parameter of Sequential is trained"):
            _fitted(transport, trained=False)

    run_ranks(1, body)


def test_after_a_refused_plan_another_may_follow() -> None:
    def body(transport: ThreadTransport) -> bool:
        for _ in range(2):
            with pytest.raises(PathosegError, match=r"^No plan of Sequential fits on one rank"):
                _fitted(transport, memory=10)
        return _trains(_fitted(transport))

    assert run_ranks(1, body) == [True]


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda own: None, "The training's optimizer is None"),
        (lambda own: torch.optim.SGD(nn.Linear(1, 1).parameters()), "does not update 3 of 3"),
        (lambda own: torch.optim.SGD(own[:2]), "does not update 1 of 3"),
    ],
)
def test_an_optimizer_that_leaves_parameters_out_is_refused(optimizer: Any, told: str) -> None:
    def body(transport: ThreadTransport) -> None:
        with pytest.raises(PathosegError, match=told):
            _fitted(transport, optimizer=optimizer)

    run_ranks(1, body)


def test_a_model_is_trained_in_the_precision_in_which_it_was_read() -> None:
    model, images, hardware = nn.Linear(3, 1), torch.zeros(2, 3), load_hardware("cpu")
    traced = Traced(model, images)
    priced = StageCosts(traced.graph, cost_model(hardware), hardware, 0)
    plan = fitting.best([priced], PlanRequest(1, 2**30, 2, "sequential"))
    training = Training(
        lambda returned, _: returned.flatten(), partial(torch.optim.SGD, lr=0.1), 0, torch.bfloat16
    )

    def body(transport: ThreadTransport) -> None:
        with pytest.raises(PathosegError, match=r"read for float32, and trains in torch\.bfloat16"):
            fitting.split(traced, plan, training, transport, torch.device("cpu"))

    run_ranks(1, body)


def _step(
    own: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int
) -> float:
    """One step of four microbatches in turn; the sum of the samples' losses."""
    optimizer.zero_grad()
    total = 0.0
    inputs, targets = own["batch"](number)
    for images, truth in zip(inputs.split(2), targets.split(2), strict=True):
        loss = own["losses"](model(images), truth).sum()
        (loss / len(inputs)).backward()
        total += loss.item()
    optimizer.step()
    return total
