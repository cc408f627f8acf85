"""A run's network, read on microbatches of its tiles, in the layout in which it trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pathoseg.config import Config
from pathoseg.device import Inputs, pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE
from pathoseg.models.build import declared_inputs, lay_out, tile_multiple
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.shards.rows import Split, strips
from pathoseg.progress import say

# Sizes of microbatches that are tried where the model's norm does not forbid it.
_SIZES = (1, 2, 4)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ReadNetwork:
    """A run's network and its graphs.

    With whole tiles it is read once for each microbatch and side; with strips each time.

    Args:
        model: The network; its weights are laid out as for training (`lay_out`).
        config: The options.
        dtype: Precision of the run's autocast, or None.
        kind: Type of the device that trains it.

    Attributes:
        model, config, dtype: As given.
    """

    def __init__(
        self, model: nn.Module, config: Config, dtype: torch.dtype | None, kind: str
    ) -> None:
        self.model, self.config, self.dtype = model, config, dtype
        self._layout = lay_out(model, config.model.with_classes(2), kind)
        self._whole: dict[tuple[int, int], Traced] = {}

    @property
    def microbatches(self) -> Sequence[int]:
        """The sizes of microbatch that may be used, smallest first.

        A configured size is kept. Else it is one sample, for batch norm takes its statistics over
        the microbatch: another size would be another training. Without batch norm several may be.
        """
        train = self.config.train
        if train.microbatch is not None:
            return [train.microbatch]
        if any(isinstance(module, _BATCH_NORMS) for module in self.model.modules()):
            return [1]
        return [size for size in _SIZES if train.batch % size == 0]

    def whole(self, size: int, side: int | None = None) -> Traced:
        """Return the network, read with a microbatch of `size` whole tiles.

        Args:
            size: Tiles of the microbatch.
            side: Of a tile, in pixels; None takes the run's.

        Raises:
            PathosegError: The model cannot be read.
        """
        key = size, side or self.config.tiles.side
        if key not in self._whole:
            self._whole[key] = self._read(*key, 1)
        return self._whole[key]

    def strip(self, size: int, side: int, shards: int) -> Traced:
        """Return the network, read with the largest of `shards` strips of each tile.

        Raises:
            PathosegError: The model cannot be read with so low an image.
        """
        return self._read(size, side, shards)

    def _read(self, size: int, side: int, shards: int) -> Traced:
        example = self._microbatch(size, side, shards)
        traced = Traced(self.model, example, self.dtype)
        if isinstance(example, dict) and set(example) != set(traced.graph.inputs):
            raise PathosegError(
                f"{type(self.model).__name__}.forward takes {', '.join(traced.graph.inputs)}, and "
                f"its inputs are {', '.join(example)}.",
                "Let it have an argument of the name of each input.",
            )
        return traced

    def _microbatch(self, size: int, side: int, shards: int) -> Inputs:
        """Return a microbatch without memory: the only input, or each by name."""
        multiple = tile_multiple(self.model)

        def rows(height: int) -> int:
            """Rows of the largest strip, up to what the network divides by."""
            if shards == 1:
                return height
            largest = max(one.height for one in strips(Split.even(height, shards).bounds))
            return -(-largest // multiple) * multiple

        shapes = {
            each.name: (size, 3, rows(each.size), each.size)
            for each in declared_inputs(self.model, self.config.tiles.mpp, side)
        }
        seen = {
            name: torch.empty(shape, device="meta", memory_format=self._layout)
            for name, shape in shapes.items()
        }
        return seen if len(seen) > 1 else seen[IMAGE]


def read_alone(model: nn.Module, config: Config) -> Traced | None:
    """Read a network on the microbatch of a run in one process.

    Returns:
        None if no graph can be made of it, in which case it trains in one process all the same.
    """
    kind, size = pick_device(config.parallel.device).type, config.train.microbatch
    try:
        return ReadNetwork(model, config, None, kind).whole(size or config.train.batch)
    except PathosegError as error:
        if config.train.compile:
            say(f"Nothing is compiled, as no graph can be made of the model: {error.problem}")
        return None
