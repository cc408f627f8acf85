"""Names the nodes of fx graphs, finds the modules that made them, and compares two graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Under this name the root that is traced holds the model.
MODEL = "model"


def layer_nodes(graph: Any) -> list[Any]:
    """Return an fx graph's layers: all nodes but placeholders, attributes and the output."""
    return [node for node in graph.nodes if node.op.startswith("call_")]


def scope(node: Any) -> tuple[str, ...]:
    """Return the module calls in which an fx node runs, outermost first.

    A module's own call is the last. A node keeps them as a mapping from `path`, or `path@n` for the
    n-th repetition.
    """
    calls = [*node.meta.get("nn_module_stack", ())][1:]
    return tuple(call.removeprefix(f"{MODEL}.") for call in calls)


def owners(node: Any) -> list[str]:
    """Return the paths of the modules whose forwards made the node, innermost first."""
    calls = [path for path, _ in node.meta.get("nn_module_stack", {}).values()][::-1]
    return calls[1:] if node.op == "call_module" else calls


def name_layers(graph: Any) -> dict[Any, str]:
    """Name each placeholder and layer of an fx graph uniquely.

    Returns:
        By node, the module's path, or `path.function` for what is no module.
    """
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
    """Compare the fx graphs of a model in training and in eval mode.

    Any cut of the one has to be a cut of the other.

    Returns:
        Paths of the modules that have to stay opaque, as they do something else in eval mode; empty
        where eval mode runs some or all of the layers of training, each on the same inputs.
    """
    known = {node.meta["layer"]: node for node in train.nodes if "layer" in node.meta}
    pairs = [(node, known.get(node.meta["layer"])) for node in layer_nodes(other)]
    strange = {_owner(node) for node, twin in pairs if twin is None or _does(node) != _does(twin)}
    if not strange:
        returned = set(_reads(other.output_node())) - set(_reads(train.output_node()))
        return {MODEL} if returned else set()
    one, two = _code_by_module(train), _code_by_module(other)
    return {path for path in one.keys() | two.keys() if one.get(path) != two.get(path)} or strange


def _code_by_module(graph: Any) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for node in layer_nodes(graph):
        found.setdefault(_owner(node), []).append((node.op, node.target))
    return found


def _owner(node: Any) -> str:
    return next(iter(owners(node)), MODEL)


def _does(node: Any) -> tuple[Any, ...]:
    return node.op, node.target, _reads(node)


def _reads(node: Any) -> list[str]:
    """Return what a node reads: names of layers and inputs, paths of the model's attributes."""
    names = (source.meta.get("layer", source.target) for source in node.all_input_nodes)
    return [name for name in names if not name.startswith("_tensor_constant")]
