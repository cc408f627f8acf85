"""Layers on strips of rows against the same layers on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pathoseg.errors import PathosegError
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig
from pathoseg.parallel.shards.exchange import Halos
from pathoseg.parallel.shards.rows import Rows, SlidingWindow, Split, strips
from pathoseg.parallel.shards.strip import Strip
from tests.parallel.shards.strips_on_threads import (
    Drawing,
    Place,
    Result,
    difference,
    run_strips,
    run_whole,
)

CHANNELS = 4
# A chain of four layers, of norms above all, enlarges what single precision rounds.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def __repr__(self) -> str:
        return self.name


class Autocast(nn.Module):
    """A layer in bfloat16."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = self.layer(x)
        return made


class Beside(nn.Module):
    """A layer's output, resized to its input, joined with the input, and mixed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.mix = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = F.interpolate(self.layer(x), size=x.shape[-2:], mode="bilinear")
        mixed: Tensor = self.mix(torch.cat([x, made], 1))
        return mixed + x * 0.5


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    kernel = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stride = draw(st.sampled_from([1, 1, 2, 3]))
    dilation = draw(st.integers(1, 2))
    padding: Any = draw(st.one_of(st.integers(0, 3), st.just("valid"), st.just("same")))
    return nn.Conv2d(
        CHANNELS,
        CHANNELS,
        kernel,
        stride=1 if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        groups=draw(st.sampled_from([1, 2])),
        bias=draw(st.booleans()),
    )


@st.composite
def transposed(draw: st.DrawFn) -> nn.Module:
    stride = draw(st.integers(1, 3))
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, min(2, dilation * (kernel - 1))))
    more = draw(st.integers(0, max(stride, dilation) - 1))
    return nn.ConvTranspose2d(CHANNELS, CHANNELS, kernel, stride, padding, more, dilation=dilation)


@st.composite
def poolings(draw: st.DrawFn) -> nn.Module:
    kernel, stride = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    padding, ceil = draw(st.integers(0, kernel // 2)), draw(st.booleans())
    if draw(st.booleans()):
        return nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
    counted = draw(st.booleans())
    return nn.AvgPool2d(kernel, stride, padding, ceil, counted)


@st.composite
def resizings(draw: st.DrawFn) -> nn.Module:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear"]))
    corners = draw(st.booleans()) if mode == "bilinear" else None
    if draw(st.booleans()):
        return nn.Upsample(
            scale_factor=draw(st.sampled_from([2, 0.5, 1.7, 4])), mode=mode, align_corners=corners
        )
    return nn.Upsample(
        size=(draw(st.integers(8, 40)), draw(st.integers(3, 9))), mode=mode, align_corners=corners
    )


class NamedAsNumpy(nn.Module):
    """Calls functions by the names of arguments that torch takes from numpy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.mean(axis=1, keepdims=True) + x.sum(axis=(2, 3))[..., None, None]
        return torch.softmax(input=x, dim=1)


