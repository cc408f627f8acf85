"""Tests that models of any structure are read, cut, run and priced as they really are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, reject, settings

from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace
from pathoseg.parallel.planning.memory_model import MemoryModel
from tests.parallel.networks.random_models import RandomModel, random_models
from tests.parallel.networks.stages import allocated, cut_places, run_on_messages, run_stages


def _train(model: RandomModel, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One forward and backward of the sum of what the model returns, if it can be trained."""
    try:
        made = model(rows)
        torch.autograd.backward([part.sum() for part in made if part.requires_grad])
    except RuntimeError:
        reject()
    return made


@pytest.mark.slow
@settings(max_examples=60)
@given(random_models())
def test_every_cut_trains_as_the_whole(model: RandomModel) -> None:
    model.double()
    rows = torch.randn(4, 8, dtype=torch.float64)
    whole = _train(model, rows)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    traced = Traced(model, rows)
    assert not traced.graph.notes
    places = cut_places(traced.graph)
    size = len(traced.graph.layers)
    for bounds in ([0, size], [0, *places, size], *([0, place, size] for place in places)):
        model.zero_grad()
        parts, gradients = run_stages(traced, bounds, {"rows": rows})
        assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))
        for name, gradient in expected.items():
            if gradient is None:
                assert name not in gradients
            else:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10)


def _peaks(model: RandomModel) -> tuple[int, int]:
    """The peak of the whole model's forward and backward: computed, and the allocator's."""
    rows = torch.randn(512, 8)
    _train(model, rows)
    model.zero_grad()
    traced = Traced(model, rows)
    whole = range(len(traced.graph.layers))
    memory = MemoryModel(traced.graph, fresh_gradients=True, workspace=cpu_workspace())
    stage = memory.stage(whole)
    return stage.peak() - stage.weights, allocated(lambda: run_on_messages(traced, whole))


@pytest.mark.slow
@settings(max_examples=60)
@given(random_models(detaching=False, plain=True))
def test_peaks_are_real_to_the_byte(model: RandomModel) -> None:
    computed, really = _peaks(model)
    assert computed == really


@pytest.mark.slow
@settings(max_examples=60)
@given(random_models(detaching=False))
def test_peaks_are_real_to_one_tensor(model: RandomModel) -> None:
    # Real views of what is written into go through `as_strided`, whose backward takes a tensor
    # more than that of the fake ones; a matrix product copies a repeated operand; and the copies
    # that norms make of what has gaps need not fall into their peak.
    computed, really = _peaks(model)
    assert abs(computed - really) <= 512 * 8 * 4 + 0.01 * really


@pytest.mark.parametrize(
    "program",
    [
        [("joined", 0, 0, 0), ("normed", 1, 0, 0)],  # a norm copies what has gaps
        [("relu", 0, 0, 1), ("resized", 0, 1, 1)],  # a layer whose values nobody reads
        [("iadd", 0, 0, 0), ("relu_", 0, 0, 0)],  # one tensor returned twice
        [("layer", 0, 0, 0), ("layer", 0, 0, 0)],  # shared weights
        [("add", 0, 0, 0), ("tanh", 0, 0, 0), ("iadd", 1, 2, 0)],  # a gradient with two owners
    ],
)
def test_peaks_of_odd_structures(program: list[tuple[str, int, int, int]]) -> None:
    computed, really = _peaks(RandomModel(program))
    assert abs(computed - really) < 64  # whole numbers that `mean` divides by
