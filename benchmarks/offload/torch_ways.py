"""Torch's own ways to save less on the device: block by block, as far as a cap asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.offload.subject import DEVICE
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet

# Does a forward of a module in another way: is given it and what it reads.
Way = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


def checkpointed(forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """torch.utils.checkpoint, as its documentation recommends it."""
    return checkpoint(forward, *given, use_reentrant=False)


def saved_on_cpu(forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """torch.autograd.graph.save_on_cpu, with pinned memory where there is an accelerator."""
    with save_on_cpu(DEVICE.type != "cpu", DEVICE.type):
        return forward(*given)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a network in the order of execution: what such a way is put around."""
    if isinstance(model, UNet):
        return [*model.encoder, *model.decoder]
    assert isinstance(model, ResNetV2)
    return [unit for group in model.groups for unit in group.children()]


def put_around(blocks: Sequence[nn.Module], way: Way) -> None:
    """Has each block run its forward in this way from now on; it is called once for a block."""
    for block in blocks:
        block.forward = _run(block.forward, way)


def _run(forward: Callable[..., Any], way: Way) -> Callable[..., Any]:
    return lambda *given: way(forward, given)


def fewest(most: int, peak: Callable[[int], int], cap: int) -> int | None:
    """The fewest blocks, from the first, with which a step's peak is at most `cap` bytes.

    Args:
        most: How many there are.
        peak: Measures a step with so many of them; falls with their number.
        cap: Bytes.

    Returns:
        None where all of them do not do.
    """
    if peak(most) > cap:
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= cap:
            high = middle
        else:
            low = middle + 1
    return high
