"""Times pathoseg, TIAToolbox and MONAI as they segment one slide with the same weights."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import zarr
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.installed import PEERS, peers_python
from benchmarks.peers.systems import NOT_INSTALLED
from benchmarks.peers.weights import POINT, SAMPLE, write_weights
from pathoseg.geometry import Box, Frame
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide

HERE = Path(__file__).resolve().parent
SIDE, TILE, STRIDE = 16_384, 1_024, 768
STORED_TILE, MPP = 512, 0.5


@dataclass(frozen=True)
class Case:
    """A network, and the resolution that it sees."""

    network: str
    level: int
    slide: int
    width: int = 0

    @property
    def mpp(self) -> float:
        return float(MPP * 2**self.level)

    @property
    def side(self) -> int:
        return self.slide >> self.level


NETWORKS = ("point", "unet")
Times = dict[str, list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=PEERS, help="their virtual environment")
    parser.add_argument("--side", type=int, default=SIDE, help="of the slide in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", choices=NETWORKS, help="one of the two")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    pythons = {"pathoseg": Path(sys.executable)}
    for peer in ("tiatoolbox", "monai"):
        pythons[peer] = peers_python(options.peers)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(folder) / "slide.tif"
        _write_slide(slide, options.side)
        for network in [options.network] if options.network else NETWORKS:
            case = Case(network, int(network != "point"), options.side, width=8)
            times = _measured(case, slide, pythons, 1 if options.quick else options.rounds)
            figures |= _figures(case, times)
    for name, value in figures.items():
        print(f"{name:40} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _write_slide(path: Path, slide_side: int) -> None:
    """A pyramid whose every tile is tissue: a sample slide again and again."""
    with open_slide(SAMPLE) as slide, tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for level, factor in enumerate((1, 2, 4, 16)):
            frame = Frame.at(slide.size, slide.mpp, MPP * factor)
            pixels = read_region(slide, frame, Box(0, 0, *_whole(frame))).pixels
            side = slide_side // factor
            tiff.write(
                _tiles(pixels, side),
                shape=(side, side, 3),
                dtype=np.uint8,
                tile=(STORED_TILE, STORED_TILE),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": 85},
                subfiletype=int(level > 0),
                resolution=(1e4 / MPP / factor,) * 2,
                resolutionunit="CENTIMETER",
                metadata=None,
            )


def _whole(frame: Frame) -> tuple[int, int]:
    return frame.size.width, frame.size.height


def _tiles(pixels: NDArray[np.uint8], side: int) -> Iterator[NDArray[np.uint8]]:
    for y in range(0, side, STORED_TILE):
        rows = pixels.take(range(y, y + STORED_TILE), 0, mode="wrap")
        for x in range(0, side, STORED_TILE):
            yield rows.take(range(x, x + STORED_TILE), 1, mode="wrap")


def _measured(case: Case, slide: Path, pythons: dict[str, Path], rounds: int) -> Times:
    """Time each system on the slide, all in turn every round, and compare their classes once.

    Args:
        case: The network and the resolution that it sees.
        slide: The slide's file.
        pythons: By system, its interpreter; systems that cannot be imported are removed.
        rounds: How many times each system runs.

    Returns:
        By system, `seconds`, `cpu_seconds` and `peak_gib` of each round.

    Raises:
        AssertionError: Classes differ by more than near ties explain.
        SystemExit: A system failed.
    """
    times: Times = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder)
        write_weights(weights, case.network, case.width, case.mpp, TILE, STRIDE)
        job = {
            "slide": str(slide),
            "bundle": str(weights / "bundle"),
            "factory": POINT if case.network == "point" else None,
            "script": str(weights / "script.pt"),
            "mpp": case.mpp,
            "level": case.level,
            "tile": TILE,
            "stride": STRIDE,
        }
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as results:
                for name, python in list(pythons.items()):
                    taken = _run(python, name, job, Path(results) / name)
                    if taken is None:
                        print(f"without {name}, which is not installed in {python.parents[1]}")
                        del pythons[name], times[name]
                        continue
                    print(case.network, name, json.dumps(taken), flush=True)
                    times[name].append(taken)
                if number == 0:
                    _compare(case, Path(results), set(pythons))
    return times


def _run(python: Path, name: str, job: dict[str, Any], out: Path) -> dict[str, float] | None:
    """Run one system in a process of its own.

    Args:
        python: The interpreter of its environment.
        name: The system's name, as `systems.py` knows it.
        job: Slide, weights, resolution, tile and stride.
        out: The folder for its results.

    Returns:
        `seconds`, `cpu_seconds` and `peak_gib`, or None where the system cannot be imported.

    Raises:
        SystemExit: The system failed; its last words are told.
    """
    command = [str(python), str(HERE / "systems.py"), name, json.dumps(job), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == NOT_INSTALLED:
        return None
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    taken: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return taken


def _compare(case: Case, results: Path, names: set[str]) -> None:
    """Requires the same classes wherever systems define the same, but for near ties.

    The 1×1 convolution's answer for a pixel is the same in all tiles that hold it, so all pixels
    are compared; of the U-Net's those that lie in one tile alone, and that one whole on the slide,
    as systems blend and pad differently.
    """
    ours = tifffile.imread(next(results.glob("pathoseg/*/mask.ome.tiff")), level=0)
    alone = np.ones(case.side, bool)
    if case.network != "point":
        starts = np.arange(0, case.side, STRIDE)
        covered = np.zeros(starts[-1] + TILE, int)
        for start in starts:
            # What lies beyond the slide is white for us and black for others.
            covered[start : start + TILE] += 1 if start + TILE <= case.side else 2
        alone = covered[: case.side] == 1
    for name in sorted(names - {"pathoseg"}):
        theirs = _classes(name, results / name)
        assert theirs.shape == ours.shape, (name, theirs.shape, ours.shape)
        differ = float((theirs != ours)[np.ix_(alone, alone)].mean())
        print(f"{case.network}: {differ:.2e} of the classes of {name} and pathoseg differ")
        assert differ < 1e-4, name


def _classes(name: str, out: Path) -> NDArray[np.uint8]:
    if name == "tiatoolbox":
        found: Any = zarr.open(next(out.rglob("*.zarr")), mode="r")
        return np.asarray(found["predictions"]).astype(np.uint8).squeeze()
    chances: Any = zarr.open(out / "merged.zarr", mode="r")
    height, width = chances.shape[-2:]
    classes = np.empty((height, width), np.uint8)
    for top in range(0, height, 1024):
        classes[top : top + 1024] = chances[0, :, top : top + 1024].argmax(0)
    return classes


def _figures(case: Case, times: Times) -> dict[str, float]:
    medians = {
        (name, key): statistics.median(each[key] for each in taken)
        for name, taken in times.items()
        for key in taken[0]
    }
    figures = {f"{case.network}_{name}_{key}": value for (name, key), value in medians.items()}
    peers = [name for name in times if name != "pathoseg"]
    if peers:
        suffix = "" if case.network == "point" else f"_{case.network}"
        best = min(peers, key=lambda name: medians[name, "seconds"])

        def over_ours(name: str, key: str) -> float:
            return medians[name, key] / medians["pathoseg", key]

        figures[f"speedup_vs_best_peer{suffix}"] = over_ours(best, "seconds")
        figures[f"cpu_speedup_vs_best_peer{suffix}"] = over_ours(best, "cpu_seconds")
        figures[f"memory_vs_best_peer{suffix}"] = 1 / over_ours(best, "peak_gib")
        figures[f"memory_vs_leanest_peer{suffix}"] = 1 / min(
            over_ours(name, "peak_gib") for name in peers
        )
    return figures


if __name__ == "__main__":
    main()
