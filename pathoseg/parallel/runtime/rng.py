"""Random numbers inside a model: a function of seed, step, microbatch and layer."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from pathoseg.device import Inputs, answer, random_states, seed_random, set_random_states
from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.segment import Segment
from pathoseg.parallel.graph.traced import Traced

# A process has one set of generators, which ranks as threads share.
_GENERATORS = threading.Lock()


def seed_of(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Hash seed, step, microbatch and layer to the seed of one layer's random numbers.

    Args:
        seed: The run's seed.
        step: Number of the step.
        microbatch: Its number in the step.
        layer: Position of the layer in the model, whatever the order in which a rank runs layers.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    digest = hashlib.blake2b(f"{seed} {step} {microbatch} {layer}".encode(), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1


class Randomness:
    """Seeds torch's, numpy's and Python's generators for the layers of a stage that draw.

    Which layers draw is observed in the first forward. Opaque blocks always count, as they may draw
    in any; so do dropouts while they drop, as their share may rise from 0 and their mode change.

    Args:
        traced: The model.
        layers: Positions of the stage's.
        seed: The run's seed.
        device: The stage's device.
    """

    def __init__(self, traced: Traced, layers: range, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        graph = traced.graph
        self._numbers = graph.numbers
        self._drawing: set[int] | None = None
        self._generators: _LentGenerators | None = None
        self._opaque = {
            position
            for position in layers
            if graph.layers[position].kind == graph.modules.get(graph.layers[position].module)
        }
        modules = {at: traced.model.get_submodule(graph.layers[at].module) for at in layers}
        self._dropouts = {at: m for at, m in modules.items() if isinstance(m, _DropoutNd)}

    @contextmanager
    def of(self, step: int, microbatch: int) -> Iterator[Callable[[int], None] | None]:
        """Make a context in which the stage's layers draw what they would draw in any process.

        Args:
            step: Number of the step.
            microbatch: Its number in the step.

        Yields:
            A function to call with each layer's position before it runs: it seeds torch's,
            NumPy's and Python's generators by (seed, step, microbatch, layer); None where no
            layer draws.
        """
        drawing = self._drawing
        if drawing is not None:
            drawing = drawing | {at for at, m in self._dropouts.items() if m.training and m.p}
            if not drawing:
                yield None
                return
        throws = self._generators = _LentGenerators(drawing, self._device)

        def before(position: int) -> None:
            throws.enter(position, seed_of(self._seed, step, microbatch, self._numbers[position]))

        try:
            yield before
        finally:
            self._generators = None
            throws.leave()
        if self._drawing is None:
            self._drawing = throws.drew | self._opaque

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make a context, inside of a layer, in which other ranks of this process may draw."""
        if self._generators is None:
            yield
            return
        with self._generators.paused():
            yield


_Shapes = tuple[tuple[int, ...], ...]  # of the inputs of a microbatch, in the model's order


