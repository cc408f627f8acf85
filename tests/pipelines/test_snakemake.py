"""pipelines/snakemake: everything once, then nothing, then only what a change asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, draw_disc

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "pipelines/snakemake"
INSTALLED = ROOT / ".venv-snakemake/bin/snakemake"


@pytest.fixture
def snakemake() -> str:
    found = str(INSTALLED) if INSTALLED.exists() else shutil.which("snakemake")
    if found is None:
        asked = "python3.11 -m venv .venv-snakemake && .venv-snakemake/bin/pip install -r"
        pytest.skip(f"needs snakemake: {asked} {PIPELINE.relative_to(ROOT)}/requirements.txt")
    return found


@pytest.fixture
def laboratory(tmp_path: Path) -> Path:
    """Annotated slides, new ones and settings, under the names that config.yaml gives.

    One slide of each folder, which the test changes, has a space in its name.
    """
    for name, slides in (
        ("annotated", {"slide 0": 0, "slide1": 1, "slide2": 2}),
        ("new", {"slide7": 7, "slide 8": 8}),
    ):
        (tmp_path / name).mkdir()
        for slide, seed in slides.items():
            draw_disc(tmp_path / name / f"{slide}.png", seed)
    for mask in (tmp_path / "new").glob("*_mask.png"):
        mask.unlink()
    text = TINY.replace("tile = 32", 'tile = 32\ncache = "tiles"').replace(
        "epochs = 4", "epochs = 1"
    )
    (tmp_path / "settings.toml").write_text(text)
    return tmp_path


def test_a_second_run_does_nothing_and_a_change_only_what_depends_on_it(
    snakemake: str, laboratory: Path
) -> None:
    def rules(*words: str) -> list[str]:
        """The rules that were run, each as often as it was."""
        command = [snakemake, "--snakefile", str(PIPELINE / "Snakefile"), "--cores", "2", *words]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=laboratory, env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(
            re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)
        )

    everything = ["all", "cache", "evaluate", "infer", "infer", "summary", "train"]
    assert rules() == everything
    assert len((laboratory / "run/evaluation.csv").read_text().splitlines()) > 3
    assert rules() == []

    kept = (laboratory / "results/slide7/mask.ome.tiff").stat()
    before = (laboratory / "results/slide 8/regions.geojson").read_bytes()
    changed = laboratory / "new/slide 8.png"
    draw_disc(changed, 9)
    changed.with_name("slide 8_mask.png").unlink()
    assert rules() == ["all", "infer", "summary"]
    assert (laboratory / "results/slide7/mask.ome.tiff").stat() == kept
    assert (laboratory / "results/slide 8/regions.geojson").read_bytes() != before

    weights = (laboratory / "run/model/weights.safetensors").read_bytes()
    draw_disc(laboratory / "annotated/slide 0.png", 5)
    assert rules("--dry-run") == everything
    assert rules("run/summary.json") == ["cache", "train"]
    assert (laboratory / "run/model/weights.safetensors").read_bytes() != weights
    [aside] = laboratory.glob("run.*")
    assert (aside / "model/weights.safetensors").read_bytes() == weights
