"""Tests models that torch.fx would read wrongly without a word, or not at all."""

from __future__ import annotations

import logging
import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from pathoseg import device
from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from tests.parallel.networks.odd import (
    OPAQUE,
    TRACEABLE,
    BranchesOnDtype,
    BranchesOnShape,
    KeepsARunningMean,
    NormsItsOwnWay,
    ResizesToItsInput,
    SkipsItself,
    SumsIntoAMovedTensor,
    TiesWeights,
    UsesAModuleTwice,
    WritesIntoViews,
    between,
)
from tests.parallel.networks.stages import cut_places, run_stages

pytestmark = pytest.mark.slow  # many seconds in all


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _python_state(module: nn.Module) -> dict[str, object]:
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return deepcopy(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), own))


def _agrees(traced: Traced, images: torch.Tensor, seed: int, bounds: list[int]) -> None:
    """The model and its stages return the same and have the same gradients and buffers."""
    model = traced.model
    state = {key: value.clone() for key, value in model.state_dict().items()}
    own = [(vars(module), _python_state(module)) for module in model.modules()]
    _seed(seed)
    whole = model(images)
    whole.sum().backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model.zero_grad()
    model.load_state_dict(state)
    for attributes, kept in own:
        attributes.update(kept)
    _seed(seed)
    parts, gradients = run_stages(traced, bounds, {"input": images})
    assert torch.equal(parts, whole)
    assert gradients.keys() == {key for key, value in expected.items() if value is not None}
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key])
    model.zero_grad()


@dataclass(frozen=True)
class _Reading:
    """A model with an odd module that has been read.

    Attributes:
        traced: The model and its layers.
        state: Its parameters and buffers.
        attributes: The attributes of each of its modules, and a copy of their values.
        changes: What the reading has left otherwise than it was.
    """

    traced: Traced
    state: dict[str, torch.Tensor]
    attributes: list[tuple[dict[str, object], dict[str, object]]]
    changes: list[str]

    def as_read(self) -> Traced:
        """Return the traced model, its values and attributes being those of the reading."""
        self.traced.model.load_state_dict(self.state)
        for attributes, kept in self.attributes:
            attributes.update(deepcopy(kept))
        return self.traced


@cache
def _read(odd: type[nn.Module], dtype: torch.dtype = torch.float64) -> _Reading:
    """Read an odd module between two convolutions, once a process."""
    model = between(odd()).to(dtype)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = [tensor.clone() for _, tensor in tensors]
    attributes = [set(vars(module)) for module in model.modules()]
    traced = Traced(model, torch.randn(3, 3, 8, 8, dtype=dtype))
    after = [*model.named_parameters(), *model.named_buffers()]
    held = [value for module in model.modules() for value in tree_leaves(dict(vars(module)))]
    checks = {
        "names": [name for name, _ in after] == [name for name, _ in tensors],
        "tensors": all(one is two for (_, one), (_, two) in zip(after, tensors, strict=True)),
        "values": all(torch.equal(one, two) for (_, one), two in zip(after, values, strict=True)),
        "gradients": all(tensor.grad is None for _, tensor in after),
        "attributes": [set(vars(module)) for module in model.modules()] == attributes,
        "fake tensors": not any(isinstance(value, FakeTensor) for value in held),
    }
    return _Reading(
        traced,
        {key: value.clone() for key, value in model.state_dict().items()},
        [(vars(module), _python_state(module)) for module in model.modules()],
        [what for what, as_before in checks.items() if not as_before],
    )


@pytest.mark.parametrize("odd", [*OPAQUE, *TRACEABLE])
@pytest.mark.parametrize("training", [True, False])
def test_stages_do_what_the_model_does(odd: type[nn.Module], training: bool) -> None:
    """Run on images and their negatives; the seeds draw either branch of `PythonRandom`."""
    traced = _read(odd).as_read()
    traced.model.train(training)
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    size = len(traced.graph.layers)
    for seed in range(2):
        for bounds in ([0, size], *([0, place, size] for place in cut_places(traced.graph))):
            _agrees(traced, images * (-1) ** seed, seed, bounds)


@pytest.mark.parametrize("odd", OPAQUE)
def test_an_untraceable_module_is_one_noted_layer(odd: type[nn.Module]) -> None:
    # To move a tensor is to copy it, and no trap, where the other has a dtype of its own.
    moves = odd is SumsIntoAMovedTensor
    graph = _read(odd, torch.float32 if moves else torch.float64).traced.graph
    assert [layer.name for layer in graph.layers] == ["0", "1", "2"]
    assert graph.layers[1].kind == odd.__name__
    assert graph.layers[1].parameters == ("1.inner.weight", "1.inner.bias")
    assert graph.layers[1].forward.flops >= graph.layers[0].forward.flops
    assert any(note.startswith("1 is one opaque layer: ") for note in graph.notes)


@pytest.mark.parametrize("odd", TRACEABLE)
def test_what_can_be_traced_is(odd: type[nn.Module]) -> None:
    assert not _read(odd).traced.graph.notes


@pytest.mark.parametrize("odd", [*OPAQUE, *TRACEABLE])
def test_the_model_is_left_as_it_was(odd: type[nn.Module]) -> None:
    assert not _read(odd).changes


@pytest.mark.parametrize("seed", range(4))
def test_stochastic_depth_is_read_whatever_it_draws(seed: int) -> None:
    """The reading runs the model whole and layer by layer, and compares what that saves."""
    _seed(seed)
    state = random.getstate()
    assert len(Traced(between(SkipsItself()), torch.randn(2, 3, 8, 8)).graph.layers) == 3
    assert random.getstate() == state


