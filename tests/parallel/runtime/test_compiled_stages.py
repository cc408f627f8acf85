"""Steps of compiled layers, on ranks and in one process: to rounding those of the serial judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pathoseg.parallel.runtime.rng import WholeModel
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.networks.runtime_models import per_sample_loss, samples
from tests.parallel.runtime.cases import (
    Case,
    judged,
    microbatches,
    prepare,
    reset,
    start,
    traced,
    training_of,
)
from tests.parallel.runtime.judge import STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    # What torch warns itself of where it imports its compiler, and is given what is no leaf.
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_as_one_process(case: Case, compiled: list[set[str]]) -> None:
    prepare(case)

    def body(transport: Any) -> dict[str, Any]:
        runner = start(case, transport, replace(training_of(case), compiles=True))
        for step in range(STEPS):
            assert runner.step(step, microbatches(case, step)).finite
        return runner.state().get("model", {})

    state = run_ranks(case.ranks, body)[0]
    expected = judged(case.model, case.dtype, tuple(case.sizes()), case.clip).state
    torch.testing.assert_close(dict(state), expected, rtol=1e-10, atol=1e-12)
    inside = set.union(*compiled)
    assert "Conv2d" in inside
    assert not {"Dropout", "Dropout2d", "AlphaDropout"} & inside


def test_one_process_trains_as_without(compiled: list[set[str]]) -> None:
    sizes = (2, 1)
    expected = judged("dropout", torch.float64, sizes, 0.0)
    alone = reset(traced("dropout", torch.float64, "judge"))
    whole = WholeModel(alone.model, alone, 0, torch.device("cpu"), compiles=True)
    gradients = None
    for _ in range(2):  # the first time as it is
        alone.model.zero_grad()
        for microbatch, size in enumerate(sizes):
            images, targets = samples(0, microbatch, size, torch.float64)
            loss = per_sample_loss(whole.forward(0, microbatch, images), targets).sum()
            (loss / sum(sizes)).backward()
        gradients = {name: p.grad for name, p in alone.model.named_parameters()}
    assert len(compiled) == 2 * 2  # blocks, of two shapes each
    torch.testing.assert_close(gradients, expected.gradients, rtol=1e-10, atol=1e-12)
