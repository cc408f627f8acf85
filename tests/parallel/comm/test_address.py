"""A host finds its address by the way to another, whatever its own name says."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pathoseg.parallel.comm import process_transport as address
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
