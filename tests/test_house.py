"""Keeps the house in order: who imports whom, no circles, file sizes, first lines, names."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pathoseg"
LONGEST_FILE = 600

GROUND = {
    *("errors", "geometry", "memory_size", "host_memory", "platform_support", "device"),
    *("giving_up", "gradient_step", "typed_json", "version"),
}
PATHOLOGY = {"slides", "annotations", "tiles", "models", *GROUND}
# What training and inference share.
FLOWS = {*("config", "progress", "interruption", "time_spent"), *PATHOLOGY}

# part -> the parts it may import; `.` is the package's own __init__ (its version and its face)
WALLS: dict[str, set[str]] = {
    ".": {"errors", "version", "slides", "training", "inference", "workflows"},
    "errors": set(),
    "geometry": {"errors"},
    "host_memory": {"platform_support"},
    "memory_size": {"errors"},
    "duration": set(),
    "platform_support": set(),
    "typed_json": set(),
    "version": set(),
    "device": {"errors", "memory_size"},
    "giving_up": set(),
    "gradient_step": {"device", "errors"},
    "progress": set(),
    "interruption": {"errors"},
    "time_spent": {"errors", "progress"},
    "slides": GROUND,
    "annotations": GROUND,
    "tiles": {"slides", "annotations", *GROUND},
    "models": GROUND,
    "outputs": {"tiles.grid", "annotations", *GROUND},
    "config": {"annotations", "tiles", "models", "duration", *GROUND},
    "config_file": {"config", "errors", "progress"},
    "parallel": {
        *("parallel.comm", "parallel.cost", "parallel.fitting", "parallel.planning"),
        "parallel.runtime",
    },
    "parallel.graph": GROUND,
    "parallel.schedule": GROUND,
    "parallel.cost": {"parallel.graph", "parallel.schedule.costs", *GROUND},
    "parallel.retention": {"parallel.graph", "parallel.schedule", *GROUND},
    "parallel.planning": {
        *("parallel.graph", "parallel.schedule", "parallel.cost", "parallel.retention"),
        *GROUND,
    },
    "parallel.comm": {"parallel.schedule.costs", *GROUND},
    "parallel.activations": {"parallel.graph", "parallel.schedule.action", *GROUND},
    "parallel.shards": {"parallel.graph", "parallel.comm.transport", *GROUND},
    "parallel.runtime": {
        *("parallel.graph", "parallel.schedule", "parallel.comm", "parallel.activations"),
        *("parallel.shards", *GROUND),
    },
    "parallel.fitting": {
        *("parallel.graph", "parallel.schedule", "parallel.cost", "parallel.retention"),
        *("parallel.planning", "parallel.comm", "parallel.activations", "parallel.runtime"),
        *GROUND,
    },
    "parallel.visit_time": {
        *("parallel.graph", "parallel.schedule", "parallel.planning", "parallel.comm"),
        *("parallel.runtime", *GROUND),
    },
    "training": {*FLOWS, "outputs.atomic"},
    "inference": {*FLOWS, "outputs"},
    "viewer": {
        *("slides", "annotations", "outputs", "tiles.slide_pool"),
        *("inference.result_folder", *GROUND),
    },
    "workflows": {*FLOWS, "config_file", "outputs", "training", "inference", "viewer", "parallel"},
    "cli": {"command_parser", "config_file", "workflows", "errors", "version"},
    "command_parser": {"config", "errors"},
    "__main__": {"cli", "errors"},
}
# Where training enters the parallel wing; workflows enter it anywhere, inference nowhere.
ENTER_PARALLEL = {
    "training/read_network.py",
    "training/step_plan.py",
    "training/pipeline_engine.py",
    "training/distributed.py",
}

# library -> the files that are its door
DOORS: dict[str, set[str]] = {
    "openslide": {"slides/openslide_reader.py"},
    "zarr": {"tiles/cache.py", "slides/zarr_reader.py", "outputs/mask_zarr.py"},
    "yaozarrs": {"outputs/mask_zarr.py"},
    "highdicom": {"outputs/mask_dicom.py"},
    "pydicom": {"slides/folder.py", "outputs/mask_dicom.py"},
    "tifffile": {
        *("slides/tiff_reader.py", "slides/tile_table.py"),
        *("outputs/mask_tiff.py", "outputs/mask_reader.py"),
    },
    "starlette": {"viewer/app.py"},
    "uvicorn": {"workflows/view.py"},
    "imagecodecs": {"slides/tile_codec.py", "annotations/tiled_mask.py", "tiles/cache.py"},
    "simplejpeg": {"slides/jpeg_stream.py"},
    "mpi4py": {"parallel/comm/mpi.py"},
    "torch.distributed": {"parallel/comm/gloo.py", "parallel/comm/nccl.py"},
    "torch.fx": {"parallel/graph/fx_tracer.py"},
    "sklearn": {"parallel/cost/regression.py", "models/metrics.py"},
    "scipy.optimize": {"parallel/retention/policy_milp.py"},
    "jinja2": {"outputs/html_report.py"},
    "typer": {"cli.py", "command_parser.py", "__main__.py"},
    "rich": {"cli.py", "progress.py"},
}


@cache
def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def _imports(path: Path) -> list[str]:
    """Every module that a file imports, `from a import b` as both `a` and `a.b`."""
    return [*_read_imports(path)]


def _read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _part(module: str) -> str:
    """The room that a module (without the leading `pathoseg.`) belongs to."""
    pieces = module.split(".")
    if pieces[0] == "parallel" and len(pieces) > 1:
        return ".".join(pieces[:2])
    return pieces[0] or "."


@cache
def _modules() -> set[str]:
    return {_module(file) for file in _files()}


def _our_imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, without the leading `pathoseg.`."""
    split = [name.partition(".") for name in _imports(path)]
    return {inner for package, _, inner in split if package == "pathoseg" and inner in _modules()}


