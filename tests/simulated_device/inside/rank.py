"""One of two processes, each with a simulated device: messages conform, and two cases train."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.parallel.comm import transport_conformance
from tests.parallel.comm.joined import OnDevice, join
from tests.parallel.computing_device import DEVICE
from tests.parallel.runtime.cases import Case, compare, prepare, run_case
from tests.simulated_device import device

CASES = [Case("branches", "gems-master", 2), Case("unet", "1f1b-recomputed", 2)]


def main() -> None:
    assert DEVICE.type == device.NAME
    torch.set_num_threads(1)
    transport = join("gloo")
    try:
        transport_conformance.run_all(OnDevice(transport, DEVICE))
        for case in CASES:
            prepare(case)
            compare(case, transport.rank, run_case(case, transport))
        assert device.counts().kernels > 1_000
        assert device.problems() == []
    except BaseException as error:
        transport.abort(f"Rank {transport.rank}: {error!r}")
        raise
    transport.close()
    if transport.rank == 0:
        print(*CASES, flush=True)


if __name__ == "__main__":
    main()
