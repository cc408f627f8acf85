"""Steps of compiled layers, on ranks and in one process: to rounding those of the serial judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pathoseg.parallel.runtime.rng import WholeModel
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.networks.runtime_models import MODELS, per_sample_loss, samples
from tests.parallel.runtime import cases
from tests.parallel.runtime.cases import Case
from tests.parallel.runtime.judge import STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    # What torch warns itself of where it imports its compiler, and is given what is no leaf.
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what torch.compile captures by torch's own kernels, as C++ takes a minute to compile.

    With another backend as its parameter, by that.
    """
    backend = getattr(request, "param", "aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The modules of each block that is compiled."""
    found: list[set[str]] = []
    compile_it: Callable[..., Any] = torch.compile

    def watch(block: nn.Module, **options: Any) -> Any:
        found.append({type(module).__name__ for module in block.modules()})
        return compile_it(block, **options)

    monkeypatch.setattr(torch, "compile", watch)
    return found


CASES = [
    # Norms write the statistics of each microbatch to a place of its own; one is called twice.
    Case("branches", "gems-mast", 2, torch.float64),
    # Layers that draw, and one whose saved tensors wait in host memory.
    Case("dropout", "1f1b", 2, torch.float64, offload={0: ["body.2"]}),
]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_as_one_process(case: Case, compiled: list[set[str]]) -> None:
    cases.prepare(case)

    def body(transport: Any) -> dict[str, Any]:
        runner = cases.start(case, transport, replace(cases.training_of(case), compiles=True))
        for step in range(STEPS):
            assert runner.step(step, cases.microbatches(case, step)).finite
        return runner.state().get("model", {})

    state = run_ranks(case.ranks, body)[0]
    expected = cases.judged_case(case).state
    torch.testing.assert_close(dict(state), expected, rtol=1e-10, atol=1e-12)
    inside = set.union(*compiled)
    assert "Conv2d" in inside
    assert not {"Dropout", "Dropout2d", "AlphaDropout"} & inside


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("captured", "model", "blocks", "sizes"),
    # Between captured blocks and those of C++ lies torch's part alone: one network shows it.
    [
        ("inductor", "dropout", 2, (2,)),
        ("aot_eager", "dropout", 2, (2, 1)),
        ("aot_eager", "branches", 3, (2, 1)),
    ],
    indirect=["captured"],
)
def test_one_process_trains_as_without(
    model: str, blocks: int, sizes: tuple[int, ...], compiled: list[set[str]]
) -> None:
    """Also where a norm asks for the value of a tensor, on which nothing can be compiled."""
    expected = cases.judged(model, torch.float64, sizes, 0.0)
    alone = cases.reset(cases.traced(model, torch.float64, "judge"))
    kind = MODELS[model]

    def whole() -> WholeModel:
        return WholeModel(alone.model, alone, 0, torch.device("cpu"), compiles=True)

    one, returned = whole(), []
    for microbatch, size in enumerate(sizes):
        images, targets = samples(0, microbatch, size, torch.float64)
        returned.append(one.forward(0, microbatch, kind.inputs(images)))
        loss = per_sample_loss(returned[-1], targets).sum()
        (loss / sum(sizes)).backward()
    assert len(compiled) == len(sizes) * blocks  # each size is a shape
    gradients = {name: p.grad for name, p in alone.model.named_parameters()}
    torch.testing.assert_close(gradients, expected.gradients, rtol=1e-10, atol=1e-12)
    # One that begins later, as a process that resumes, has the same digits from the start.
    last = len(sizes) - 1
    images, _ = samples(0, last, sizes[last], torch.float64)
    resumed = whole().forward(0, last, kind.inputs(images))
    torch.testing.assert_close(resumed, returned[last], rtol=0, atol=0)
