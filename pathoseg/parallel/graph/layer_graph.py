"""A model as plain data: what its layers cost, read, save and send, and how it is cut."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

# What a message to another stage can hold; a receiver knows a dtype by its position here.
SENT_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"),
    *("int32", "int16", "int8", "complex64", "complex128"),
)
MOST_DIMENSIONS = 8

# What an attribute of a layer can be; sequences are tuples.
Attribute = bool | int | float | str | tuple["Attribute", ...] | None


@dataclass(frozen=True, slots=True)
class Value:
    """An output of a layer that others read: a tensor, or integers taken from a shape.

    Attributes:
        shape: Sizes of a tensor; () or (how many,) of whole numbers.
        dtype: Torch's name of it (`float32`); `int` for whole numbers.
        bytes: Bytes of the elements alone; 8 for each whole number.
        storage: Index into `LayerGraph.storages`: a view and its base share one. None where it
            has none of its own (whole numbers, constants).
        gradient: Whether a gradient flows back to it.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int | None
    gradient: bool


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that one or several values live in.

    Attributes:
        bytes: Its size.
        layer: Position of the layer that makes it; -1 for an input of the model.
        until: Position of the last layer whose forward needs it; the number of layers where a
            backward, or the model's caller, does.
    """

    bytes: int
    layer: int
    until: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Memory that the backward of one layer leaves to that of an earlier one.

    Attributes:
        bytes: Its size.
        until: Position of the layer whose backward frees it; -1 where none does.
        sums: Positions of the layers, descending, whose own gradients were added to it in place.
    """

    bytes: int
    until: int
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one pass (forward or backward) of a layer.

    Attributes:
        flops: Floating-point operations of convolutions and matrix products, a multiply-add
            being two; all else counts by its bytes.
        read: Bytes of the tensors that its kernels read, each kernel's counted.
        written: Bytes that they write.
        peak: Most bytes beyond those held when the pass began, whatever outlives it included.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a module without traced inside, or of a function.

    Attributes:
        name: Unique in its graph.
        kind: The ATen operator that does most of the work (`convolution`, `native_batch_norm`,
            `relu`, `cat`…); of a layer without kernels, the function's name; of an opaque block or
            a fold, the module's class.
        attributes: The operator's arguments that are no tensors, by the names of its schema, with
            the shapes of its first tensor (`input`) and, where it has one, `weight`. `has_gaps`:
            the first tensor is part of another or repeats it; `gradient_has_gaps`: so its gradient.
        scope: The calls of modules that it runs in, outermost first, its own last. A module's
            second call is `path@1`.
        inputs: Names of the layers and model inputs that it reads.
        outputs: What it makes; not one where it returns nothing or several values.
        sendable: Whether its output can travel to another stage: one tensor of `SENT_DTYPES`, of
            at most `MOST_DIMENSIONS`, or whole numbers.
        parameters: Names of the parameters that it uses, as in `model.named_parameters()`.
        buffers: Names of the buffers that it uses.
        forward: Work of its forward.
        backward: Work of its backward.
        saved: Storages that it keeps for its backward, parameters and buffers aside.
        gradients: Memory that its backward leaves to others, parameters' gradients aside.
    """

    name: str
    kind: str
    attributes: Mapping[str, Attribute]
    scope: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    sendable: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    forward: Work
    backward: Work
    saved: tuple[int, ...]
    gradients: tuple[Gradient, ...]

    @property
    def module(self) -> str:
        """The path of the innermost module that the layer is part of; empty for the model."""
        return self.scope[-1].partition("@")[0] if self.scope else ""

    @property
    def is_free(self) -> bool:
        """Return True if the layer runs no kernel: a view, or arithmetic with sizes."""
        return not self.forward.written


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's size in bytes, and whether it is trained."""

    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class Colocation:
    """Layers that must be on one stage.

    Attributes:
        first: Position of the first of them.
        last: Position of the last one; those between are on it too.
        reason: The reason, as part of a sentence.
    """

    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """A value that one layer makes and another reads.

    Attributes:
        source: Name of the layer, or model input, that makes it.
        target: Name of the layer that reads it.
        bytes: Its size.
    """

    source: str
    target: str
    bytes: int


