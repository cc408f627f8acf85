"""What the nodes of a torch.fx graph say: their layer's name and scope, where two graphs differ."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

from pathoseg.errors import PathosegError

# Under this name the root that is traced holds the model.
MODEL = "model"


def layer_nodes(graph: Any) -> list[Any]:
    """The nodes that are layers: all but placeholders, attributes and the output."""
    return [node for node in graph.nodes if node.op.startswith("call_")]


def scope(node: Any) -> tuple[str, ...]:
    """The module calls that a node runs in, outermost first; a call of a module ends with its own.

    A node keeps them as a mapping from `path`, or `path@n` for the n-th repetition.
    """
    calls = [*node.meta.get("nn_module_stack", ())][1:]
    return tuple(call.removeprefix(f"{MODEL}.") for call in calls)


def name_layers(graph: Any) -> dict[Any, str]:
    """A unique name for each placeholder and layer: the module's path, or `path.function`."""
    names: dict[Any, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.target
        elif node.op == "call_module":
            names[node] = scope(node)[-1] if scope(node) else MODEL
    taken = Counter(names.values())
    for node in layer_nodes(graph):
        if node not in names:
            function = node.target if isinstance(node.target, str) else node.target.__name__
            name = ".".join([*scope(node)[-1:], function.strip("_")])
            names[node] = f"{name}_{taken[name]}" if taken[name] else name
            taken[name] += 1
    return names


def differences(train: Any, other: Any) -> set[str]:
    """Paths of modules that have to be opaque, as they do something else in eval mode.

    Empty where eval mode runs some or all of the layers of training, each on the same inputs; then
    any cut of the one is a cut of the other.
    """
    known = {node.meta["layer"]: node for node in train.nodes if "layer" in node.meta}
    pairs = [(node, known.get(node.meta["layer"])) for node in layer_nodes(other)]
    strange = {_owner(node) for node, twin in pairs if twin is None or _does(node) != _does(twin)}
    if not strange:
        returned = set(_reads(other.output_node())) - set(_reads(train.output_node()))
        return {MODEL} if returned else set()
    first, second = _code_by_module(train), _code_by_module(other)
    odd = {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}
    return odd or strange


def attribute(root: Any, node: Any) -> Any:
    """The parameter, buffer, constant or module that a `get_attr` node takes from the root."""
    return operator.attrgetter(node.target)(root)


def call(root: Any, node: Any, look: Callable[[Any], Any]) -> Any:
    """What a node makes, where `look` tells what its sources made; of the output, all of it."""
    args, kwargs = _fill(node.args, look), _fill(node.kwargs, look)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return root.get_submodule(node.target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def expect(value: Any, wanted: bool) -> None:
    """Runs in place of a branch that was taken when the model was traced.

    Raises:
        PathosegError: With this input the model would take the other one.
    """
    if bool(value) != wanted:
        raise PathosegError(
            "The model does something else with inputs of this size than with those it was "
            "planned for.",
            "Plan it for the tile and microbatch that it is trained with.",
        )


def _fill(argument: Any, look: Callable[[Any], Any]) -> Any:
    """An argument with its nodes replaced by what they made."""
    if hasattr(argument, "all_input_nodes"):
        return look(argument)
    if isinstance(argument, tuple):
        return tuple(_fill(item, look) for item in argument)
    if isinstance(argument, list):
        return [_fill(item, look) for item in argument]
    if isinstance(argument, dict):
        return {key: _fill(item, look) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(
            *(_fill(item, look) for item in (argument.start, argument.stop, argument.step))
        )
    return argument


def _code_by_module(graph: Any) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for node in layer_nodes(graph):
        found.setdefault(_owner(node), []).append((node.op, node.target))
    return found


def _owner(node: Any) -> str:
    """Path of the module whose forward made the node."""
    calls = reversed(node.meta.get("nn_module_stack", {}).values())
    if node.op == "call_module":
        next(calls)
    return next((path for path, _ in calls), MODEL)


def _does(node: Any) -> tuple[Any, ...]:
    return node.op, node.target, _reads(node)


def _reads(node: Any) -> list[str]:
    """What a node reads: names of layers and inputs, paths of the model's attributes."""
    names = (source.meta.get("layer", source.target) for source in node.all_input_nodes)
    return [name for name in names if not name.startswith("_tensor_constant")]
