"""Asks how fast readers deliver tiles: pathoseg's direct one and five others."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.installed import PEERS, peers_python

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PATHOSEG_DATA", HERE.parents[2] / "shared" / "data")) / "slides"
SLIDE, SIZE = "wsi_gastric-erosion_13196x16866.tif", (13196, 16866)
SLIDE_MPP = 0.5
TILE, OVERLAP = 1024, 192
CUCIM = [
    "cucim==23.10.0",
    "numpy==1.26.4",
    "opencv-python-headless==4.10.0.84",
    "lazy_loader",
    "packaging",
    "click",
]
NATIVE, TWICE, BETWEEN = 1.0, 2.0, 1.4  # times the resolution of level 0; the next level has 4


@dataclass(frozen=True)
class Case:
    """One read to be timed: the scale of its tiles, their order and the threads.

    Attributes:
        factor: Side of a tile's pixel, in pixels of level 0.
        order: `random` anywhere on the slide, or `scan` in overlapping rows.
        threads: How many threads share the tiles.
    """

    factor: float
    order: str
    threads: int

    @property
    def name(self) -> str:
        return f"x{self.factor:g}_{self.order}_{self.threads}"

    def corners(self, tiles: int) -> list[tuple[int, int]]:
        """Return the top left corner (x, y) of each of `tiles` tiles, in pixels of level 0.

        Random corners are the same at every call.
        """
        extent = round(TILE * self.factor)
        if self.order == "random":
            spots = np.random.default_rng(0).random((tiles, 2)) * (np.array(SIZE) - extent)
            return [(int(x), int(y)) for x, y in spots]
        stride = round((TILE - OVERLAP) * self.factor)
        across = (SIZE[0] - extent) // stride + 1  # whole rows of the slide
        y = SIZE[1] // 3
        return [(n % across * stride, y + n // across * stride) for n in range(tiles)]


CASES = [
    Case(NATIVE, "random", 1),
    Case(NATIVE, "random", 2),
    Case(NATIVE, "scan", 1),
    Case(NATIVE, "scan", 2),
    Case(TWICE, "random", 1),
    Case(TWICE, "scan", 1),
    Case(TWICE, "scan", 2),
    Case(BETWEEN, "scan", 1),
]


@contextmanager
def worker(reader: str, python: Path, slide: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that reads with one reader, each in its own so that none warms another's memory."""
    command = [str(python), str(HERE / "readers.py"), reader, str(slide)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        answer(process)  # ready
        yield process
        process.stdin.close()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args!r} ended early")
    return line


def seconds(process: subprocess.Popen[str], case: Case, tiles: int) -> float:
    """Have a reader's process read the tiles of a case, and return the seconds that it reports.

    They are seconds of processor time for one thread, of wall time for several.

    Raises:
        SystemExit: The process has ended.
    """
    assert process.stdin is not None
    work = {"corners": case.corners(tiles), "factor": case.factor, "threads": case.threads}
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    return float(answer(process))


def cucims_python() -> Path | None:
    """The interpreter of a virtual environment with cuCIM, None where it does not install."""
    folder = HERE / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([python, *quiet, *CUCIM], capture_output=True, check=False)
    return python if _imports(python, "from cucim import CuImage") else None


def tiatoolboxs_python(folder: Path) -> Path | None:
    """The interpreter of the environment of benchmarks/peers, None where it has no TIAToolbox."""
    python = peers_python(folder)
    statement = "from tiatoolbox.wsicore.wsireader import OpenSlideWSIReader"
    return python if _imports(python, statement) else None


def _imports(python: Path, statement: str) -> bool:
    return subprocess.run([python, "-c", statement], capture_output=True).returncode == 0


