"""A model and the layers read from it: what each costs, and how to run any of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from traceback import walk_tb
from typing import Any

from pathoseg.device import imitated_autocast, imitated_recomputation
from pathoseg.errors import PathosegError
from pathoseg.parallel.graph import fx_tracer as fx
from pathoseg.parallel.graph.compiled_blocks import compiled_step, find_blocks
from pathoseg.parallel.graph.fx_nodes import (
    MODEL,
    differences,
    layer_nodes,
    name_layers,
    owners,
    scope,
)
from pathoseg.parallel.graph.fx_tracer import attribute, call
from pathoseg.parallel.graph.kernel_log import KernelLog
from pathoseg.parallel.graph.layer_graph import (
    MOST_DIMENSIONS,
    SENT_DTYPES,
    Attribute,
    Layer,
    LayerGraph,
    Parameter,
    Value,
    find_ties,
)
from pathoseg.parallel.graph.lent_model import unchanged
from pathoseg.parallel.graph.memory_profile import (
    MemoryProfile,
    Recorder,
    strides_of,
    tensors_in,
)
from pathoseg.parallel.graph.reorder import reordered
from pathoseg.parallel.graph.segment import Call, Segment, SegmentPlan, Step

# Whose modules do the same at each call.
_KNOWN = ("torch.nn.", "pathoseg.models.")
# One thread at a time: torch.fx replaces the calls of all modules while it traces.
_READING = Lock()


@cache
def held_once() -> int:
    """`_use_count` of a gradient that only autograd holds, while it is the first of a sum.

    It is the count of those that stem from the product in a small backward; the sum of `one + one`
    begins with a gradient that both its terms hold.

    Raises:
        PathosegError: This torch tells the two apart by another sign.
    """
    root = fx.Root(_Sums(), fx.to_tensor([1]).float().requires_grad_())
    recorder = Recorder(MemoryProfile(1), 0)
    listener = fx.Listener(root.fake, recorder)
    with root.lent():
        with listener.forward():
            listener.enter(0)
            made = [*root.run(*root.inputs)]
        listener.backward(made)
    return alone(recorder.holders)


class _Sums(fx.Module):
    def forward(self, one: Any) -> tuple[Any, Any]:
        return one * one, one + one


def alone(holders: Sequence[int]) -> int:
    """Return the use count at which autograd owns a gradient alone and may add in place.

    Raises:
        PathosegError: They do not agree, or count no less.
    """
    if len(holders) == 3 and holders[0] > holders[1] == holders[2]:
        return holders[1]
    raise PathosegError(
        f"This version of torch counts the holders of gradients in another way ({holders}), so "
        "the memory of a backward cannot be computed.",
        "Install torch 2.13, with which pathoseg is tested.",
    )


@dataclass(frozen=True)
class _Measured:
    """The layers of a model as they ran.

    Attributes:
        graph: The layers.
        returned: The shapes of what they return.
        strides: As of `Traced`.
        drawing: Positions of the layers that draw.
    """

    graph: LayerGraph
    returned: str
    strides: Mapping[str, tuple[tuple[int, ...], ...]]
    drawing: set[int]


@dataclass(frozen=True)
class _Forward:
    """The layers of a model, whose forward ran and whose backward may.

    Attributes:
        recorder, listener: Who followed it.
        inputs: Of the model.
        made: By layer.
        sendable: By position.
        strides: As of `Traced`.
        ends: What the model returns, nested, as tensors.
        returned: The shapes of that.
    """

    recorder: Recorder
    listener: fx.Listener
    inputs: Mapping[str, Value]
    made: Mapping[str, tuple[Value, ...]]
    sendable: Sequence[bool]
    strides: Mapping[str, tuple[tuple[int, ...], ...]]
    ends: list[Any]
    returned: str


class Traced:
    """A model and the layers that were read from it.

    What torch.fx would lose without a word (branches on values or in Python's random numbers,
    `no_grad`, `autocast`, `checkpoint`, custom autograd functions, tensors kept as attributes)
    makes the module around it one opaque layer, which runs as it is and has a note.

    Args:
        model: Any module, on any device; `meta` will do. The graph is that of training; modules in
            `eval` mode stay so where the model as a whole is in training mode.
        example: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.
            Of tensors, only shape, dtype and `requires_grad` count.
        autocast: The precision (a torch dtype) of the autocast under which it will run, or None.

    Attributes:
        autocast: As given.
        graph: The layers, as plain data.
        strides: By name of a layer or input of the model, those of the tensors that it makes, in
            elements: how they lie in memory, given parameters and examples that lie as these do.

    Raises:
        PathosegError: The model fails on the example.
    """

    def __init__(self, model: fx.Module, example: Any, autocast: Any = None) -> None:
        self.model, self.autocast = model, autocast
        with _READING, fx.mode(model, training=True), _failing(model, "cannot be read"):
            self._root = fx.Root(model, example)
            with self._root.lent():
                self._read()

    def segment(self, layers: range) -> Segment:
        """Return a callable that runs the layers at these positions."""
        return self._segment(layers, self._steps)

    def compiled_segment(self, layers: range, apart: Collection[int]) -> Segment:
        """Return a callable that in training runs the layers in blocks, compiled by torch.compile.

        Args:
            layers: Their positions.
            apart: Positions of those that run by themselves, as do those that draw random numbers,
                and opaque ones.
        """
        graph, in_training = self.graph, dict(self._steps[True])
        others = {
            position
            for position in layers
            if position not in in_training
            or graph.layers[position].kind == graph.modules.get(graph.layers[position].module)
        }
        for block in find_blocks(graph, layers, others | self._drawing | {*apart}):
            step = compiled_step(self._root, [self._nodes[position] for position in block])
            for position in block:
                del in_training[position]
            in_training[block[-1]] = step
        ordered = {position: in_training[position] for position in sorted(in_training)}
        return self._segment(layers, {**self._steps, True: ordered})

    def _segment(self, layers: range, steps: Mapping[bool, Mapping[int, Step]]) -> Segment:
        model = self.model
        return Segment(
            self.graph, layers, steps, lambda: model.training, fx.to_tensor, fx.from_tensor
        )

    def on(self, model: fx.Module) -> Traced:
        """Return the same layers, run by another model of the same modules.

        Args:
            model: A copy of the model that was read. Its values may differ, its modules may not.
        """
        other = copy(self)
        other.model, other._root = model, self._root.on(model)
        other._bind(self._nodes)
        return other

    def reordered(self, order: Sequence[int]) -> Traced:
        """Return the same model, its layers in another order (`reorder.reordered`).

        Raises:
            PathosegError: It is no order of these layers.
        """
        other = copy(self)
        other.graph = reordered(self.graph, order)
        if order:
            other._steps = {
                training: {new: known[old] for new, old in enumerate(order) if old in known}
                for training, known in self._steps.items()
            }
            other._nodes = [self._nodes[old] for old in order]
            other._drawing = {new for new, old in enumerate(order) if old in self._drawing}
        return other

    def measured(
        self,
        place: Callable[[str, Any], Any],
        run: Call | None = None,
        tensors: Callable[[Any], Any] = lambda values: values,
    ) -> LayerGraph:
        """Read the layers again as they run on other values, without real memory.

        Args:
            place: Takes the name of an input and a tensor like it, without memory; returns what the
                layers are given in its place.
            run: Runs a layer, as for `Segment`; None runs it as it is.
            tensors: Returns nested values of layers with the tensors that stand for them.
        """
        with _READING, fx.mode(self.model, training=True), self._root.lent():
            forward = self._forward(None, place, run, tensors)
            return self._backward(forward, *self._found).graph

    def assemble(self, values: Mapping[str, Any]) -> Any:
        """Build what the model itself would return from the values named by `graph.outputs`."""
        numbers = {
            name: fx.from_tensor(values[name])
            for name in self.graph.outputs
            if any(value.dtype == "int" for value in self.graph.made_by(name))
        }
        return self._ends[self.model.training].run({**values, **numbers})

    def _read(self) -> None:
        """Traces and measures, while the model has fake parameters."""
        # `mode` restores the generators: the layers draw what this does and skip the same blocks.
        # A class of one's own may do something else when it is called again.
        calls = 1 + any(not type(m).__module__.startswith(_KNOWN) for m in self.model.modules())
        with fx.running_modules(self._root) as running, unchanged(self.model):
            log = KernelLog(self._root.tensors(), lambda: tuple(running))
            for _ in range(calls):
                with _failing(self.model, "fails its own forward"), self._logged(log):
                    returned = _shapes(self._root.run(*self._root.inputs))
        opaque: dict[str, str] = {}
        while True:
            graphs = {training: self._trace(training, opaque) for training in (True, False)}
            nodes = layer_nodes(graphs[True])
            if odd := differences(graphs[True], graphs[False]):
                opaque.update(dict.fromkeys(odd, "it does something else in eval mode"))
                continue
            self._graphs = graphs
            self._bind(nodes)
            with unchanged(self.model):
                forward, misread = self._checked(nodes, log, calls)
                if forward is not None:
                    parts = self._backward(forward, nodes, opaque)
                    break
            opaque[misread] = "torch.fx reads other operators than it runs"
        self._nodes = nodes  # by position, of the graph in training
        self._found = nodes, opaque
        self.graph, self.strides, self._drawing = parts.graph, parts.strides, parts.drawing
        if not nodes:
            raise PathosegError(
                f"{type(self.model).__name__} has no layers: it returns what it is given.",
                "Give a model that computes something.",
            )
        if returned != parts.returned:
            raise PathosegError(
                f"{type(self.model).__name__} cannot be cut: its layers return {parts.returned}, "
                f"the model itself {returned}.",
                "Train it on one rank, or give what is unusual in it a module of its own.",
            )

    def _checked(
        self, nodes: Sequence[Any], whole: KernelLog, calls: int
    ) -> tuple[_Forward | None, str]:
        """Run the layers, and compare their kernels with those of the model.

        Args:
            nodes: The layers.
            whole: The kernels of the model.
            calls: Number of its forwards in there.

        Returns:
            The first forward of the layers; or None, and the path of the innermost module that
            differs and can be made one layer. Where the model is one layer already, its forward.
        """
        reached: list[int] = []  # positions of the layers that have begun
        log = KernelLog(self._root.tensors(), lambda: nodes[reached[-1]])
        forward, failure = None, None
        try:
            with fx.mode(self.model, training=True):
                forward = self._forward(log, before=reached.append)
            for _ in range(1, calls):
                values = dict(zip(self._root.names, self._root.inputs, strict=True))
                with self._logged(log):
                    SegmentPlan.of(self._steps[True], ()).run(values, reached.append)
        except Exception as error:  # whatever layers raise that were read wrongly
            failure = error
        at = whole.difference(log)
        found: list[str] = []
        if at is not None:
            read = {path for node in nodes for path in owners(node)}
            running = [path for paths in whole.owners[at : at + 1] for path in paths]
            running += [path for node in log.owners[at : at + 1] for path in owners(node)]
            found = [path for path in running if path in read]  # in the same order on all ranks
        if found:
            return None, max(found, key=lambda path: path.count("."))
        if failure is not None:
            raise failure
        return forward, ""

    def _bind(self, nodes: Sequence[Any]) -> None:
        """Make the steps, which run the modules of the root; `nodes` are the layers in order."""
        position = {node.meta["layer"]: index for index, node in enumerate(nodes)}
        self._steps = {
            training: {
                position[node.meta["layer"]]: self._step(node) for node in layer_nodes(graph)
            }
            for training, graph in self._graphs.items()
        }
        self._ends = {
            training: self._step(graph.output_node()) for training, graph in self._graphs.items()
        }

    def _trace(self, training: bool, opaque: dict[str, str]) -> Any:
        known = -1
        while len(opaque) > known:
            known = len(opaque)
            precision = imitated_autocast(self.autocast)  # a model may branch on a dtype
            with fx.mode(self.model, training), unchanged(self.model), precision:
                graph = fx.Tracer(self._root, opaque).nodes()
        for node, name in name_layers(graph).items():
            node.meta["layer"] = name
        return graph

    def _step(self, node: Any) -> Step:
        reads = [source for source in node.all_input_nodes if source.op != "get_attr"]
        names = tuple(source.meta["layer"] for source in reads)

        def run(values: Mapping[str, Any]) -> Any:
            def look(source: Any) -> Any:
                if source.op == "get_attr":
                    return attribute(self._root, source)
                return values[source.meta["layer"]]

            return call(self._root, node, look)

        def run_module(values: Mapping[str, Any]) -> Any:
            return module(*[values[name] for name in names])

        if node.op == "call_module" and node.args == tuple(reads) and not node.kwargs:
            # What most layers are; `call` would take 8 µs more for each.
            module = self._root.get_submodule(node.target)
            return Step(node.meta["layer"], names, run_module)
        return Step(node.meta.get("layer", "output"), names, run)

    @contextmanager
    def _logged(self, log: KernelLog) -> Iterator[None]:
        """Make a context in which a forward in training runs on fake tensors and is logged."""
        precision = imitated_autocast(self.autocast)
        logger = fx.Logger(self._root.fake, log)
        with fx.mode(self.model, True), precision, logger.forward():
            yield

    def _forward(
        self,
        log: KernelLog | None,
        place: Callable[[str, Any], Any] = lambda name, tensor: tensor,
        run: Call | None = None,
        tensors: Callable[[Any], Any] = lambda values: values,
        before: Callable[[int], None] = lambda position: None,
    ) -> _Forward:
        """Run the layers one by one, as `measured`.

        Args:
            log: Whom their kernels are told, if anyone.
            place, run, tensors: As for `measured`.
            before: Called with the position of each layer before it runs.
        """
        root, steps, end = self._root, self._steps[True], self._ends[True]
        profile = MemoryProfile(len(steps))
        recorder = Recorder(profile, held_once())
        listener = fx.Listener(root.fake, recorder, log)
        values: dict[str, Any] = {}
        made: dict[str, tuple[Value, ...]] = {}
        sendable: list[bool] = []
        strides: dict[str, tuple[tuple[int, ...], ...]] = {}

        def enter(position: int) -> None:
            before(position)
            listener.enter(position)

        def describe(value: Any) -> None:
            name = steps[len(sendable)].name
            made[name] = recorder.values(tensors(value))
            strides[name] = strides_of(tensors(value))
            sendable.append(_sendable(tensors(value), made[name]))
            if any(writer == profile.position for writer, _ in recorder.writes):
                # What is written into, and its views, may need gradients from now on.
                others = ((name, tensors(other)) for name, other in values.items())
                made.update((name, recorder.values(other)) for name, other in others)

        with imitated_autocast(self.autocast), listener.forward():
            for name, tensor in zip(root.names, root.inputs, strict=True):
                values[name] = place(name, tensor)
                recorder.watch(tensors(values[name]))
            inputs = {name: recorder.values(tensors(value))[0] for name, value in values.items()}
            strides |= {name: strides_of(tensors(value)) for name, value in values.items()}
            SegmentPlan.of(steps, end.inputs).run(values, enter, describe, run)
            returned = _shapes(tensors(end.run(values)))
        ends = [tensors(values.pop(name)) for name in end.inputs]
        return _Forward(recorder, listener, inputs, made, sendable, strides, ends, returned)

    def _backward(
        self, forward: _Forward, nodes: Sequence[Any], opaque: Mapping[str, str]
    ) -> _Measured:
        """Run the backward of the layers, and describe what they did."""
        root, end, recorder = self._root, self._ends[True], forward.recorder
        profile, listener = recorder.profile, forward.listener
        storages = tuple(profile.storages)
        with imitated_recomputation(self.autocast):
            listener.backward(forward.ends)
        for parameter in root.parameters():
            if parameter.grad is not None:
                recorder.outlives(parameter.grad)
        graph = LayerGraph(
            type(self.model).__name__,
            forward.inputs,
            self._layers(nodes, forward, opaque),
            end.inputs,
            storages,
            {_short(n): Parameter(p.nbytes, p.requires_grad) for n, p in root.named_parameters()},
            {_short(name): buffer.nbytes for name, buffer in root.named_buffers()},
            {_short(path): type(module).__name__ for path, module in root.named_modules() if path},
            notes=_notes(nodes, opaque, listener.guessed),
        )
        # A module may change its buffers without an operator that says so (batch norm does).
        used = {
            id(b) for node in nodes for module in _modules(root, node) for b in module.buffers()
        }
        changing = {
            _short(name)
            for name, buffer in root.named_buffers()
            if id(buffer) in used or buffer.untyped_storage() in recorder.changed
        }
        graph = replace(graph, ties=find_ties(graph, recorder.writes, changing))
        return _Measured(graph, forward.returned, forward.strides, listener.drawing)

    def _layers(
        self, nodes: Sequence[Any], forward: _Forward, opaque: Mapping[str, str]
    ) -> tuple[Layer, ...]:
        root, profile = self._root, forward.recorder.profile
        parameters = {id(p): _short(name) for name, p in root.named_parameters()}
        buffers = {id(buffer): _short(name) for name, buffer in root.named_buffers()}
        layers = []
        for position, node in enumerate(nodes):
            step, modules = self._steps[True][position], _modules(root, node)
            tensors = [id(tensor) for tensor in _attributes(root, node)]
            for module in modules:
                tensors += [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
            layers.append(
                Layer(
                    step.name,
                    *_kind(step.name, modules, profile, position, node.target in opaque),
                    scope(node),
                    step.inputs,
                    forward.made[step.name],
                    forward.sendable[position],
                    tuple(parameters[tensor] for tensor in tensors if tensor in parameters),
                    tuple(buffers[tensor] for tensor in tensors if tensor in buffers),
                    profile.forward_of(position),
                    profile.backward_of(position),
                    profile.saved_by(position),
                    profile.gradients_of(position),
                )
            )
        return tuple(layers)


def _attributes(root: fx.Root, node: Any) -> list[Any]:
    """Return the tensors and modules of the model that a node uses."""
    return [attribute(root, source) for source in node.all_input_nodes if source.op == "get_attr"]


def _modules(root: fx.Root, node: Any) -> list[fx.Module]:
    """The modules that a node runs."""
    modules = [item for item in _attributes(root, node) if isinstance(item, fx.Module)]
    if node.op == "call_module":
        modules.append(root.get_submodule(node.target))
    return modules


def _kind(
    name: str, modules: Sequence[fx.Module], profile: MemoryProfile, position: int, opaque: bool
) -> tuple[str, Mapping[str, Attribute]]:
    """`Layer.kind` and `Layer.attributes`."""
    is_norm = bool(modules) and isinstance(modules[0], fx._NormBase)  # with an activation, perhaps
    if modules and (opaque or (any(modules[0].children()) and not is_norm)):
        return type(modules[0]).__name__, {}
    kernel, back = profile.main_kernel(position), profile.main_kernel(position, forward=False)
    if kernel is None:
        return name.rpartition(".")[2], {}
    if back and back.attributes.get("has_gaps"):
        return kernel.name, {**kernel.attributes, "gradient_has_gaps": True}
    return kernel.name, kernel.attributes


def _sendable(made: Any, values: Sequence[Value]) -> bool:
    """`Layer.sendable` of a layer's result, with its description."""
    if isinstance(made, tuple):
        return bool(made) and all(type(part) is int for part in made)
    if not hasattr(made, "untyped_storage"):
        return type(made) is int
    return all(
        value.dtype in SENT_DTYPES and len(value.shape) <= MOST_DIMENSIONS for value in values
    )


