"""Modules that a symbolic tracer gets wrong, or not at all, if it is not careful."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint


class Odd(nn.Module):
    """A convolution, so that there is something to save and to train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)


class BranchesOnValues(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.mean() > 0 else self.inner(-x)


class CountsValues(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int((x > 100).sum()) + 1):
            x = self.inner(x)
        return x


class PythonRandom(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if random.random() < 0.5 else 2 * self.inner(x)


class SkipsItself(Odd):
    """Stochastic depth by Python's generator: the block saves nothing where it is skipped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + torch.tanh(self.inner(x))


class NumpyRandom(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(np.random.rand())


class TorchRandom(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.rand(1)


class Checkpoints(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(F.relu(x) * 2))


class CheckpointsByModule(Checkpoints):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self._run, x, use_reentrant=True)


class WithoutGradient(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        return self.inner(x) / scale


class Autocasts(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).to(x.dtype)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class ReversesGradient(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reverse.apply(self.inner(x))


class KeepsATensor(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.inner(x)
        return self.seen * 2


class CachesAGrid(Odd):
    """Caches a grid at its first forward, like CoordConv, positional encodings and cached masks."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.grid is None:
            self.grid = torch.ones_like(x[:1]).cumsum(2)
        return x + self.grid


class CachesInADictionary(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[torch.Size, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if x.shape[2:] not in self.grids:
            self.grids[x.shape[2:]] = torch.ones_like(x[:1]).cumsum(2)
        return x + self.grids[x.shape[2:]]


class CachesInABuffer(CachesAGrid):
    def __init__(self) -> None:
        super().__init__()
        del self.grid
        self.register_buffer("grid", None, persistent=False)


class MakesABuffer(Odd):
    """A buffer that is None until the first forward, which needs nothing of its input for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.0, 1)
        return self.inner(x) * self.scale


class DropsPaths(Odd):
    """Stochastic depth, whose eval mode is another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)


class LoopsOverTheBatch(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner(image[None])[0] for image in x])


class CountsItsCalls(Odd):
    """A warm-up by the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * min(1.0, self.calls / 4)


class OwnGenerator(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.dice = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(self.dice.uniform(0.5, 1.5))


class ReadsWhatAHookKeeps(Odd):
    """A feature that a hook keeps outside of the module, as for pretrained encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.features = {"inner": torch.zeros(())}
        self.inner.register_forward_hook(lambda *told: self.features.update(inner=told[2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.features["inner"].mean((2, 3), keepdim=True)


class SumsIntoANewTensor(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(1)
        for _ in range(2):
            x = self.inner(x)
            total += x.mean()
        return x + total


class SumsIntoAMovedTensor(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(1).to(x)
        total += self.inner(x).mean()
        return self.inner(x) + total


class CountsInADictionary(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.known = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.known["calls"] += 1
        return self.inner(x) * min(1.0, self.known["calls"] / 4)


@dataclass
class Annealing:
    temperature: float = 1.0


class CoolsAnObject(Odd):
    """An object of one's own that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.annealing = Annealing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.annealing.temperature *= 0.5
        return self.inner(x) / self.annealing.temperature


class CoolsATensor(Odd):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature = self.temperature * 0.5
        return self.inner(x) / self.temperature


class CoolsATensorInPlace(CoolsATensor):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature.mul_(0.5)
        return self.inner(x) / self.temperature


class AsksForTheType(Odd):
    """A branch on the type, which is another while torch.fx reads it."""

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return self.inner(x) * 2
        return self.inner(x)


class AsksForTheGradient(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x * 2 if x.requires_grad else x


OPAQUE = [
    BranchesOnValues,
    CountsValues,
    PythonRandom,
    NumpyRandom,
    TorchRandom,
    Checkpoints,
    CheckpointsByModule,
    WithoutGradient,
    Autocasts,
    ReversesGradient,
    KeepsATensor,
    CachesAGrid,
    CachesInADictionary,
    CachesInABuffer,
    MakesABuffer,
    DropsPaths,
    LoopsOverTheBatch,
    CountsItsCalls,
    OwnGenerator,
    ReadsWhatAHookKeeps,
    SumsIntoANewTensor,
    SumsIntoAMovedTensor,
    CountsInADictionary,
    CoolsAnObject,
    CoolsATensor,
    CoolsATensorInPlace,
    AsksForTheType,
    AsksForTheGradient,
]


class BranchesOnShape(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2 or x.ndim != 4:
            raise ValueError("odd side")
        if len(x.shape) == 4 and x.size(1) == self.inner.weight.shape[1]:
            return self.inner(x)
        return x


class BranchesOnDtype(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x.clamp(max=100) if x.dtype == torch.bfloat16 or x.is_cuda else x


class UnpacksShape(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, *rest = x.shape
        return self.inner(x).reshape(batch, -1).view(batch, *rest)


class ResizesToItsInput(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        x = self.inner(F.avg_pool2d(x, 2))
        return F.interpolate(x, size=size, mode="bilinear")


class UsesWeightsAsTensors(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("offset", torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(4.0)[:, None, None]
        return F.conv2d(x, self.inner.weight, padding=1) * self.scale + self.offset + ramp


class FunctionalDropout(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.inner(x), 0.5, training=self.training)


class SplitsAndJoins(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.inner(x).chunk(2, 1)
        return torch.cat([two, one.relu()], 1)


class WritesIntoViews(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        flat = x.flatten(1)
        x[:, 0] += 1
        x.mul_(2)
        return flat.view_as(x) + 1


class KeepsARunningMean(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


class UsesAModuleTwice(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Recurrent(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(self.inner(x), 4)  # each row is a step, and each step is many operators
        rows, _ = self.recurrent(x.flatten(2).transpose(1, 2))
        return rows.transpose(1, 2).unflatten(2, x.shape[2:])


class Reparametrised(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(self.inner)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(self.inner(x))


class NormsItsOwnWay(Odd):
    """A norm with an activation, as timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAndActivation(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


class NormAndActivation(nn.BatchNorm2d):
    """A norm of one's own: torch's function by its statistics, and an activation."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.activation = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        affine = self.weight, self.bias
        normed = F.batch_norm(x, *statistics, *affine, self.training, self.momentum or 0.0)
        return self.activation(normed)


class TiesWeights(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.inner(x)))


class WritesByOtherNames(Odd):
    """Augmented assignments to a view, a second name, an argument and a list's item."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        part = x[:, :2]
        part += 1
        same = x
        same *= 2
        centre(x)
        kept = [x]
        kept[0] -= 0.5
        side = x.shape[-1]
        side //= 2
        return torch.tanh(self.inner(x)) + side


def centre(pixels: torch.Tensor) -> None:
    pixels -= pixels.mean((2, 3), keepdim=True)


class Sampler:
    """A user's object whose method only sounds like a generator's."""

    def get_state(self) -> dict[str, int]:
        return {}


class Settings(dict[str, int]):
    """A dictionary of the user's that refuses changes, as some of Hugging Face do."""

    def clear(self) -> None:
        raise TypeError("settings do not change")


class HoldsOddAttributes(Odd):
    """Attributes that no forward changes, though they equal nothing or look like generators."""

    def __init__(self) -> None:
        super().__init__()
        self.missing, self.sampler = float("nan"), Sampler()
        self.settings = Settings(width=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class CountsInABuffer(Odd):
    """A buffer that is written by another name."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.steps
        steps += 1
        return self.inner(x) * steps


class CachesConstants(Odd):
    """A ramp that does not depend on the input, made at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ramps: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 4 not in self.ramps:
            ramp = torch.zeros(4)
            ramp[1:] = torch.linspace(0.5, 1, 3)
            self.ramps[4] = ramp.to(torch.float32)
        return self.inner(x) * (1 + self.ramps[4])[:, None, None]


TRACEABLE = [
    CachesConstants,
    BranchesOnShape,
    UnpacksShape,
    ResizesToItsInput,
    UsesWeightsAsTensors,
    FunctionalDropout,
    SplitsAndJoins,
    WritesIntoViews,
    KeepsARunningMean,
    UsesAModuleTwice,
    Recurrent,
    Reparametrised,
    NormsItsOwnWay,
    TiesWeights,
    WritesByOtherNames,
    CountsInABuffer,
    HoldsOddAttributes,
]


def between(odd: nn.Module) -> nn.Sequential:
    """The odd module between two convolutions."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), odd, nn.Conv2d(4, 2, 3, padding=1))
