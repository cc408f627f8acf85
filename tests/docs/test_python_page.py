"""The programs of docs/python.md run as they stand, on smaller numbers."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
SMALLER = {'"tile": 512': '"tile": 32', '"width": 32': '"width": 4', '"epochs": 20': '"epochs": 1'}


@pytest.mark.slow
def test_the_programs_of_the_page_run(
    toy_slides: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 3
    for large, small in SMALLER.items():
        assert large in programs[0]
        programs[0] = programs[0].replace(large, small)
    # Plain images state no resolution.
    programs[0] = programs[0].replace("slides/slide0.svs", "slides/slide0.png")
    programs[0] = programs[0].replace("options = {", 'options = {"data": {"assume_mpp": 0.5}, ')
    programs[0] = programs[0].replace('out="results")', 'out="results", options=options)')
    trained, predicted, opened = ({} for _ in range(3))
    exec(programs[0], trained)
    assert trained["run"] == Path("runs/first")
    with trained["table"].open() as file:
        assert next(csv.DictReader(file))["split"] == "val"
    capsys.readouterr()
    exec(programs[1], predicted)
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == ["background", "class 1"]
    found = predicted["found"]
    np.testing.assert_allclose(found.probabilities.sum(0), 1, atol=1e-5)
    exec(programs[2], opened)
    assert opened["slide"].vendor == "image"


LIGHT = """
import sys
{program}
heavy = {{"torch", "cv2", "scipy", "shapely", "sklearn", "PIL", "zarr", "albumentations"}}
print(sorted(heavy & set(sys.modules)))
"""
REFUSED = """
import pathoseg.cli
sys.argv = ["pathoseg", "train", "--slides", "x", "--tile", "0"]
try:
    pathoseg.cli.main()
except SystemExit as end:
    assert end.code == 2
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "program",
    ["import pathoseg, pathoseg.parallel, pathoseg.config", REFUSED],
    ids=["import", "a refused option"],
)
def test_no_heavy_library_is_imported_by(program: str) -> None:
    code = LIGHT.format(program=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