@pytest.mark.parametrize("path", _files(), ids=_module)
def test_imports_stay_within_the_walls(path: Path) -> None:
    me = _module(path)
    part = _part(me)
    assert part in WALLS, f"{me} belongs to no room of the design"
    for module in _our_imports(path):
        other = _part(module)
        if other == part or module in WALLS[part] or other in WALLS[part]:
            continue
        relative = path.relative_to(PACKAGE).as_posix()
        if other.startswith("parallel") and (part == "workflows" or relative in ENTER_PARALLEL):
            continue
        pytest.fail(f"{me} may not import {module}")


@pytest.mark.parametrize("path", _files(), ids=_module)
def test_libraries_enter_by_their_door(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    for name in _imports(path):
        for library, doors in DOORS.items():
            if name == library or name.startswith(f"{library}."):
                assert relative in doors, f"{relative} imports {name}"
        if relative.startswith(("parallel/schedule/", "parallel/graph/")):
            allowed = relative == "parallel/graph/fx_tracer.py"
            assert allowed or name.split(".")[0] != "torch", f"{relative} imports torch"


# What is of one kind of accelerator alone; every other file serves all kinds through device.py.
_ONE_KIND = re.compile(r"""torch\.cuda\b|\bis_cuda\b|\.type [!=]= ["'](cuda|xpu|mps|hip)\b""")
_ONE_KIND_HERE = {"device.py", "parallel/comm/nccl.py"}


@pytest.mark.parametrize("path", _files(), ids=_module)
def test_code_serves_any_device(path: Path) -> None:
    if path.relative_to(PACKAGE).as_posix() not in _ONE_KIND_HERE:
        found = _ONE_KIND.search(path.read_text())
        assert found is None, f"{found[0] if found else ''}: ask pathoseg.device"


def test_no_circles_between_files_or_rooms() -> None:
    files = {_module(path): _our_imports(path) for path in _files()}
    rooms: dict[str, set[str]] = {}
    for module, found in files.items():
        rooms.setdefault(_part(module), set()).update(map(_part, found))
    for graph in (files, rooms):
        for name, found in graph.items():
            found.discard(name)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            pytest.fail(f"imports in a circle: {circle.args[1]}")


def _listed(*options: str) -> list[Path]:
    """The files that git knows; asked as tests are collected, for these start no process."""
    command = ["git", "ls-files", "-z", *options]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.exists()]


TRACKED = _listed()
PYTHON_FILES = _listed("--cached", "--others", "--exclude-standard", "*.py")


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_their_job(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    if path.is_relative_to(PACKAGE):
        assert len(lines) <= LONGEST_FILE, f"{len(lines)} lines: more than one mechanism"
    first = lines[0]
    assert first.startswith('"""'), "the first line says the file's job"
    assert first.rstrip('"').endswith("."), "the first line is one whole clause"
    assert path.stem not in {"utils", "util", "misc", "helpers", "helper", "common"}


def test_a_file_is_the_only_one_of_its_name() -> None:
    """A command's page in `workflows/` may be called like the part that it shows."""
    names = Counter(path.name for path in _files() if path.parent.name != "workflows")
    assert [name for name, count in names.items() if count > 1] == ["__init__.py"]


def test_nothing_large_is_tracked() -> None:
    large = [str(file) for file in TRACKED if file.stat().st_size > 2_000_000]
    assert not large
