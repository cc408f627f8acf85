"""A network and a step of it, on the device that is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pathoseg.device import peak_memory, pick_device, synchronize
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig

DEVICE = pick_device()
SHARES = (75, 50, 40, 25, 10)  # caps, in per cent of the peak with everything kept
_SEGMENTATION = build_loss(LossConfig())

# Runs one step, of which it is told the number; returns the sum of the samples' losses.
Step = Callable[[int], float]
# Makes a step, with a network of its own on the device.
MakeStep = Callable[[], Step]


@dataclass(frozen=True)
class Subject:
    """A network in training.

    Attributes:
        make: Makes it; the weights are those of a fixed seed.
        side: Of a square tile, in pixels.
        batch: Samples of a step.
        microbatches: In how many parts they go through the network.
        dtype: Autocast precision, or None.
        dense: Whether it answers for each pixel.
    """

    make: Callable[[], nn.Module]
    side: int
    batch: int = 1
    microbatches: int = 1
    dtype: torch.dtype | None = None
    dense: bool = True
    images: Tensor = field(init=False, repr=False)
    targets: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        shape = (self.batch, 3, self.side, self.side)
        images = torch.rand(shape, generator=seeded).to(DEVICE)
        wanted = (self.batch, self.side, self.side) if self.dense else (self.batch,)
        targets = torch.randint(2, wanted, generator=seeded).to(DEVICE)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "targets", targets)

    def model(self) -> nn.Module:
        """The network, always with the same weights, on the device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(DEVICE)

    def example(self) -> Tensor:
        """A microbatch of its images without values."""
        size = self.batch // self.microbatches
        return torch.empty((size, 3, self.side, self.side), device="meta")

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype is not None)

    def loss(self, returned: Any, targets: Tensor) -> Tensor:
        """The loss of each sample; Inception's second answer counts as published."""
        if self.dense:
            return _SEGMENTATION(returned.float(), targets)
        if isinstance(returned, tuple):
            first, second = (self.loss(each, targets) for each in returned)
            return first + 0.4 * second
        return nn.functional.cross_entropy(returned.float(), targets, reduction="none")


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Without state, so that memory is that of activations."""
    return torch.optim.SGD(parameters, 1e-3)


def plain(subject: Subject, model: nn.Module) -> Step:
    """A plain PyTorch loop: all forwards, then all backwards, as GPipe on one rank."""
    trained = optimizer([*model.parameters()])

    def step(number: int) -> float:
        trained.zero_grad(set_to_none=True)
        count = subject.microbatches
        losses = []
        for images, targets in zip(
            subject.images.chunk(count), subject.targets.chunk(count), strict=True
        ):
            with subject.autocast():
                losses.append(subject.loss(model(images), targets).sum() / subject.batch)
        total = sum(loss.item() for loss in losses) * subject.batch
        while losses:
            torch.autograd.backward(losses.pop(0))
        trained.step()
        return total

    return step


def settle() -> None:
    """Returns once the device has done all that it was given."""
    if DEVICE.type != "cpu":
        synchronize(DEVICE)


def peak_of(step: Step) -> int:
    """Most bytes of the device that are taken while a step runs; 0 on one that counts none."""
    gc.collect()
    if peak_memory(DEVICE) is None:
        return 0
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    step(0)
    settle()
    return peak_memory(DEVICE) or 0


def peak_alone(make: MakeStep) -> int:
    """Most bytes of the device that are taken while a step runs that is made for this alone.

    Every other step in the process has its weights, and after it has run its gradients, on the
    device, and they would count: the caller holds none.
    """
    return peak_of(make())


def seconds_of(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each, all in turn, `rounds` times after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            settle()
            begin = time.perf_counter()
            step(number)
            settle()
            if number:
                times[name].append(time.perf_counter() - begin)
    return {name: median(taken) for name, taken in times.items()}