SIMPLE: list[Callable[[], nn.Module]] = [
    NamedAsNumpy,
    lambda: nn.ReLU(),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.GELU(),
    lambda: nn.PReLU(CHANNELS),
    lambda: nn.BatchNorm2d(CHANNELS),
    lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    lambda: nn.GroupNorm(2, CHANNELS),
    lambda: nn.GroupNorm(1, CHANNELS, affine=False),
    lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
    lambda: nn.InstanceNorm2d(CHANNELS),
    lambda: nn.Softmax(dim=1),
    lambda: Drawing(nn.Dropout(0.3)),
    lambda: Drawing(nn.Dropout2d(0.3)),
    lambda: Drawing(nn.AlphaDropout(0.2)),
    lambda: nn.ReflectionPad2d((1, 2, 0, 0)),
    lambda: nn.ZeroPad2d((1, 0, 2, 3)),
    lambda: Call(lambda x: x[:, :, 1:-2], "crop"),
    lambda: Call(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), "squeeze-and-excite"),
    lambda: Call(lambda x: x + F.adaptive_avg_pool2d(x, 1), "global average"),
    lambda: Call(
        lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,)).permute(0, 3, 1, 2),
        "channels last",
    ),
    lambda: Call(lambda x: x.flatten(2).softmax(1).reshape(x.shape), "flat"),
    lambda: Call(lambda x: x.softmax(2), "softmax of rows, gathered"),
    lambda: Call(lambda x: F.pixel_shuffle(x.repeat_interleave(4, 1), 2), "pixel shuffle"),
]
layers = st.one_of(
    convolutions(),
    transposed(),
    poolings(),
    resizings(),
    st.sampled_from(SIMPLE).map(lambda make: make()),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, Tensor, tuple[int, ...]]:
    """A chain of layers, an input, and the bounds of its strips."""
    torch.manual_seed(draw(st.integers(0, 100)))
    chain = draw(st.lists(st.one_of(layers, layers.map(Beside)), min_size=1, max_size=4))
    shards = draw(st.integers(2, 8))
    height = draw(st.integers(max(10, 3 * shards), 48))
    bounds = Split.even(height, shards).bounds
    if draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, height - 1), min_size=shards - 1, max_size=shards - 1))
        bounds = (0, *sorted(cuts), height)
    x = torch.randn(draw(st.integers(1, 2)), CHANNELS, height, draw(st.integers(6, 9)))
    return nn.Sequential(*chain), x, bounds


