"""Consecutive layers of a model, run on the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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


Call = Callable[[int, Step, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Steps in order, and after which of them each value has no reader left.

    Attributes:
        steps: The steps, each with a number of the caller's and the names of what dies after it.
    """

    steps: tuple[tuple[int, Step, tuple[str, ...]], ...]

    @classmethod
    def of(cls, steps: Mapping[int, Step], keep: Collection[str]) -> SegmentPlan:
        """Plan which values each step may free; the values named in `keep` are never freed."""
        last: dict[str, int] = {}
        for number, step in steps.items():
            last.update(dict.fromkeys((*step.inputs, step.name), number))
        dead: dict[int, list[str]] = {number: [] for number in steps}
        for name, number in last.items():
            if name not in keep:
                dead[number].append(name)
        return cls(tuple((number, step, tuple(dead[number])) for number, step in steps.items()))

    def run(
        self,
        values: dict[str, Any],
        before: Callable[[int], None] | None = None,
        after: Callable[[Any], None] | None = None,
        run: Call | None = None,
    ) -> None:
        """Run the steps; `values` gains what they make, and loses what has died.

        Args:
            values: Values that the steps read, by name.
            before: Called with the number of each step before it runs.
            after: Called with what each step made.
            run: Called with the number, the step and the values in place of `step.run`.
        """
        for number, step, dead in self.steps:
            if before:
                before(number)
            made = run(number, step, values) if run else step.run(values)
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
        self._plans = {
            mode: SegmentPlan.of({p: known[p] for p in layers if p in known}, self.outputs)
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
        self,
        values: Mapping[str, Any],
        before: Callable[[int], None] | None = None,
        run: Call | None = None,
    ) -> dict[str, Any]:
        """Run the layers; return the outputs that others read, by name, integers as int64 tensors.

        In `eval` mode some of `inputs` and `outputs` may not exist.

        Args:
            values: Values that they read from outside, by name; the mapping is left as it is.
            before: Called with the position of each layer before it runs.
            run: Called with the position, the step and what it may read, to run a layer in place
                of `step.run`.
        """
        at_hand = {
            name: self._from_tensor(values[name]) if name in self._numbers else values[name]
            for name in self.inputs
            if name in values
        }
        self._plans[self._training()].run(at_hand, before, run=run)
        return {
            name: self._to_tensor(at_hand[name]) if name in self._numbers else at_hand[name]
            for name in self.outputs
            if name in at_hand
        }
