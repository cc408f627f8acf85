"""A host finds its address by the way to another, whatever its own name says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pathoseg.parallel.comm import mpi
from pathoseg.parallel.comm import process_transport as address
from pathoseg.parallel.comm.mpi import MpiWire
from pathoseg.parallel.comm.process_transport import own_address, reached_by

WAYS = {"me": "127.0.1.1", "node2": "10.0.0.1", "10.0.0.3": "10.0.0.1"}


@pytest.fixture(autouse=True)
def _ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(host: str) -> str:
        if host not in WAYS:
            raise OSError(f"{host} is not known")
        return WAYS[host]

    monkeypatch.setattr(address, "own_address", way)


def test_the_way_to_this_machine_is_its_loopback_interface() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("hosts", [["node2"], ["me", "node2"], ["me", "gone", "10.0.0.3"]])
def test_the_way_to_the_first_other_host_counts(hosts: list[str]) -> None:
    assert reached_by(hosts) == "10.0.0.1"


@pytest.mark.parametrize("hosts", [[], ["me"], ["gone"]])
def test_where_there_is_no_other_host_the_name_has_to_do(hosts: list[str]) -> None:
    assert reached_by(hosts) == socket.gethostname()


def test_no_more_hosts_are_asked_than_needed() -> None:
    def hosts() -> Iterator[str]:
        yield from ("me", "node2")
        pytest.fail("one too many")

    assert reached_by(hosts()) == "10.0.0.1"


@pytest.mark.parametrize("ranks_told", [{0, 1}, {0}, {1}, set()])
def test_ranks_of_mpi_meet_at_the_address_that_rank_0_is_told(
    ranks_told: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks make the same calls to MPI, on whichever of them MASTER_ADDR is set."""
    gathered = dict[int, bytes]()
    monkeypatch.setattr(mpi, "_reads_cuda", lambda _: False)

    def address_of(rank: int) -> str:
        def gather(own: list[bytearray], told: list[bytearray]) -> None:
            gathered[rank] = bytes(own[0])
            told[0][:] = b"".join(gathered.get(each, gathered[rank]) for each in (0, 1))

        node = SimpleNamespace(Get_size=lambda: 1, Free=lambda: None)
        world = SimpleNamespace(
            Get_rank=lambda: rank,
            Get_size=lambda: 2,
            Get_attr=lambda _: 2**30,
            Idup=lambda: (SimpleNamespace(Allgather=gather), None),
            Split_type=lambda _: node,
        )
        library = SimpleNamespace(
            COMM_WORLD=world,
            COMM_TYPE_SHARED=0,
            TAG_UB=0,
            BYTE=0,
            Get_library_version=lambda: "an MPI",
            Request=SimpleNamespace(Testall=lambda _: True),
        )
        monkeypatch.setattr(mpi, "_import_mpi", lambda: library)
        monkeypatch.setattr(socket, "gethostname", lambda: ("me", "node2")[rank])
        monkeypatch.setenv("MASTER_ADDR", "10.0.0.9" if rank in ranks_told else "")
        return MpiWire().host

    address_of(1)  # what it says
    found = [address_of(rank) for rank in (0, 1)]
    assert gathered.keys() == {0, 1}
    assert found == ["10.0.0.9" if 0 in ranks_told else "10.0.0.1"] * 2