def judged(module: nn.Module, x: Tensor, bounds: tuple[int, ...]) -> tuple[Result, Result]:
    return run_strips(module, x, bounds), run_whole(module, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@settings(max_examples=200)
@given(cases(), st.sampled_from([torch.float32, torch.float64]))
def test_any_chain_is_exact(
    case: tuple[nn.Module, Tensor, tuple[int, ...]], dtype: torch.dtype
) -> None:
    module, x, bounds = case
    module, x = module.to(dtype), x.to(dtype)
    try:
        expected = run_whole(module, x)
    except (RuntimeError, ValueError):  # no rows are left
        assume(False)
    try:
        found = run_strips(module, x, bounds)
    except PathosegError as error:
        if "rows" not in error.problem:
            raise
        assume(False)  # too small a strip
    for name, share in difference(found, expected).items():
        assert share <= _ROUNDING[dtype], f"{name} differs by {share:.2g}"


@pytest.mark.parametrize("make", SIMPLE)
def test_layers_that_need_no_other_rows_gather_nothing(make: Callable[[], nn.Module]) -> None:
    layer, x = (
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), make()),
        torch.randn(2, CHANNELS, 12, 6),
    )
    found, expected = judged(layer.double(), x.double(), (0, 5, 12))
    assert found.gathered == (["softmax"] if "gathered" in str(layer) else [])
    assert max(difference(found, expected).values()) <= 1e-13


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "flip": (lambda x: x.flip(3, 1) * x, []),
    "flip of rows": (lambda x: x.flip(3, 2) * x, ["flip"]),
    "flip by name": (lambda x: torch.flip(x, dims=(3,)) * x, []),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, upscale_factor=2), []),
    "as many columns": (lambda x: F.interpolate(x, None, (2, 1.15), "nearest-exact"), []),
    "as many rows": (lambda x: F.interpolate(x, None, (1.05, 2), "bilinear"), ["interpolate"]),
    "one hot": (
        lambda x: x * F.one_hot(x.argmax(1), num_classes=CHANNELS).permute(0, 3, 1, 2),
        [],
    ),
    "layer norm": (lambda x: torch.layer_norm(x, normalized_shape=(6,)), []),
    "RMS norm": (lambda x: torch.rms_norm(x, normalized_shape=(6,)), []),
    "torch's batch norm": (
        lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        ["batch_norm"],
    ),
    "matrix product": (lambda x: x @ x.transpose(-2, -1), ["matmul"]),
    "matrix product, reflected": (lambda x: torch.ones(12, 12).to(x.dtype) @ x, ["matmul"]),
    "remainder": (lambda x: +x + 2.0 % (x.detach().abs() + 1.0), []),
    "floor division": (lambda x: x * (3.0 // (x.detach().abs() + 1.0)), []),
    "an operand of more dimensions": (
        lambda x: (x * torch.ones(3, 1, CHANNELS, 1, 1).cumsum(0).to(x.dtype)).mean((-1, -2)),
        [],
    ),
    "torch's dropout": (lambda x: torch.dropout(x, p=0.5, train=False), ["dropout"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_called_in_all_of_torchs_ways(name: str) -> None:
    """Varargs, names of parameters and Python's operators; what needs other rows is gathered."""
    function, gathered = CALLS[name]
    layer = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), Call(function, name)).double()
    found, expected = judged(layer, torch.randn(2, CHANNELS, 12, 6).double(), (0, 5, 12))
    assert found.gathered == gathered
    assert max(difference(found, expected).values()) <= 1e-13


def test_a_write_into_a_part_of_a_strip_is_refused() -> None:
    def write(x: Tensor) -> Tensor:
        x = x * 1
        x[:, 0] = 0
        return x

    with pytest.raises(PathosegError, match="setitem writes into a tile that is cut into strips"):
        run_strips(Call(write, "write"), torch.randn(1, CHANNELS, 12, 6), (0, 5, 12))


def _within(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :, 2:-2].mul_(0.5)
    return x


def _border(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :, 0].zero_()
    return x


def _flat(x: Tensor) -> Tensor:
    x = x * 1
    x.flatten(1).mul_(0.5)
    return x


def _beneath(x: Tensor) -> Tensor:
    x = x * 1
    part = x.narrow(2, 1, 6)
    x.add_(1)
    return part


@pytest.mark.parametrize("write", [_within, _border, _flat, _beneath])
def test_a_write_that_a_view_of_a_strip_would_miss_is_refused(
    write: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(PathosegError, match="writes in place into a part of a tile"):
        run_strips(Call(write, "write"), torch.randn(1, CHANNELS, 12, 6), (0, 5, 12))


def _channels(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2].add_(1)
    return x


@pytest.mark.parametrize("write", [_channels, lambda x: (x * 1)[:, :, 2:-2].mul_(0.5)])
def test_a_write_that_nothing_misses_is_exact(write: Callable[[Tensor], Tensor]) -> None:
    found, expected = judged(Call(write, "write"), torch.randn(1, CHANNELS, 12, 6), (0, 5, 12))
    assert max(difference(found, expected).values()) <= 1e-6


def _network() -> nn.Module:
    """Weights drawn within a test are the same in every run (`conftest.py` seeds it)."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(inplace=True),
        nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2),
    )


def test_a_halo_without_its_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public code of the papers sends halos outside of autograd: no gradient comes back."""
    x = torch.randn(1, CHANNELS, 16, 6)
    network = _network()
    assert max(difference(*judged(network, x, (0, 7, 16))).values()) < 1e-6

    monkeypatch.setattr(Halos, "add", lambda *_: None)
    wrong = difference(*judged(network, x, (0, 7, 16)))
    assert wrong["output"] < 1e-6, "the forward hides it"
    assert wrong["input"] > 0.01
    assert wrong["0.weight"] > 0.001


# With a stride of 2 the rank of rows 0-6 convolves them as they lie, the other joins its halos.
@pytest.mark.parametrize("make", [_network, lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)])
def test_autocast_is_that_of_whole_tiles(make: Callable[[], nn.Module]) -> None:
    found, expected = judged(Autocast(make()), torch.randn(2, CHANNELS, 16, 6), (0, 7, 16))
    assert found.output.dtype is expected.output.dtype is torch.bfloat16
    assert max(difference(found, expected).values()) < 0.02


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(CHANNELS), nn.GroupNorm(2, CHANNELS)])
def test_norms_lose_no_more_at_a_large_mean_than_torchs_own(layer: nn.Module) -> None:
    """The mean of squares less the square of the mean would lose all digits of the variance."""
    x = torch.randn(2, CHANNELS, 12, 6) + 4096
    found = run_strips(layer, x, (0, 5, 12))
    exact = run_whole(deepcopy(layer).double(), x.double())
    assert max(difference(found, exact).values()) < 2e-3, "torch's own: up to 6e-4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5, 3.0)])
