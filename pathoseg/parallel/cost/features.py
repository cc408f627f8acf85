"""The features of a layer's forward or backward for the regression."""

from __future__ import annotations

from math import log, prod

from pathoseg.parallel.graph.layer_graph import Attribute, Layer, Work

CONVOLUTION, POINTWISE, GROUPED, TRANSPOSED = (
    f"{sort}convolution" for sort in ("", "pointwise ", "grouped ", "transposed ")
)
PRODUCT = "product"
ATTENTION = "attention"
# The family of what is neither convolution nor product, and of a kind that was not measured.
OTHER = "other"
# Families that no other can stand in for.
BASIC = (CONVOLUTION, POINTWISE, GROUPED, TRANSPOSED, PRODUCT, OTHER)
_FUSED = "_scaled_dot_product"  # how the kernels of attention that keep no scores are called
# Vector registers and tensor cores take channels by so many; what is missing is computed too.
_LANES = 16
# Bytes that the cache of a core holds.
_CACHE = 2e6
# Bytes from which glibc gives memory back at once, so that it is always new (malloc.c).
_RETURNED = 2**25


def family(layer: Layer) -> str:
    """Return the name of the regression that prices a layer; one family has one set of features."""
    if layer.kind == "convolution":
        if layer.attributes["transposed"]:
            return TRANSPOSED
        if layer.attributes["groups"] != 1:
            return GROUPED
        is_point = prod(_ints(layer.attributes["weight"])[2:]) == 1
        return POINTWISE if is_point else CONVOLUTION
    if layer.kind.startswith(_FUSED):
        return ATTENTION
    return PRODUCT if layer.forward.flops else layer.kind


def stand_in(family: str) -> str:
    """Return the family that prices the layers of one that was not measured: its features are the
    same."""
    return PRODUCT if family == ATTENTION else OTHER


def arithmetic(layer: Layer, work: Work) -> int:
    """Return the FLOPs of a layer's forward or backward, whose work is `work`.

    torch's count of a grouped convolution's backward forgets the groups; here it is at most twice
    the forward's.
    """
    if layer.kind == "convolution":
        return min(work.flops, 2 * layer.forward.flops)
    return work.flops


def amounts(layer: Layer, work: Work, slowness: float = 1.0) -> tuple[float, ...]:
    """Return the amounts of work of a pass, by resource: FLOPs and bytes of each kind of access.

    Args:
        layer: The layer.
        work: Its forward, or its backward; it writes something.
        slowness: Time of a FLOP over that of one in float32.
    """
    flops = slowness * arithmetic(layer, work)
    if layer.kind == "convolution":
        return _convolution_amounts(layer, flops)
    if layer.forward.flops:
        return flops, work.read, work.written, 1.0
    # Memory that is new to a process costs it more than memory that it has used before.
    fresh = work.peak
    window = prod(_ints(layer.attributes.get("kernel_size"))) * prod(_made(layer))
    return (
        work.read,
        work.written,
        fresh,
        fresh * (work.written >= _RETURNED),
        _beyond_cache(work.read + work.written),
        window,
        1.0,
    )


def features(layer: Layer, work: Work) -> tuple[float, ...]:
    """Return numbers that tell how well such a pass uses the device, mostly logarithms of sizes.

    Args:
        layer: The layer.
        work: Its forward, or its backward; it writes something.
    """
    moved = work.read + work.written
    if layer.kind == "convolution":
        return (*_convolution_features(layer), log(max(1, work.flops) / moved))
    if layer.forward.flops:
        rows = prod(_made(layer)[:-1])
        return log(max(1, work.flops)), log(moved), log(max(1, rows))
    shape = _ints(layer.attributes.get("input")) or _made(layer)
    kernel = prod(_ints(layer.attributes.get("kernel_size")))
    return log(moved), log(max(1, prod(shape[2:]))), log(kernel), work.peak / moved


def _made(layer: Layer) -> tuple[int, ...]:
    """Return the shape of what a layer makes; a write into a slice of a tensor makes none."""
    return layer.outputs[0].shape if layer.outputs else ()


def _convolution_amounts(layer: Layer, flops: float) -> tuple[float, ...]:
    (batch, inputs, *sides), (_, outputs, *target) = _images(layer), layer.outputs[0].shape
    weight, groups = _ints(layer.attributes["weight"]), _groups(layer)
    area, strided = prod(weight[2:]), prod(_ints(layer.attributes["stride"])) > 1
    read, written = (4.0 * batch * prod(pixels) for pixels in (sides, target))
    padded = flops * _padding(inputs / groups) * _padding(outputs / groups)
    blocks_in = read * inputs * _padding(inputs)
    blocks_out = written * outputs * _padding(outputs)
    return (
        flops,
        padded,
        padded * (area > 9),
        padded * strided,
        read * inputs,
        blocks_in,
        blocks_in * strided,
        _beyond_cache(blocks_in),
        written * outputs,
        blocks_out,
        _beyond_cache(blocks_out),
        blocks_out * (blocks_out >= _RETURNED),
        written * inputs * area,
        4.0 * prod(weight),
        1.0,
    )


def _convolution_features(layer: Layer) -> tuple[float, ...]:
    (batch, inputs, *_), (_, outputs, *target) = _images(layer), layer.outputs[0].shape
    groups, weight = _groups(layer), _ints(layer.attributes["weight"])
    return (
        log(batch),
        log(inputs / groups),
        log(outputs / groups),
        log(prod(target)),
        log(prod(weight[2:])),
        log(prod(_ints(layer.attributes["stride"]))),
        log(_padding(inputs / groups)),
        log(_padding(outputs / groups)),
        log(groups),
    )


def _padding(channels: float) -> float:
    """Whole blocks of channels over channels."""
    return -(-channels // _LANES) * _LANES / channels


def _beyond_cache(size: float) -> float:
    return max(0.0, size - _CACHE)


def _images(layer: Layer) -> tuple[int, ...]:
    return _ints(layer.attributes["input"])


def _groups(layer: Layer) -> int:
    return prod(_ints((layer.attributes["groups"],)))


def _ints(attribute: Attribute) -> tuple[int, ...]:
    if not isinstance(attribute, tuple):
        return ()
    return tuple(item for item in attribute if isinstance(item, int))
