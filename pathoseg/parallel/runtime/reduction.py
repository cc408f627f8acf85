"""The sum of a stage's gradients over the ranks that hold a copy, begun while the backward runs.

The last backward of a stage on its rank; gradients are complete from the last layer to the first:

    backward     | layer 5 | layer 4 | layer 3 | layer 2 | layer 1 | layer 0 | REDUCE   WAIT_REDUCE
    begins                           part 0              part 1                part 2
    on the wire                      |==== part 0 ====|  |==== part 1 ====|    |= part 2 =|

A hook of autograd at each parameter begins a part once all its gradients are there (1), and gives
the transport a moment for those under way: some move messages only when they are called (2). The
REDUCE of a bucket begins the parts that are left, among them all with a parameter that this
backward does not reach (3). So when a part begins is a matter of time, and nothing else is: its
parameters, the order in which parts begin and the order in which ranks are added are fixed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Pending, Transport
from pathoseg.parallel.runtime.messages import Layout

PART_BYTES = 25 * 2**20  # as torch's DistributedDataParallel
_UNDER_WAY = 2  # parts while the backward runs: their memory comes beside its activations


@dataclass(frozen=True, eq=False)
class _Part:
    """Parameters of one dtype whose gradients are one message.

    Attributes:
        parameters: At least one.
        layouts: How each lies in memory, the same on all ranks even where its bytes are parked.
    """

    parameters: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]


@dataclass
class _Begun:
    """The parts of a bucket that have begun.

    Attributes:
        since: When the first of them did, by `time.perf_counter`.
        sums: Each with its message: the gradients end to end, then how many ranks have each.
    """

    since: float
    sums: list[tuple[_Part, Pending, Tensor]]


class GradientReduction:
    """Sums the gradients of one stage.

    A gradient is flattened as its parameter lies in memory, channels last in most convolutions:
    in another order it would be transposed on the way there and back.

    A parameter that has no gradient on any rank has none afterwards.

    Args:
        parameters: The stage's trained parameters, in the order in which a backward completes
            their gradients; the same on every rank. None of them is parked yet.
        buckets: In how many parts of about as many bytes the schedule sums them.
        transport: Joins the ranks.
        holders: The ranks with a copy, ascending.
        part_bytes: Most bytes of a message of several gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: int,
        transport: Transport,
        holders: tuple[int, ...],
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._transport, self._holders = transport, holders
        sizes = [parameter.nbytes for parameter in parameters]
        total = max(1, sum(sizes))
        own: list[list[Tensor]] = [[] for _ in range(buckets)]
        for parameter, end in zip(parameters, accumulate(sizes), strict=True):
            # The middle of the parameter decides.
            own[min(buckets - 1, (2 * end - parameter.nbytes) * buckets // (2 * total))].append(
                parameter
            )
        self._buckets = [_parts(each, part_bytes) for each in own]
        self._begun: dict[int, _Begun] = {}

    @contextmanager
    def overlapping(self, buckets: Sequence[int]) -> Iterator[None]:
        """Make a context for the last backward of the stage on this rank, in which sums begin.

        Args:
            buckets: Those that this rank starts next, in this order, and no sum of another stage
                between them: holders begin all sums that they share in one order.

        Raises:
            PathosegError: A parameter is given a gradient twice in this backward, of which the
                second misses the sum; or a rank is lost.
        """
        waiting = deque((bucket, part) for bucket in buckets for part in self._buckets[bucket])
        if len(self._holders) == 1:
            waiting.clear()
        owner = {id(each): part for _, part in waiting for each in part.parameters}
        lacking = {part: {id(each) for each in part.parameters} for _, part in waiting}
        under_way: list[Pending] = []

        def complete(parameter: Tensor) -> None:
            part = owner[id(parameter)]
            if part not in lacking:
                raise _twice(parameter)
            lacking[part].discard(id(parameter))
            under_way[:] = [each for each in under_way if not each.done()]  # (2)
            while waiting and not lacking[waiting[0][1]] and len(under_way) < _UNDER_WAY:  # (1)
                bucket, first = waiting.popleft()
                del lacking[first]
                under_way.append(self._begin(bucket, first))

        with ExitStack() as stack:
            for part in lacking:
                for parameter in part.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]  # torch's
                    stack.callback(hook.remove)
            yield

    def start(self, bucket: int) -> float:
        """Begin the sums of a bucket that have not (3), all complete here; all holders call it.

        Returns:
            When the first of them began, by `time.perf_counter`.
        """
        begun = self._begun.setdefault(bucket, _Begun(time.perf_counter(), []))
        if len(self._holders) > 1:
            for part in self._buckets[bucket][len(begun.sums) :]:
                self._begin(bucket, part)
        return begun.since

    def wait(self, bucket: int) -> None:
        """Wait for the sums of a bucket, and make them the parameters' `grad`.

        A gradient that is None on all holders stays None. A second call does nothing.
        """
        if bucket not in self._begun:
            return
        for part, pending, flat in self._begun.pop(bucket).sums:
            pending.wait()
            sizes = [parameter.numel() for parameter in part.parameters]
            *sums, present = torch.split(flat, [*sizes, len(sizes)])
            each = zip(part.parameters, part.layouts, sums, present.tolist(), strict=True)
            for parameter, layout, total, copies in each:
                parameter.grad = layout.unpacked(total) if copies else None

    def _begin(self, bucket: int, part: _Part) -> Pending:
        flat = _taken(part)
        begun = self._begun.setdefault(bucket, _Begun(time.perf_counter(), []))
        pending = self._transport.sum(flat, self._holders)
        begun.sums.append((part, pending, flat))
        return pending


def _taken(part: _Part) -> Tensor:
    """Return a part's message; its parameters have no gradients from now on."""
    pieces, present = list[Tensor](), list[float]()
    for parameter, layout in zip(part.parameters, part.layouts, strict=True):
        gradient = parameter.grad
        present.append(float(gradient is not None))
        pieces.append(
            torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            if gradient is None
            else layout.packed(gradient.detach()).view(-1)
        )
        parameter.grad = None
    return torch.cat([*pieces, pieces[0].new_tensor(present)])


def _parts(parameters: Sequence[Tensor], part_bytes: int) -> list[_Part]:
    """Cut a bucket's parameters into parts, in the order in which they are complete."""
    found: list[list[Tensor]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        part = filling.get(parameter.dtype)
        if part is None or sum(each.nbytes for each in (*part, parameter)) > part_bytes:
            found.append(part := [])
            filling[parameter.dtype] = part
        part.append(parameter)
    return [_Part(tuple(part), tuple(Layout.of(each) for each in part)) for part in found]


def _twice(parameter: Tensor) -> PathosegError:
    return PathosegError(
        f"A parameter of shape {tuple(parameter.shape)} is given a gradient twice in one backward, "
        "the second after its sum over the ranks has begun.",
        "Where the model calls torch.utils.checkpoint, give it use_reentrant=False.",
    )
