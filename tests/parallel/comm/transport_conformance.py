"""Cases that every transport must pass, each run by all of its ranks together."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pathoseg.parallel.comm.transport import Transport

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def made(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> Tensor:
    """A tensor that both sides can make."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=generator).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def arrival_in_any_order(transport: Transport) -> None:
    """Many tags between all pairs, begun in a different order on each rank, all at once."""
    tags = [0, 1, 7, 32767, 32768, 2**20 - 1, *range(100, 125)]
    routes = [
        (source, to, tag)
        for source in range(transport.ranks)
        for to in range(transport.ranks)
        for tag in tags
        if source != to and transport.rank in (source, to)
    ]
    random.Random(transport.rank).shuffle(routes)
    pending, received = [], []
    for source, to, tag in routes:
        tensor = made((5, 3), torch.float32, source, to, tag)
        if transport.rank == source:
            pending.append(transport.send(tensor, to, tag))
        else:
            into = torch.empty_like(tensor)
            pending.append(transport.receive(into, source, tag))
            received.append((into, tensor))
    random.Random(-1 - transport.rank).shuffle(pending)
    for each in pending:
        each.wait()
        assert each.done()
    assert all(same_bits(into, tensor) for into, tensor in received)
    assert len(received) == (transport.ranks - 1) * len(tags)


def one_tag_keeps_its_order(transport: Transport) -> None:
    to, source = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    buffers = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
    pending = [transport.send(torch.tensor([number]), to, 4) for number in range(20)]
    pending += [transport.receive(buffer, source, 4) for buffer in buffers]
    for each in pending:
        each.wait()
    assert [int(buffer) for buffer in buffers] == list(range(20))


def every_dtype_and_size(transport: Transport) -> None:
    to, source = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    for dtype in (*DTYPES, torch.int16, torch.complex64, torch.complex128):
        for shape in ((), (0,), (3, 0, 2), (1,), (2, 3, 5), (40001,)):
            into = torch.empty(shape, dtype=dtype)
            receiving = transport.receive(into, source, 9)
            transport.send(made(shape, dtype, transport.rank), to, 9).wait()
            receiving.wait()
            assert same_bits(into, made(shape, dtype, source)), (dtype, shape)


def looking_is_enough(transport: Transport) -> None:
    """`done` alone brings a message home, posted before or after it was sent."""
    to, source = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    for early in (True, False):
        if early:
            transport.barrier()
        into = torch.empty(300_000)
        pending = [transport.receive(into, source, 3)] if early else []
        transport.barrier()
        pending.append(transport.send(torch.full((300_000,), float(transport.rank)), to, 3))
        if not early:
            transport.barrier()
            pending.append(transport.receive(into, source, 3))
        while pending := [each for each in pending if not each.done()]:
            pass
        assert torch.equal(into, torch.full_like(into, float(source)))