class WholeModel:
    """The forward of a whole model in one process, with the random numbers of its stages on ranks.

    A model that draws runs layer by layer, each seeded as on ranks; any other runs as it is, after
    a first microbatch. A model without a graph draws as one layer; it cannot be trained on several
    ranks.

    Args:
        model: The model.
        traced: Its layers, read from a microbatch of the usual size; None where it has no graph.
        seed: The run's seed.
        device: The model's device.
        compiles: Whether the layers that do not draw are compiled; what has no graph is not.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced | None,
        seed: int,
        device: torch.device,
        compiles: bool = False,
    ) -> None:
        self._model, self._traced, self._seed, self._device = model, traced, seed, device
        self._compiles = compiles
        self._known: dict[_Shapes, tuple[Traced, Segment, Randomness] | None] = {}

    def forward(self, step: int, microbatch: int, inputs: Inputs) -> Any:
        """Return what the model makes of a microbatch; the generators are left as they were.

        Args:
            step: The run's step, from 0.
            microbatch: Its number in the step, from 0.
            inputs: Its samples, by name where the model has several inputs.
        """
        if self._traced is None:
            return self._as_one_layer(step, microbatch, inputs)
        names = self._traced.graph.inputs
        named = inputs if isinstance(inputs, dict) else dict.fromkeys(names, inputs)
        shapes = tuple(tuple(named[name].shape) for name in names)
        if shapes not in self._known:
            self._known[shapes] = self._read(self._traced, shapes, inputs)
        known = self._known[shapes]
        if known is None:
            return self._as_one_layer(step, microbatch, inputs)
        traced, segment, randomness = known
        with randomness.of(step, microbatch) as before:
            if before is None and not self._compiles:
                return answer(self._model, inputs)
            return traced.assemble({**named, **segment(named, before)})

    def _as_one_layer(self, step: int, microbatch: int, inputs: Inputs) -> Any:
        throws = _LentGenerators({0}, self._device)
        throws.enter(0, seed_of(self._seed, step, microbatch, 0))
        try:
            return answer(self._model, inputs)
        finally:
            throws.leave()

    def _read(
        self, traced: Traced, shapes: _Shapes, inputs: Inputs
    ) -> tuple[Traced, Segment, Randomness] | None:
        """The layers for microbatches of these shapes, which may branch on them."""
        if shapes != tuple(usual.shape for usual in traced.graph.inputs.values()):
            example = tree_map(lambda tensor: tensor.to("meta"), inputs)
            try:
                with torch.autocast(self._device.type, enabled=False):
                    traced = Traced(self._model, example, traced.autocast)
            except PathosegError:
                return None
        layers = range(len(traced.graph.layers))
        randomness = Randomness(traced, layers, self._seed, self._device)
        segment = traced.compiled_segment(layers, ()) if self._compiles else traced.segment(layers)
        return traced, segment, randomness


class _LentGenerators:
    """The generators during one forward: lent to one layer at a time, restored afterwards.

    Attributes:
        drew: The layers that were seen to draw; filled only while `drawing` is None.
    """

    def __init__(self, drawing: set[int] | None, device: torch.device) -> None:
        self.drew: set[int] = set()
        self._drawing, self._device = drawing, device
        self._before: Any = None
        self._seeded: Any = None
        self._position = -1

    def enter(self, position: int, seed: int) -> None:
        self.leave()
        if self._drawing is None or position in self._drawing:
            _GENERATORS.acquire()
            self._before = _state(self._device)
            _seed(seed, self._device)
            self._position = position
            if self._drawing is None:
                self._seeded = _state(self._device)

    def leave(self) -> None:
        if self._before is None:
            return
        if self._seeded is not None and not _equal(self._seeded, _state(self._device)):
            self.drew.add(self._position)
        _restore(self._before, self._device)
        self._before = self._seeded = None
        _GENERATORS.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make a context in which the generators are as they were before the layer."""
        if self._before is None:
            yield
            return
        own = _state(self._device)
        _restore(self._before, self._device)
        _GENERATORS.release()
        try:
            yield
        finally:
            _GENERATORS.acquire()
            self._before = _state(self._device)
            _restore(own, self._device)


def _seed(seed: int, device: torch.device) -> None:
    seed_random(device, seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _state(device: torch.device) -> tuple[list[torch.Tensor], Any, Any]:
    return random_states(device), random.getstate(), np.random.get_state(legacy=False)


def _restore(state: tuple[list[torch.Tensor], Any, Any], device: torch.device) -> None:
    torchs, python, numpys = state
    set_random_states(device, torchs)
    random.setstate(python)
    np.random.set_state(numpys)


def _equal(one: tuple[list[torch.Tensor], Any, Any], two: tuple[Any, Any, Any]) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    key, other = one[2]["state"], two[2]["state"]
    numpys = key["pos"] == other["pos"] and np.array_equal(key["key"], other["key"])
    return same and one[1] == two[1] and numpys
