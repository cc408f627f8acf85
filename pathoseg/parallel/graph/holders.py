"""Asks torch how it counts the holders of a gradient, which differs from version to version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph import fx_tracer as fx
from pathoseg.parallel.graph.memory_profile import Tape
from pathoseg.parallel.graph.record import Recorder


@cache
def held_once() -> int:
    """`_use_count` of a gradient that only autograd holds, while it is the first of a sum.

    It is the count of those that stem from the product in a small backward; the sum of `one + one`
    begins with a gradient that both its terms hold.

    Raises:
        PathosegError: This torch tells the two apart by another sign.
    """
    root = fx.Root(_Sums(), fx.to_tensor([1]).float().requires_grad_())
    recorder = Recorder(Tape(1), 0)
    listener = fx.Listener(root.fake, recorder)
    with root.lent():
        with listener.forward():
            listener.enter(0)
            made = [*root.run(*root.inputs)]
        listener.backward(made)
    return alone(recorder.holders)


class _Sums(fx.Module):
    def forward(self, one: Any) -> tuple[Any, Any]:
        return one * one, one + one


def alone(holders: Sequence[int]) -> int:
    """What sums that begin with an unshared gradient count, after one that begins with a shared.

    Raises:
        PathosegError: They do not agree, or count no less.
    """
    if len(holders) == 3 and holders[0] > holders[1] == holders[2]:
        return holders[1]
    raise PathosegError(
        f"This version of torch counts the holders of gradients in another way ({holders}), so "
        "the memory of a backward cannot be computed.",
        "Install torch 2.13, with which pathoseg is tested.",
    )
