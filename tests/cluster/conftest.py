"""The hosts, the Slurm and the folder of slides that these tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = str(Path(__file__).resolve().parents[2])

if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests.cluster import hosts as network  # noqa: E402
from tests.cluster import slurm as scheduler  # noqa: E402
from tests.cluster.hosts import Hosts  # noqa: E402
from tests.cluster.lab import Lab  # noqa: E402
from tests.cluster.slurm import Slurm  # noqa: E402


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := network.missing():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts")) as joined:
        yield joined


@pytest.fixture(scope="session")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := scheduler.missing():
        pytest.skip(reason)
    with Slurm(hosts, tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as folder:
        yield folder
