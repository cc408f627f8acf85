"""What torch's kernels take for themselves on a CPU, which the layers' shapes do not show."""

from __future__ import annotations

from math import prod

from pathoseg.parallel.graph.layer_graph import Attribute, Layer
from pathoseg.parallel.planning.memory_model import Workspace

# Images with so few channels are read as they are.
_FEW = 3
# Below so many images, and with one thread, torch runs pointwise convolutions itself.
_MANY = 16


def cpu_workspace(lanes: int = 16, threads: int = 1) -> Workspace:
    """The workspace of contiguous (NCHW) float32 layers, found by watching torch 2.13's allocator.

    The backward of batch norm has a temporary of its input's size. oneDNN copies the input, weight
    and output of a convolution into blocks of channels, and its result back.

    Args:
        lanes: Channels in a block, as many as a vector register holds: 16 with AVX-512, 8 with
            AVX2.
        threads: What `torch.get_num_threads()` is.
    """

    def workspace(layer: Layer) -> tuple[int, int]:
        if layer.kind == "native_batch_norm":
            return 0, 4 * prod(_ints(layer.attributes["input"]))
        if layer.kind == "convolution":
            return _convolution(layer, lanes, threads)
        return 0, 0

    return workspace


def _convolution(layer: Layer, lanes: int, threads: int) -> tuple[int, int]:
    source, weight = _ints(layer.attributes["input"]), _ints(layer.attributes["weight"])
    target = layer.outputs[0].shape
    stride = prod(_ints(layer.attributes["stride"]))
    if threads == 1 and prod(weight[2:]) == stride == 1 and source[0] < _MANY:
        return 0, 0
    blocked = _padded(source, lanes), _padded(target, lanes), _padded_weight(weight, lanes)
    if source[1] <= _FEW:
        blocked = 0, blocked[1], 4 * prod(weight)
    plain = 4 * prod(source), 4 * prod(target), 4 * prod(weight)
    transposed = layer.attributes["transposed"] is True
    return _forward(plain, blocked, stride, transposed), _backward(plain, blocked, stride)


def _forward(
    plain: tuple[int, int, int], blocked: tuple[int, int, int], stride: int, transposed: bool
) -> int:
    """Beyond the output: the copies, or at the end the output in both layouts."""
    ends = 2 if transposed and stride > 1 else 1
    return max(sum(blocked) - plain[1], ends * blocked[1])


def _backward(plain: tuple[int, int, int], blocked: tuple[int, int, int], stride: int) -> int:
    """Beyond the gradients of input and weight, which are computed one after the other."""
    source, _, weight = plain
    first = max(sum(blocked), source + (2 if stride > 1 else 1) * blocked[0])
    second = source + max(sum(blocked), blocked[2] + weight)
    return max(first, second) - source - weight


def _padded(shape: tuple[int, ...], lanes: int) -> int:
    images, channels, *sides = shape
    return 4 * images * -(-channels // lanes) * lanes * prod(sides)


def _padded_weight(shape: tuple[int, ...], lanes: int) -> int:
    one, other, *sides = shape
    if other == 1:
        return 4 * prod(shape)
    return 4 * prod(-(-channels // lanes) * lanes for channels in (one, other)) * prod(sides)


def _ints(attribute: Attribute) -> tuple[int, ...]:
    assert isinstance(attribute, tuple)
    return tuple(item for item in attribute if isinstance(item, int))
