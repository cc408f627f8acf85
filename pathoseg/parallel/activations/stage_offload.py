"""Parameters, gradients and optimizer state of stages that wait, in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pathoseg.parallel.activations.offload import Copies, Label
from pathoseg.parallel.activations.rematerialize import Place, is_plain
from pathoseg.parallel.graph.activation_policy import SMALL
from pathoseg.parallel.schedule.action import Action, Kind


class Park(StrEnum):
    """The kinds of tensors of a waiting stage that may be offloaded."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


# What an action needs of its stage. A REDUCE takes gradients away, a WAIT_REDUCE leaves their sums.
_NEEDS: Mapping[Kind, Collection[Park]] = {
    Kind.FORWARD: {Park.PARAMETERS},
    Kind.RECOMPUTE: {Park.PARAMETERS},
    Kind.BACKWARD: {Park.PARAMETERS, Park.GRADIENTS},
    Kind.REDUCE: {Park.GRADIENTS},
    Kind.WAIT_REDUCE: {Park.GRADIENTS},
}

Key = tuple[Park, int]  # what, and of which parameter


class StageNeeds(NamedTuple):
    """The tensors that have to be on the device for an action.

    Attributes:
        now: Tensors that the action needs.
        then: Tensors that the next action with any needs; they come back while this one runs.
    """

    now: Collection[Key]
    then: Collection[Key]


@dataclass(slots=True)
class _Waiting:
    """A tensor whose bytes are on the host.

    Attributes:
        tensor: It stays the same object, and is given its bytes again.
        place: The tensor's position in them.
        ticket: Stands for the bytes.
    """

    tensor: Tensor
    place: Place
    ticket: Any


