"""The memory profile of one forward and backward: kernels, storages, and what each layer saves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from pathoseg.parallel.graph.layer_graph import Attribute, Gradient, Storage, Value, Work


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator call: its kernel and its work.

    Attributes:
        name: The ATen operator's name; an in-place one's is that of the other.
        flops: See `Work.flops`.
        read: Bytes of the tensors among its arguments.
        written: Bytes of the tensors that it returns.
        attributes: See `Layer.attributes`.
    """

    name: str
    flops: int
    read: int
    written: int
    attributes: Mapping[str, Attribute]


def describe(
    operator: Any,
    arguments: Sequence[tuple[str, Any]],
    read: Sequence[Any],
    written: Sequence[Any],
    flops: int,
) -> Kernel | None:
    """Return the kernel that a call runs; None where it only makes a view or reserves memory.

    Args:
        operator: The `OpOverload` that was called.
        arguments: Names of its arguments, and what was given.
        read: The tensors among these.
        written: The tensors that it returned.
        flops: Floating-point operations of its convolution or matrix product.
    """
    name: str = operator._overloadpacket.__name__
    if operator.is_view or "empty" in name or not written:
        return None
    return Kernel(
        name.rstrip("_"), flops, _bytes(read), _bytes(written), dict(_attributes(arguments))
    )


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _attributes(arguments: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Attribute]]:
    first = "input"
    for name, value in arguments:
        if hasattr(value, "untyped_storage"):
            if first or name == "weight":
                yield first or name, tuple(value.shape)
            if (
                first
                and not value.is_contiguous()
                and value.nbytes != value.untyped_storage().nbytes()
            ):
                yield "has_gaps", True
            first = ""
        elif _is_plain(value):
            yield name, tuple(value) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


@dataclass
class _Pass:
    """The kernels and storages of one layer's forward, or of its backward."""

    kernels: list[Kernel] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    born: list[int] = field(default_factory=list)

    def work(self) -> Work:
        return Work(
            sum(kernel.flops for kernel in self.kernels),
            sum(kernel.read for kernel in self.kernels),
            sum(kernel.written for kernel in self.kernels),
            self.peak,
        )


class MemoryProfile:
    """The kernels, storages and saved tensors of one forward and backward of a model, by layer.

    The recorder writes it in the order of events; later it is read by layer. A position is that of
    a layer; `layers` stands for the model's caller, whose backward makes the gradients that the
    model's starts from, and -1 for what was there before.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.storages: list[Storage] = []
        self.kept: set[int] = set()
        self._passes = {
            forward: {position: _Pass() for position in range(-1, layers + 1)}
            for forward in (True, False)
        }
        self._saved: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._freed_in_backward: dict[int, int] = {}
        self._sums: dict[int, list[int]] = {}
        self._owners: list[int] = []
        self.at(-1, forward=True)

    def at(self, position: int, *, forward: bool) -> None:
        """Attribute the calls that follow to this layer's forward, or to its backward."""
        self.position, self.forward = position, forward
        self._pass = self._passes[forward][position]

    def ran(self, kernel: Kernel) -> None:
        self._pass.kernels.append(kernel)

    def born(self, size: int) -> int:
        """Record a new storage of `size` bytes; return its index."""
        self.storages.append(Storage(size, self.position, self.layers))
        self._owners.append(1)
        self._pass.born.append(len(self.storages) - 1)
        self._hold(size)
        return len(self.storages) - 1

    def adopted(self, storage: int) -> None:
        """Record a further owner of a storage, which ends when `freed` was called for each."""
        self._owners[storage] += 1
        self._sums.setdefault(storage, []).append(self.position)

    def freed(self, storage: int) -> None:
        """Record that one owner of a storage is gone."""
        self._owners[storage] -= 1
        if not self._owners[storage]:
            self._hold(-self.storages[storage].bytes)
            if self.forward:
                self.storages[storage] = replace(self.storages[storage], until=self.position)
            else:
                self._freed_in_backward[storage] = self.position

    def saved(self, storage: int) -> None:
        """Record that the running layer saves a tensor on a storage for its backward."""
        self._saved[self.position][storage] += 1

    def dropped(self, layer: int, storage: int) -> None:
        """Record that a tensor which `layer` saved on a storage is gone before its backward."""
        if self.forward:
            self._saved[layer][storage] -= 1

    def _hold(self, size: int) -> None:
        self._pass.held += size
        self._pass.peak = max(self._pass.peak, self._pass.held)

    def main_kernel(self, position: int, *, forward: bool = True) -> Kernel | None:
        """Return the kernel with most FLOPs (then bytes) of a layer's forward or backward.

        None where no kernel ran.
        """
        kernels = self._passes[forward][position].kernels
        return max(
            kernels, key=lambda kernel: (kernel.flops, kernel.read + kernel.written), default=None
        )

    def forward_of(self, position: int) -> Work:
        return self._passes[True][position].work()

    def backward_of(self, position: int) -> Work:
        return self._passes[False][position].work()

    def saved_by(self, position: int) -> tuple[int, ...]:
        return tuple(storage for storage, times in self._saved[position].items() if times)

    def gradients_of(self, position: int) -> tuple[Gradient, ...]:
        """Return the gradients that a layer's backward makes and that outlive it.

        Those of parameters (`kept`) count only until the last of them has been added.
        """
        found = []
        for storage in self._passes[False][position].born:
            sums = [place for place in self._sums.get(storage, ()) if place != position]
            until = self._freed_in_backward.get(storage, -1)
            if storage in self.kept:
                until = sums[-1] if sums else position
            if until != position:
                others = tuple(dict.fromkeys(sums))
                found.append(Gradient(self.storages[storage].bytes, until, others))
        return tuple(found)


