"""The tensors that a forward saves, and the recomputation of those that were not kept.

Four layers, of which a, b, c save what the next one reads; autograd holds a `Handle` for each:

    layer               a          b            c           d
    makes               A          B            C           loss       `Made`: a storage, its maker
    fate                KEEP       RECOMPUTE    OFFLOAD
    piece of content    Kept       Dropped      OffloadedPiece         `Handle.piece`

    forward    (1) Each layer is `Recorded`: what it read, saved, returned and overwrote.
               (2) After the last one, `plan_again` goes through the dropped pieces, latest need
                   first: B is made by b, which becomes a `Rerun` with A as its source.
    backward   (3) d, then c ask for C and B: `Handle.tensor` calls `storage()` of the piece. Kept
                   has it; OffloadedPiece fetches it from the host; Dropped has its layer run
                   (`Rerun.give`), and ahead of it, in the forward's order, whatever made sources
                   that are gone.
               (4) A layer that has run lets go of its sources; a piece ends with its last handle.

A storage that is written into has versions: a piece is the content of one of them. Of the fate
TWICE, a layer runs in passing for recomputed layers behind it, and again for its own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.offload import Copies, Label
from pathoseg.parallel.graph.segment import Step

GIVEN = -1  # in place of a layer's position: what no layer of the stage made
_NOTHING = torch.empty(0)  # in place of a tensor that nobody will read


class Fate(Enum):
    """The policy for one storage that a backward needs: keep it, offload it, or recompute it."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2
    TWICE = 3  # for layers behind it, and for its own backward


class Place(NamedTuple):
    """The position of a tensor in its storage.

    Attributes:
        dtype: The tensor's.
        sizes: Its shape.
        strides: In elements.
        offset: In elements.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this position of a storage, not a copy."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.sizes, self.strides)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a uint8 tensor of one dimension, not a copy."""
    return Place(torch.uint8, (storage.nbytes(),), (1,), 0).on(storage)


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
    """Content that stays on the device, in the storage of `tensor`.

    A parameter of a stage that is offloaded leaves it, and is back before the stage's backward.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(packed=True)
        self.tensor = tensor

    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


class OffloadedPiece(_Content):
    """Content in host memory, once it has left; freed there with the last reference to this.

    Attributes:
        copies: The copies to the host and back.
        ticket: Stands for the bytes on the host; None until they leave.
    """

    __slots__ = ("_here", "copies", "ticket")

    def __init__(self, copies: Copies, storage: torch.UntypedStorage) -> None:
        super().__init__(packed=True)
        self.copies = copies
        self.ticket: Any = None
        self._here: torch.UntypedStorage | None = storage

    def leave(self, label: Label) -> None:
        """Copy the storage, which nobody writes into from now on, to the host."""
        assert self._here is not None
        self.ticket = self.copies.leave(bytes_of(self._here), label)
        self._here = None

    def storage(self) -> torch.UntypedStorage:
        if self._here is not None:
            return self._here
        return self.copies.fetch(self.ticket).untyped_storage()

    def __del__(self) -> None:
        if self.ticket is not None:
            self.copies.drop(self.ticket)


class Dropped(_Content):
    """Content that a layer will make once more.

    Attributes:
        run: The run of that layer, once it is planned.
        made: The storage that it made.
    """

    __slots__ = ("made", "run")

    def __init__(self, packed: bool) -> None:
        super().__init__(packed)
        self.run: Rerun | None = None
        self.made: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        if self.made is None:
            assert self.run is not None
            self.run.give()
        assert self.made is not None
        return self.made


Piece = Kept | OffloadedPiece | Dropped


@dataclass(slots=True, eq=False)
class Made:
    """One storage of a forward, and the versions of its content.

    Attributes:
        known: Keeps the storage's identity from being reused, not its memory.
        fate: Its policy.
        given: The stage's own or received tensor in it, where no layer made it.
        makers: The positions of the layers that wrote it, each with the version that it found.
        pieces: Its content, as long as somebody refers to it: by version, and whether it is made
            again in passing, for recomputed layers behind it alone (TWICE).
    """

    known: StorageWeakRef
    fate: Fate
    given: Tensor | None
    makers: list[tuple[int, int]]
    pieces: dict[tuple[int, bool], ref[Piece]] = field(default_factory=dict)

    def piece(self, version: int, passing: bool = False) -> Piece | None:
        found = self.pieces.get((version, passing))
        return None if found is None else found()

    def maker(self, version: int) -> int:
        """Return the position of the layer that left this version behind, or GIVEN."""
        return next(at for at, found in reversed(self.makers) if found < version)


class Handle:
    """The stand-in that autograd holds for a saved tensor.

    Attributes:
        piece: The content of its storage; None where `witness` is the tensor.
        place: The tensor's position in it.
        witness: Shares the version counter of the tensor, and its memory only if that is kept.
        version: The tensor's version when it was saved.
        layer: Name of the layer that saved it.
    """

    __slots__ = ("layer", "piece", "place", "version", "witness")

    def __init__(
        self, witness: Tensor, layer: str, piece: Piece | None, place: Place | None
    ) -> None:
        self.witness, self.version, self.layer = witness, witness._version, layer
        self.piece, self.place = piece, place

    def tensor(self) -> Tensor:
        """Return the saved tensor, with its storage kept, fetched or recomputed: the unpack hook.

        Raises:
            PathosegError: It was written into since, or cannot be recomputed.
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


