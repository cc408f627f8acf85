"""Times messages of MPI and gloo while the ranks compute, and while they wait."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from pathoseg.parallel.comm.gloo import keep_store
from pathoseg.parallel.comm.launcher import World, connect
from pathoseg.parallel.comm.link_benchmark import measure_links
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.comm.transport import Pending, Transport

PIECES = 12  # of computation between the start of a message and the wait for it
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        command = [sys.executable, *sys.argv, "--rank"]
        sys.exit(start_local(2, command, "mpi"))
    figures = measure(5 if options.quick else 15)
    if figures and options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(rounds: int) -> dict[str, float | str]:
    """One rank's part; the figures, on rank 0."""
    torch.set_num_threads(1)
    mpi = connect("mpi")
    store, own = keep_store()  # rank 0's counts
    port = int(mpi.gather(str(own))[0])
    gloo = connect("gloo", World("torchrun", mpi.rank, mpi.ranks, port=port, hosted=True))
    factor = torch.randn(512, 512)

    def piece() -> None:
        for _ in range(2):
            torch.mm(factor, factor)

    ways: dict[str, tuple[Transport, Callable[[list[Pending]], None]]] = {
        "mpi": (mpi, lambda pending: compute(piece)),
        "mpi_looking": (mpi, lambda pending: compute(piece, pending)),
        "mpi_thread": (mpi, lambda pending: with_thread(piece, pending, 5e-4)),
        "mpi_slow_thread": (mpi, lambda pending: with_thread(piece, pending, 4e-3)),
        "gloo": (gloo, lambda pending: compute(piece)),
    }
    figures: dict[str, float | str] = {"device": "cpu"}
    for name, joined in (("mpi", mpi), ("gloo", gloo)):
        link = measure_links(joined)
        figures |= {f"{name}_alpha_us": link.alpha * 1e6, f"{name}_gb_per_s": 1e-9 / link.beta}
    for size in (1, 16):
        seconds: dict[str, list[float]] = {name: [] for name in ("compute", *ways)}
        alone: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            seconds["compute"].append(timed(mpi, 0, lambda pending: compute(piece)))
            for name, (transport, work) in ways.items():
                alone[name].append(timed(transport, size * MIB, lambda pending: None))
                seconds[name].append(timed(transport, size * MIB, work))
        base = median(seconds["compute"])
        for name in ways:
            figures[f"{name}_alone_ms_{size}mib"] = median(alone[name]) * 1e3
            figures[f"{name}_added_ms_{size}mib"] = (median(seconds[name]) - base) * 1e3
        figures[f"compute_ms_{size}mib"] = base * 1e3
    gloo.close()
    mpi.close()
    del store
    if mpi.rank:
        return {}
    print(table(figures, list(ways)))
    return figures


def timed(transport: Transport, size: int, work: Callable[[list[Pending]], None]) -> float:
    """Seconds until both ranks have sent and received a message and done their work."""
    other = 1 - transport.rank
    sent, came = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    transport.barrier()
    begin = time.perf_counter()
    pending: list[Pending] = []
    if size:
        pending = [transport.receive(came, other, 1), transport.send(sent, other, 1)]
    work(pending)
    for each in pending:
        each.wait()
    transport.barrier()
    return time.perf_counter() - begin


def compute(piece: Callable[[], None], pending: Sequence[Pending] = ()) -> None:
    for _ in range(PIECES):
        piece()
        for each in pending:
            each.done()


def with_thread(piece: Callable[[], None], pending: list[Pending], every: float) -> None:
    """Computes while a thread, the only one that uses the transport meanwhile, looks.

    It goes on looking when all is done: in a schedule a receive is always posted.
    """
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for each in pending:
                each.done()
            time.sleep(every)

    thread = threading.Thread(target=look)
    thread.start()
    compute(piece)
    over.set()
    thread.join()


def table(figures: dict[str, float | str], ways: list[str]) -> str:
    rows = ["| | µs a message | GB/s |", "|---|---|---|"]
    rows += [
        f"| {name} | {figures[f'{name}_alpha_us']:.0f} | {figures[f'{name}_gb_per_s']:.1f} |"
        for name in ("mpi", "gloo")
    ]
    for size in (1, 16):
        base = figures[f"compute_ms_{size}mib"]
        rows += ["", f"{size} MiB each way, computation {base:.1f} ms", ""]
        rows += ["| | alone, ms | added to the computation, ms |", "|---|---|---|"]
        for way in ways:
            alone, added = (figures[f"{way}_{what}_ms_{size}mib"] for what in ("alone", "added"))
            rows.append(f"| {way} | {alone:.2f} | {added:.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
