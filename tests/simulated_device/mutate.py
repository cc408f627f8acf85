"""Takes each wait out of the product, one by one: a test on the simulated device must fail.

    make mutate, or python -m tests.simulated_device.mutate [words of a place]

What is taken out is found in the syntax tree: a statement that calls one of `_STATEMENTS` is left
out, and a question by one of `_QUESTIONS` is answered with yes without being asked. Each mutant
lies in a copy of the package, ahead of the repository on the path of a process of its own.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.simulated_device.build import built_library
from tests.simulated_device.run import HERE, ROOT, command, environment

FILES = [
    "device.py",
    "parallel/activations/streams.py",
    "parallel/activations/offload.py",
    "parallel/activations/stage_offload.py",
    "parallel/activations/rematerialize.py",
    "parallel/activations/saved_tensor_hooks.py",
    "parallel/comm/process_transport.py",
]
TESTS = ["test_copies.py", "test_messages.py"]
TABLE = HERE / "mutants.md"
_STATEMENTS = {"wait", "wait_event", "wait_stream", "record", "record_event", "synchronize"}
_QUESTIONS = {"query", "passed"}
_PATIENCE = 300  # seconds; without a wait something may wait for ever

# Places whose mutant survives, by function and code, each with the reason.
SURVIVORS = {
    ("_unpin", "torch.cuda.synchronize()"): "CUDA alone pins its memory so; no test device has it",
}


class Mutant(NamedTuple):
    """A place in the product where the device is waited for.

    Attributes:
        file: Of the package.
        line: Number of the line.
        column: Where the expression begins.
        function: Of the class and function around it.
        code: The call.
        replacement: What stands there instead.
    """

    file: str
    line: int
    column: int
    function: str
    code: str
    replacement: str


class Fate(NamedTuple):
    """The outcome of a mutant.

    Attributes:
        killed: Whether a test failed.
        by: The first test that did.
    """

    killed: bool
    by: str


def mutants() -> Iterator[Mutant]:
    """Find all places in `FILES`."""
    for file in FILES:
        source = (ROOT / "pathoseg" / file).read_text()
        yield from _mutants_of(file, ast.parse(source), source, [])


def _mutants_of(file: str, node: ast.AST, source: str, around: list[str]) -> Iterator[Mutant]:
    for child in ast.iter_child_nodes(node):
        names = around
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            names = [*around, child.name]
        place = ".".join(names)
        call = child.value if isinstance(child, ast.Expr) else None
        if isinstance(call, ast.Call) and _name(call) in _STATEMENTS:
            code = ast.get_source_segment(source, call) or ""
            yield Mutant(file, call.lineno, call.col_offset, place, code, "pass")
            continue
        if isinstance(child, ast.Call) and _name(child) in _QUESTIONS:
            code = ast.get_source_segment(source, child) or ""
            yield Mutant(file, child.lineno, child.col_offset, place, code, "True")
            continue
        yield from _mutants_of(file, child, source, names)


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def mutated(mutant: Mutant) -> str:
    """Return the source of a mutant's file."""
    lines = (ROOT / "pathoseg" / mutant.file).read_text().splitlines(keepends=True)
    before = sum(map(len, lines[: mutant.line - 1])) + mutant.column
    source = "".join(lines)
    assert source.startswith(mutant.code, before), mutant
    return source[:before] + mutant.replacement + source[before + len(mutant.code) :]


def try_all(chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, Fate]]:
    """Run the tests on each mutant.

    Raises:
        RuntimeError: A process ended without a failed test.
    """
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder)
        ignored = shutil.ignore_patterns("node_modules", "__pycache__")
        shutil.copytree(ROOT / "pathoseg", overlay / "pathoseg", ignore=ignored)
        for mutant in chosen:
            target = overlay / "pathoseg" / mutant.file
            original = target.read_text()
            target.write_text(mutated(mutant))
            yield mutant, _fate(overlay)
            target.write_text(original)


def _fate(overlay: Path) -> Fate:
    options = ["-x", "-q", "--no-header", "--tb=no", "-k", "not processes"]
    options.append("--hypothesis-profile=mutants")
    env = environment(overlay) | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command([*TESTS, *options]),
            cwd=overlay,  # which Python looks into first, ahead of its path
            env=env,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Fate(True, "the time, as it waits for ever")
    if done.returncode == 0:
        return Fate(False, "")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise RuntimeError(done.stdout + done.stderr)
    return Fate(True, failed[0].split("::")[-1].split(" - ")[0])


_HEAD = """# Waits of the product, taken out one by one

Made by `make mutate`: every call in the files of `mutate.py` that waits, records or asks, found in
the syntax tree, with the test of `inside/` that fails without it. What survives has its reason.

| file | in | taken out | killed by |
| --- | --- | --- | --- |
"""


def row_of(mutant: Mutant) -> str:
    """Return the beginning of a mutant's row in the table, which knows no lines."""
    code = mutant.code if mutant.replacement == "pass" else f"{mutant.code} → True"
    return f"| {mutant.file} | {mutant.function} | `{code}` |"


def main(words: Sequence[str]) -> int:
    """Try all mutants and write the table, or those of a place that has one of these words.

    Returns:
        The number of mutants that survive without a known reason.
    """
    built_library()
    chosen = [m for m in mutants() if not words or any(word in str(m) for word in words)]
    rows, unknown = [], 0
    for mutant, fate in try_all(chosen):
        reason = SURVIVORS.get((mutant.function, mutant.code))
        outcome = f"`{fate.by}`" if fate.killed else f"survives: {reason}"
        unknown += not fate.killed and reason is None
        rows.append(f"{row_of(mutant)} {outcome} |")
        print(rows[-1], flush=True)
    if not words:
        TABLE.write_text(_HEAD + "\n".join(rows) + "\n")
    return unknown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
