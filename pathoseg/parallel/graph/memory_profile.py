"""The record of one forward and backward, kernel by kernel, and what it says of each layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from pathoseg.parallel.graph.kernel import Kernel
from pathoseg.parallel.graph.layer_graph import Gradient, Storage, Work


@dataclass
class _Pass:
    """What happened in one layer's forward, or backward."""

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


class Tape:
    """Written by the recorder in the order of events, then read by layer.

    `at` says where the run is: in a layer's forward or backward; the position `layers` stands for
    the model's caller, whose backward makes the gradients that the model's starts from, and -1
    for what was there before.
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
        """What follows happens in this layer's forward, or backward."""
        self.position, self.forward = position, forward
        self._pass = self._passes[forward][position]

    def ran(self, kernel: Kernel) -> None:
        self._pass.kernels.append(kernel)

    def born(self, size: int) -> int:
        """A storage of `size` bytes was made; returns its index."""
        self.storages.append(Storage(size, self.position, self.layers))
        self._owners.append(1)
        self._pass.born.append(len(self.storages) - 1)
        self._hold(size)
        return len(self.storages) - 1

    def adopted(self, storage: int) -> None:
        """A further tensor holds the storage: it is gone only when `freed` has come for each."""
        self._owners[storage] += 1
        self._sums.setdefault(storage, []).append(self.position)

    def freed(self, storage: int) -> None:
        """One that held the storage let go of it."""
        self._owners[storage] -= 1
        if not self._owners[storage]:
            self._hold(-self.storages[storage].bytes)
            if self.forward:
                self.storages[storage] = replace(self.storages[storage], until=self.position)
            else:
                self._freed_in_backward[storage] = self.position

    def saved(self, storage: int) -> None:
        """The running layer keeps the storage for its backward."""
        self._saved[self.position][storage] += 1

    def dropped(self, layer: int, storage: int) -> None:
        """What the layer has saved once is not kept any longer."""
        if self.forward:
            self._saved[layer][storage] -= 1

    def _hold(self, size: int) -> None:
        self._pass.held += size
        self._pass.peak = max(self._pass.peak, self._pass.held)

    def main_kernel(self, position: int, *, forward: bool = True) -> Kernel | None:
        """The kernel that does most of a layer's forward (backward), None where none ran."""
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

    def saved_bytes(self) -> int:
        """Bytes of all that is saved, each storage once."""
        saved = {storage for position in self._saved for storage in self.saved_by(position)}
        return sum(self.storages[storage].bytes for storage in saved)

    def gradients_of(self, position: int) -> tuple[Gradient, ...]:
        """What a layer's backward leaves to others; `kept` storages (parameters' gradients) only
        until the last of them has been added."""
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
