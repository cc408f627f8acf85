"""One rank of MPI that joins many times, each time held up at other moments than the others."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pathoseg.parallel.comm import mpi

_TIMES = 30
_LONGEST = 0.003  # seconds of a delay


def main() -> None:
    library = mpi._import_mpi()
    delays = random.Random(library.COMM_WORLD.Get_rank())

    class HeldUp(library.Intracomm):
        def Idup(self) -> object:  # noqa: N802
            made = super().Idup()
            if delays.random() < 0.5:
                time.sleep(delays.random() * _LONGEST)
            made[1].Test()
            return made

    changed = ModuleType("MPI")
    vars(changed).update(vars(library))
    vars(changed)["COMM_WORLD"] = HeldUp(library.COMM_WORLD)
    mpi._import_mpi = lambda: changed
    mpi.MEETING = 10.0
    wires = [mpi.MpiWire() for _ in range(_TIMES)]
    for wire in wires:
        for comm in wire._comms:
            comm.Free()
    if wires[0].rank == 0:
        print(len(wires), flush=True)
    library.Finalize()


if __name__ == "__main__":
    main()
