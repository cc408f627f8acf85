"""Running statistics that were kept and applied are those that torch's own norms reach."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.running_statistics import RunningStatistics
from pathoseg.parallel.graph.traced import Traced
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks
from tests.parallel.networks.odd import NormAndActivation


class NormPlusOne(nn.BatchNorm2d):
    """A norm of one's own that calls torch's."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 1


class SkipsItsNorm(nn.Module):
    """An opaque block that calls its norm for some microbatches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=None)

    def forward(self, images: Tensor) -> Tensor:
        return images if images.mean() > 1.5 else self.norm(images)


class RepeatsItsNorm(SkipsItsNorm):
    """An opaque block that calls its norm twice."""

    def forward(self, images: Tensor) -> Tensor:
        return images if images.mean() > 1.5 else self.norm(torch.tanh(self.norm(images)))


class Norms(nn.Module):
    """Norms with and without momentum, called twice or not always, frozen, and of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = SkipsItsNorm()
        self.twice = nn.BatchNorm2d(3, momentum=0.3)
        self.average = nn.BatchNorm2d(3, momentum=None)
        self.frozen = nn.BatchNorm2d(3)
        self.instance = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        self.plain = nn.BatchNorm2d(3, track_running_stats=False)
        self.own = nn.Sequential(NormAndActivation(3), NormPlusOne(3))

    def forward(self, images: Tensor) -> Tensor:
        once = torch.tanh(self.twice(self.skipped(images)))
        aside = self.instance(self.frozen(self.average(once)))
        total: Tensor = self.own(self.plain(aside)) + self.twice(once)
        return total


@pytest.mark.parametrize("copies", [1, 2])
def test_statistics_are_those_of_torch(copies: int) -> None:
    torch.manual_seed(0)
    model = Norms().double()
    model.frozen.eval()
    batches = [torch.randn(2, 3, 5, 5).double() * 3 + index for index in range(4)]
    sizes = [2, 2, 0, 2]
    own = [Traced(deepcopy(model), batches[0]) for _ in range(copies)]

    def body(transport: ThreadTransport) -> dict[str, Tensor]:
        traced = own[transport.rank]
        layers = range(len(traced.graph.layers))
        statistics = RunningStatistics(traced.model, traced.graph, layers)
        segment = traced.segment(layers)
        for _ in range(2):
            with statistics.kept():
                for index in reversed(range(transport.rank, 4, copies)):
                    if sizes[index]:
                        row = statistics.lend()
                        segment({"images": batches[index]}, statistics.enter)
                        statistics.keep(index, row)
            statistics.apply(sizes, lambda rows: transport.sum(rows, tuple(range(copies))).wait())
        return traced.model.state_dict()

    for state in run_ranks(copies, body):
        whole = deepcopy(model)
        for _ in range(2):
            for batch, size in zip(batches, sizes, strict=True):
                if size:
                    whole(batch)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-13, atol=1e-13)


def test_a_norm_that_one_layer_calls_twice_is_refused() -> None:
    model, images = nn.Sequential(nn.Tanh(), RepeatsItsNorm()), torch.randn(2, 3, 5, 5)
    traced = Traced(model, images)
    statistics = RunningStatistics(model, traced.graph, range(2))
    with statistics.kept():
        row = statistics.lend()
        traced.segment(range(2))({"input": images})
        statistics.keep(0, row)
    with pytest.raises(PathosegError, match=r"1\.norm more than once, .* can have no copies"):
        statistics.apply([2], lambda rows: None)


def test_a_backward_goes_through_norms_of_both_kinds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Conv2d(4, 2, 1),
    ).double()
    images, own = torch.randn(2, 3, 5, 5).double(), deepcopy(model)
    model(images).pow(2).sum().backward()
    traced = Traced(own, images)
    statistics = RunningStatistics(own, traced.graph, range(5))
    with statistics.kept():
        row = statistics.lend()
        returned = traced.segment(range(5))({"input": images}, statistics.enter)["4"]
        statistics.keep(0, row)
        returned.pow(2).sum().backward()
    statistics.apply([2], lambda rows: None)
    for found, parameter in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-9, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(own.get_buffer(name), buffer, rtol=1e-13, atol=1e-13)
