"""Tells which folders are OME-Zarr, and reads their attributes, without Zarr itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pathoseg.platform_support import is_file, is_folder

METADATA = ("zarr.json", ".zattrs", ".zgroup", ".zarray")  # of Zarr 3, the others of Zarr 2
LAYOUT = "bioformats2raw.layout"
_SUFFIX = ".ome.zarr"
_MOST_BYTES = 16 << 20


def is_zarr(path: Path) -> bool:
    """Return True if a folder is named like OME-Zarr, or holds metadata of Zarr.

    A folder that may not be read is none.
    """
    if not is_folder(path):
        return False
    named = path.name.lower().endswith(_SUFFIX)
    return named or any(is_file(path / name) for name in METADATA)


def is_zarr_slide(path: Path) -> bool:
    """Return True if a folder is meant as a slide: an image, or named like one and damaged.

    Labels, plates and other arrays are none.
    """
    if not is_zarr(path):
        return False
    try:
        attributes = ome_attributes(path)
    except (OSError, ValueError):
        return path.name.lower().endswith(_SUFFIX)
    is_image = "multiscales" in attributes or LAYOUT in attributes
    return is_image and "image-label" not in attributes


def ome_attributes(folder: Path) -> dict[str, Any]:
    """Return what OME has to say of a group: of Zarr 3 under `ome`, of Zarr 2 all attributes.

    Raises:
        OSError: There is no such group, or it cannot be read.
        ValueError: Its metadata is damaged.
    """
    is_zarr_3 = (folder / "zarr.json").is_file()
    content = read_json(folder / ("zarr.json" if is_zarr_3 else ".zattrs"))
    found = content.get("attributes", {}) if is_zarr_3 else content
    if isinstance(found, dict) and is_zarr_3:
        found = found.get("ome", {})
    if not isinstance(found, dict):
        raise ValueError("its attributes are no JSON object")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of metadata.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON object, or larger than metadata is.
    """
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content
