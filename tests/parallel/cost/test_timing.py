"""Tests that layers run alone do what they do in their model, and how runs become figures."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pathoseg.parallel.cost.calibration_layers import draw_cases, reference_networks
from pathoseg.parallel.cost.timing import (
    Alone,
    Run,
    Spread,
    Whole,
    can_run_alone,
    distinct,
    time_copies,
    time_in_turn,
)
from pathoseg.parallel.graph.traced import Traced
from tests.parallel.networks.small import SMALL, small_traced

SECONDS = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(SECONDS)
def test_a_spread_is_in_order_and_forgets_the_order_of_runs(runs: list[float]) -> None:
    spread = Spread.of(runs)
    assert spread.minimum <= spread.quartile <= spread.median <= spread.maximum
    assert spread.minimum == min(runs)
    assert spread.maximum == max(runs)
    assert Spread.of(runs[::-1]) == spread


@given(SECONDS, st.floats(1, 100))
def test_a_busy_host_moves_the_quartile_less_than_the_maximum(
    runs: list[float], longer: float
) -> None:
    disturbed = Spread.of([*runs, *runs, *runs, max(runs) * longer])
    assert disturbed.quartile <= Spread.of(runs * 3).median


class _Counted:
    """Pretends to run, and writes down in which order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._runs = 0

    def visit(self) -> Run:
        self._log.append(self._name)
        return self._run

    def _run(self) -> tuple[float, float]:
        self._runs += 1
        # What comes first after a visit began is much slower, as it is in truth.
        first = self._runs % 11 == 1
        return (1e6, 1e6) if first else (1.0, 2.0)


