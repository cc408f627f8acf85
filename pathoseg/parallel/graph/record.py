"""Understands what operators do to tensors and storages, and writes it on a tape.

It only asks the objects that it is given (operators, tensors, storages), so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from pathoseg.parallel.graph.kernel import describe
from pathoseg.parallel.graph.layer_graph import Value
from pathoseg.parallel.graph.memory_profile import Tape


class Saved:
    """What autograd holds in place of a tensor that a layer saved."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Recorder:
    """Follows storages from birth to end.

    Args:
        tape: Where it writes.
        held_once: `_use_count` of a gradient that only autograd holds, as the first of a sum.

    Attributes:
        holders: `_use_count` of each gradient that was the first of a sum.
        writes: Which layer (by position) writes in place into which storage of the tape.
        changed: Storages that the run found there (parameters, buffers) and wrote into.
    """

    def __init__(self, tape: Tape, held_once: int) -> None:
        self.tape = tape
        self.holders: list[int] = []
        self._held_once = held_once
        self.writes: set[tuple[int, int]] = set()
        self.changed: WeakSet[Any] = WeakSet()
        self._ids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def watch(self, tensor: Any) -> None:
        """Follows the storage of a tensor that was not made here."""
        storage = tensor.untyped_storage()
        if storage not in self._ids:
            self._follow(storage, self.tape.born(storage.nbytes()))

    def keep(self, tensor: Any) -> Saved:
        """A layer saves the tensor for its backward; those that were found there do not count."""
        kept, index = Saved(tensor.detach()), self._ids.get(tensor.untyped_storage())
        if index is not None:
            self.tape.saved(index)
            finalize(kept, self.tape.dropped, self.tape.position, index).atexit = False
        return kept

    def outlives(self, tensor: Any) -> None:
        """The tensor, a parameter's gradient, is none that a backward leaves to another."""
        self.tape.kept.add(self._ids[tensor.untyped_storage()])

    def ran(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, flops: int
    ) -> None:
        """An operator was called and returned."""
        schema = operator._schema.arguments
        named = [(argument.name, value) for argument, value in zip(schema, args, strict=False)]
        named += kwargs.items()
        read, written = list(_tensors((args, kwargs))), list(_tensors(made))
        found = {tensor.untyped_storage() for tensor in read}
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage not in self._ids and storage not in found:
                self._follow(storage, self._place(operator, read, storage))
        written_into = {argument.name for argument in schema if _writes(argument)}
        for name, value in named:
            if name in written_into and value is not None:
                self._wrote(value.untyped_storage())
        kernel = describe(operator, named, read, written, flops)
        if kernel:
            self.tape.ran(kernel)

    def values(self, made: Any) -> tuple[Value, ...]:
        """What a layer made, as plain data: whole numbers as one value, else one a tensor."""
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
            for tensor in _tensors(made)
        )

    def _place(self, operator: Any, read: list[Any], storage: Any) -> int:
        """The tape's index of a new storage.

        While operators are listened to, autograd sums the gradients of a tensor with several
        readers into new memory; else into the first of them, if nothing else holds it.
        """
        if not self.tape.forward and str(operator) == "aten.add.Tensor":
            first = read[0]
            index = self._ids.get(first.untyped_storage())
            is_whole = first.nbytes == storage.nbytes() and not first._is_view()
            self.holders.append(first._use_count())
            if index is not None and is_whole and self.holders[-1] == self._held_once:
                self.tape.adopted(index)
                return index
        return self.tape.born(storage.nbytes())

    def _wrote(self, storage: Any) -> None:
        index = self._ids.get(storage)
        if index is None:
            self.changed.add(storage)
        elif self.tape.forward and self.tape.storages[index].layer < self.tape.position:
            self.writes.add((self.tape.position, index))

    def _follow(self, storage: Any, index: int) -> None:
        self._ids[storage] = index
        finalize(storage, self.tape.freed, index).atexit = False


def _tensors(item: Any) -> Iterator[Any]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if hasattr(item, "untyped_storage"):
        yield item
    elif isinstance(item, tuple | list):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        yield from _tensors(tuple(item.values()))


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