class StageOffload:
    """Offload of the parameters, gradients and optimizer state of a rank's waiting stages.

    Tensors stay the objects that they are; while their bytes are away, reading them gives NaN.
    What the next visit needs and is here stays here; where copies run ahead of use, what is not
    here comes while the visit ahead of it computes. Bytes that nobody has changed are not copied
    out again. Tensors below `SMALL` bytes stay on the device.

    Args:
        parked: The kinds of tensors that are offloaded.
        stages: The parameters of each stage on this rank.
        optimizer: The rank's, or None.
        copies: Copies to the host; None where nothing waits.
    """

    def __init__(
        self,
        parked: Collection[Park],
        stages: Mapping[int, Sequence[nn.Parameter]],
        optimizer: torch.optim.Optimizer | None,
        copies: Copies | None,
    ) -> None:
        self.copies = copies
        self._parked = frozenset(parked if copies is not None else ())
        self._optimizer = optimizer
        self._parameters: list[nn.Parameter] = []
        self._home: list[int] = []  # by parameter, the first stage with it
        numbers: dict[int, int] = {}
        self._stages: dict[int, list[int]] = {}
        for stage, parameters in stages.items():
            for each in parameters:
                if id(each) not in numbers:
                    numbers[id(each)] = len(numbers)
                    self._parameters.append(each)
                    self._home.append(stage)
            self._stages[stage] = [numbers[id(each)] for each in parameters]
        homes: dict[int, list[int]] = {}
        for number, stage in enumerate(self._home):
            homes.setdefault(0 if not self._parked else stage, []).append(number)
        # The parameters of each stage; one list of all where nothing is offloaded.
        self._by_stage = [*homes.values()]
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._away: dict[Key, list[_Waiting]] = {}
        # What is on the device, with what is the same on the host.
        self._here: dict[Key, list[_Waiting]] = {
            key: [] for key in self._keys(range(len(self._parameters)), {Park.PARAMETERS})
        }
        self._leave(())

    @property
    def active(self) -> bool:
        """Return True if any kind of tensor is offloaded."""
        return bool(self._parked)

    @property
    def parks_parameters(self) -> bool:
        """Return True if parameters are offloaded."""
        return Park.PARAMETERS in self._parked

    def needs_by_position(self, actions: Sequence[Action]) -> dict[int, StageNeeds]:
        """Find the tensors that each action of a rank's list needs on the device.

        Returns:
            By position in the list; empty where nothing is offloaded.
        """
        if not self._parked:
            return {}
        needs = {
            position: self._keys(self._stages[action.stage], _NEEDS[action.kind])
            for position, action in enumerate(actions)
            if action.kind in _NEEDS
        }
        needs = {position: keys for position, keys in needs.items() if keys}
        return {
            position: StageNeeds(needs[position], needs.get(then, ()))
            for position, then in pairwise([*needs, -1])
        }

    @contextmanager
    def during(self, needs: StageNeeds | None, changed: Collection[Park]) -> Iterator[None]:
        """Make a context in which the tensors that an action needs are on the device.

        Args:
            needs: Of `needs_by_position`; None needs nothing.
            changed: The kinds of tensors that are written inside, whose copies on the host are
                stale.
        """
        if needs is None:
            yield
            return
        self._bring(needs.now, changed)
        self._ask(needs.then)
        yield
        self._leave(needs.then)

    def in_turn(
        self, *needed: Park, changed: Collection[Park] = ()
    ) -> Iterator[Sequence[nn.Parameter]]:
        """Yield the parameters of one stage of the rank after the other, each while it is here.

        Args:
            needed: The kinds of tensors that are on the device meanwhile.
            changed: The kinds that are written meanwhile.

        Yields:
            The parameters of one stage, each parameter once; all at once where nothing is
            offloaded.
        """
        keys = [self._keys(numbers, needed) for numbers in self._by_stage]
        for place, numbers in enumerate(self._by_stage):
            then = keys[place + 1] if place + 1 < len(keys) else ()
            with self.during(StageNeeds(keys[place], then), changed):
                yield [self._parameters[number] for number in numbers]

    @contextmanager
    def alone(self, parameters: Sequence[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
        """Make a context in which the optimizer has these parameters and their state alone."""
        optimizer = self._optimizer
        assert optimizer is not None
        if not self._parked:
            yield optimizer
            return
        chosen = {id(each) for each in parameters}
        whole, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in chosen]
        optimizer.state = defaultdict(dict)
        optimizer.state.update((each, state[each]) for each in parameters if each in state)
        try:
            yield optimizer
        finally:
            for group, every in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = every
            for each in parameters:
                state.pop(each, None)
            state.update(optimizer.state)
            optimizer.state = state

    def forget_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set these parameters' gradients to None, host copies too, if gradients are offloaded."""
        if Park.GRADIENTS not in self._parked:
            return
        chosen = {id(each) for each in parameters}
        for number, parameter in enumerate(self._parameters):
            if id(parameter) in chosen:
                key = Park.GRADIENTS, number
                for each in [*self._away.pop(key, ()), *self._here.pop(key, ())]:
                    self._drop(each)
                parameter.grad = None

    def lasting(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries for use beyond their turn: copied to the host if any are offloaded."""
        if not self._parked:
            return dict(entries)
        return {
            name: each.detach().to("cpu", copy=True) if isinstance(each, Tensor) else each
            for name, each in entries.items()
        }

    def _keys(self, numbers: Iterable[int], needed: Collection[Park]) -> dict[Key, None]:
        chosen = [park for park in Park if park in self._parked and park in needed]
        return {(park, number): None for number in numbers for park in chosen}

    def _tensors(self, key: Key) -> Iterator[Tensor]:
        park, number = key
        parameter = self._parameters[number]
        found: Iterable[Any] = [parameter]
        if park is Park.GRADIENTS:
            found = [parameter.grad]
        elif park is Park.OPTIMIZER:
            found = (
                () if self._optimizer is None else self._optimizer.state.get(parameter, {}).values()
            )
        for each in found:
            if not isinstance(each, Tensor) or not is_plain(each) or each.nbytes < SMALL:
                continue
            if each.device == parameter.device:
                yield each

    def _ask(self, keys: Collection[Key]) -> None:
        assert self.copies is not None or not keys
        if self.copies is not None:
            tickets = [each.ticket for key in keys for each in self._away.get(key, ())]
            self.copies.ask(tickets)

    def _bring(self, keys: Collection[Key], changed: Collection[Park]) -> None:
        for key in keys:
            waiting = self._away.pop(key, [])
            for each in waiting:
                assert self.copies is not None
                bytes_of_it = self.copies.fetch(each.ticket)
                each.tensor.data = each.place.on(bytes_of_it.untyped_storage())
            same = self._here.setdefault(key, [])
            same += waiting
            if key[0] in changed:
                while same:
                    self._drop(same.pop())

    def _leave(self, but: Collection[Key]) -> None:
        """Offload all tensors on the device, except for some."""
        for key in [key for key in self._here if key not in but]:
            same = {id(each.tensor): each for each in self._here.pop(key)}
            for tensor in self._tensors(key):
                waiting = same.get(id(tensor))
                if waiting is None:
                    waiting = self._waiting(key, tensor)
                else:
                    assert self.copies is not None
                    self.copies.release(waiting.ticket)
                tensor.data = self._empty(tensor)
                self._away.setdefault(key, []).append(waiting)
        if self.copies is not None:
            self.copies.let_go()

    def _waiting(self, key: Key, tensor: Tensor) -> _Waiting:
        assert self.copies is not None
        place = Place.of(tensor)
        size = tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(place.sizes, place.strides, strict=True))
        # Not the whole storage: gradients that were summed over ranks share one.
        span = Place(torch.uint8, ((last + 1) * size,), (1,), place.offset * size)
        label = Label(self._home[key[1]], None, str(key[0]))
        ticket = self.copies.leave(span.on(tensor.untyped_storage()), label, lasting=True)
        return _Waiting(tensor, place._replace(offset=0), ticket)

    def _empty(self, like: Tensor) -> Tensor:
        """Return a tensor of the same dtype and shape that takes hardly any memory."""
        if like.dtype not in self._nothing:
            unknown = torch.nan if like.is_floating_point() or like.is_complex() else 0
            self._nothing[like.dtype] = like.detach().new_full((), unknown)
        return self._nothing[like.dtype].expand(like.shape)

    def _drop(self, waiting: _Waiting) -> None:
        assert self.copies is not None
        self.copies.drop(waiting.ticket)


def changed_by(kind: Kind) -> Collection[Park]:
    """Return the kinds of tensors that an action changes."""
    return set(_NEEDS.get(kind, ())) & {Park.GRADIENTS}


def parked_bytes(
    parked: Collection[Park],
    parameters: Iterable[nn.Parameter],
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
) -> int:
    """Return an upper bound of the host bytes that a stage's offloaded tensors take.

    Args:
        parked: The kinds of tensors that are offloaded.
        parameters: The stage's, each once.
        optimizer: Makes an optimizer; the size of its state is found by a step on a small
            parameter.
    """
    own = [*parameters]
    all_of_them = sum(each.nbytes for each in own)
    trained = sum(each.nbytes for each in own if each.requires_grad)
    total = all_of_them * (Park.PARAMETERS in parked) + trained * (Park.GRADIENTS in parked)
    if trained and Park.OPTIMIZER in parked:
        small = nn.Parameter(own[0].detach().new_zeros(8, 8))
        small.grad = torch.zeros_like(small)
        probe = optimizer([small])
        probe.step()
        kept = [each for each in probe.state[small].values() if isinstance(each, Tensor)]
        total += trained * sum(each.nbytes for each in kept if each.ndim) // small.nbytes
    return total
