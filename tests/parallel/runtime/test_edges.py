"""Test edges between ranks whose tensors are of unusual kinds, against the model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import custom
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training, edge_values
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

CPU = torch.device("cpu")
SAMPLES, COUNT, STEPS = 2, 4, 3


def _loss(returned: Tensor, targets: object) -> Tensor:
    return returned.pow(2).flatten(1).mean(1)


def _agrees(model: nn.Module, last_stage: str, brightness: Sequence[Sequence[int]] = ()) -> None:
    """Two ranks of 1F1B reach the weights of one process; the second begins at this layer."""
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS, COUNT, SAMPLES, 3, 8, 8)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    if brightness:
        images += torch.tensor(brightness).reshape(STEPS, COUNT, 1, 1, 1, 1)
    # It shrinks whatever has a gradient, be it zero.
    optimizer = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    wholes = [Traced(deepcopy(model), images[0, 0]) for _ in range(2)]
    cut = custom(wholes[0].graph, [last_stage])
    schedule = lower(one_f_one_b(2, COUNT), list(edge_values(cut)))
    assert schedule.setting.messages
    training = Training(_loss, optimizer)

    def body(transport: ThreadTransport) -> tuple[list[float], dict]:
        runner = Runner(wholes[transport.rank], cut, schedule, transport, CPU, training)

        def step(number: int) -> float:
            batch = Microbatches(
                [SAMPLES] * COUNT, lambda index: {"images": images[number, index]}, lambda _: None
            )
            return runner.step(number, batch).loss_sum

        return [step(number) for number in range(STEPS)], runner.state()

    losses, state = run_ranks(2, body)[0]
    steps = optimizer(model.parameters())
    for number, found in enumerate(losses):
        steps.zero_grad()
        loss = torch.stack([_loss(model(each), None).sum() for each in images[number]]).sum()
        (loss / (COUNT * SAMPLES)).backward()
        steps.step()
        assert found == pytest.approx(loss.item(), rel=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-9, atol=1e-12)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: weights of the lowest frequencies."""

    def __init__(self, conjugates: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.weight = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.float64))
        self.conjugates = conjugates

    def forward(self, images: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(self.first(images))[..., :4] * self.weight
        if self.conjugates:
            spectrum = spectrum.conj()
        result: Tensor = self.last(torch.fft.irfft2(spectrum, s=(8, 8)).tanh())
        return result


@pytest.mark.parametrize("conjugates", [False, True])
def test_complex_tensors_travel_with_their_gradients(conjugates: bool) -> None:
    torch.manual_seed(0)
    _agrees(Spectral(conjugates), "fft_irfft2")


class Rounds(nn.Module):
    """A mask of small whole numbers beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        values = self.first(images)
        mask = values.detach().round().to(torch.int32)
        result: Tensor = self.last(values.tanh() * mask)
        return result


def test_whole_numbers_of_any_size_travel() -> None:
    torch.manual_seed(0)
    _agrees(Rounds(), "mul")


class Chooses(nn.Module):
    """An opaque block that uses its second input where that is bright."""

    def forward(self, values: Tensor, skip: Tensor) -> Tensor:
        return values + skip if float(skip.detach().mean()) > 0 else values


class Skipping(nn.Module):
    """A skip connection that some microbatches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 1, 1))
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
        self.chooses = Chooses()

    def forward(self, images: Tensor) -> Tensor:
        skip = images * self.gain
        result: Tensor = self.last(self.chooses(self.first(images), skip))
        return result


def test_a_value_may_be_used_by_later_microbatches_alone() -> None:
    """In the first step it has no gradient at all, which is not a gradient of zeros."""
    torch.manual_seed(0)
    _agrees(Skipping(), "chooses", [[-1, -1, -1, -1], [-1, 1, -1, 1], [1, -1, -1, 1]])