@dataclass(frozen=True)
class LayerGraph:
    """A model's layers in the order of execution, which is a topological one.

    Attributes:
        model: Name of the model's class.
        inputs: The model's inputs by name.
        layers: The layers; a layer's *position* is its index here.
        outputs: Names of the layers (or inputs) whose values the model returns.
        storages: Memory that the values live in.
        parameters: Parameters by name, shared ones once.
        buffers: Bytes of the buffers by name.
        modules: Class of each module that runs, by path.
        ties: Layers that no cut may part.
        notes: Remarks for the reader, such as blocks that could not be traced.
        order: Where the layers run in another order than in the model itself (`reorder`), the
            position there of each; empty elsewhere.
    """

    model: str
    inputs: Mapping[str, Value]
    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]
    storages: tuple[Storage, ...]
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, int]
    modules: Mapping[str, str]
    ties: tuple[Colocation, ...] = ()
    notes: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def numbers(self) -> Sequence[int]:
        """The position of each layer in the order in which the model itself runs them."""
        return self.order or range(len(self.layers))

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The position of each layer, by name."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """By name of a layer or input, the ascending positions of the layers that read its value.

        The model's caller reads the outputs at position `len(layers)`.
        """
        found: dict[str, set[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in layer.inputs:
                found.setdefault(name, set()).add(index)
        for name in self.outputs:
            found.setdefault(name, set()).add(len(self.layers))
        return {name: tuple(sorted(positions)) for name, positions in found.items()}

    @property
    def edges(self) -> Iterator[LayerEdge]:
        """Yield the edges between layers, long skips included, in the order of their targets."""
        for layer in self.layers:
            for name in dict.fromkeys(layer.inputs):
                yield LayerEdge(name, layer.name, self.bytes_of(name))

    def made_by(self, name: str) -> tuple[Value, ...]:
        """Return the values of the layer or model input called `name`; several for a tuple."""
        if name in self.inputs:
            return (self.inputs[name],)
        return self.layers[self.position[name]].outputs

    def bytes_of(self, name: str) -> int:
        """Return the bytes of the values that the layer or model input called `name` makes."""
        return sum(value.bytes for value in self.made_by(name))

    def gradient_bytes(self, name: str) -> int:
        """Return the bytes of the gradients of the values that layer or input `name` makes."""
        return sum(value.bytes for value in self.made_by(name) if value.gradient)

    def saved_bytes(self, first: int = 0, last: int | None = None) -> int:
        """Return the bytes that the layers from `first` to before `last` save for backward.

        A storage that several of them save counts once.
        """
        kept = {storage for layer in self.layers[first:last] for storage in layer.saved}
        return sum(self.storages[storage].bytes for storage in kept)

    def parameter_bytes(self, first: int = 0, last: int | None = None) -> int:
        """Return the bytes of the parameters of layers `first` to before `last`, each once."""
        used = {name for layer in self.layers[first:last] for name in layer.parameters}
        return sum(self.parameters[name].bytes for name in used)

    @cached_property
    def structure(self) -> str:
        """The model's structure as text, equal on all ranks that run the model together.

        It holds the layers (name, kind, arguments, and the values that they read, make and use),
        the inputs, outputs, parameters and buffers, and the ties that no cut may part. Costs are
        left out (work, storages, saved tensors, gaps in tensors): no step depends on them, and two
        readings of one model may differ in them.
        """
        parts = asdict(replace(self, storages=(), notes=()))
        for value in parts["inputs"].values():
            del value["storage"]
        for layer in parts["layers"]:
            for price in ("forward", "backward", "saved", "gradients"):
                del layer[price]
            for value in layer["outputs"]:
                del value["storage"]
            for gaps in ("has_gaps", "gradient_has_gaps"):
                layer["attributes"].pop(gaps, None)
        return json.dumps(parts)


@dataclass(frozen=True, slots=True)
class StageEdge:
    """A value that one stage sends to another, straight, however many stages lie between.

    Attributes:
        value: Name of the layer that makes it.
        source: The stage that makes it.
        target: The stage that reads it; the last one for an output of the model.
        bytes: Bytes of one message.
        gradient: Whether as many come back in the backward.
    """

    value: str
    source: int
    target: int
    bytes: int
    gradient: bool


@dataclass(frozen=True)
class Partition:
    """Stages, each an interval of the layers.

    Attributes:
        bounds: Position of the first layer of each stage, and the number of layers at the end.
        edges: The values that stages send each other, by source, target, then order of execution.
        inputs: For each stage, the names of the model's inputs that it reads.
        loads: For each stage, what the cut was balanced by.
    """

    bounds: tuple[int, ...]
    edges: tuple[StageEdge, ...]
    inputs: tuple[tuple[str, ...], ...]
    loads: tuple[float, ...] = field(default=(), compare=False)

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages of one microbatch's forward."""
        return sum(edge.bytes for edge in self.edges)

    def layers(self, stage: int) -> range:
        """Return the positions of a stage's layers."""
        return range(self.bounds[stage], self.bounds[stage + 1])