def test_losses_are_those_of_whole_tiles(dtype: torch.dtype, weights: Any) -> None:
    """Dice is a ratio of sums, and a class may be in one strip alone; some pixels are ignored."""
    targets = torch.randint(0, CHANNELS, (2, 16, 6), generator=torch.Generator().manual_seed(5))
    targets[0, :9][targets[0, :9] == 3] = 0  # class 3 in the second strip alone
    targets[0, 12:] = 255
    targets[1] = 255
    each = build_loss(LossConfig(focal=0.5, class_weights=weights))
    bounds = (0, 9, 16)

    def loss(output: Any) -> Tensor:
        if isinstance(output, Tensor):
            return each(output, targets).sum()
        own = targets[:, output.own.first : output.own.stop]
        losses: Any = each(output, Strip(own, 1, bounds, output.shards))  # type: ignore[arg-type]
        assert losses.shape == (2,)
        return losses.sum()  # type: ignore[no-any-return]

    module, x = _network().to(dtype), torch.randn(2, CHANNELS, 16, 6, dtype=dtype)
    found, expected = run_strips(module, x, bounds, loss), run_whole(module, x, loss)
    assert found.gathered == []
    assert max(difference(found, expected).values()) <= _ROUNDING[dtype] / 10


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("function", [F.mse_loss, F.huber_loss, F.binary_cross_entropy])
def test_weights_of_elements_count_as_torch_counts_them(function: Any, is_cut: bool) -> None:
    """Torch divides some means by the sum of the weights, others by the number of elements."""
    bounds, generator = (0, 5, 12), torch.Generator().manual_seed(5)
    targets, weights = torch.rand(2, 2, CHANNELS, 12, 6, generator=generator).double()

    def loss(output: Any) -> Tensor:
        given = [targets, weights]
        if isinstance(output, Strip) and is_cut:
            first, stop = output.own
            given = [Strip(x[:, :, first:stop], 2, bounds, output.shards) for x in given]  # type: ignore[misc]
        each: Tensor = function(output, given[0], weight=given[1])
        return each

    layer = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Sigmoid()).double()
    x = torch.randn(2, CHANNELS, 12, 6).double()
    found, expected = run_strips(layer, x, bounds, loss), run_whole(layer, x, loss)
    assert max(difference(found, expected).values()) <= 1e-13


def test_a_strip_smaller_than_a_halo_is_refused() -> None:
    layer = nn.Conv2d(CHANNELS, CHANNELS, 7, padding=3)
    with pytest.raises(PathosegError, match="looks 3 rows beyond its strip") as caught:
        run_strips(layer, torch.randn(1, CHANNELS, 8, 6), (0, 2, 4, 6, 8))
    assert "fewer shards" in caught.value.hint


def test_too_few_rows_for_all_strips_are_refused() -> None:
    pool = nn.AvgPool2d(4)
    with pytest.raises(PathosegError, match="2 rows, too few for 3 strips"):
        run_strips(pool, torch.randn(1, CHANNELS, 8, 8), (0, 2, 5, 8))
    with pytest.raises(PathosegError, match="cannot be cut into 5 strips"):
        Split.even(4, 5)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.data())
