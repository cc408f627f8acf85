"""Test offload and recomputation of layers that write in place, share storages, or draw numbers.

Losses and state must stay equal to the bit; layers that cannot be run again are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations import saved_tensor_hooks as keeping
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import linear
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.computing_device import DEVICE
from tests.parallel.runtime.judge import optimizer

SAMPLES, COUNT = 2, 3


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALL", 1)


class InPlace(nn.Module):
    """In-place activations behind norms, and sums into what was made earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        values = F.relu(self.norm(self.first(images)), inplace=True)
        branch = self.group(self.second(values))
        branch += values.mean()
        F.leaky_relu_(branch, 0.1)
        result: Tensor = self.last((branch * 0.5).sigmoid_())
        return result


class Views(nn.Module):
    """Views and slices that several layers save, pieces of one storage, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.last = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        values = self.first(images).tanh()
        upper, lower = values.chunk(2, dim=1)
        pooled, indices = self.pool(upper * lower)
        spread = self.unpool(pooled.exp(), indices)
        best = spread.max(dim=2, keepdim=True).values
        rows = (spread * best + lower.transpose(2, 3).contiguous()).permute(0, 2, 3, 1)
        flat = rows.reshape(rows.size(0), -1, 4)
        result: Tensor = self.last(flat[:, ::2] * flat[:, 1::2])
        return result


class Shared(nn.Module):
    """A layer that runs twice, dropout, attention, a softmax whose result is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 4, stride=4)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = self.drop(F.gelu(self.twice(self.norm(tokens))))
        mixed, _ = self.attention(tokens, tokens, tokens)
        return (self.twice(mixed) + tokens).softmax(-1)


