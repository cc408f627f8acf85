"""The one door to torch.fx: traces a model's nodes, and listens to kernels on fake tensors."""

from __future__ import annotations

import inspect
import operator
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx._symbolic_trace import _maybe_revert_all_patches
from torch.nn import Module as Module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from pathoseg.parallel.graph.nodes import attribute, call, expect
from pathoseg.parallel.graph.record import Recorder

# Modules of torch.nn that are worth cutting inside, by the beginning of their class's name.
_OPEN = ("Sequential", "Transformer")
_aten = torch.ops.aten
_flash = "_scaled_dot_product_flash_attention"
_FLOPS = {
    **flop_registry,
    getattr(_aten, f"{_flash}_for_cpu"): flop_registry[getattr(_aten, _flash)],
    getattr(_aten, f"{_flash}_for_cpu_backward"): flop_registry[
        getattr(_aten, f"{_flash}_backward")
    ],
}
# A loop that asks for a tensor's value this often would never end without real values.
_MOST_GUESSES = 10_000


class UntraceableError(Exception):
    """Something that torch.fx would lose without a word."""


class Root(nn.Module):
    """Holds a model and what it is called with, so that the whole model can be one node too.

    Args:
        model: The model.
        example: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.

    Attributes:
        names: Names of the tensors among the arguments.
        fake: The mode in which kernels run without memory.
        inputs: Fake tensors like those of the example.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        signature = inspect.signature(model.forward)
        if isinstance(example, Mapping):
            self._arguments = signature.bind(**example)
        elif isinstance(example, torch.Tensor):
            self._arguments = signature.bind(example)
        else:
            self._arguments = signature.bind(*example)
        flat, self._spec = tree_flatten_with_path(dict(self._arguments.arguments))
        self._leaves = [leaf for _, leaf in flat]
        self._slots = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.names = [
            "_".join(re.findall(r"\w+", "".join(str(key) for key in flat[slot][0])))
            for slot in self._slots
        ]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs = [self._imitate(self._leaves[slot]) for slot in self._slots]

    def forward(self, do: Callable[[], None]) -> None:
        """Lets `functional_call` lend the model fake parameters while `do` runs."""
        do()

    def lend(self, do: Callable[[], None]) -> None:
        """Runs `do` while parameters and buffers are fake ones."""
        state = {name: self._imitate(tensor) for name, tensor in self.state().items()}
        torch.func.functional_call(self, state, (do,))

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, shared ones once."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def run(self, *tensors: Any) -> Any:
        """Calls the model with `tensors` in place of those of the example."""
        leaves = [*self._leaves]
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
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Lends a model in training or eval mode; restores it, and all generators of random numbers."""
    modes = {module: module.training for module in model.modules()}
    dice = _dice()
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in modes.items():
            module.training = flag
        _throw_again(dice)


def to_tensor(numbers: int | Sequence[int]) -> torch.Tensor:
    """Whole numbers as a message."""
    return torch.tensor(numbers, dtype=torch.int64)


def from_tensor(message: torch.Tensor) -> int | torch.Size:
    """The inverse of `to_tensor`."""
    return torch.Size(message.tolist()) if message.dim() else int(message)


class _Proxy(fx.Proxy):
    tracer: Tracer

    def __len__(self) -> int:
        return len(self.tracer.parts(self))


