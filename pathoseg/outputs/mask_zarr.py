"""Writes a mask as OME-NGFF 0.5 (OME-Zarr, Zarr 3) while its bands arrive.

    mask.ome.zarr/            group: which label images there are
      mask/                   label image: axes, scale in µm, colours and names of the classes
        0/  c/0/0  c/1/0 …    level 0: a file (shard) for each strip of 512 rows, of all chunks
        1/  c/0/0 …           level 1, and so on, until one is small enough

A strip is written whole, once and alone, so what is held is what the pyramid holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray
from yaozarrs import v05
from zarr.codecs import ZstdCodec

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, UNREAD_COLOUR, ClassTable
from pathoseg.geometry import Mpp, Size
from pathoseg.outputs.atomic import new_folder
from pathoseg.outputs.pyramid import TILE, Add, FinishedRows, Pyramid, mode_of_four

LABEL = "mask"
_AXES = ("y", "x")


@contextmanager
def zarr_mask_writer(path: Path, size: Size, mpp: Mpp, classes: ClassTable) -> Iterator[Add]:
    """Make a context that yields what takes the next rows of a mask; `path` appears at its end.

    The levels are those of `write_mask`.

    Args:
        path: Must not exist; after an error it does not.
        size: The mask's extent.
        mpp: Microns per pixel.
        classes: Names and colours of the indices.

    Yields:
        A function of a band of shape (any number of rows, width).

    Raises:
        OSError: The disk is full or cannot be written, or `path` exists.
        ValueError: The bands have more or fewer rows than `size`.
    """
    pyramid = Pyramid(size, 1, mode_of_four)
    with new_folder(path) as draft:
        listed = v05.LabelsGroup(labels=[LABEL]).model_dump(mode="json", exclude_none=True)
        group = zarr.create_group(draft, attributes={"ome": listed})
        shown = _label_image(len(pyramid.sizes), mpp, classes)
        label = group.create_group(LABEL, attributes={"ome": shown})
        levels = [
            label.create_array(
                str(number),
                shape=(level.height, level.width),
                chunks=(TILE, TILE),
                shards=(TILE, level.rounded_up(TILE).width),
                dtype=np.uint8,
                fill_value=BACKGROUND,
                compressors=ZstdCodec(level=3),
                dimension_names=_AXES,
            )
            for number, level in enumerate(pyramid.sizes)
        ]

        def write(strips: Iterable[FinishedRows]) -> None:
            for strip in strips:
                (rows,) = strip.rows
                levels[strip.level][strip.top : strip.top + len(rows)] = rows

        def add(band: NDArray[np.uint8]) -> None:
            write(pyramid.add(band[None]))

        yield add
        write(pyramid.finish())


def _label_image(levels: int, mpp: Mpp, classes: ClassTable) -> dict[str, object]:
    """Return the metadata of the label image.

    A pixel of level n is 2ⁿ × 2ⁿ of level 0, also where the last one has less to show. The origin
    is the centre of level 0's first pixel, as it is in programs that know no translations.
    """
    sides = (mpp.y, mpp.x)
    colours = {
        BACKGROUND: (0, 0, 0, 0),
        **{number: (*colour, 255) for number, colour in enumerate(classes.colours, 1)},
        IGNORE: (*UNREAD_COLOUR, 255),
    }
    names = {BACKGROUND: "background", **dict(enumerate(classes.names, 1)), IGNORE: "unread"}
    multiscale = {
        "name": LABEL,
        "axes": [{"name": axis, "type": "space", "unit": "micrometer"} for axis in _AXES],
        "datasets": [
            {
                "path": str(number),
                "coordinateTransformations": [
                    {"type": "scale", "scale": [side * 2**number for side in sides]},
                    {
                        "type": "translation",
                        "translation": [side * (2**number - 1) / 2 for side in sides],
                    },
                ],
            }
            for number in range(levels)
        ],
        "type": "mode of 2 × 2 pixels",
    }
    metadata: dict[str, object] = {
        "version": "0.5",
        "multiscales": [multiscale],
        "image-label": {
            "colors": [{"label-value": v, "rgba": [*rgba]} for v, rgba in colours.items()],
            "properties": [{"label-value": v, "class": name} for v, name in names.items()],
        },
    }
    v05.LabelImage.model_validate(metadata)  # itself it would keep no names of classes
    return metadata