class Block(nn.Module):
    """One opaque layer: it branches on a value, draws, writes in place, has a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, values: Tensor) -> Tensor:
        made = self.norm(self.conv(values))
        if float(made.detach().mean()) > 1e9:
            made = made * 2
        kept = F.dropout(made, 0.3, self.training)
        result: Tensor = kept.mul(torch.rand_like(kept)).relu_()
        return result


def _opaque() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), Block(), nn.Conv2d(4, 2, 1), nn.Sigmoid())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place": InPlace,
    "views": Views,
    "shared": Shared,
    "opaque": _opaque,
}


@cache
def _read(model: nn.Module) -> Traced:
    return Traced(deepcopy(model), torch.empty(SAMPLES, 3, 8, 8))


def _train(
    model: nn.Module,
    offload: Callable[[int], bool],
    recompute: Callable[[int], bool],
    memory: Memory,
    dtype: torch.dtype | None = None,
    stages: int = 1,
    twice: Callable[[int], bool] = lambda at: False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state after two steps; layers are chosen by position."""
    images = torch.randn(COUNT, SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = [_read(model).on(deepcopy(model)) for _ in range(stages)]
    graph = whole[0].graph
    partition = even(graph, stages)

    def names(chosen: Callable[[int], bool]) -> dict[int, list[str]]:
        return {
            stage: [graph.layers[at].name for at in partition.layers(stage) if chosen(at)]
            for stage in range(stages)
        }

    schedule = lower(gpipe(linear(stages), COUNT), offload=names(offload))
    given = Memory(names(recompute), names(twice), memory.window, memory.mode)
    training = Training(
        lambda returned, targets: returned.float().pow(2).flatten(1).sum(1), optimizer, dtype=dtype
    )
    batch = Microbatches(
        [SAMPLES] * COUNT, lambda at: {next(iter(graph.inputs)): images[at]}, lambda _: 0
    )

    def body(transport: Any) -> tuple[list[float], dict[str, Tensor]]:
        rank = transport.rank
        runner = Runner(whole[rank], partition, schedule, transport, DEVICE, training, given)
        losses = [runner.step(step, batch).loss_sum for step in range(2)]
        return losses, runner.state().get("model", {})

    return run_ranks(stages, body)[0]


def _equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def _never(position: int) -> bool:
    return False


CHOICES: dict[str, tuple[Callable[[int], bool], Callable[[int], bool]]] = {
    "all offloaded": (lambda at: True, _never),
    "all recomputed": (_never, lambda at: True),
    "even offloaded, odd recomputed": (lambda at: at % 2 == 0, lambda at: at % 2 == 1),
    "odd offloaded, even recomputed": (lambda at: at % 2 == 1, lambda at: at % 2 == 0),
    "every third recomputed": (_never, lambda at: at % 3 == 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_layers_do_with_storages_is_done_again(name: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(3)
    model = MODELS[name]()
    expected = _train(model, _never, _never, Memory(), dtype)
    for offload, recompute in CHOICES.values():
        _equal(_train(model, offload, recompute, Memory(window=3_000), dtype), expected)
    for step in (2, 3, 5):
        once = {*range(1, 100, step)}
        rest = {*range(100)} - once
        found = _train(model, _never, once.__contains__, Memory(), dtype, twice=rest.__contains__)
        _equal(found, expected)


def test_two_stages_mix_what_they_keep() -> None:
    torch.manual_seed(3)
    model = _opaque()
    expected = _train(model, _never, _never, Memory(), stages=2)
    offload, recompute = CHOICES["odd offloaded, even recomputed"]
    _equal(_train(model, offload, recompute, Memory(), stages=2), expected)


class Filled(nn.Module):
    """Layers whose kernels write into what autograd has saved already, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = nn.Sequential(nn.Conv2d(3, 4, 1), nn.RReLU(), nn.Conv2d(4, 4, 1))
        self.dropped = nn.Sequential(nn.RReLU(inplace=True), nn.Dropout(0.3), nn.Sigmoid())
        self.gates, self.cell = nn.GRU(64, 8), nn.LSTM(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        rows, _ = self.gates(self.dropped(self.noisy(images)).flatten(2))
        result, _ = self.cell(rows)
        return result * result.mean()


@pytest.mark.parametrize("mode", [OffloadMode.NAIVE, OffloadMode.OVERLAPPED])
def test_what_a_kernel_fills_after_it_was_saved_leaves_when_it_is_full(mode: OffloadMode) -> None:
    torch.manual_seed(3)
    model = Filled()
    expected = _train(model, _never, _never, Memory())
    _equal(_train(model, lambda at: True, _never, Memory(window=3_000, mode=mode)), expected)


class Conjugates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        bands = torch.fft.fft2(self.first(images).to(torch.complex64))
        conjugate = bands.conj()
        made: Tensor = self.last(torch.tanh((conjugate * bands * conjugate).real * 1e-3))
        return made


class BufferAtFirst(nn.Module):
    """A buffer that is None until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 1)
        self.register_buffer("scale", None, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.0, 8)
        made: Tensor = self.first(images) * self.scale
        return made


@pytest.mark.parametrize("last", [Conjugates, BufferAtFirst])
def test_conjugates_and_buffers_that_begin_as_none_are_recomputed(last: type[nn.Module]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), last())
    expected = _train(model, _never, _never, Memory())
    _equal(_train(model, _never, lambda at: True, Memory()), expected)


class Writing(nn.Module):
    """Writes into what the sigmoid has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 1)
        self.saved = nn.Sigmoid()

    def forward(self, images: Tensor) -> Tensor:
        saved = self.saved(self.first(images))
        return saved.add_(1)


@pytest.mark.parametrize("choice", CHOICES)
def test_writing_into_what_was_saved_is_refused(choice: str) -> None:
    """As autograd does, whose own check hooks switch off."""
    with pytest.raises(PathosegError, match="saved has saved for its backward was then written"):
        _train(Writing(), *CHOICES[choice], Memory())


class ReadAhead(nn.Module):
    """A layer reads what the next one overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.aside = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        values = self.first(images)
        doubled = values * 2
        values = F.relu(values, inplace=True)
        total: Tensor = self.aside(doubled) + self.last(values)
        return total


@pytest.mark.parametrize("recomputed", [(0, 1), (1, 2), (0, 1, 2)])
def test_what_a_layer_overwrites_is_still_there_for_others(recomputed: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    model = ReadAhead()
    losses, state = _train(model, _never, recomputed.__contains__, Memory())
    steps = optimizer([*model.parameters()])
    images = torch.randn(COUNT, SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for found in losses:
        steps.zero_grad()
        loss = torch.stack([model(batch).pow(2).sum() for batch in images]).sum()
        (loss / (COUNT * SAMPLES)).backward()
        steps.step()
        assert found == pytest.approx(loss.item(), rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class Received(nn.Module):
    """A layer writes into what its stage is given, after another has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        shifted = (images + self.bias).exp()
        images.add_(1)
        return shifted * images


def test_a_layer_whose_input_is_overwritten_cannot_be_recomputed() -> None:
    model = nn.Sequential(Received(), nn.Conv2d(3, 2, 1))
    with pytest.raises(PathosegError, match=r"0.add cannot be recomputed: 0.add_1 writes into"):
        _train(model, _never, lambda at: at < 2, Memory())


class Counting(nn.Module):
    """A running state that is no norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.calls.add_(1)
        scaled: Tensor = self.layer(values)
        return scaled.sigmoid()


def test_running_state_of_other_kinds_is_not_recomputed() -> None:
    with pytest.raises(PathosegError, match="calls, which is no norm's running statistic"):
        _train(Counting(), _never, lambda at: True, Memory())


@pytest.mark.parametrize("mode", OffloadMode)
def test_a_layer_that_is_not_there_is_named(mode: OffloadMode) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid())
    traced = Traced(model, torch.ones(2, 3, 8, 8))
    partition = even(traced.graph, 1)
    training = Training(lambda returned, targets: returned.sum((1, 2, 3)), optimizer)

    def refused(offload: list[str], recompute: list[str], message: str) -> None:
        schedule = lower(gpipe(linear(1), 2), offload={0: offload})
        memory = Memory({0: recompute}, mode=mode)
        with pytest.raises(PathosegError, match=message):
            run_ranks(
                1, lambda line: Runner(traced, partition, schedule, line, DEVICE, training, memory)
            )

    refused(["nothing"], [], "Stage 0 has no layer nothing that could be offloaded")
    refused([], ["nothing"], "Stage 0 has no layer nothing that could be recomputed")
    refused(["1"], ["1"], "no layer 1 that could be recomputed beside")
