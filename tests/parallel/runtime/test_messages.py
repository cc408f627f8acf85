"""Layouts: what a receiver makes of a tensor is that tensor, memory order included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.process_transport import _bytes
from pathoseg.parallel.runtime.messages import _HEADER, Layout, _header, _layout

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool),
    *(torch.int32, torch.int16, torch.int8, torch.complex64, torch.complex128),
]


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    sizes = draw(st.lists(st.integers(0, 4), max_size=5))
    tensor = (
        torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(draw(st.sampled_from(DTYPES)))
    )
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[..., ::2]
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[:1].expand(draw(st.integers(1, 3)) if len(tensor) else 0, *tensor.shape[1:])
    return tensor


@given(_tensors())
def test_a_tensor_survives_its_message(tensor: torch.Tensor) -> None:
    layout = Layout.of(tensor)
    header = _header(layout)
    assert header.shape == (_HEADER,)
    assert _layout(header.tolist()) == layout
    memory, received = layout.buffer(torch.device("cpu"))
    packed = layout.packed(tensor)
    assert (packed.shape, packed.dtype) == (memory.shape, memory.dtype)
    memory.copy_(packed)
    assert torch.equal(received, tensor)
    assert memory.is_contiguous()
    assert layout.fits(received)
    if tensor.is_contiguous(memory_format=torch.preserve_format) and tensor.numel() > 1:
        assert packed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_memory_order_is_kept_without_a_copy() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout.of(tensor)
    assert layout.packed(tensor).data_ptr() == tensor.data_ptr()
    assert layout.buffer(torch.device("cpu"))[1].stride() == tensor.stride()


def test_the_bytes_of_a_conjugate_are_its_values() -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 4j]])
    for view in (tensor.conj(), tensor[:, :1].conj().imag):
        packed = Layout.of(view).packed(view)
        assert not packed.is_conj()
        assert not packed.is_neg()
        assert torch.equal(_bytes(packed).view(view.dtype), view.flatten())


def test_what_does_not_exist_has_a_header_too() -> None:
    assert _layout(_header(None).tolist()) is None


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(PathosegError, match="cannot be sent"):
        _header(Layout.of(torch.zeros([1] * 9)))
    with pytest.raises(PathosegError, match="uint16"):
        _header(Layout.of(torch.zeros(1, dtype=torch.uint16)))
