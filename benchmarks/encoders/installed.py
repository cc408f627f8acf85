"""The virtual environment of timm and torchvision, which share our torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ORIGINALS = Path.home() / ".cache" / "pathoseg-encoders"

_PACKAGES = ["timm==1.0.27", "torchvision==0.28.0"]


def originals_python(folder: Path) -> Path:
    """The interpreter of the originals' virtual environment, made where it is missing.

    torch, safetensors and the rest are those of the environment that runs this program: one torch
    computes both sides, and torchvision's wheel brings no second one.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for wanted in (["--no-deps", *_PACKAGES], ["huggingface_hub", "pyyaml"]):
            subprocess.run([*pip, *wanted], check=False)
    return python
