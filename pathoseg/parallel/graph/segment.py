"""Consecutive layers of a model, run on the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pathoseg.parallel.graph.layer_graph import LayerGraph


@dataclass(frozen=True, slots=True)
class Step:
    """One layer, ready to run.

    Attributes:
        name: The layer's name.
        inputs: Names of the layers and model inputs that it reads.
        run: Takes the values that are at hand, by name, and returns what the layer makes.
    """

    name: str
    inputs: tuple[str, ...]
    run: Callable[[Mapping[str, Any]], Any]


def replay(
    steps: Sequence[Step],
    values: dict[str, Any],
    keep: Collection[str],
    before: Callable[[int], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Runs steps in order; `values` gains what they make and loses it after its last reader.

    Args:
        steps: The steps.
        values: What they read, by name.
        keep: Names of values that stay.
        before: Called with the index of each step before it runs.
        after: Called with what each step made.
    """
    for index, (step, dead) in enumerate(zip(steps, _last_reads(steps, keep), strict=True)):
        if before:
            before(index)
        made = step.run(values)
        if after:
            after(made)
        values[step.name] = made
        del made
        for name in dead:
            del values[name]


class Segment:
    """Runs some consecutive layers, in training or `eval` mode as the model is in.

    Args:
        graph: The model's layers.
        layers: Positions of those to run.
        steps: All layers' steps by position, in training (True) and in `eval` mode (False), where
            some may be missing.
        training: Says which mode the model is in.
        to_tensor: Makes a tensor of whole numbers, which are to be sent.
        from_tensor: Its inverse.

    Attributes:
        inputs: Names of the values that it reads from outside.
        outputs: Names of the values that it makes for others (or for the model's caller).
    """

    def __init__(
        self,
        graph: LayerGraph,
        layers: range,
        steps: Mapping[bool, Mapping[int, Step]],
        training: Callable[[], bool],
        to_tensor: Callable[[Any], Any],
        from_tensor: Callable[[Any], Any],
    ) -> None:
        own = graph.layers[layers.start : layers.stop]
        made = {layer.name for layer in own}
        read = dict.fromkeys(name for layer in own for name in layer.inputs)
        self.inputs = tuple(name for name in read if name not in made)
        self.outputs = tuple(
            layer.name for layer in own if graph.readers.get(layer.name, (-1,))[-1] >= layers.stop
        )
        self._steps = {
            mode: {position: known[position] for position in layers if position in known}
            for mode, known in steps.items()
        }
        self._training = training
        self._to_tensor, self._from_tensor = to_tensor, from_tensor
        self._numbers = {
            name
            for name in (*self.inputs, *self.outputs)
            if any(value.dtype == "int" for value in graph.made_by(name))
        }

    def __call__(
        self, values: Mapping[str, Any], before: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """What the layers make for others, by name, whole numbers as int64 tensors.

        In `eval` mode some of `inputs` and `outputs` may not exist.

        Args:
            values: What they read from outside, by name; it is left as it is.
            before: Called with the position of each layer before it runs.
        """
        at_hand = {
            name: self._from_tensor(values[name]) if name in self._numbers else values[name]
            for name in self.inputs
            if name in values
        }
        steps = self._steps[self._training()]
        positions = [*steps]
        enter = None if before is None else lambda index: before(positions[index])
        replay([*steps.values()], at_hand, self.outputs, enter)
        return {
            name: self._to_tensor(at_hand[name]) if name in self._numbers else at_hand[name]
            for name in self.outputs
            if name in at_hand
        }


def _last_reads(steps: Sequence[Step], keep: Collection[str]) -> list[list[str]]:
    """For each step, the names of the values that nobody reads after it."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys(step.inputs, index))
        last[step.name] = index
    dead: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        if name not in keep:
            dead[index].append(name)
    return dead