def _short(name: str) -> str:
    """A path below the model, of one below the root."""
    return name.removeprefix(MODEL).removeprefix(".")


def _notes(
    nodes: Sequence[Any], opaque: Mapping[str, str], guessed: Sequence[int]
) -> tuple[str, ...]:
    blocks = [
        f"{_short(node.target) or 'The model'} is one opaque layer: {opaque[node.target]}."
        for node in nodes
        if node.target in opaque
    ]
    asking = [
        f"{nodes[position].meta['layer']} asks for values of tensors: it is priced as if branches "
        "on them were not taken."
        for position in sorted(set(guessed))
    ]
    return (*dict.fromkeys(blocks), *asking)


def _shapes(made: Any) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors_in(made))


@contextmanager
def _failing(model: fx.Module, what: str) -> Iterator[None]:
    """Make a context whose failure is one error that names the model; torch's log repeats it."""

    def silence(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(silence)
    try:
        yield
    except PathosegError:
        raise
    except Exception as error:  # whatever the user's code raises
        names = {id(module): name for name, module in model.named_modules() if name}
        frames = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        where = [names[id(module)] for module in frames if id(module) in names]
        first = str(error).split("\n")[0]
        raise PathosegError(
            f"{type(model).__name__} {what}{f' in {where[-1]}' if where else ''} "
            f"({type(error).__name__}: {first}).",
            "Check its forward on one example: the number of inputs, their channels, and sides "
            "that the model's strides divide.",
        ) from error
    finally:
        log.removeFilter(silence)
