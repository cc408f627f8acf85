"""The virtual environment of TIAToolbox and MONAI, whose needs disagree with ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PEERS = Path.home() / ".cache" / "pathoseg-peers"

# TIAToolbox pins torch and torchvision to releases older than the one that all systems run here,
# so it and what asks for these two come without their needs, which are named instead.
ALONE = ["tiatoolbox==2.1.3", "monai==1.6.1", "torchvision==0.28.0", "timm==1.0.27"]
ALONE += ["transformers==5.13.1"]
NEEDS = [
    *("bokeh<3.9", "click", "dask<2026.7", "defusedxml", "flask", "flask-cors", "glymur"),
    *("huggingface_hub<1.24", "imagecodecs", "joblib", "matplotlib", "numba", "numpy<2.4.4"),
    *("opencv-python-headless", "openslide-bin", "openslide-python", "pandas<3.0.3", "pillow"),
    *("psutil", "pydicom", "pyyaml", "requests", "safetensors", "scikit-image", "scikit-learn"),
    *("regex", "scipy", "shapely", "SimpleITK", "tifffile", "tokenizers<=0.23.0", "tqdm", "typer"),
    *("umap-learn", "universal_pathlib", "wsidicom", "zarr<3.2"),
]


def peers_python(folder: Path) -> Path:
    """The interpreter of the peers' virtual environment, made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for wanted in (["torch==2.13.0"], ["--no-deps", *ALONE], ["torch==2.13.0", *NEEDS]):
            subprocess.run([*pip, *wanted], check=False)
    return python
