"""Compares the encoders' features with those of timm and torchvision from the same weights."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.encoders.installed import ORIGINALS, originals_python
from pathoseg.models.encoder_weights import fitting_options, read_encoder, set_encoder
from pathoseg.models.model_options import VIT_SEG, ModelConfig, vit_shape
from pathoseg.models.unet_resnet import RESNETS, ResNetEncoder
from pathoseg.models.vit_seg import VisionTransformer

CASES = ("resnet50", "vit-s14", "vit-l16", "vit-h14-swiglu-reg4")
# The grid that positions were learnt on, and a larger, oblong one (112 px wider).
SIDES = {"resnet50": (224, 448), "vit-s14": (224, 336), "vit-l16": (224, 336)}
SIDES["vit-h14-swiglu-reg4"] = (224, 336)
LIMIT = 1e-6  # of the norm of the difference over that of the original's features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--originals", type=Path, default=ORIGINALS, help="their environment")
    parser.add_argument("--quick", action="store_true", help="the two small networks alone")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    python = originals_python(options.originals)
    figures: dict[str, float] = {}
    for case in CASES[:2] if options.quick else CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            program = Path(__file__).with_name("originals.py")
            sides = [str(side) for side in SIDES[case]]
            subprocess.run([python, program, case, folder, *sides], check=True)
            figures |= {f"error_{case}_{at}": error for at, error in compare(case, folder).items()}
    worst = max(figures.values())
    print(f"Worst: {worst:.2g}")
    if options.json:
        options.json.write_text(json.dumps({**figures, "worst_error": worst}, indent=2) + "\n")
    if worst > LIMIT:
        sys.exit(f"More than {LIMIT:g}")


def compare(case: str, folder: Path) -> dict[str, float]:
    """Return the relative error of the worst features at each side."""
    weights = read_encoder(folder / "model.safetensors")
    name = "unet_resnet50" if case == "resnet50" else VIT_SEG
    options = fitting_options(ModelConfig(name, "segment", 2), weights)
    encoder: torch.nn.Module
    if case == "resnet50":
        encoder = ResNetEncoder(*RESNETS[50])
    else:
        shape = vit_shape(options)
        encoder = VisionTransformer(shape)
    missing = set_encoder(encoder.eval(), weights)
    print(f"{case}: options {dict(options)}, missing {missing}, left over {weights.left_over}")
    expected = load_file(folder / "features.safetensors")
    found: dict[str, float] = {}
    for side in SIDES[case]:
        began = time.monotonic()
        with torch.inference_mode():
            features = encoder(expected.pop(f"{side} images"))
        seconds = time.monotonic() - began
        if case == "resnet50":
            names = ["stem", *(f"layer{level}" for level in (1, 2, 3, 4))]
        else:
            names = [*(f"block {tap}" for tap in shape.taps[:3]), "tokens"]
            # timm gives the patches' tokens alone of blocks inside.
            features = [each[:, 1 + shape.registers :] for each in features[:3]] + features[3:]
        errors = []
        for name, own in zip(names, features, strict=True):
            theirs = expected.pop(f"{side} {name}")
            assert own.shape == theirs.shape, (name, own.shape, theirs.shape)
            error = float((own - theirs).norm() / theirs.norm())
            most = float((own - theirs).abs().max())
            print(f"  {side} px, {name}: {error:.2g} (largest difference {most:.2g})")
            errors.append(error)
        found[f"{side}px"] = max(errors)
        print(f"  {side} px: {seconds:.2f} s")
    return found


if __name__ == "__main__":
    main()
