"""Traces a model by torch.fx, names its layers, and listens to the kernels on fake tensors."""

from __future__ import annotations

import inspect
import operator
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx._symbolic_trace import _maybe_revert_all_patches
from torch.nn import Module as Module
from torch.nn.modules.batchnorm import _NormBase as _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from pathoseg.device import autocast_types
from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.fx_nodes import MODEL
from pathoseg.parallel.graph.kernel_log import KernelLog
from pathoseg.parallel.graph.lent_model import state_of, unchanged
from pathoseg.parallel.graph.memory_profile import Recorder, SavedTensor


def attribute(root: Any, node: Any) -> Any:
    """Return what a `get_attr` node takes from the root: a parameter, buffer or module."""
    return operator.attrgetter(node.target)(root)


def call(root: Any, node: Any, look: Callable[[Any], Any]) -> Any:
    """Run one node on the values that `look` returns for its sources; return its result."""
    args, kwargs = _fill(node.args, look), _fill(node.kwargs, look)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return root.get_submodule(node.target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


class Block:
    """Consecutive layers as one compiled function, which runs the modules of the root.

    Args:
        root: The module that was traced.
        nodes: The layers, in order; the last one's value is returned.

    Attributes:
        sources: What the function takes, in order: nodes of layers, inputs and attributes that the
            layers read. Attributes are inputs too, as parameters and buffers may be replaced.
    """

    def __init__(self, root: nn.Module, nodes: Sequence[Any]) -> None:
        from torch._dynamo.exc import TorchDynamoException  # 1.5 s, for what compiles alone

        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        self.sources = [source for source in read if source not in nodes]
        graph = fx.Graph()
        known = {source: graph.placeholder(f"value_{at}") for at, source in enumerate(self.sources)}
        for node in nodes:
            known[node] = graph.node_copy(node, known.__getitem__)
        graph.output(known[nodes[-1]])
        self._compiled = torch.compile(fx.GraphModule(root, graph), dynamic=False)
        self._failures = TorchDynamoException
        self._said = f"{nodes[0].meta['layer']} to {nodes[-1].meta['layer']}"

    def __call__(self, *values: Any) -> Any:
        """Run the layers on the values of `sources`; they are compiled for each new shape.

        Raises:
            PathosegError: torch.compile failed.
        """
        try:
            return self._compiled(*values)
        except self._failures as error:
            why = " ".join(str(error).split("\n")[:2])  # the first names the backend alone
            raise PathosegError(
                f"torch.compile fails for the layers from {self._said} ({why}).",
                "Leave out [train] compile, or install what it needs: a C++ compiler for a CPU, "
                "Triton for a GPU.",
            ) from error


def expect(value: Any, wanted: bool) -> None:
    """Check a condition on the input that the model branches on; it runs in place of the branch.

    Args:
        value: The condition with this input.
        wanted: The condition with the input by which the model was traced.

    Raises:
        PathosegError: They differ, so that the model would take the other branch.
    """
    if bool(value) != wanted:
        raise PathosegError(
            "The model does something else with inputs of this size, dtype or device than with "
            "those it was planned for.",
            "Plan it for the tile and microbatch it is trained with; branch on no dtype or device.",
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
        ends = argument.start, argument.stop, argument.step
        return slice(*(_fill(item, look) for item in ends))
    return argument


_OPEN = ("Sequential", "Transformer")  # how modules of torch.nn worth cutting inside are called
_aten = torch.ops.aten
_flash = "_scaled_dot_product_flash_attention"
_FLOPS = dict(flop_registry)
for _pass in ("", "_backward"):  # torch counts this attention on a GPU only
    _FLOPS[getattr(_aten, f"{_flash}_for_cpu{_pass}")] = _FLOPS[getattr(_aten, _flash + _pass)]
# `v += 1` writes into v and all that share its memory; torch.fx alone would read `v = v + 1`.
_AUGMENTED = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_WRITTEN = {f"__i{name}__": getattr(operator, f"__i{name}__") for name in _AUGMENTED}
_WRITTEN["__setitem__"] = operator.setitem
_DEVICE = torch.ops.prim.device.default  # asked of fake tensors as often as all else together
_MOST_GUESSES = 10_000  # of a tensor's value; a loop that asks more often would never end


class UntraceableError(Exception):
    """The model does something that torch.fx would leave out of its graph without an error."""


class Root(nn.Module):
    """Holds a model and an example of its arguments; so the whole model can be one node too.

    Attributes:
        names: Names of the tensors among the arguments.
        inputs: Fake tensors like them.
        fake: The mode in which kernels run without memory.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        named = example if isinstance(example, Mapping) else {}
        listed = (example,) if isinstance(example, torch.Tensor) else () if named else example
        self._arguments = inspect.signature(model.forward).bind(*listed, **named)
        leaves, self._spec = tree_flatten_with_path(dict(self._arguments.arguments))
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        tensors = {
            slot: ("_".join(re.findall(r"\w+", "".join(map(str, path)))), leaf)
            for slot, (path, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        self._slots = list(tensors)
        self.names = [name for name, _ in tensors.values()]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs = [self._imitate(tensor) for _, tensor in tensors.values()]

    def on(self, model: nn.Module) -> Root:
        """Return a root of another model with the same modules, and the same example."""
        other = copy(self)
        other._modules = {**self._modules, "model": model}
        other._arguments = copy(self._arguments)  # `run` replaces its tensors
        other.fake = FakeTensorMode(allow_non_fake_inputs=True)
        other.inputs = [other._imitate(tensor) for tensor in self.inputs]
        return other

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Make a context in which the model has fake parameters and buffers, and gradients."""
        # `functional_call` leaves its tensors in modules that the model holds twice.
        own = [
            (module, name, tensor)
            for module in self.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        fakes = {id(tensor): self._imitate(tensor) for _, _, tensor in own}
        try:
            for module, name, tensor in own:
                setattr(module, name, fakes[id(tensor)])
            with torch.enable_grad(), unchanged(self.model):
                yield
        finally:
            for module, name, tensor in own:
                setattr(module, name, tensor)

    def tensors(self) -> list[tuple[str, Any]]:
        """Return the inputs, parameters and buffers with their names."""
        inputs = zip(self.names, self.inputs, strict=True)
        return [*inputs, *self.named_parameters(), *self.named_buffers()]

    def run(self, *tensors: Any) -> Any:
        """Call the model with the example's arguments, its tensors replaced by these in order."""
        leaves = [*self._constants]
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        self._arguments.arguments = tree_unflatten(leaves, self._spec)
        return self.model(*self._arguments.args, **self._arguments.kwargs)

    def _imitate(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
            fake = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def running_modules(root: nn.Module) -> Iterator[list[str]]:
    """Make a context with the paths of the modules whose forwards run, innermost last."""
    paths = {id(module): path for path, module in root.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(paths.get(id(module), MODEL))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Make a context with the model in training or eval mode; also restores random generators."""
    modes, dice = {module: module.training for module in model.modules()}, _dice()
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in modes.items():
            module.training = flag
        _throw_again(dice)


def to_tensor(numbers: int | Sequence[int]) -> torch.Tensor:
    """Encode a whole number or a shape as an int64 tensor, to be sent between stages."""
    return torch.tensor(numbers, dtype=torch.int64)


def from_tensor(message: torch.Tensor) -> int | torch.Size:
    """Decode the number or shape that `to_tensor` encoded."""
    return torch.Size(message.tolist()) if message.dim() else int(message)


class Tracer(fx.Tracer):
    """Traces a root in the mode that its model is in.

    Branches on shapes are taken as the example's shapes decide, and checked when the nodes run.

    Args:
        root: The model, made ready for tracing.
        opaque: Why each module that is not traced inside is not, by path; gains what it finds.
    """

    proxy_buffer_attributes = True
    traced_func_name = "run"

    def __init__(self, root: Root, opaque: dict[str, str]) -> None:
        super().__init__()
        # `checkpoint` becomes a node; where its arguments cannot be a node's, its module is opaque.
        self._autowrap_function_ids.add(id(checkpoint.checkpoint))
        self._autowrap_search.append(checkpoint)
        self._source = root
        self._opaque = opaque
        self._contexts = _contexts()
        self._known: dict[fx.Node, Any] = {}

    def nodes(self) -> fx.Graph:
        """Trace the root's `run` to an fx graph."""
        apply = torch.autograd.Function.__dict__["apply"]

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                raise UntraceableError("it calls a custom autograd function")
            return apply.__get__(None, cls)(*args, **kwargs)

        def node_of(function: Any) -> Any:
            return lambda *args: self.create_proxy("call_function", function, args, {})

        proxy: Any = {"__len__": lambda proxy: len(self.parts(proxy))}
        proxy |= {name: node_of(function) for name, function in _WRITTEN.items()}
        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
            mock.patch.multiple(fx.Proxy, create=True, **proxy),
        ):
            return self.trace(self._source)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._source.names]
        for proxy, value in zip(proxies, self._source.inputs, strict=True):
            self._known[proxy.node] = value
        return root_fn, [self._source, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A user's norm as well: its running statistics are lent to the module, not to its layers.
        known = super().is_leaf_module(m, module_qualified_name) or isinstance(m, _NormBase)
        is_open = type(m).__name__.startswith(_OPEN)
        return module_qualified_name in self._opaque or (known and not is_open)

    def create_node(self, kind: str, target: Any, args: Any, *more: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts:
            raise UntraceableError("it switches gradients or autocast off or on")
        first = args[0] if args else None
        is_new = isinstance(first, fx.Node) and str(first.target).startswith("_tensor_constant")
        if is_new and kind.startswith("call_") and _writes(target):
            # The graph makes the tensor once, the model at each call.
            raise UntraceableError("it writes into a tensor that it makes")
        return super().create_node(kind, target, args, *more, **kwargs)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        # An identity would only make a second message of the same tensor.
        if type(m) is nn.Identity and not m._forward_hooks:
            return args[0]
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            mark, depth = len(self.graph.nodes), len(self.module_stack)
            attributes, buffers, dice = dict(vars(m)), dict(m._buffers), _dice()
            plain = state_of(m)
            try:
                made = super().call_module(m, forward, args, kwargs)
                held = (*vars(m).values(), *m._buffers.values())
                if any(isinstance(value, fx.Proxy) for value in held):
                    raise UntraceableError("it keeps a tensor as an attribute")
                if any(buffers.get(name) is not each for name, each in m._buffers.items()):
                    raise UntraceableError("it makes a buffer")
                now = state_of(m)
                if any(now.get(name) != value for name, value in plain.items()):
                    raise UntraceableError("it changes an attribute")
                if _thrown_since(dice):
                    raise UntraceableError("it draws random numbers outside of torch's layers")
                return made
            except Exception as error:  # whatever the user's code raises on symbolic values
                self._opaque[path] = str(error).split("\n")[0] or type(error).__name__
                _throw_again(dice)
                vars(m).clear()
                vars(m).update(attributes)
                m._buffers.clear()
                m._buffers.update(buffers)
                self._take_back(mark, depth)
        if m._forward_hooks and path != MODEL:  # it runs with the layer, but not while tracing
            raise UntraceableError("a forward hook may hand it a tensor")
        return super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self._value(obj.node)
        if isinstance(value, torch.Tensor):
            raise UntraceableError("it branches on the values of a tensor")
        self.create_node("call_function", expect, (obj.node, bool(value)), {})
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter([operator.getitem(obj, index) for index in range(len(self.parts(obj)))])

    def parts(self, obj: fx.Proxy) -> Sequence[Any]:
        """Return the items of a proxy of a tuple; raise for a tensor, whose length may vary."""
        value = self._value(obj.node)
        if isinstance(value, tuple | list):
            return value
        raise UntraceableError(f"it loops over {type(value).__name__}")

    def _value(self, node: fx.Node) -> Any:
        """Run the node on the fake tensors of the example input; return its result."""
        with _maybe_revert_all_patches(), self._source.fake, torch.no_grad():
            for earlier in self.graph.nodes:
                if earlier.op == "get_attr":
                    self._known[earlier] = attribute(self._source, earlier)
                elif earlier not in self._known:
                    self._known[earlier] = call(self._source, earlier, self._known.__getitem__)
        return self._known[node]

    def _take_back(self, mark: int, depth: int) -> None:
        """Erases the nodes after the first `mark` ones; attributes stay, as torch.fx knows them."""
        for node in reversed([*self.graph.nodes][mark:]):
            if node.op != "get_attr":
                self.graph.erase_node(node)
        while len(self.module_stack) > depth:
            self.module_stack.popitem()


class Logger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Tells a log of every operator that runs on fake tensors.

    Args:
        fake: The mode of the fake tensors.
        log: Whom it tells.
    """

    def __init__(self, fake: FakeTensorMode, log: KernelLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._fake, self._log, self._guesses = fake, log, 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Make a context in which operators are logged, but for those that save tensors."""
        with self._fake, self, saved_tensors_hooks(self._keep, SavedTensor.get):
            yield

    def _keep(self, tensor: torch.Tensor) -> SavedTensor:
        with self._log.paused():
            return SavedTensor(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        try:
            made = func(*args, **kwargs)
        except DataDependentOutputException as error:
            self._guesses += 1
            return _guess(error, func, args, self._guesses)
        if func.namespace != "prim":
            self._log.ran(func, args, kwargs, made, _draws(func, args, kwargs))
        return made


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Runs a forward and its backward on fake tensors, and tells a recorder of every operator.

    Args:
        fake: The mode of the fake tensors.
        recorder: Whom it tells.
        log: Whom it tells of the forward's operators, too.

    Attributes:
        guessed: Positions of the layers that asked for a tensor's value, and were told one.
        drawing: Positions of the layers whose forward draws random numbers by torch.
    """

    def __init__(
        self, fake: FakeTensorMode, recorder: Recorder, log: KernelLog | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.guessed: list[int] = []
        self.drawing: set[int] = set()
        self._fake, self._recorder, self._profile = fake, recorder, recorder.profile
        self._starts: list[int] = []
        self._log = log

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Make a context in which kernels are counted as those of a forward."""
        with self._fake, self, saved_tensors_hooks(self._keep, SavedTensor.get):
            yield
        self._log = None
        self.enter(self._profile.layers)

    def enter(self, position: int) -> None:
        """Count the kernels that follow for the forward of the layer at `position`."""
        self._profile.at(position, forward=True)
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def backward(self, made: list[Any]) -> None:
        """Run the backward of the values that the forward made, counting kernels by layer.

        The list is emptied as it goes; parameters' gradients are held.
        """
        self._profile.at(self._profile.layers, forward=False)
        with self._fake, self:
            roots = [
                (get_gradient_edge(leaf), torch.empty_like(leaf))
                for leaf in tree_leaves(made)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            made.clear()
            self._end = torch._C._autograd._get_sequence_nr()
            self._profile.at(self._profile.layers - 1, forward=False)
            torch.autograd.backward([edge for edge, _ in roots], [given for _, given in roots])

    def _keep(self, tensor: torch.Tensor) -> SavedTensor:
        with self._log.paused() if self._log is not None else nullcontext():
            return self._recorder.keep(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if not self._profile.forward:
            self._locate()
        elif _draws(func, args, kwargs):
            self.drawing.add(self._profile.position)
        # One tensor is the gradient of both biases; the cache would make two of it at a hit.
        self._fake.cache_enabled = func is not _aten.mkldnn_rnn_layer_backward.default
        try:
            made = func(*args, **kwargs)
        except DataDependentOutputException as error:
            self.guessed.append(self._profile.position)
            return _guess(error, func, args, len(self.guessed))
        if func.namespace != "prim":
            formula = _FLOPS.get(func._overloadpacket)
            flops = formula(*args, **kwargs, out_val=made) if formula else 0
            self._recorder.ran(func, args, kwargs, made, flops)
            if self._log is not None:
                self._log.ran(func, args, kwargs, made, _draws(func, args, kwargs))
        return made

    def _locate(self) -> None:
        """Tell the profile whose backward runs: that of the layer that made autograd's node."""
        node = torch._C._current_autograd_node()
        # Sums into `.grad`, and what `checkpoint` runs again, have numbers above all others. Nodes
        # of views whose base was written into come after the layers'; they count to the last.
        if node is not None and node._sequence_nr() < self._end:
            position = bisect_right(self._starts, node._sequence_nr()) - 1
            self._profile.at(min(position, self._profile.layers - 1), forward=False)


def _guess(error: Exception, func: Any, args: Sequence[Any], guesses: int) -> bool | int:
    """A value for a tensor that has none: branches on it are not taken, sizes are 1.

    Args:
        error: What is raised where the operator asks for something else.
        func: The operator.
        args: Its arguments.
        guesses: How many there were, this one included.
    """
    if func is not _aten._local_scalar_dense.default:
        raise error
    if guesses > _MOST_GUESSES:
        raise UntraceableError("it loops until a tensor has a certain value")
    return False if args[0].dtype == torch.bool else 1


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operator draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def _writes(target: Any) -> bool:
    """Return True if a function or method writes into its first argument."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _WRITTEN or f"__{name}__" in _WRITTEN


def _contexts() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, autocast_types())


def _dice() -> tuple[Any, Any, torch.Tensor]:
    """The states of all generators of random numbers."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _thrown_since(dice: tuple[Any, Any, torch.Tensor]) -> bool:
    now = _dice()
    numpys = (np.array_equal(one, two) for one, two in zip(now[1], dice[1], strict=True))
    return now[0] != dice[0] or not all(numpys) or not torch.equal(now[2], dice[2])


def _throw_again(dice: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(dice[0])
    np.random.set_state(dice[1])
    torch.set_rng_state(dice[2])
