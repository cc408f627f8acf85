"""Two subgroups of one transport, each of which passes what every transport has to."""

from __future__ import annotations

import pytest

from pathoseg.parallel.comm.subgroup import Subgroup
from tests.parallel.comm import transport_conformance
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks


@pytest.mark.parametrize("interleaved", [True, False])
def test_subgroups_conform_beside_one_another(interleaved: bool) -> None:
    """Ranks with the same strip are interleaved, those with one tile are neighbours."""

    def body(whole: ThreadTransport) -> list[str]:
        rank = whole.rank
        members = [rank % 2, rank % 2 + 2] if interleaved else [rank // 2 * 2, rank // 2 * 2 + 1]
        subgroup = Subgroup(whole, members)
        assert (subgroup.rank, subgroup.ranks) == (members.index(rank), 2)
        return transport_conformance.run_all(subgroup)

    for names in run_ranks(4, body):
        assert names == [case.__name__ for case in transport_conformance.CASES]