def test_visits_take_turns_and_first_runs_do_not_count() -> None:
    log: list[str] = []
    advanced: list[None] = []
    items = [_Counted("a", log), _Counted("b", log)]
    timings = time_in_turn(items, 3, lambda: advanced.append(None))
    assert log == ["a", "b"] * 3
    assert len(advanced) == 6
    for timing in timings:
        assert timing.forward == Spread(1.0, 1.0, 1.0, 1.0)
        assert timing.backward == Spread(2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("name", SMALL)
def test_each_layer_of_a_network_runs_alone(name: str) -> None:
    traced = small_traced(name)
    for position in distinct(traced.graph).values():
        layer = traced.graph.layers[position]
        if can_run_alone(traced.graph, position):
            forward, backward = Alone(traced, position).visit()()
            assert forward > 0
            assert (backward > 0) == any(value.gradient for value in layer.outputs)


class _Spy(torch.autograd.Function):
    """Tells which backward ran."""

    ran: ClassVar[list[str]] = []

    @staticmethod
    def forward(context: object, image: torch.Tensor) -> torch.Tensor:
        return image * 2

    @staticmethod
    def backward(context: object, *gradients: torch.Tensor) -> torch.Tensor:
        _Spy.ran.append("backward")
        return gradients[0] * 2


class _InPlace(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.relu_(image)


class _Opaque(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Spy.apply(image)
        return made


def test_the_backward_really_runs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), _Opaque())
    traced = Traced(model, torch.zeros(1, 3, 4, 4))
    _Spy.ran.clear()
    Alone(traced, len(traced.graph.layers) - 1).visit()()
    assert _Spy.ran == ["backward"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_layer_is_timed_in_the_networks_layout(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=layout)  # type: ignore[call-overload]  # not in its stub
    seen: list[torch.Tensor] = []
    grad = torch.autograd.grad

    def spy(
        roots: list[torch.Tensor], edges: object, given: list[torch.Tensor], **more: bool
    ) -> object:
        seen.extend([*roots, *given])
        return grad(roots, edges, given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.autograd, "grad", spy)
    Alone(Traced(model, torch.zeros(1, 3, 8, 8)), 1).visit()()
    assert [each.is_contiguous(memory_format=layout) for each in seen] == [True, True]


class _OneMatrix(nn.Module):
    """Attention whose queries, keys and values are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(tokens).unflatten(-1, (3, 2, 8)).transpose(1, 3)
        return F.scaled_dot_product_attention(*parts.unbind(2)).transpose(1, 2).flatten(2)


class _Strides(TorchDispatchMode):
    """Writes down how the tensors lie that attention's forward and backward are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            tensors = (each for each in args if isinstance(each, torch.Tensor))
            self.seen.append(tuple(each.stride() for each in tensors))
        return func(*args, **(kwargs or {}))


def test_inputs_and_gradients_lie_in_memory_as_in_the_model() -> None:
    model, tokens = _OneMatrix(), torch.zeros(2, 5, 16)
    traced = Traced(model, tokens)
    kinds = [layer.kind for layer in traced.graph.layers]
    [at] = [at for at, kind in enumerate(kinds) if "attention" in kind]
    with _Strides() as in_model:
        model(tokens).square().sum().backward()
    with _Strides() as alone:
        Alone(traced, at).visit()()
    assert in_model.seen[0] == ((240, 8, 48, 1),) * 3
    assert alone.seen == in_model.seen


def test_the_backward_of_a_layer_in_place_really_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), _InPlace())
    traced = Traced(model, torch.zeros(1, 3, 4, 4))
    got: list[torch.Tensor] = []
    grad = torch.autograd.grad

    def spy(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        made: tuple[torch.Tensor, ...] = grad(*args, **kwargs)  # type: ignore[arg-type]
        got.extend(made)
        return made

    monkeypatch.setattr(torch.autograd, "grad", spy)
    Alone(traced, 1).visit()()
    (gradient,) = got
    # Where the input was below 0, which about half of it was, nothing flows back.
    assert 0 < (gradient == 0).sum() < gradient.numel()


def test_a_model_keeps_its_parameters_and_has_no_gradients_from_layers_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    before = [parameter.clone() for parameter in model.parameters()]
    traced = Traced(model, torch.zeros(1, 3, 8, 8))
    time_in_turn([Alone(traced, position) for position in range(2)], 1)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
        assert parameter.grad is None


def test_a_whole_model_runs_forward_and_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    forward, backward = Whole(model, torch.rand(1, 3, 8, 8)).visit()()
    assert forward > 0
    assert backward > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_give_a_link() -> None:
    link = time_copies(torch.device("cpu"))
    assert link.alpha >= 0
    assert link.beta > 0


def test_reference_networks_have_the_layers_that_networks_are_made_of() -> None:
    """Look at their modules alone: `test_profiled.py` traces and times them."""
    kinds = {type(module) for case in reference_networks() for module in case.module.modules()}
    assert {nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.MaxPool2d, nn.Upsample} <= kinds


@pytest.mark.slow
def test_images_of_a_calibration_lie_as_asked_and_no_kernel_writes_beyond_its_memory() -> None:
    with torch.device("meta"):
        cases = draw_cases()
    for case in cases:
        for example in case.example(torch.channels_last):
            assert example.dim() != 4 or example.is_contiguous(memory_format=torch.channels_last)
        if isinstance(case.module, nn.Conv2d) and case.module.stride[0] > 1:
            assert case.module.kernel_size != (1, 1) or case.module.in_channels >= 8


def test_the_same_seed_draws_the_same_layers() -> None:
    first, second = (
        [(str(case.module), case.shapes) for case in draw_cases(0.05, seed)] for seed in (1, 1)
    )
    assert first == second
    assert first != [(str(case.module), case.shapes) for case in draw_cases(0.05, 2)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_are_timed_on_cuda() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).cuda()
    traced = Traced(model, torch.zeros(4, 3, 512, 512, device="cuda"))
    timings = time_in_turn([Alone(traced, position) for position in range(3)], 2)
    for timing in timings:
        assert 0 < timing.forward.minimum < 1
        assert 0 < timing.backward.minimum < 1