def test_a_norm_of_ones_own_is_priced_as_torchs() -> None:
    graph = _read(NormsItsOwnWay).traced.graph
    assert [layer.name for layer in graph.layers] == ["0", "1.inner", "1.norm", "2"]
    assert graph.layers[2].kind == "native_batch_norm"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("odd", OPAQUE)
def test_a_model_may_be_one_opaque_layer(odd: type[nn.Module]) -> None:
    graph = Traced(odd(), torch.randn(2, 4, 8, 8)).graph
    assert len(graph.layers) == 1
    assert graph.layers[0].parameters == ("inner.weight", "inner.bias")


def test_another_branch_than_the_traced_one_is_refused() -> None:
    traced = Traced(between(BranchesOnShape()), torch.randn(2, 3, 8, 8))
    run = traced.segment(range(len(traced.graph.layers)))
    assert run({"input": torch.randn(2, 3, 12, 12)})
    with pytest.raises(PathosegError, match="of this size"):
        run({"input": torch.randn(2, 3, 9, 9)})


def test_a_branch_on_a_dtype_is_that_of_the_precision() -> None:
    model, images = between(BranchesOnDtype()), torch.randn(2, 3, 8, 8)
    runs = {}
    for dtype in (None, torch.bfloat16):
        traced = Traced(model, images, dtype)
        runs[dtype] = traced.segment(range(len(traced.graph.layers)))
    assert runs[None]({"input": images})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(runs[torch.bfloat16]({"input": images})["2"], model(images))
        with pytest.raises(PathosegError, match="dtype or device than with those") as caught:
            runs[None]({"input": images})
    assert "branch on no dtype" in caught.value.hint


def test_another_batch_than_the_traced_one_is_fine() -> None:
    traced = Traced(between(ResizesToItsInput()), torch.randn(2, 3, 8, 8))
    images = torch.randn(5, 3, 8, 8)
    parts, _ = run_stages(traced, [0, 4, len(traced.graph.layers)], {"input": images})
    assert torch.equal(parts, traced.model(images))


def test_whole_numbers_are_sent() -> None:
    graph = _read(ResizesToItsInput).traced.graph
    numbers = [layer for layer in graph.layers if layer.outputs[0].dtype == "int"]
    assert numbers
    assert all(layer.sendable and layer.is_free for layer in numbers)


class Unsendable(nn.Module):
    """A tensor of too many dimensions, then one of a dtype that no message has."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = images.reshape(*images.shape[:2], *(1,) * 5, *images.shape[2:]).squeeze()
        counted = values.detach().round().abs().to(torch.uint16)
        return values * counted.to(values.dtype)


def test_no_cut_is_where_a_tensor_cannot_be_sent() -> None:
    graph = Traced(between(Unsendable()), torch.randn(2, 3, 8, 8)).graph
    stuck = {layer.name for layer in graph.layers if layer.outputs and not layer.sendable}
    assert stuck == {"1.reshape", "1.to"}
    for place in cut_places(graph):
        edges = cut(graph, [0, place, len(graph.layers)]).edges
        assert stuck.isdisjoint(edge.value for edge in edges)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (UsesAModuleTwice, "all use 1.inner.weight"),
        (TiesWeights, "all use 1.inner.weight"),
        (WritesIntoViews, "writes in place into 1.inner"),
        (KeepsARunningMean, "all use 1.mean"),
    ],
)
def test_ties_say_why(odd: type[nn.Module], reason: str) -> None:
    ties = _read(odd).traced.graph.ties
    assert any(tie.reason.endswith(reason) for tie in ties)


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Conv2d(3, 4, 1), torch.randn(2, 5, 8, 8), "channels"),
        (nn.Conv2d(3, 4, 1), (torch.randn(2, 3, 8, 8),) * 2, "too many positional"),
        (between(nn.Linear(5, 5)), torch.randn(2, 3, 8, 8), "in 1 "),
        (nn.LazyLinear(4), torch.randn(2, 3), "uninitialized"),
        (between(BranchesOnShape()), torch.randn(2, 3, 9, 9), "in 1 .*odd side"),
    ],
)
def test_a_model_that_fails_says_where(model: nn.Module, example: object, words: str) -> None:
    with pytest.raises(PathosegError, match=words):
        Traced(model, example)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_is_recomputed_in_the_precision_of_its_forward(use_reentrant: bool) -> None:
    """Group norm is computed in float32 by an accelerator's autocast, and not by CPUs'."""
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = nn.Conv2d(3, 4, 1), inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = checkpoint(self.inner, self.stem(x), use_reentrant=use_reentrant)
            return made.sum((2, 3))

    traced = Traced(Checkpointed(), torch.ones(2, 3, 8, 8), torch.bfloat16)
    assert len(traced.graph.layers) == 3


def test_a_forward_that_fails_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep torch's log of the operator that failed to itself."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.zeros(3, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.places

    log = logging.getLogger("torch._subclasses.fake_tensor")  # which tells no root logger
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(PathosegError, match="fails its own forward"):
        Traced(Placed(), torch.ones(1, 3, 8, 4))
    assert not caplog.records


def test_upsampling_is_in_float32_where_an_accelerator_does_it_so() -> None:
    """Follow torch's list for CUDA; CPUs' autocast leaves bfloat16 as it is."""
    x = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), device._AcceleratorLists():
        for mode in ("nearest", "bilinear"):
            assert F.interpolate(x, scale_factor=2, mode=mode).dtype == torch.float32
            assert nn.Upsample(scale_factor=2, mode=mode)(x).dtype == torch.float32
