"""Tests that models of any structure are read, cut, run and priced as they really are."""

from __future__ import annotations

import torch
from hypothesis import given, reject, settings

from pathoseg.parallel.graph.traced import Traced
from tests.parallel.networks.random_models import RandomModel, random_models
from tests.parallel.networks.stages import cut_places, run_stages


def _train(model: RandomModel, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One forward and backward of the sum of what the model returns, if it can be trained."""
    try:
        made = model(rows)
        torch.autograd.backward([part.sum() for part in made if part.requires_grad])
    except RuntimeError:
        reject()
    return made


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
