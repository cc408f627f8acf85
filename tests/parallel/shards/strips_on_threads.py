"""A module on strips of its input, one thread a rank, to be compared with the module itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.shards.exchange import Team
from pathoseg.parallel.shards.rows import Split
from pathoseg.parallel.shards.sharding import RowCopies, Rules
from pathoseg.parallel.shards.strip import Strip, whole
from tests.parallel.comm.thread_ranks import run_ranks


@dataclass
class Result:
    """The outcome of one forward and backward.

    Attributes:
        output: The whole output.
        values: The whole gradient of the input, then of the parameters, then the buffers, by name.
        gathered: The functions that took whole tensors.
    """

    output: Tensor
    values: dict[str, Tensor]
    gathered: list[str] = field(default_factory=list)


class Place:
    """The team and the rules of a test's strips."""

    def __init__(self, transport: Transport, split: Split) -> None:
        self.team, self.rule = Team(transport, split), Rules().find
        self.gathered: list[str] = []
        self.copies = RowCopies()
        self.copied = self.copies.add

    def gathers(self, what: str) -> None:
        self.gathered.append(what)


Loss = Callable[[Tensor], Tensor]


def weighted(output: Tensor) -> Tensor:
    """A loss that weighs each element otherwise: of squares alone a norm's gradient is nearly 0."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    exact = output.double()
    return (weights.double() * (exact + 0.3 * exact * exact)).sum() / output.numel()


def run_whole(module: nn.Module, x: Tensor, loss: Loss = weighted) -> Result:
    module = deepcopy(module)
    x = x.clone().requires_grad_(x.is_floating_point())
    output = module(x)
    loss(output).backward()  # type: ignore[no-untyped-call]  # torch's
    return Result(output.detach(), _values(module, x.grad))


def run_strips(
    module: nn.Module, x: Tensor, bounds: Sequence[int], loss: Loss = weighted
) -> Result:
    """As `run_whole`; gradients of all ranks added up, one rank's output and buffers."""
    split = Split(tuple(bounds))

    def rank(transport: Transport) -> tuple[Result, dict[str, Tensor]]:
        place, own = Place(transport, split), deepcopy(module)
        first, stop = bounds[transport.rank], bounds[transport.rank + 1]
        local = x[:, :, first:stop].clone().requires_grad_()
        strip = Strip(local, 2, bounds, place)
        output = own(strip)
        place.copies.check()
        (loss(output) / split.shards).backward()  # type: ignore[no-untyped-call]  # torch's
        grad = torch.zeros_like(x)
        assert local.grad is not None
        grad[:, :, first:stop] = local.grad
        values = _values(own, grad)
        with torch.no_grad():
            full: Tensor = whole(output).detach()
        return Result(full, values, place.gathered), dict(own.named_buffers())

    ranks = run_ranks(split.shards, rank)
    first, buffers = ranks[0]
    for other, others in ranks[1:]:
        assert torch.equal(other.output, first.output)
        for name, buffer in others.items():
            assert torch.equal(buffer, buffers[name]), name
    summed = {
        name: value
        if name in buffers
        else torch.stack([each.values[name] for each, _ in ranks]).sum(0)
        for name, value in first.values.items()
    }
    return Result(first.output, summed, first.gathered)


_GENERATOR = threading.Lock()


class Drawing(nn.Module):
    """A layer that draws, each time from the same state of the generator, which threads share."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            made: Tensor = self.layer(x)
            return made


def _values(module: nn.Module, grad: Tensor | None) -> dict[str, Tensor]:
    assert grad is not None
    values = {"input": grad}
    values |= {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }
    return values | {name: b.detach().clone() for name, b in module.named_buffers()}


def difference(found: Result, expected: Result) -> dict[str, float]:
    """‖a - b‖ / ‖b‖ of the output and of each gradient and buffer.

    A bias ahead of a norm has a gradient of 0 but for rounding: no norm counts as smaller than a
    tenth of the largest gradient's.
    """
    least = max(float(b.double().norm()) for b in expected.values.values()) / 10
    pairs = {name: (found.values[name], value, least) for name, value in expected.values.items()}
    pairs["output"] = found.output, expected.output, 1e-30
    return {
        name: float((a.double() - b.double()).norm() / b.double().norm().clamp(min=floor))
        for name, (a, b, floor) in pairs.items()
    }
