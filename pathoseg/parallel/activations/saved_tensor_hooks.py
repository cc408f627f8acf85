"""Keeps, offloads or drops what the forwards of one stage save for their backwards.

The life of one saved tensor, from a layer's forward to its backward:

    (1) run      a layer of the stage runs, and with it `_position` says whose saves these are
    (2) _pack    autograd hands over each tensor that the layer saves
    (3) _made    whose storage is it? one seen first is this layer's; its fate is the layer's:
                     KEEP ............ Kept: the tensor stays on the device
                     OFFLOAD ......... OffloadedPiece: its bytes leave for the host now, or at the
                                       end of the layer that makes them (SMALL ones stay)
                     RECOMPUTE, TWICE  Dropped: nothing is kept
    (4) Handle   autograd holds this in place of the tensor: the piece, and where in it the tensor
                 lies; without memory, but with the tensor's version counter
    (5) finish   the forward is over: dropped pieces learn which layers make them (`plan_again`)
    (6) tensor   the backward asks the Handle for it (rematerialize.py): there, fetched, or made
                 again

A storage saved by several layers, or as several views, is one piece. A parameter is Kept, and never
by its own tensor where stages park: its bytes may be away meanwhile, and back before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.activations.offload import Copies, Label
from pathoseg.parallel.activations.rematerialize import (
    Dropped,
    Fate,
    Handle,
    Kept,
    Leaf,
    Made,
    OffloadedPiece,
    Piece,
    Place,
    Recorded,
    Storages,
    is_plain,
    leaves_of,
    map_leaves,
    plan_again,
)
from pathoseg.parallel.activations.running_statistics import norms_at, uncounted
from pathoseg.parallel.graph.activation_policy import SMALL, ActivationPolicy
from pathoseg.parallel.graph.segment import Step
from pathoseg.parallel.graph.traced import Traced

# Sets up randomness and precision as in the forward; gives what is called ahead of each layer.
RerunContext = Callable[[], AbstractContextManager[Callable[[int], None] | None]]


class SavedTensorHooks:
    """The saved-tensor hooks of a stage: each saved tensor is kept, offloaded or dropped.

    Args:
        traced: The model.
        layers: Positions of the stage's layers.
        number: The stage's number.
        policy: The layers whose saved tensors are offloaded or recomputed.
        copies: Copies to the host; None where everything stays on the device.
        parks: Whether the stage's parameters may leave the device ahead of a backward.

    Raises:
        PathosegError: The policy names a layer that is not there, or twice.
    """

    def __init__(
        self,
        traced: Traced,
        layers: range,
        number: int,
        policy: ActivationPolicy,
        copies: Copies | None,
        parks: bool = False,
    ) -> None:
        self._number, self._copies, self._parks = number, copies, parks
        graph = traced.graph
        self._names = {position: graph.layers[position].name for position in layers}
        self._fates: dict[int, Fate] = {}
        positions = {name: position for position, name in self._names.items()}
        for names, fate in (
            (policy.offloaded, Fate.OFFLOAD),
            (policy.recomputed, Fate.RECOMPUTE),
            (policy.twice, Fate.TWICE),
        ):
            for name in names:
                position = positions.get(name)
                if position is None or position in self._fates:
                    raise PathosegError(
                        f"Stage {number} has no layer {name} that could be "
                        f"{'offloaded' if fate is Fate.OFFLOAD else 'recomputed'}"
                        + (" beside what is planned for it." if position is not None else "."),
                        "Plan the memory of these stages again.",
                    )
                self._fates[position] = fate
        if copies is None:
            self._fates = {at: f for at, f in self._fates.items() if f is not Fate.OFFLOAD}
        self.recomputes = policy.runs_again
        own = [graph.layers[position] for position in layers]
        self._parameters = _owners(traced.model, (name for each in own for name in each.parameters))
        # Of norms others in each microbatch (`RunningStatistics.lend`).
        self._buffers = _owners(traced.model, (name for each in own for name in each.buffers))
        self._given: Storages | None = None
        self._norms = {
            position: norms_at(traced.model, graph, position) if self.recomputes else []
            for position in layers
        }

    @property
    def active(self) -> bool:
        """Return True if any saved tensor is offloaded or dropped."""
        return bool(self._fates) or self._parks

    @property
    def leaving(self) -> Collection[int]:
        """Return the positions of the layers whose saved tensors are offloaded or dropped."""
        return self._fates.keys()

    def begin(self) -> None:
        """Begin a step: parameters may have moved to other memory since the last one."""
        self._given = None

    def recording(
        self, microbatch: int, received: Mapping[str, Tensor], again: RerunContext
    ) -> Recording:
        """Return the recording of one forward, to be entered by its `hooks`.

        Args:
            microbatch: Its number.
            received: The stage's inputs for it, by name; their storages are always kept.
            again: Makes a context in which its layers run once more, with the same random numbers
                and precision.
        """
        if self._given is None or self._parks:
            self._given = Storages(_tensors_of(self._parameters))
        given = [*_tensors_of(self._buffers), *filter(is_plain, received.values())]
        return Recording(self, microbatch, Storages(given, self._given), again)

    def uncounted(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        """Return a context in which the norms of these layers update no running statistics."""
        return uncounted(norm for position in positions for norm in self._norms[position])


class Recording:
    """One forward of a stage: its tensors are saved as the stage's policy says.

    It runs the layers in place of the segment (`run`), within `hooks`; `finish` ends it.
    """

    def __init__(
        self, hooks: SavedTensorHooks, microbatch: int, storages: Storages, again: RerunContext
    ) -> None:
        self._hooks, self._microbatch, self._again = hooks, microbatch, again
        self._fates, self._names, self._copies = hooks._fates, hooks._names, hooks._copies
        self._storages = storages
        self._position: int | None = None
        self._saves: list[tuple[Made, int] | None] = []
        self._recorded: dict[int, Recorded] = {}
        self._notes: dict[str, Any] = {}
        self._pieces: list[tuple[ref[Piece], Made, int]] = []
        self._leaving: list[tuple[ref[OffloadedPiece], Label]] = []
        self._count = 0

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors go through `_pack` and `Handle.tensor`."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, Handle.tensor)

    def run(self, position: int, step: Step, values: Mapping[str, Any]) -> Any:
        """(1) Run a layer.

        Args:
            position: The layer's.
            step: The layer.
            values: By name, what it reads.

        Returns:
            The layer's result: a tensor, or tuples, lists and dicts of them.
        """
        self._position = position
        if self._hooks.recomputes:
            made = self._run_recorded(position, step, values)
        else:
            made = step.run(values)
            for tensor in leaves_of(made, Tensor):
                self._made(tensor)
        for known, label in self._leaving:
            if (piece := known()) is not None:
                piece.leave(label)
        self._leaving.clear()
        self._position = None
        return made

    def finish(self) -> list[ref[Piece]]:
        """(5) End the forward: plan what will run once more.

        Returns:
            The pieces on the host, in the order in which the backward needs them.

        Raises:
            PathosegError: A layer that is to be recomputed cannot be.
        """
        alive = [
            (piece, made, at) for known, made, at in self._pieces if (piece := known()) is not None
        ]
        hooks, again = self._hooks, self._again

        @contextmanager
        def context(positions: Sequence[int]) -> Iterator[Callable[[int], None]]:
            with torch.enable_grad(), hooks.uncounted(positions), again() as before:
                yield before or _nothing

        plan_again(
            [(piece, made, at) for piece, made, at in alive if isinstance(piece, Dropped)],
            self._recorded,
            context,
        )
        away = [piece for piece, _, _ in alive if isinstance(piece, OffloadedPiece)]
        away.sort(key=lambda piece: -piece.needed)
        # Autograd holds on to the hooks, and through them to this.
        self._storages, self._recorded, self._notes = Storages(()), {}, {}
        self._pieces, self._saves = [], []
        return [ref(piece) for piece in away]

    def _run_recorded(self, position: int, step: Step, values: Mapping[str, Any]) -> Any:
        reads = {name: self._note_of(name, values[name]) for name in step.inputs}
        found: list[tuple[Tensor, Leaf]] = []
        for name, note in reads.items():
            if isinstance(note, Leaf):
                found.append((values[name], note))
            else:
                tensors = filter(is_plain, leaves_of(values[name], Tensor))
                found += zip(tensors, leaves_of(note, Leaf), strict=True)
        saves: list[tuple[Made, int] | None] = []
        self._saves = saves
        made = step.run(values)
        writes = {}
        for tensor, leaf in found:
            if tensor._version != leaf.version and (leaf.made, leaf.version) not in writes:
                writes[leaf.made, leaf.version] = leaf, tensor._version
                leaf.made.makers.append((position, leaf.version))
        self._notes[step.name] = returns = self._note(made)
        self._recorded[position] = Recorded(
            position, step, reads, saves, returns, [*writes.values()]
        )
        return made

    def _note_of(self, name: str, value: Any) -> Any:
        """Return the record of a value as it is now."""
        note = self._notes.get(name)
        if not isinstance(note, Leaf) or note.version != value._version:
            note = self._notes[name] = self._note(value)
        return note

    def _note(self, value: Any) -> Any:
        def leaf(tensor: Tensor) -> Any:
            if not is_plain(tensor):
                return tensor.detach().requires_grad_(tensor.requires_grad)
            made = self._made(tensor)
            return Leaf(made, tensor._version, Place.of(tensor), tensor.requires_grad)

        return map_leaves(value, Tensor, leaf)

    def _made(self, tensor: Tensor) -> Made:
        position = -1 if self._position is None else self._position
        fate = self._fates.get(position, Fate.KEEP)
        return self._storages.of(tensor.untyped_storage(), position, fate)

    def _pack(self, tensor: Tensor) -> Handle:
        """(2) Return the handle that autograd is to hold in place of a tensor that it saves."""
        assert self._position is not None
        layer = self._names[self._position]
        tensor = tensor.detach()  # it may be the one that the layer returns
        if not is_plain(tensor):
            self._saves.append(None)
            return Handle(tensor, layer, None, None)
        made, version = self._made(tensor), tensor._version
        self._saves.append((made, version))
        piece = made.piece(version)
        if piece is None:
            piece = self._piece(made, tensor)
            made.pieces[version, False] = ref(piece)
            self._pieces.append((ref(piece), made, version))
        self._count += 1
        piece.needed = self._count
        if isinstance(piece, Kept) and not self._may_leave(made):
            return Handle(tensor, layer, piece, None)
        handle = Handle(tensor, layer, piece, Place.of(tensor))
        # The version counter stays, the memory goes.
        tensor.data = tensor.new_empty(0)
        return handle

    def _may_leave(self, made: Made) -> bool:
        """Return True for a parameter's storage, which may leave the device with its stage."""
        return self._hooks._parks and isinstance(made.given, nn.Parameter)

    def _piece(self, made: Made, tensor: Tensor) -> Piece:
        if made.fate in (Fate.RECOMPUTE, Fate.TWICE):
            return Dropped(packed=True)
        if self._may_leave(made):
            assert made.given is not None
            return Kept(made.given)
        storage = tensor.untyped_storage()
        if made.fate is Fate.KEEP or storage.nbytes() < SMALL:
            return Kept(tensor)
        assert self._copies is not None
        maker = made.makers[0][0]
        label = Label(self._hooks._number, self._microbatch, self._names[maker])
        piece = OffloadedPiece(self._copies, storage)
        if maker == self._position:
            # Kernels still fill it: RReLU its noise, a GRU's cell the other parts of its gates.
            self._leaving.append((ref(piece), label))
        else:
            piece.leave(label)
        return piece


def _owners(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Return modules and names of tensors, which would take long to look up in each microbatch."""
    parts = (name.rpartition(".") for name in sorted({*names}))
    return [(model.get_submodule(path), last) for path, _, last in parts]


def _tensors_of(owners: Iterable[tuple[nn.Module, str]]) -> Iterator[Tensor]:
    for module, name in owners:
        if isinstance(tensor := getattr(module, name), Tensor) and is_plain(tensor):
            yield tensor


def _nothing(position: int) -> None:
    """Prepare no layer: the default of `before`."""