def write_stated(path: Path) -> None:
    """A copy of the slide that states its resolution; TIAToolbox reads no slide without one."""
    shutil.copyfile(DATA / SLIDE, path)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        levels: Any = tiff.pages  # typed as what may lack tags
        for level in levels:
            per_centimeter = 1e4 / SLIDE_MPP * level.shape[1] / SIZE[0]
            for axis in ("XResolution", "YResolution"):
                level.tags[axis].overwrite((round(per_centimeter * 1000), 1000))
            level.tags["ResolutionUnit"].overwrite(tifffile.RESUNIT.CENTIMETER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tiles and rounds")
    parser.add_argument("--peers", type=Path, default=PEERS, help="TIAToolbox's environment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if not (DATA / SLIDE).exists():
        parser.exit(0, f"skipped: no {SLIDE} in {DATA} (set PATHOSEG_DATA)\n")
    pythons = dict.fromkeys(
        ("direct", "openslide", "openslide_pillow", "zarr_store"), Path(sys.executable)
    )
    for name, python in (
        ("cucim", cucims_python()),
        ("tiatoolbox", tiatoolboxs_python(options.peers)),
    ):
        if python is None:
            print(f"without {name}, which does not install here")
        else:
            pythons[name] = python
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(folder) / SLIDE
        write_stated(slide)
        times = measured(pythons, slide, *((8, 3) if options.quick else (16, 7)))
    figures = {
        f"{reader}_{case.name}_mpx_per_s": rate
        for (reader, case), rate in rates(times, 8 if options.quick else 16).items()
    }
    table(times, figures)
    for name, value in ratios(times).items():
        figures[name] = value
        print(f"{name:50} {value:6.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


Times = dict[tuple[str, Case], float]


def measured(pythons: dict[str, Path], slide: Path, tiles: int, rounds: int) -> Times:
    """Median seconds of each reader and case, all in turn every round.

    Another reader is first each time: who is first after a case of one thread may find the second
    core asleep, or on a virtual machine beside the first on one core of the host.
    """
    taken: dict[tuple[str, Case], list[float]] = {}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(worker(name, python, slide))
            for name, python in pythons.items()
        }
        for turn, (number, case) in product(range(rounds), enumerate(CASES)):
            turns = deque(workers)
            turns.rotate(turn + number)
            for name in turns:
                found = seconds(workers[name], case, tiles)
                taken.setdefault((name, case), []).append(found)
    return {key: statistics.median(taken[key]) for key in product(pythons, CASES)}


def rates(times: Times, tiles: int) -> dict[tuple[str, Case], float]:
    """Megapixels of tiles a second."""
    return {key: tiles * TILE * TILE / 1e6 / value for key, value in times.items()}


def table(times: Times, figures: dict[str, float]) -> None:
    readers = list(dict.fromkeys(reader for reader, _ in times))
    print(f"{'megapixels a second':24}" + "".join(f"{reader:>18}" for reader in readers))
    for case in CASES:
        values = [figures[f"{reader}_{case.name}_mpx_per_s"] for reader in readers]
        print(f"{case.name:24}" + "".join(f"{value:18.1f}" for value in values))


def ratios(times: Times) -> dict[str, float]:
    """The peer's time over the direct reader's, random and scan order together."""

    def against(peer: str, factor: float, threads: int = 1) -> float:
        cases = [case for case in CASES if (case.factor, case.threads) == (factor, threads)]
        theirs, ours = (sum(times[name, case] for case in cases) for name in (peer, "direct"))
        return theirs / ours

    found = {
        "direct_vs_openslide_between_levels_by_pillow": against("openslide_pillow", TWICE),
        "direct_vs_openslide_between_levels_x1.4_by_pillow": against("openslide_pillow", BETWEEN),
    }
    for peer in dict.fromkeys(reader for reader, _ in times):
        if peer in ("direct", "openslide_pillow"):
            continue
        found[f"direct_vs_{peer}"] = against(peer, NATIVE)
        found[f"direct_vs_{peer}_two_threads"] = against(peer, NATIVE, 2)
        found[f"direct_vs_{peer}_between_levels"] = against(peer, TWICE)
        found[f"direct_vs_{peer}_between_levels_x1.4"] = against(peer, BETWEEN)
    return found


if __name__ == "__main__":
    main()