def a_large_message(transport: Transport) -> None:
    size = 2**26
    if transport.rank == 0:
        sent = torch.arange(size // 8)
        transport.send(sent, transport.ranks - 1, 1).wait()
    elif transport.rank == transport.ranks - 1:
        into = torch.empty(size // 8, dtype=torch.int64)
        transport.receive(into, 0, 1).wait()
        assert torch.equal(into, torch.arange(size // 8))


def sums_of_every_dtype(transport: Transport) -> None:
    everyone = tuple(range(transport.ranks))
    for dtype in DTYPES[:-1]:
        for shape in ((0,), (1,), (3, 5), (10007,)):
            tensor = made(shape, dtype, transport.rank)
            transport.sum(tensor, everyone).wait()
            parts = [made(shape, dtype, rank) for rank in everyone]
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            total = parts[0].to(wide)
            for part in parts[1:]:
                total = total + part.to(wide)
            assert is_sum(tensor, total), (dtype, shape)
            digests = transport.gather(bytes(tensor.view(-1).view(torch.uint8).numpy()).hex())
            assert len(set(digests)) == 1, (dtype, shape)


def sums_under_way_together(transport: Transport) -> None:
    """Sums over overlapping groups, finished in another order than they were begun in."""
    last = transport.ranks - 1
    groups = [
        tuple(range(transport.ranks)),
        (0, last),
        (last,),
        (0,),
        tuple(range(last)),
        (0, last),
    ]
    begun = []
    for number, group in enumerate(groups):
        if transport.rank in group:
            tensor = made((1000 + number,), torch.float64, transport.rank, number)
            begun.append((number, group, tensor, transport.sum(tensor, group)))
    for number, group, tensor, pending in reversed(begun):
        pending.wait()
        total = made(tensor.shape, torch.float64, group[0], number)
        for rank in group[1:]:
            total += made(tensor.shape, torch.float64, rank, number)
        assert is_sum(tensor, total), group


def is_sum(found: Tensor, total: Tensor) -> bool:
    """Compare a sum with one in the order of the ranks: NCCL has an order of its own."""
    if not found.is_floating_point():
        return same_bits(found, total)
    rounded = 0.02 if found.itemsize == 2 else 8 * torch.finfo(found.dtype).eps
    largest = float(total.abs().max()) if total.numel() else 0.0
    return torch.allclose(found.to(total.dtype), total, rtol=0, atol=rounded * largest)


def sums_in_the_order_of_ranks(transport: Transport) -> None:
    """Sums of gloo, MPI and threads are equal to the bit."""
    everyone = tuple(range(transport.ranks))
    for dtype in (torch.float32, torch.float64):
        tensor = made((10007,), dtype, transport.rank)
        transport.sum(tensor, everyone).wait()
        total = made((10007,), dtype, 0)
        for rank in everyone[1:]:
            total = total + made((10007,), dtype, rank)
        assert same_bits(tensor, total)


def texts_of_all(transport: Transport) -> None:
    texts = ["", "Größe 5 µm × 2", "病理 \U0001f52c\n\0", "x" * 300_000]
    for turn in range(3):
        own = texts[(transport.rank + turn) % 4]
        expected = [texts[(rank + turn) % 4] for rank in range(transport.ranks)]
        assert transport.gather(own) == expected
    transport.barrier()


def no_tensor_is_kept(transport: Transport) -> None:
    """Leaf tensors that need gradients go through, and stay what they were."""
    weight = torch.ones(4, requires_grad=True)
    transport.sum(weight.detach(), tuple(range(transport.ranks))).wait()
    assert weight.tolist() == [float(transport.ranks)] * 4
    assert weight.requires_grad


CASES: tuple[Callable[[Transport], None], ...] = (
    arrival_in_any_order,
    one_tag_keeps_its_order,
    every_dtype_and_size,
    looking_is_enough,
    a_large_message,
    sums_of_every_dtype,
    sums_under_way_together,
    sums_in_the_order_of_ranks,
    texts_of_all,
    no_tensor_is_kept,
)


def cases_of(library: str) -> list[Callable[[Transport], None]]:
    """Return the cases that ranks joined by a library must pass."""
    adds_in_order = library not in ("nccl", "imitated")
    return [case for case in CASES if adds_in_order or case is not sums_in_the_order_of_ranks]


def run_all(transport: Transport, library: str = "") -> list[str]:
    """Runs every case; the names of those that passed on this rank."""
    for case in cases_of(library):
        try:
            case(transport)
        except BaseException as error:
            transport.abort(f"{case.__name__}: {error!r}")
            raise
    return [case.__name__ for case in cases_of(library)]


def main(library: str) -> None:
    """One rank of a world of processes."""
    from tests.parallel.comm.joined import join

    torch.set_num_threads(1)
    transport = join(library)
    passed = run_all(transport, library)
    transport.close()
    print("passed:", *passed, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(sys.argv[1])
