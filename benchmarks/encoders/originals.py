"""Networks of timm and torchvision with random weights: these, images, and the features of them.

Runs in the originals' own environment, which has nothing of pathoseg:
`python originals.py CASE FOLDER SIDE [SIDE…]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# torchvision's wheel registers kernels for these where its extension loads; beside a CPU torch it
# does not, and what it imports first asks for their schemas.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _transformer(name: str, **options: Any) -> torch.nn.Module:
    import timm

    # `num_classes=0` leaves out the head; any size of image is what pathology models are given.
    model: torch.nn.Module = timm.create_model(
        name, num_classes=0, dynamic_img_size=True, img_size=224, **options
    )
    return model


def _build(case: str) -> torch.nn.Module:
    from timm.layers import SwiGLUPacked

    if case == "resnet50":
        from torchvision.models import resnet50

        model: torch.nn.Module = resnet50(weights=None)
        return model
    if case == "vit-s14":
        return _transformer("vit_small_patch14_dinov2", init_values=1e-5)
    if case == "vit-l16":  # as UNI
        return _transformer("vit_large_patch16_224", init_values=1e-5)
    return _transformer(  # as Virchow 2
        "vit_huge_patch14_224",
        init_values=1e-5,
        mlp_ratio=5.3375,
        mlp_layer=SwiGLUPacked,
        act_layer=torch.nn.SiLU,
        reg_tokens=4,
    )


def _shuffle(model: torch.nn.Module) -> None:
    """Weights that hide nothing: LayerScale of 1e-5 would hide the blocks, a fresh norm itself."""
    for name, tensor in model.state_dict().items():
        if name.endswith(("gamma", "running_var")) or (tensor.ndim == 1 and "weight" in name):
            tensor.uniform_(0.5, 1.0)
        elif name.endswith(("bias", "running_mean", "token", "pos_embed")):
            tensor.normal_(0, 0.2)


def _features(case: str, model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    if case == "resnet50":
        stem = model.relu(model.bn1(model.conv1(images)))
        found = {"stem": stem}
        features = model.maxpool(stem)
        for level in (1, 2, 3, 4):
            features = getattr(model, f"layer{level}")(features)
            found[f"layer{level}"] = features
        return found
    depth = len(model.blocks)
    taps = [depth * quarter // 4 - 1 for quarter in (1, 2, 3)]
    inner = model.forward_intermediates(
        images, indices=taps, norm=False, output_fmt="NLC", intermediates_only=True
    )
    found = {f"block {tap + 1}": tokens for tap, tokens in zip(taps, inner, strict=True)}
    return {**found, "tokens": model.forward_features(images)}


def main(case: str, folder: Path, sides: list[int]) -> None:
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    torch.manual_seed(0)
    with torch.inference_mode():
        model = _build(case).eval()
        _shuffle(model)
        save_file(model.state_dict(), folder / "model.safetensors")
        found = {}
        for side in sides:
            images = torch.randn(1, 3, side, side + (side > 224) * 112)
            found[f"{side} images"] = images
            for name, features in _features(case, model, images).items():
                found[f"{side} {name}"] = features.contiguous()
        save_file(found, folder / "features.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(side) for side in sys.argv[3:]])
