"""Asks how many augmented tiles a second reach a trainer, beside DataLoader and MONAI."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.feed.feeds import NOT_INSTALLED, Job
from pathoseg.platform_support import usable_cores

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PATHOSEG_DATA", ROOT.parent / "shared" / "data"))
SLIDE = DATA / "slides" / "wsi_gastric-erosion_13196x16866.tif"
PEERS = Path.home() / ".cache" / "pathoseg-feed"
MONAI = "monai==1.6.1"

Way = tuple[str, int]  # what feeds, and by how many threads or processes
Taken = dict[Way, list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path, default=SLIDE, help="taken as 0.5 µm")
    parser.add_argument("--peers", type=Path, default=PEERS, help="MONAI's virtual environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of fewer tiles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if not options.slide.exists():
        raise SystemExit(f"{options.slide} is not there; name a slide with --slide.")
    rounds, tiles = (1, 64) if options.quick else (options.rounds, 128)
    cores = len(usable_cores())
    threads = sorted({1, min(2, cores), cores})
    ways = [(name, count) for name in ("cache", "slide") for count in threads]
    # Up to as many workers as cores, and one more as the main process is often waiting.
    counts = sorted(
        {0, 1, max(1, cores // 2), cores, cores + 1} - ({0, 1} if options.quick else set())
    )
    ways += [(name, count) for name in ("dataloader", "monai") for count in counts]
    pythons = {"monai": monai_python(options.peers)}
    taken: Taken = {}
    with tempfile.TemporaryDirectory() as cache:
        run(Path(sys.executable), Job("fill", str(options.slide), cache, cores, cores, 0))
        for _ in range(rounds):
            for way in list(ways):
                name, count = way
                used = count if name in ("slide", "cache") else cores
                job = Job(name, str(options.slide), cache, count, used, tiles)
                found = run(pythons.get(name, Path(sys.executable)), job)
                if found is None:
                    print(f"without {name}, which is not installed in {options.peers}")
                    ways = [other for other in ways if other[0] != name]
                    continue
                taken.setdefault(way, []).append(found)
                print(name, count, json.dumps(found), flush=True)
    figures = named(taken, cores)
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def named(taken: Taken, cores: int) -> dict[str, float]:
    """The figures, of the medians of all rounds."""
    speeds = {
        way: statistics.median(each["tiles"] / each["seconds"] for each in rounds)
        for way, rounds in taken.items()
    }
    figures = {f"{name}_{count}_tiles_per_s": speed for (name, count), speed in speeds.items()}
    figures["cores"] = float(cores)
    figures["tiles_per_s_per_core"] = speeds["cache", 1]
    cpu = [each["cpu_seconds"] / each["tiles"] for each in taken["cache", 1]]
    figures["cpu_ms_per_tile"] = 1e3 * statistics.median(cpu)
    if cores > 1:
        figures["two_threads"] = speeds["cache", 2] / speeds["cache", 1]
    for peer in ("dataloader", "monai"):
        theirs = {way[1]: speed for way, speed in speeds.items() if way[0] == peer}
        if theirs:
            best = max(theirs, key=lambda count: theirs[count])
            figures[f"{peer}_best_workers"] = float(best)
            figures[f"vs_{peer}"] = speeds["slide", cores] / theirs[best]
            figures[f"cache_vs_{peer}"] = speeds["cache", cores] / theirs[best]
    return figures


def run(python: Path, job: Job) -> dict[str, float] | None:
    """Run a job in a process of its own.

    Returns:
        Wall and processor seconds of its second epoch and the number of its tiles; None where the
        peer cannot be imported.
    """
    command = [str(python), str(Path(__file__).with_name("feeds.py")), json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == NOT_INSTALLED:
        return None
    if done.returncode:
        raise SystemExit(f"{job} failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def monai_python(folder: Path) -> Path:
    """The interpreter of MONAI's virtual environment, made where it is missing.

    All else is taken from the environment of this process, so that all feeds run the same.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", MONAI], check=False)
    # Every time, as another environment may have made it.
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(own) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


if __name__ == "__main__":
    main()