class SavedTensor:
    """The stand-in that autograd holds for a saved tensor, whose end the recorder observes."""

    def __init__(self, tensor: Any) -> None:
        # What a layer made would hold the node of autograd that is to hold it.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()

    def get(self) -> Any:
        """Return a tensor with the saved one's memory."""
        return self._tensor


class Recorder:
    """Follows storages from birth to end.

    Args:
        profile: What it writes.
        held_once: `_use_count` of a gradient that only autograd holds, as the first of a sum.

    Attributes:
        holders: `_use_count` of each gradient that was the first of a sum.
        writes: Which layer (by position) writes in place into which storage of the profile.
        changed: Storages that the run found there (parameters, buffers) and wrote into.
    """

    def __init__(self, profile: MemoryProfile, held_once: int) -> None:
        self.profile = profile
        self.holders: list[int] = []
        self._held_once = held_once
        self.writes: set[tuple[int, int]] = set()
        self.changed: WeakSet[Any] = WeakSet()
        self._ids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def watch(self, tensor: Any) -> None:
        """Follow the storage of a tensor that no recorded operator made."""
        storage = tensor.untyped_storage()
        if storage not in self._ids:
            self._follow(storage, self.profile.born(storage.nbytes()))

    def keep(self, tensor: Any) -> SavedTensor:
        """Record that the running layer saves a tensor; return the stand-in for autograd to hold.

        Tensors that the run found there, such as parameters, do not count.
        """
        kept, index = SavedTensor(tensor), self._ids.get(tensor.untyped_storage())
        if index is not None:
            self.profile.saved(index)
            finalize(kept, self.profile.dropped, self.profile.position, index).atexit = False
        return kept

    def outlives(self, tensor: Any) -> None:
        """Record that a tensor is a parameter's gradient, which no other backward takes over."""
        self.profile.kept.add(self._ids[tensor.untyped_storage()])

    def ran(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, flops: int
    ) -> None:
        """Record an operator's call: its kernel, FLOPs, and the storages of what it made."""
        schema = operator._schema.arguments
        named = [(argument.name, value) for argument, value in zip(schema, args, strict=False)]
        named += kwargs.items()
        read, written = list(tensors_in((args, kwargs))), list(tensors_in(made))
        found = {tensor.untyped_storage() for tensor in read}
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage not in self._ids and storage not in found:
                self._follow(storage, self._place(operator, read, storage))
        written_into = written_names(operator)
        for name, value in named:
            if name in written_into and value is not None:
                self._wrote(value.untyped_storage())
        kernel = describe(operator, named, read, written, flops)
        if kernel:
            self.profile.ran(kernel)

    def values(self, made: Any) -> tuple[Value, ...]:
        """Return a layer's outputs as plain data: one value for integers, else one a tensor."""
        if type(made) is int:
            return (Value((), "int", 8, None, False),)
        if isinstance(made, tuple) and made and all(type(part) is int for part in made):
            return (Value((len(made),), "int", 8 * len(made), None, False),)
        return tuple(
            Value(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.nbytes,
                self._ids.get(tensor.untyped_storage()),
                tensor.requires_grad,
            )
            for tensor in tensors_in(made)
        )

    def _place(self, operator: Any, read: list[Any], storage: Any) -> int:
        """The profile's index of a new storage.

        While operators are listened to, autograd sums the gradients of a tensor with several
        readers into new memory; else into the first of them, if nothing else holds it.
        """
        if not self.profile.forward and str(operator) == "aten.add.Tensor":
            first = read[0]
            index = self._ids.get(first.untyped_storage())
            is_whole = first.nbytes == storage.nbytes() and not first._is_view()
            self.holders.append(first._use_count())
            if index is not None and is_whole and self.holders[-1] == self._held_once:
                self.profile.adopted(index)
                return index
        return self.profile.born(storage.nbytes())

    def _wrote(self, storage: Any) -> None:
        index = self._ids.get(storage)
        if index is None:
            self.changed.add(storage)
        elif self.profile.forward and self.profile.storages[index].layer < self.profile.position:
            self.writes.add((self.profile.position, index))

    def _follow(self, storage: Any, index: int) -> None:
        self._ids[storage] = index
        finalize(storage, self.profile.freed, index).atexit = False


def strides_of(made: Any) -> tuple[tuple[int, ...], ...]:
    """Return the strides of the tensors in nested values, in elements."""
    return tuple(tuple(tensor.stride()) for tensor in tensors_in(made))


def tensors_in(item: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and mappings, in order."""
    if hasattr(item, "untyped_storage"):
        yield item
    elif isinstance(item, tuple | list):
        for part in item:
            yield from tensors_in(part)
    elif isinstance(item, dict):
        yield from tensors_in(tuple(item.values()))


def written_names(operator: Any) -> set[str]:
    """Return the names of the arguments that an operator of torch writes into."""
    return {
        argument.name
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
