"""Makes the old files of this folder with the code of 4b9ee32; README.md says how to run it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 192  # pixels of 0.25 µm
WRITTEN = 1_700_000_000  # seconds: when the slides count as written; saved rows go by it

CONFIG = """
[data]
slides = "slides"
assume_mpp = 0.25
classes = ["disc", "square"]
[tiles]
mpp = 0.5
tile = 32
[model]
width = 4
depth = 2
[train]
epochs = 14
lr = 0.02
checkpoint_minutes = 0.0001
"""
COMMON = ("--config", "run.toml")
STOP_STEP, STOP_ROW = 88, 1  # within the thirteenth epoch; within the last slide


def main(hardware: Path) -> None:
    """Fill the working directory; `hardware` is a file of `pathoseg calibrate --quick`."""
    socket.gethostname = lambda: "lab"
    Path("run.toml").write_text(CONFIG)
    draw_all()

    assert run(["train", *COMMON, "--out", "runs/finished"]) == 0
    assert run(["train", *COMMON, "--out", "runs/unfinished"], stop_training) == 143
    shutil.copytree("runs/unfinished", "again")
    assert run(["train", "--resume", "--out", "again"]) == 0
    assert figures("again") == figures("runs/finished"), "a stop changes nothing"
    assert run(["evaluate", "--model", "runs/finished"]) == 0

    segment = ["infer", "fresh", "--model", "runs/finished", "--assume-mpp", "0.25"]
    assert run(segment, stop_segmenting) == 143
    shutil.copytree("results", "results-again")
    assert run([*segment, "--out", "results-again", "--resume"]) == 1
    Path("expected").mkdir()
    for mask in Path("results-again").glob("*/mask.ome.tiff"):
        shutil.copy(mask, f"expected/{mask.parent.name}.ome.tiff")

    shutil.copy(hardware, "hardware.json")
    Path("plans").mkdir()
    ranks = ["--ranks", "2", "--order", "1f1b", "--epochs", "1", "--out", "ranks"]
    assert run(["train", *COMMON, *ranks]) == 0
    shutil.copy("ranks/plan.json", "plans/1f1b.json")
    plan = ["plan", "--hardware", "hardware.json", "--tile", "512", "--ranks", "2", "--out", "plan"]
    for name, more in {
        "gems-mast": ["--order", "gems-mast", "--memory", "2GiB"],
        "offload": ["--memory", "440MB"],
    }.items():
        assert run([*plan, *more]) == 0
        shutil.copy("plan/plan.json", f"plans/{name}.json")

    clean_away()


def draw_all() -> None:
    """Draw four slides with annotations of three kinds, and three to be segmented."""
    for folder in ("slides", "fresh"):
        Path(folder).mkdir()
    for seed, name in enumerate(("a", "b", "c", "d")):
        disc, square = draw(Path("slides") / f"{name}.png", seed)
        if name == "b":
            write_asap(disc, square)
        elif name == "c":
            y, x = np.mgrid[:SIDE, :SIDE] + 0.5
            mask = np.zeros((SIDE, SIDE), np.uint8)
            mask[(x - disc[0]) ** 2 + (y - disc[1]) ** 2 < disc[2] ** 2] = 1
            mask[(abs(x - square[0]) < square[2]) & (abs(y - square[1]) < square[2])] = 2
            Image.fromarray(mask).save("slides/c_mask.png", optimize=True)
        else:
            write_qupath(Path("slides") / f"{name}.geojson", disc, square, region=name == "d")
    for seed, name in enumerate(("done", "stopped"), start=10):
        draw(Path("fresh") / f"{name}.png", seed)
    whole = Path("fresh/stopped.png").read_bytes()
    Path("fresh/broken.png").write_bytes(whole[: len(whole) // 2])
    for path in Path("fresh").iterdir():
        os.utime(path, (WRITTEN, WRITTEN))


Mark = tuple[float, float, float]  # x, y, half of the extent


def draw(path: Path, seed: int) -> tuple[Mark, Mark]:
    """Draw a dark disc and a small green square on pink, in grains of three pixels."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    disc = (*rng.uniform(60, 100, 2), rng.uniform(25, 40))
    square = (*rng.uniform(145, 165, 2), rng.uniform(15, 20))
    image = np.full((SIDE, SIDE, 3), (225, 170, 200))
    image[(x - disc[0]) ** 2 + (y - disc[1]) ** 2 < disc[2] ** 2] = (120, 60, 140)
    image[(abs(x - square[0]) < square[2]) & (abs(y - square[1]) < square[2])] = (60, 190, 90)
    grains = rng.integers(-20, 21, (SIDE // 3, SIDE // 3)).repeat(3, 0).repeat(3, 1)
    pixels = np.clip(image + grains[..., None], 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path, optimize=True)
    return disc, square


def ring(mark: Mark, corners: int) -> list[list[float]]:
    """Return a closed ring of a disc, or of a square where there are four corners."""
    turns = (np.arange(corners + 1) % corners + 0.5) / corners * 2 * np.pi
    radius = mark[2] * (2**0.5 if corners == 4 else 1)
    points = np.stack([np.cos(turns), np.sin(turns)], 1) * radius + mark[:2]
    return [[round(float(x), 2), round(float(y), 2)] for x, y in points]


def write_qupath(path: Path, disc: Mark, square: Mark, region: bool) -> None:
    """Write both outlines, and around the disc a `Region*`, as QuPath does."""
    outlines = [("disc", ring(disc, 60)), ("square", ring(square, 4))]
    if region:
        outlines.append(("Region*", ring((*disc[:2], disc[2] + 15.5), 4)))
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [points]},
            "properties": {
                "objectType": "annotation",
                "classification": {"name": name, "color": [90, 90, 200]},
            },
        }
        for name, points in outlines
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def write_asap(disc: Mark, square: Mark) -> None:
    """Write slides/b.xml."""
    marks = []
    for group, points in (("disc", ring(disc, 60)), ("square", ring(square, 4))):
        corners = "".join(
            f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>'
            for order, (x, y) in enumerate(points[:-1])
        )
        marks.append(
            f'<Annotation Name="{group}" Type="Polygon" PartOfGroup="{group}">'
            f"<Coordinates>{corners}</Coordinates></Annotation>"
        )
    groups = '<Group Name="disc"/><Group Name="square"/>'
    Path("slides/b.xml").write_text(
        f"<ASAP_Annotations><Annotations>{''.join(marks)}</Annotations>"
        f"<AnnotationGroups>{groups}</AnnotationGroups></ASAP_Annotations>\n"
    )


