"""Workspace of torch's kernels, by device, which the layers' shapes do not show."""

from __future__ import annotations

from math import prod

from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.layer_graph import Attribute, Layer
from pathoseg.parallel.planning.memory_model import Workspace

# What is given to these, and has gaps, is copied first.
_COPY_GAPS = ("convolution", "native_layer_norm", "native_group_norm")
# Images with so few channels are read as they are.
_FEW = 3
# Below so many images, and with one thread, torch runs pointwise convolutions itself.
_MANY = 16

# torch keeps a cuBLAS workspace for each handle and stream: 32 MiB from compute capability 9 on,
# 8 MiB before (`CUBLAS_WORKSPACE_CONFIG` in torch's notes on CUDA). Threads have handles of their
# own, and autograd's backward is a thread.
_CUBLAS = 2 * 32 * 2**20
# The limit that Caffe2 set cuDNN's convolutions (`kCONV_CUDNN_WORKSPACE_LIMIT_BYTES`), with which
# Winograd's were fast. torch's own have none, but take another kernel where memory is short.
_CUDNN = 64 * 2**20


def workspace_of(hardware: Hardware) -> Workspace | None:
    """Return the workspace of a device's kernels, None where nothing is known of it."""
    if hardware.device == "cpu":
        return cpu_workspace(threads=hardware.threads or 1)
    return cuda_workspace if hardware.device == "cuda" else None


def cuda_workspace(layer: Layer) -> tuple[int, int]:
    """Return the bytes of cuDNN in a convolution and of cuBLAS in a matrix product: constants."""
    if layer.kind == "convolution":
        return _CUDNN, _CUDNN
    return (_CUBLAS, _CUBLAS) if layer.forward.flops else (0, 0)


def vector_lanes() -> int | None:
    """Return the channels in one of oneDNN's blocks on this machine; None if not known."""
    import torch

    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability())


def cpu_workspace(lanes: int = 16, threads: int = 1) -> Workspace:
    """Return the workspace of contiguous (NCHW) float32 layers on a CPU, as torch 2.13 takes it.

    The backward of batch norm has a temporary of its input's size. oneDNN copies the input, weight
    and output of a convolution into blocks of channels, and its result back.

    Args:
        lanes: Channels in a block, as many as a vector register holds: 16 with AVX-512, 8 with
            AVX2.
        threads: `torch.get_num_threads()`.
    """

    def workspace(layer: Layer) -> tuple[int, int]:
        if layer.kind == "native_batch_norm":
            return 0, 4 * prod(_ints(layer.attributes["input"]))
        if layer.kind not in _COPY_GAPS:
            return 0, 0
        forward, backward = 0, 0
        if layer.kind == "convolution":
            forward, backward = _blocked_copies(layer, lanes, threads)
        if layer.attributes.get("has_gaps"):
            size = 4 * prod(_ints(layer.attributes["input"]))
            forward, backward = forward + size, backward + size
        if layer.attributes.get("gradient_has_gaps"):
            backward += 4 * prod(layer.outputs[0].shape)
        return forward, backward

    return workspace


def _blocked_copies(layer: Layer, lanes: int, threads: int) -> tuple[int, int]:
    source, weight = _ints(layer.attributes["input"]), _ints(layer.attributes["weight"])
    target = layer.outputs[0].shape
    stride = prod(_ints(layer.attributes["stride"]))
    is_point, strided = prod(weight[2:]) == 1, stride > 1
    transposed = layer.attributes["transposed"] is True
    if threads == 1 and is_point and not strided and source[0] < _MANY:
        return 0, 0
    plain_source, plain_target, plain_weight = (
        4 * prod(shape) for shape in (source, target, weight)
    )
    blocked_source, blocked_target = _padded(source, lanes), _padded(target, lanes)
    blocked_weight = _padded_weight(weight, lanes)
    if source[1] <= _FEW:
        blocked_source, blocked_weight = 0, plain_weight
    copies = blocked_source + blocked_weight + blocked_target
    # Strided kernels collect an image for each thread before they spread it or thin it out.
    images = threads / source[0]
    thinned = blocked_source * images * strided * (transposed or is_point / stride)
    spread = blocked_target * images * strided * (not transposed)
    returned = (1 + (transposed and strided)) * blocked_target
    forward = max(copies + thinned - plain_target, returned)
    # The gradient of the input comes first, then that of the weight.
    first = max(copies + spread, plain_source + (1 + strided) * blocked_source)
    second = plain_source + max(copies, blocked_weight + plain_weight)
    return int(forward), int(max(first, second) - plain_source - plain_weight)


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