class Tracer(fx.Tracer):
    """Traces a root in the mode that its model is in.

    Branches on shapes are taken as the example's shapes decide, and checked when the nodes run.

    Args:
        root: What to trace.
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
        """The graph of the root's `run`."""
        apply = torch.autograd.Function.__dict__["apply"].__func__

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                raise UntraceableError("it calls a custom autograd function")
            return apply(cls, *args, **kwargs)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)):
            return self.trace(self._source)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._source.names]
        for proxy, value in zip(proxies, self._source.inputs, strict=True):
            self._known[proxy.node] = value
        return root_fn, [self._source, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._opaque:
            return True
        return super().is_leaf_module(m, module_qualified_name) and not type(m).__name__.startswith(
            _OPEN
        )

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts:
            raise UntraceableError("it switches gradients or autocast off or on")
        return super().create_node(kind, *args, **kwargs)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if type(m) is nn.Identity:
            return args[0]
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            mark, depth = len(self.graph.nodes), len(self.module_stack)
            attributes, dice = dict(vars(m)), _dice()
            try:
                made = super().call_module(m, forward, args, kwargs)
                if any(isinstance(value, fx.Proxy) for value in vars(m).values()):
                    raise UntraceableError("it keeps a tensor as an attribute")
                if _dice() != dice:
                    raise UntraceableError("it draws random numbers outside of torch's layers")
            except Exception as error:  # whatever the user's code raises on symbolic values
                self._opaque[path] = str(error).split("\n")[0] or type(error).__name__
                _throw_again(dice)
                vars(m).update(attributes)
                self._take_back(mark, depth)
            else:
                return made
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self._value(obj.node)
        if isinstance(value, torch.Tensor):
            raise UntraceableError("it branches on the values of a tensor")
        self.create_node("call_function", expect, (obj.node, bool(value)), {})
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter([operator.getitem(obj, index) for index in range(len(self.parts(obj)))])

    def parts(self, obj: fx.Proxy) -> Sequence[Any]:
        """What a proxy of several values stands for; a tensor is none, as its length may vary."""
        value = self._value(obj.node)
        if not isinstance(value, tuple | list):
            raise UntraceableError(f"it loops over {type(value).__name__}")
        return value

    def _value(self, node: fx.Node) -> Any:
        """What the node makes of the example, on fake tensors."""
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


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Runs a forward and its backward on fake tensors, and tells a recorder of every operator.

    Args:
        fake: The mode of the fake tensors.
        recorder: Whom it tells.

    Attributes:
        guessed: Positions of the layers that asked for a tensor's value, and were told one.
    """

    def __init__(self, fake: FakeTensorMode, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.guessed: list[int] = []
        self._fake = fake
        self._recorder = recorder
        self._tape = recorder.tape
        self._starts: list[int] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What runs in here is a forward."""
        with self._fake, self, saved_tensors_hooks(self._recorder.keep, lambda tensor: tensor):
            yield
        self.enter(self._tape.layers)

    def enter(self, position: int) -> None:
        """The forward of the layer at this position begins."""
        self._tape.at(position, forward=True)
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def backward(self, made: list[Any]) -> None:
        """The backward of what the forward made, which is let go; its gradients are held."""
        self._tape.at(self._tape.layers, forward=False)
        with self._fake, self:
            leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            gradients = [torch.empty_like(leaf) for leaf in leaves if leaf.requires_grad]
            edges = [get_gradient_edge(leaf) for leaf in leaves if leaf.requires_grad]
            made.clear()
            leaves.clear()
            if edges:
                torch.autograd.backward(edges, gradients)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._tape.forward:
            self._locate()
        try:
            made = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not _aten._local_scalar_dense.default:
                raise
            return self._guess(args[0].dtype)
        if func.namespace != "prim":
            formula = _FLOPS.get(func._overloadpacket)
            flops = formula(*args, **kwargs, out_val=made) if formula else 0
            self._recorder.ran(func, args, kwargs, made, flops)
        return made

    def _locate(self) -> None:
        """Tells the tape whose backward runs: that of the layer that made autograd's node."""
        node = torch._C._current_autograd_node()
        # Sums into `.grad`, and what `checkpoint` runs again, have numbers above all layers'.
        if node is not None and node._sequence_nr() < self._starts[-1]:
            position = bisect_right(self._starts, node._sequence_nr()) - 1
            self._tape.at(position, forward=False)

    def _guess(self, dtype: torch.dtype) -> bool | int | float:
        """A value for a tensor that has none: branches on it are not taken, sizes are 1."""
        self.guessed.append(self._tape.position)
        if len(self.guessed) > _MOST_GUESSES:
            raise UntraceableError("it loops until a tensor has a certain value")
        if dtype == torch.bool:
            return False
        return 1.0 if dtype.is_floating_point else 1


def _contexts() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in devices)


def _dice() -> tuple[Any, ...]:
    """The state of the generators of random numbers, comparable."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, tuple(keys), *rest), tuple(torch.get_rng_state().tolist())


def _throw_again(dice: tuple[Any, ...]) -> None:
    python, numpy, torchs = dice
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch.tensor(torchs, dtype=torch.uint8))
