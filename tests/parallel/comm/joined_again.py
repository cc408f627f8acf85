"""One rank of a world that one leaves in the middle of messages, and that all join once more."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pathoseg.errors import MemoryExhaustedError
from pathoseg.parallel.comm.launcher import connect_on, find_world, join_wire
from pathoseg.parallel.comm.transport import Transport
from tests.parallel.comm import transport_conformance

_SMALL, _LARGE = 10, 2**20  # floats: sent at once, and once its receiver is there
_DEVICE = torch.device("cpu")


def leave_in_the_middle(transport: Transport) -> None:
    """Messages that nobody receives, buffers to which nobody sends, a sum that one rank lacks."""
    right, left = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    everyone = tuple(range(transport.ranks))
    pending = []
    for tag, size in enumerate((_SMALL, _LARGE)):
        pending.append(transport.send(torch.zeros(size), right, tag))
        pending.append(transport.receive(torch.empty(size), left, 10 + tag))
    arrives = transport.receive(torch.empty(_LARGE), left, 1)
    if transport.rank:
        transport.sum(torch.zeros(_LARGE), everyone).wait()
    else:
        arrives.wait()
        transport.abort("Rank 0 has no memory left.", fits=7)
        transport.barrier()


def main(library: str) -> None:
    choice = "mpi" if library == "mpi" else "gloo"
    wire = join_wire(choice, find_world())
    with closing(connect_on(wire, choice, _DEVICE)) as transport:
        with pytest.raises(MemoryExhaustedError, match=r"^Rank 0 has no memory left\.") as left:
            leave_in_the_middle(transport)
        assert left.value.fits == 7
    with closing(connect_on(wire.again(), choice, _DEVICE)) as transport:
        found = transport_conformance.run_all(transport)
    if wire.rank == 0:
        print(*found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