class Storages:
    """The storages that one forward has come across.

    Args:
        given: The stage's own and received tensors: their content is always kept.
        known: The storages of other given tensors, as of an earlier forward; None where there is
            none.
    """

    def __init__(self, given: Iterable[Tensor], known: Storages | None = None) -> None:
        self._known: dict[int, Made] = {} if known is None else dict(known._known)
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._add(storage, Fate.KEEP, tensor, GIVEN)

    def of(self, storage: torch.UntypedStorage, position: int, fate: Fate) -> Made:
        """Return the record of a storage; one seen first was made by the layer at `position`."""
        made = self._known.get(storage._cdata)
        return self._add(storage, fate, None, position) if made is None else made

    def _add(
        self, storage: torch.UntypedStorage, fate: Fate, given: Tensor | None, maker: int
    ) -> Made:
        known = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # untyped in torch
        made = self._known[storage._cdata] = Made(known, fate, given, [(maker, -1)])
        return made


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is a plain view of its storage, without further state."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


# Sets up what layers at these positions need to run as in their forward; gives what is to be called
# with the position of each.
Context = Callable[[Sequence[int]], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a layer read or made, as its storage was at that moment.

    Attributes:
        made: The storage.
        version: The version of its content.
        place: The tensor's position in it.
        requires_grad: Whether the tensor needed a gradient.
    """

    made: Made
    version: int
    place: Place
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of one forward of a layer, by which it is recomputed.

    Attributes:
        position: The layer's.
        step: The layer.
        reads: Its arguments by name, with a `Leaf` in place of each tensor.
        saves: The storages that it saved, with their versions, in turn; None for a tensor that is
            no plain one.
        returns: Its result, with a `Leaf` in place of each tensor.
        writes: Tensors that it read and then wrote into, each with the version that it left.
    """

    position: int
    step: Step
    reads: Mapping[str, Any]
    saves: Sequence[tuple[Made, int] | None]
    returns: Any
    writes: Sequence[tuple[Leaf, int]]


def plan_again(
    dropped: Iterable[tuple[Dropped, Made, int]],
    recorded: Mapping[int, Recorded],
    context: Context,
) -> None:
    """(2) Link each dropped piece to the layer run that will make its content again.

    What is kept or waits in host memory is had from there, and held until the layers that read it
    have run; what nobody saved is made again too. Layers of the fate TWICE run once in passing,
    for recomputed ones behind them, and what they make then goes when it has been read; for their
    own backward they run again.

    Args:
        dropped: Content that will be needed, with its storage and version.
        recorded: The record of each layer's forward, by position.
        context: Sets up randomness and precision for layers that run again.

    Raises:
        PathosegError: A layer read what was overwritten since.
    """
    numbers = count()

    def want(piece: Dropped, made: Made, version: int, passing: bool) -> _Wanted:
        return _Wanted(-piece.needed, next(numbers), piece, made, version, passing)

    wanted = [
        want(piece, made, version, passing=made.fate is not Fate.TWICE)
        for piece, made, version in dropped
    ]
    heapify(wanted)
    runs: dict[_RunKey, Rerun] = {}
    while wanted:
        # Latest needs first, so that each source learns of the first that asks for it.
        _, _, piece, made, version, passing = heappop(wanted)
        if piece.run is not None:
            continue
        key = _RunKey(made.maker(version), passing)
        piece.run = run = runs.get(key) or Rerun(recorded[key.position], passing, context)
        run.makes.append((made, version, ref(piece)))
        if key in runs:
            continue
        runs[key] = run
        for leaf in leaves_of(run.layer.reads, Leaf):
            if (leaf.made, leaf.version) in run.sources:
                continue
            source = _source(leaf, run, recorded)
            source.readers += 1
            source.needed = max(source.needed, piece.needed)
            run.sources[leaf.made, leaf.version] = source
            if isinstance(source, Dropped) and source.run is None:
                how = passing or leaf.made.fate is Fate.RECOMPUTE
                heappush(wanted, want(source, leaf.made, leaf.version, how))


class _Wanted(NamedTuple):
    """Dropped content that is asked for; of the same need, what was asked for first comes first."""

    need: int
    number: int
    piece: Dropped
    made: Made
    version: int
    passing: bool


class _RunKey(NamedTuple):
    """The identity of a rerun within a stage; sorts in the order of the forward."""

    position: int
    passing: bool


def _source(leaf: Leaf, run: Rerun, recorded: Mapping[int, Recorded]) -> Piece:
    made, version = leaf.made, leaf.version
    source = made.piece(version)
    passing = run.passing and made.fate is not Fate.RECOMPUTE
    if passing and (source is None or isinstance(source, Dropped)):
        source = made.piece(version, passing)
    if source is not None:
        return source
    if made.maker(version) != GIVEN:
        source = Dropped(packed=False)
    elif made.given is not None and made.given._version == version:
        source = Kept(made.given)
    else:
        name, writer = run.layer.step.name, recorded[made.makers[-1][0]].step.name
        raise PathosegError(
            f"{name} cannot be recomputed: {writer} writes into what it has read.",
            f"Keep what {name} makes.",
        )
    made.pieces[version, passing] = ref(source)
    return source


class Rerun:
    """A layer that is to run once more, at most once.

    Attributes:
        layer: The record of its forward.
        passing: Whether for layers behind it, and not for the backward of what it saves (TWICE).
        sources: The content that it reads; emptied when it has run.
        makes: The content that it is to make, by storage and version.
    """

    def __init__(self, layer: Recorded, passing: bool, context: Context) -> None:
        self.layer, self.passing = layer, passing
        self.sources: dict[tuple[Made, int], Piece] = {}
        self.makes: list[tuple[Made, int, ref[Dropped]]] = []
        self._context = context

    def give(self) -> None:
        """(3) Run the layer and, in the order of the forward, all that has to run ahead of it.

        The pieces of `makes` then have what they lacked.

        Raises:
            PathosegError: A layer saves other tensors than in its forward, or its input was
                overwritten since.
        """
        ahead: dict[_RunKey, Rerun] = {}
        waiting = [self]
        while waiting:
            run = waiting.pop()
            key = _RunKey(run.layer.position, run.passing)
            if key in ahead:
                continue
            ahead[key] = run
            for source in run.sources.values():
                if isinstance(source, Dropped) and source.made is None:
                    assert source.run is not None
                    waiting.append(source.run)
        order = sorted(ahead)
        with self._context([key.position for key in order]) as before:
            for key in order:
                before(key.position)
                ahead.pop(key)._run()

    def _run(self) -> None:
        layer = self.layer
        storages = {key: self._storage(key) for key in self.sources}
        overwritten = {(leaf.made, leaf.version) for leaf, _ in layer.writes}

        def restore(leaf: Leaf) -> Tensor:
            key = leaf.made, leaf.version
            tensor = leaf.place.on(storages[key])
            if leaf.requires_grad and key in overwritten:
                token = torch.empty(0, requires_grad=True)
                found: Tensor = _Inner.apply(token, tensor)  # type: ignore[no-untyped-call]  # torch's
                return found
            return tensor.requires_grad_(leaf.requires_grad)

        saves: list[Tensor] = []

        def save(tensor: Tensor) -> Tensor:
            saves.append(tensor.detach())
            return _NOTHING  # the tensor itself could hold on to what saves it

        with torch.autograd.graph.saved_tensors_hooks(save, _never):
            returns = layer.step.run(map_leaves(layer.reads, Leaf, restore))
        if len(saves) != len(layer.saves):
            raise PathosegError(
                f"{layer.step.name} saves {len(saves)} tensors when it runs once more, and "
                f"{len(layer.saves)} in its forward.",
                f"Keep what {layer.step.name} makes.",
            )
        made = {
            (leaf.made, version): storages[leaf.made, leaf.version]
            for leaf, version in layer.writes
        }
        plain = filter(is_plain, leaves_of(returns, Tensor))
        for leaf, tensor in zip(leaves_of(layer.returns, Leaf), plain, strict=True):
            made[leaf.made, leaf.version] = tensor.untyped_storage()
        for saved, tensor in zip(layer.saves, saves, strict=True):
            if saved is not None:
                made[saved] = tensor.untyped_storage()
        for known, version, dropped in self.makes:
            if (piece := dropped()) is not None and piece.made is None:
                piece.made = made.get((known, version))
        for key, source in self.sources.items():
            source.readers -= 1
            is_needed = source.packed or source.readers  # then a copy was written into
            if key in overwritten and isinstance(source, Dropped) and not is_needed:
                source.made = None
        self.sources.clear()

    def _storage(self, key: tuple[Made, int]) -> torch.UntypedStorage:
        """Return the storage that the layer reads; a copy if it writes what others need."""
        source = self.sources[key]
        if isinstance(source, Kept) and source.tensor._version != key[1]:
            raise PathosegError(
                f"What {self.layer.step.name} has read was written into since, so it cannot be "
                "recomputed.",
                "Let the model write into copies of what other layers need, not in place.",
            )
        storage = source.storage()
        written = any((leaf.made, leaf.version) == key for leaf, _ in self.layer.writes)
        shared = source.packed or source.readers > 1 or not isinstance(source, Dropped)
        return storage.clone() if written and shared else storage  # type: ignore[no-untyped-call]  # torch's


class _Inner(torch.autograd.Function):
    """A tensor that is no leaf, so that a layer may write into it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor) -> Tensor:
        return Place.of(tensor).on(tensor.untyped_storage())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        raise AssertionError("what runs once more has no backward of its own")


def _never(tensor: Tensor) -> Tensor:
    raise AssertionError("what runs once more has no backward of its own")


def leaves_of(value: Any, kind: type) -> Iterator[Any]:
    """Yield the items of a type in nested tuples, lists and dicts, in a fixed order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item, kind)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with `change` applied to each item of type `kind`.

    A container without such an item is returned itself, not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if not isinstance(value, (tuple, list, dict)) or next(leaves_of(value, kind), None) is None:
        return value
    if isinstance(value, dict):
        return type(value)((key, map_leaves(item, kind, change)) for key, item in value.items())
    items = [map_leaves(item, kind, change) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