def test_windows_read_what_they_see(
    kernel: int, stride: int, padding: int, dilation: int, data: st.DataObject
) -> None:
    """Against the definition: output row o sees the rows o · stride - padding + k · dilation."""
    window = SlidingWindow(kernel, stride, padding, dilation)
    first = data.draw(st.integers(0, 20))
    made = Rows(first, first + data.draw(st.integers(1, 9)))
    seen = {o * stride - padding + k * dilation for o in range(*made) for k in range(kernel)}
    assert window.reads(made) == (min(seen), max(seen) + 1)
    rows = range(-60, 60)
    reaching = {
        i
        for i in rows
        if any(i * stride - padding + k * dilation in range(*made) for k in range(kernel))
    }
    seeing = {o for o in range(40) if window.reads(Rows(o, o + 1)).within(made).height}
    assert set(range(*window.reached(made).within(Rows(0, 40)))) == seeing
    wanted = window.reads_transposed(made)
    assert reaching <= set(range(*wanted))
    assert window.reached_from(wanted.first) <= made.first
    assert window.reached_from(wanted.stop - 1) + window.span >= made.stop


@given(st.integers(2, 4096), st.integers(2, 16))
def test_even_strips(height: int, shards: int) -> None:
    assume(height >= shards)
    split = Split.even(height, shards)
    sizes = [one.height for one in strips(split.bounds)]
    assert sum(sizes) == height
    assert len(sizes) == shards
    assert min(sizes) >= 1
    assert max(sizes) <= max(-(-height // shards), height * (1 + 1 / 16) / shards)
    assert split.of(height) == split.bounds


def test_strides_of_2_fit_even_strips() -> None:
    assert Split.even(1024, 2).bounds == (0, 512, 1024)
    assert all(bound % 16 == 0 for bound in Split.even(1024, 3).bounds)


class Alone:
    """The other rank sends zeros, so that one thread shows all that is held and done."""

    rank, ranks = 0, 2

    def receive(self, into: Tensor, source: int, tag: int) -> Alone:
        into.zero_()
        return self

    def send(self, tensor: Tensor, to: int, tag: int) -> Alone:
        return self

    sum = send

    def wait(self) -> None:
        pass


def test_of_halo_and_strip_the_halo_alone_is_saved() -> None:
    """Or each convolution would hold its input twice: with halos for itself, without for others."""
    rows = 64
    place = Place(Alone(), Split((0, rows, 2 * rows)))  # type: ignore[arg-type]
    network = nn.Sequential(*[nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(8)])
    x = torch.randn(1, CHANNELS, rows, 64)
    made: list[Any] = []

    def held(given: Any) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile:
            made.append(network(given))
        events = profile.profiler.kineto_results.events()
        return sum(event.nbytes() for event in events if event.name() == "[memory]")

    whole = held(x)
    strip = held(Strip(x, 2, (0, rows, 2 * rows), place))
    assert strip <= whole * (1 + 2 / rows), "one row of halo, and one of padding, a layer"


class Kernels(TorchDispatchMode):  # type: ignore[misc]  # untyped in torch
    """The rows that convolutions and their backwards are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket._qualified_op_name.startswith("aten::convolution"):
            self.rows.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


def test_halos_are_awaited_behind_the_kernel_of_the_strip() -> None:
    """Test that messages are under way while the strip, as it lies, is convolved."""
    events: list[Any] = []
    kernels = Kernels()

    class Noting(Alone):
        def send(self, tensor: Tensor, to: int, tag: int) -> Alone:
            events.append(("sends", tensor.shape[2], [*kernels.rows]))
            return self

        def wait(self) -> None:
            events.append(("waits", [*kernels.rows]))

    place = Place(Noting(), Split((0, 8, 16)))  # type: ignore[arg-type]
    layer = nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2)
    x = torch.randn(1, CHANNELS, 8, 6, requires_grad=True)
    with kernels:
        made: Any = layer(Strip(x, 2, (0, 8, 16), place))
        assert kernels.rows == [8, 6], "the strip; two rows at its end look at four more"
        kernels.rows.clear()
        made.local.backward(torch.ones_like(made.local))
    assert kernels.rows == [2, 8], "the gradients of two rows, then of all"
    sent, waited = [("sends", 2, [])], [("waits", [8])] * 2
    back, awaited = [("sends", 2, [2])], [("waits", [2, 8])] * 2
    assert events == [*sent, *waited, *back, *awaited]