def run(arguments: Sequence[str], prepare: Callable[[], None] = lambda: None) -> int:
    """Run a command of pathoseg in a process of its own, after `prepare`; return its exit code."""
    child = os.fork()
    if child == 0:
        from pathoseg.__main__ import main as command

        prepare()
        sys.argv = ["pathoseg", *arguments]
        command()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stop_training() -> None:
    """Have this process sent a SIGTERM after step `STOP_STEP`."""
    from pathoseg.workflows.loop import Loop

    whole = Loop._step

    def step(self: Any, *arguments: Any) -> None:
        whole(self, *arguments)
        if self._progress.step == STOP_STEP:
            os.kill(os.getpid(), signal.SIGTERM)

    Loop._step = step


def stop_segmenting() -> None:
    """Have this process sent a SIGTERM once row `STOP_ROW` of stopped.png is saved."""
    from pathoseg.workflows.saved_rows import SavedRows

    whole = SavedRows.save

    def save(self: Any, row: Any) -> None:
        whole(self, row)
        if self._folder.parent.name == "stopped" and row.number == STOP_ROW:
            os.kill(os.getpid(), signal.SIGTERM)

    SavedRows.save = save


def figures(folder: str) -> list[list[str]]:
    """Return the lines of metrics.csv without tiles a second."""
    lines = [line.split(",") for line in (Path(folder) / "metrics.csv").read_text().splitlines()]
    speed = lines[0].index("tiles_per_s")
    return [line[:speed] + line[speed + 1 :] for line in lines]


def clean_away() -> None:
    """Remove what no test reads."""
    for path in ("again", "results-again", "ranks", "plan", "run.toml", "runs/latest"):
        if Path(path).is_symlink() or Path(path).is_file():
            Path(path).unlink()
        else:
            shutil.rmtree(path)
    for link in [path for path in Path("runs").iterdir() if path.is_symlink()]:
        link.unlink()
    for part in ("checkpoints", "tensorboard", "predictions"):
        shutil.rmtree(f"runs/finished/{part}")
    Path("runs/unfinished/checkpoints/best.pt").unlink()
    shutil.rmtree("runs/unfinished/predictions")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
