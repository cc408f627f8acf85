"""Asks what a million objects take, beside a library that holds the whole mask."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MONUSEG = Path(os.environ.get("PATHOSEG_DATA", ROOT.parent / "shared" / "data")) / "monuseg-train"
PEER = Path.home() / ".cache" / "pathoseg-scikit-image"
FULL = (1_000_000, 24_000, 4, 3)
"""Objects; pixels of the mask across; images along a side of the slide, and rounds, of `share`."""

Figures = dict[str, float]


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="80,000 objects, four images")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--peer", type=Path, default=PEER, help="environment of scikit-image")
    options = parser.parse_args()
    count, width, side, rounds = (80_000, 4_800, 2, 1) if options.quick else FULL
    peer = peer_python(options.peer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = ours(folder, count // 4, width)
        theirs = json_of(peer, "peer.py", str(count // 4), str(width)) if peer else {}
        whole = ours(folder, count, width)
        after = ours(folder, count // 4, width)
    figures = compared(whole, before, after, theirs)
    if MONUSEG.is_dir():
        shared = json_of(Path(sys.executable), "share.py", str(MONUSEG), str(side), str(rounds))
        figures |= {"postprocess_share": shared["postprocess_s"] / shared["forward_s"], **shared}
    else:
        print(f"without postprocess_share: there is no {MONUSEG} (set PATHOSEG_DATA)")
    print("| figure | |\n|---|---|")
    for key, value in figures.items():
        print(f"| `{key}` | {value:.4g} |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def peer_python(folder: Path) -> Path | None:
    """Return the interpreter of scikit-image's environment, made where it is missing, or None."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "scikit-image==0.26.0"], check=False)
    if subprocess.run([str(python), "-c", "import skimage"], check=False).returncode:
        print(f"without vs_scikit_image: scikit-image could not be installed into {folder}")
        return None
    return python


def ours(folder: Path, count: int, width: int) -> Figures:
    """Find, measure and write about `count` objects in a process of its own."""
    return json_of(Path(sys.executable), "ours.py", str(folder), str(count), str(width))


def json_of(python: Path, script: str, *arguments: str) -> Figures:
    """Run a script of this folder on one core; return the figures that it prints."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **threads, "PYTHONPATH": paths}
    command = [str(python), str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def compared(whole: Figures, before: Figures, after: Figures, theirs: Figures) -> Figures:
    """Return the figures of all objects, beside a quarter measured before and after, and theirs."""
    million = 1e6 / whole["objects"]
    spent = {name: million * whole[name] for name in ("find_s", "read_s", "write_s")}
    seconds = sum(spent.values())
    quarter = sum(each[name] for each in (before, after) for name in spent)
    quarter *= 1e6 / (before["objects"] + after["objects"])
    figures = {
        "objects": whole["objects"],
        "drawn": whole["drawn"],
        "touching_share": whole["touching_share"],
        "seconds_per_million": seconds,
        "wall_seconds_per_million": million * whole["wall_s"],
        **{f"{name}_per_million": value for name, value in spent.items()},
        "seconds_ratio_to_a_quarter": seconds / quarter,
        "peak_mib": whole["peak_mib"],
        "peak_mib_of_a_quarter": max(before["peak_mib"], after["peak_mib"]),
        "geojson_mib": whole["geojson_mib"],
    }
    if theirs:
        find, measure = (theirs[name] / theirs["objects"] * 1e6 for name in ("find_s", "measure_s"))
        figures |= {
            "vs_scikit_image": (find + measure) / seconds,
            "scikit_image_objects": theirs["objects"],
            "scikit_image_drawn": before["drawn"],
            "scikit_image_find_s_per_million": find,
            "scikit_image_measure_s_per_million": measure,
            "scikit_image_peak_mib": theirs["peak_mib"],
        }
    return figures


if __name__ == "__main__":
    main()