@dataclass(frozen=True, slots=True)
class Life:
    """The use of a storage after the layer that makes it.

    Attributes:
        bytes: Its size.
        end: Position of the last layer whose forward needs it.
        saved: Position of the first layer that saves it for backward; the number of layers if none
            does.
    """

    bytes: int
    end: int
    saved: int


def lifetimes(graph: LayerGraph) -> list[list[Life]]:
    """Return, by position of a layer, the storages that it makes and that outlive its forward."""
    size = len(graph.layers)
    saved: dict[int, int] = {}
    for position, layer in enumerate(graph.layers):
        for storage in layer.saved:
            saved.setdefault(storage, position)
    lives: list[list[Life]] = [[] for _ in range(size)]
    for index, made in enumerate(graph.storages):
        if made.until > made.layer >= 0:
            lives[made.layer].append(Life(made.bytes, made.until, saved.get(index, size)))
    return lives


def find_ties(
    graph: LayerGraph, writes: Collection[tuple[int, int]], stateful: Collection[str]
) -> tuple[Colocation, ...]:
    """Find the layers that no cut may part.

    Args:
        graph: The layers, still without ties.
        writes: Pairs of a layer's position and the index of a storage into which it writes in
            place.
        stateful: Names of buffers that layers change or may change.

    Returns:
        The constraints, ordered by first layer.
    """
    ties = {*_writers(graph, writes), *_sharers(graph, stateful), *unsendable(graph)}
    return tuple(sorted(ties, key=lambda tie: (tie.first, tie.last, tie.reason)))


def _writers(graph: LayerGraph, writes: Collection[tuple[int, int]]) -> Iterator[Colocation]:
    """A layer that writes belongs to the maker: a received copy would leave other views as they
    were, and autograd allows no write into a leaf."""
    for writer, storage in writes:
        maker = graph.storages[storage].layer
        first, last = maker, writer
        if maker < 0:
            # Each stage is given the model's inputs afresh, so all readers have to be together.
            names = [name for name, value in graph.inputs.items() if value.storage == storage]
            readers = [position for name in names for position in graph.readers[name]]
            first, last = min(readers), min(max(*readers, writer), len(graph.layers) - 1)
        if first < last:
            target = graph.layers[maker].name if maker >= 0 else "the input"
            reason = f"{graph.layers[writer].name} writes in place into {target}"
            yield Colocation(first, last, reason)


def _sharers(graph: LayerGraph, stateful: Collection[str]) -> Iterator[Colocation]:
    """Copies of a trained weight, or of a running statistic, would drift apart."""
    found: dict[str, list[int]] = {}
    for position, layer in enumerate(graph.layers):
        trained = [name for name in layer.parameters if graph.parameters[name].trained]
        for name in (*trained, *(name for name in layer.buffers if name in stateful)):
            found.setdefault(name, []).append(position)
    for name, positions in found.items():
        if positions[0] < positions[-1]:
            yield Colocation(positions[0], positions[-1], f"all use {name}")


def unsendable(graph: LayerGraph) -> Iterator[Colocation]:
    """Yield a constraint for each layer whose output cannot travel, up to its last reader."""
    for position, layer in enumerate(graph.layers):
        readers = [reader for reader in graph.readers.get(layer.name, ()) if reader > position]
        if readers and not layer.sendable:
            last = min(readers[-1], len(graph.layers) - 1)
            if last > position:
                yield Colocation(position, last, f"{layer.name} makes no single tensor to send")
