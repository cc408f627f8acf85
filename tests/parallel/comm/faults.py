"""One rank of a world in which the last rank comes to grief, which test_transports.py starts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pathoseg.errors import PathosegError
from tests.parallel.comm.joined import join


def main(library: str, fault: str) -> None:
    join(library).close()  # a program may join its ranks more than once
    transport = join(library)
    last = transport.ranks - 1
    transport.barrier()
    if transport.rank == last:
        time.sleep(0.3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "abort":
            transport.abort("Rank 2 failed: the glass broke.")
        elif fault == "raise":
            with transport:
                raise ValueError("the glass broke")
    if fault == "leave":
        (transport.close if transport.rank == last else transport.barrier)()
        return
    try:  # the others wait for each other, not for the rank that is lost
        transport.receive(torch.empty(5), 1 - transport.rank % 2, 5).wait()
    except PathosegError as error:
        print(f"rank {transport.rank} waited: {error}", flush=True)
    try:
        transport.barrier()
    except PathosegError as error:
        print(f"rank {transport.rank} later: {error}", flush=True)
    transport.close()
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
