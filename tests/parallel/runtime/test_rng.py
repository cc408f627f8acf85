"""Test that draws depend on seed, step, microbatch and layer only, and restore generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.runtime.rng import Randomness, WholeModel, seed_of


class Mixed(nn.Module):
    """Draws from all three generators, unseen by the tracer."""

    def forward(self, values: Tensor) -> Tensor:
        if random.random() < 2:
            values = values + random.random() + float(np.random.rand())
        return values + torch.rand(())


def _made() -> tuple[Traced, Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh(), Mixed())
    return Traced(model, torch.ones(2, 4)), torch.ones(2, 4)


def _run(traced: Traced, values: Tensor, randomness: Randomness, step: int, batch: int) -> Tensor:
    segment = traced.segment(range(len(traced.graph.layers)))
    with randomness.of(step, batch) as before:
        return next(iter(segment({"input": values}, before).values())).detach()


def test_draws_depend_on_step_and_microbatch_alone() -> None:
    traced, values = _made()
    layers = range(len(traced.graph.layers))
    one, two = (Randomness(traced, layers, 5, torch.device("cpu")) for _ in range(2))
    found = {(s, b): _run(traced, values, one, s, b) for s in range(2) for b in range(3)}
    for (step, batch), value in reversed(found.items()):
        random.seed(step)
        torch.manual_seed(batch)
        assert torch.equal(_run(traced, values, two, step, batch), value)
        assert torch.equal(_run(traced, values, one, step, batch), value)
    distinct = {tuple(value.flatten().tolist()) for value in found.values()}
    assert len(distinct) == len(found)
    other = Randomness(traced, layers, 6, torch.device("cpu"))
    assert not torch.equal(_run(traced, values, other, 0, 0), found[0, 0])


def test_generators_are_left_as_they_were() -> None:
    traced, values = _made()
    randomness = Randomness(traced, range(4), 5, torch.device("cpu"))
    for _ in range(2):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        _run(traced, values, randomness, 0, 0)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]


def test_layers_that_draw_nothing_cost_nothing() -> None:
    traced = Traced(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4))
    randomness = Randomness(traced, range(2), 5, torch.device("cpu"))
    _run(traced, torch.ones(2, 4), randomness, 0, 0)
    with randomness.of(0, 1) as before:
        assert before is None


@pytest.mark.parametrize("starts", ["with a share of 0", "in eval mode"])
def test_a_dropout_that_begins_later_is_seeded(starts: str) -> None:
    dropout = nn.Dropout(0.5)
    traced = Traced(nn.Sequential(nn.Linear(4, 4), dropout, nn.Tanh()), torch.ones(2, 4))
    randomness = Randomness(traced, range(3), 5, torch.device("cpu"))
    dropout.p, dropout.training = (0.0, True) if "share" in starts else (0.5, False)
    _run(traced, torch.ones(2, 4), randomness, 0, 0)
    dropout.p, dropout.training = 0.5, True
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        found.append(_run(traced, torch.ones(2, 4), randomness, 0, 1))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_whole_model_draws_by_step_and_microbatch_whatever_its_size(has_graph: bool) -> None:
    traced, values = _made()
    whole = WholeModel(traced.model, traced if has_graph else None, 5, torch.device("cpu"))
    found = {
        (step, batch, size): whole.forward(step, batch, values[:size]).detach()
        for size in (2, 1)
        for step in range(2)
        for batch in range(3)
    }
    for (step, batch, size), value in reversed(found.items()):
        torch.manual_seed(batch)
        before = torch.get_rng_state()
        assert torch.equal(whole.forward(step, batch, values[:size]), value)
        assert torch.equal(torch.get_rng_state(), before)
    distinct = {tuple(value.flatten().tolist()) for value in found.values()}
    assert len(distinct) == len(found)
    if has_graph:
        randomness = Randomness(traced, range(4), 5, torch.device("cpu"))
        assert torch.equal(_run(traced, values, randomness, 1, 2), found[1, 2, 2])


def test_a_whole_model_that_draws_nothing_runs_as_it_is() -> None:
    """Its modules' hooks are called, which its layers one by one would leave out."""
    model, values = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    whole = WholeModel(model, Traced(model, values), 5, torch.device("cpu"))
    expected = whole.forward(0, 0, values)
    calls: list[nn.Module] = []
    model.register_forward_hook(lambda module, given, made: calls.append(module))
    assert torch.equal(whole.forward(0, 1, values), expected)
    assert calls == [model]


def test_seeds_differ() -> None:
    seeds = {
        seed_of(a, b, c, d) for a in range(4) for b in range(4) for c in (1, 11) for d in (1, 2)
    }
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
