"""What a forward saves for its backward: the content of storages, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.offload import Copies

GIVEN = -1  # in place of a layer's position: what no layer of the stage made


class Fate(Enum):
    """What becomes of what a layer makes and a backward needs."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2
    TWICE = 3  # for layers behind it, and for its own backward


class Place(NamedTuple):
    """Where in its storage a tensor lies."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.sizes, self.strides)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as a tensor of them."""
    return Place(torch.uint8, (storage.nbytes(),), (1,), 0).on(storage)


class Run(Protocol):
    """A layer that can be run once more."""

    def give(self, piece: Dropped) -> None:
        """Has a piece get its content, with whatever has to run ahead."""


class _Content:
    """The content of a storage.

    Attributes:
        needed: The number of the latest save that needs it; the backward comes to that one first.
        packed: Whether a backward needs it as it is.
        readers: Layers that will read it when they run once more.
    """

    __slots__ = ("__weakref__", "needed", "packed", "readers")

    def __init__(self, packed: bool) -> None:
        self.needed = GIVEN
        self.packed = packed
        self.readers = 0


class Kept(_Content):
    """Content that stays on the device, where `tensor` lies. A parked parameter leaves it and is
    back before its stage's backward."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(packed=True)
        self.tensor = tensor

    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


class Away(_Content):
    """Content that waits in host memory, under a ticket."""

    __slots__ = ("copies", "ticket")

    def __init__(self, copies: Copies, ticket: Any) -> None:
        super().__init__(packed=True)
        self.copies, self.ticket = copies, ticket

    def storage(self) -> torch.UntypedStorage:
        return self.copies.fetch(self.ticket).untyped_storage()

    def __del__(self) -> None:
        self.copies.drop(self.ticket)


class Dropped(_Content):
    """Content that a layer will make once more.

    Attributes:
        run: That layer, once it is known.
        made: What it made.
    """

    __slots__ = ("made", "run")

    def __init__(self, packed: bool) -> None:
        super().__init__(packed)
        self.run: Run | None = None
        self.made: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        if self.made is None:
            assert self.run is not None
            self.run.give(self)
        assert self.made is not None
        return self.made


Piece = Kept | Away | Dropped


@dataclass(slots=True, eq=False)
class Made:
    """A storage that a forward came across.

    Attributes:
        known: Keeps its identity from being given to another, not its memory.
        fate: What becomes of it.
        given: What the stage was given in it, where no layer made it.
        makers: The layers that made its content, each with the version that it found.
        pieces: Its content by version, as long as somebody needs it.
        passing: Likewise what is made again for recomputed layers behind it alone.
    """

    known: StorageWeakRef
    fate: Fate
    given: Tensor | None
    makers: list[tuple[int, int]]
    pieces: dict[int, ref[Piece]] = field(default_factory=dict)
    passing: dict[int, ref[Piece]] = field(default_factory=dict)

    def piece(self, version: int, passing: bool = False) -> Piece | None:
        found = (self.passing if passing else self.pieces).get(version)
        return None if found is None else found()

    def maker(self, version: int) -> int:
        """The layer that left this version behind, or GIVEN."""
        return next(at for at, found in reversed(self.makers) if found < version)


class Handle:
    """What autograd holds in place of a tensor that it saved.

    Attributes:
        piece: The content of its storage; None where `witness` is the tensor.
        place: Where in it the tensor lies.
        witness: Shares the version counter of the tensor, and its memory only if that is kept.
        version: Of the tensor when it was saved.
        layer: Name of the layer that saved it.
    """

    __slots__ = ("layer", "piece", "place", "version", "witness")

    def __init__(
        self, witness: Tensor, layer: str, piece: Piece | None, place: Place | None
    ) -> None:
        self.witness, self.version, self.layer = witness, witness._version, layer
        self.piece, self.place = piece, place

    def tensor(self) -> Tensor:
        """The tensor that was saved.

        Raises:
            PathosegError: Somebody has written into it since.
        """
        if self.witness._version != self.version:
            raise PathosegError(
                f"A tensor that {self.layer} has saved for its backward was then written into "
                f"(version {self.witness._version} instead of {self.version}).",
                "Let the model write into copies of what other layers need, not in place.",
            )
        if self.piece is None or self.place is None:
            return self.witness
        return self.place.on(self.piece.storage())


def unpack(handle: Handle) -> Tensor:
    """The hook by which autograd gets back what it saved."""
    return handle.tensor()


class Storages:
    """The storages that one forward has come across.

    Args:
        given: What the stage has or was given: its content is always kept.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self._known: dict[int, Made] = {}
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._add(storage, Fate.KEEP, tensor, GIVEN)

    def of(self, storage: torch.UntypedStorage, position: int, fate: Fate) -> Made:
        """What is known of a storage; a new one was made by the layer at this position."""
        made = self._known.get(storage._cdata)
        return self._add(storage, fate, None, position) if made is None else made

    def _add(
        self, storage: torch.UntypedStorage, fate: Fate, given: Tensor | None, maker: int
    ) -> Made:
        known = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # untyped in torch
        made = self._known[storage._cdata] = Made(known, fate, given, [(maker, -1)])
        return made


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a place in a storage."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )
