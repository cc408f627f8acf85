"""Tests that what is read from a model runs exactly as the model does, whole or in stages."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pathoseg.parallel.graph.traced import Traced
from tests.parallel.networks.small import SMALL, small_traced
from tests.parallel.networks.stages import cut_places, run_stages


def _images(name: str) -> torch.Tensor:
    _, shape = SMALL[name]
    return torch.randn(shape, dtype=torch.float64)


def _parts(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", SMALL)
def test_stages_train_as_the_whole(name: str) -> None:
    traced, images = small_traced(name, torch.float64), _images(name)
    model = traced.model
    places = cut_places(traced.graph)
    chosen = [places[len(places) // 4], places[len(places) // 2], places[3 * len(places) // 4]]
    state = {key: value.clone() for key, value in model.state_dict().items()}

    torch.manual_seed(1)
    whole = model(images)
    sum(part.sum() for part in _parts(whole)).backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    after = {key: value.clone() for key, value in model.state_dict().items()}

    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(1)
    (names,) = traced.graph.inputs
    parts, gradients = run_stages(traced, [0, *chosen, len(traced.graph.layers)], {names: images})
    pairs = zip(_parts(whole), _parts(parts), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12)
    assert all(torch.equal(after[key], value) for key, value in model.state_dict().items())
    model.zero_grad()


@pytest.mark.parametrize("name", SMALL)
def test_a_copy_of_the_model_runs_the_layers_that_were_read(name: str) -> None:
    """Another model's values, whole in training and in two stages in eval mode; its own graph."""
    read, images = small_traced(name, torch.float64), _images(name)
    other = deepcopy(read.model)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    bound = read.on(other)
    graph = bound.graph
    (input_name,) = graph.inputs

    torch.manual_seed(1)
    expected = other(images)
    torch.manual_seed(1)
    made = bound.assemble(bound.segment(range(len(graph.layers)))({input_name: images}))
    for one, two in zip(_parts(made), _parts(expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)

    other.eval()
    places = cut_places(graph)
    bounds = [0, places[len(places) // 2], len(graph.layers)]
    parts, _ = run_stages(bound, bounds, {input_name: images})
    assert all(map(torch.equal, _parts(parts), _parts(other(images))))
    assert bound.measured(lambda _, tensor: tensor) == graph


@pytest.mark.parametrize("name", ["unet-resnet", "alexnet", "transformer"])
def test_a_graph_says_nothing_of_the_values_of_parameters(name: str) -> None:
    """Read three networks, which have all kinds of layers but views and slices."""
    traced = small_traced(name, torch.float64)
    other = deepcopy(traced.model)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert Traced(other, _images(name)).graph == traced.graph


def test_a_model_is_read_alike_each_time() -> None:
    model, example = torch.nn.LSTM(4, 4, num_layers=2, bidirectional=True), torch.empty(5, 2, 4)
    FakeTensorMode.cache_clear()  # as in a new process
    first, second = (Traced(model, example).graph for _ in range(2))
    assert first == second
