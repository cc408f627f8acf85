"""HookNet (van Rijthoven et al., 2021): a U-Net that also sees a coarse field around its tile.

Two branches of depth d, for a tile of T pixels that are m wide. The context has as many pixels,
each four times as wide, around the same centre: a field of 4T × 4T pixels of the tile.

    level    tile                      context
      0      T pixels of m             T pixels of 4m
      …      …                         …
     d-2     T/2^(d-2) of 2^(d-2) m    T/2^(d-2) of 2^d m    (1) two blocks of the decoder end here
     d-1     …                         …          ^
      d      T/2^d of 2^d m    (2)     T/2^d of 2^(d+2) m

Pixels of (1) and (2) are as wide as each other, and (2) shows the middle quarter of what (1) does.
That quarter (#) is cut out and concatenated to (2), which is the hook; the tile's decoder goes on
from both. Along one axis, d = 4, T = 256, a letter is 4 pixels of 16m:

    (1) 64 pixels  ······####······
    (2) 16 pixels        ####            24 pixels on either side

They coincide exactly, and never by halves, as T is divisible by 4 · 2^d: then T/2^d, and the 3/8 of
(1) on either side, are whole and even.

(3) What the context alone says of a class is a 1×1 convolution of (1). Of the quarter, and one
    pixel more on each side, it is drawn out to the tile's pixels and added to the logits.
(4) In training the whole of it is returned, too, drawn out to the context's pixels, for a second
    loss: on the labels of the context, as in the paper. By way of the hook alone the context hears
    of the classes late, when the tile's branch has learnt all that it can tell, and from a
    sixteenth of what it sees. (3) passes no gradient, which would ask of the context what the tile
    lacks, and not what it sees (`benchmarks/context` has what each of these is worth).

The paper convolves without padding, tiles of 284 px. Here all convolutions are padded, so that a
mask is as large as its tile. The zeros at the context's edge do not reach the quarter that is cut
out where T ≥ 8/3 · `context_reach`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from pathoseg.geometry import IMAGE, Box
from pathoseg.models.layers import he_initialise
from pathoseg.models.model_options import Norm
from pathoseg.models.unet import Up, decode_inside, padding_reach, two_convolutions

_RATIO = 4  # of the two pixels' widths: two poolings
CONTEXT = "context"


class HookNet(nn.Module):
    """A U-Net on the tile, and at its bottom what a second one makes of the field around it.

    Args:
        classes: Channels of the answer: classes, background included, and the height of objects.
        width: Channels of `encoder[0]` and of `context_encoder[0]`; each pooling doubles them.
        depth: Number of poolings of each branch, 2 or more.
        norm: Normalisation layer.

    Attributes:
        multiple: A tile's sides must be divisible by it: 4 · 2^depth, a pixel at the bottom of the
            context's branch.
        reach: As `UNet.reach`, from the tile's edge.
        labelled_input: Name of the input beside the tile whose labels training asks for, too.
        context_reach: As `reach`, by name of the input beside the tile: pixels from that one's edge
            to the tile's field from which a larger one gives the same logits; empty without one.
    """

    labelled_input = CONTEXT

    def __init__(self, classes: int, width: int = 32, depth: int = 4, norm: Norm = "batch") -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        hooked = depth - 2
        self.context_encoder = _encoder(channels, norm)
        self.context_decoder = _decoder(channels[hooked:], 0, norm)
        self.encoder = _encoder(channels, norm)
        self.decoder = _decoder(channels, channels[hooked], norm)
        self.head = nn.Conv2d(width, classes, 1)
        self.context_head = nn.Conv2d(channels[hooked], classes, 1)
        self._scale, self._context_scale = 2**depth, 2**hooked
        self.multiple = _RATIO * 2**depth
        self.reach = padding_reach(depth, depth) if norm == "batch" else None
        self.context_reach: dict[str, int] = {}
        if norm == "batch":
            self.context_reach[CONTEXT] = (padding_reach(depth, 2) + 1) * 2**hooked
        he_initialise(self)

    def inputs_at(self, mpp: float, tile: int) -> Mapping[str, tuple[float, int]]:
        """Return microns per pixel and side of each input, for a tile of these."""
        return {IMAGE: (mpp, tile), CONTEXT: (_RATIO * mpp, tile)}

    def forward(
        self, image: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits of a tile.

        Args:
            image: The tile, (n, 3, h, w), its sides divisible by `multiple`.
            context: The field around it, (n, 3, h/4 + 2·k, w/4 + 2·l): its middle h/4 × w/4 pixels
                are the tile's field; k and l are multiples of `multiple` / 8, not 0. Mostly
                (n, 3, h, w), and in training always.

        Returns:
            Shape (n, classes, h, w); in training beside it, likewise, the logits of the context's
            pixels (4).
        """
        features, skips, said = self._hooked(image, context)
        for block in self.decoder:
            features = block(features, skips.pop())
        logits: torch.Tensor = self.head(features) + self._drawn_out(said, image)
        if not self.training:
            return logits
        return logits, _enlarged(said, self._context_scale)

    def logits_inside(self, inputs: Mapping[str, torch.Tensor], inside: Box) -> torch.Tensor:
        """Logits of a part of a tile alone, as `UNet.logits_inside`; the inputs are named."""
        image = inputs[IMAGE]
        features, skips, said = self._hooked(image, inputs[CONTEXT])
        logits: torch.Tensor = self.head(decode_inside(self.decoder, features, skips, inside))
        rows, columns = slice(inside.y, inside.bottom), slice(inside.x, inside.right)
        return logits + self._drawn_out(said, image)[..., rows, columns]

    def _hooked(
        self, image: torch.Tensor, context: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return the input of the tile's decoder, its skips from the top down, and what the context
        says of the classes, in the pixels of (1)."""
        seen, skips = _down(self.context_encoder, context)
        for block in self.context_decoder:
            seen = block(seen, skips.pop())
        features, skips = _down(self.encoder, image)
        said: torch.Tensor = self.context_head(seen)
        return torch.cat([features, _middle(seen, *features.shape[2:])], 1), skips, said

    def _drawn_out(self, said: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Return what the context says of the tile's field, in the tile's pixels (3)."""
        scale = self._scale
        height, width = (side // scale for side in image.shape[2:])
        drawn = _enlarged(_middle(said.detach(), height + 2, width + 2), scale)
        return drawn[..., scale:-scale, scale:-scale]


def _encoder(channels: list[int], norm: Norm) -> nn.ModuleList:
    blocks = [two_convolutions(3, channels[0], norm)]
    blocks += [
        two_convolutions(above, below, norm, pool=True) for above, below in pairwise(channels)
    ]
    return nn.ModuleList(blocks)


def _decoder(channels: list[int], hook: int, norm: Norm) -> nn.ModuleList:
    """Blocks from the lowest of these levels to the uppermost; `hook` more channels come in."""
    blocks = [Up(below, above, norm, skip=above) for above, below in pairwise(channels)]
    above, below = channels[-2:]
    blocks[-1] = Up(below + hook, above, norm, skip=above)
    return nn.ModuleList(reversed(blocks))


def _down(
    blocks: Iterable[nn.Module], images: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the features of the lowest block, and the skips of those above, from the top down."""
    features, skips = images, []
    for block in blocks:
        features = block(features)
        skips.append(features)
    skips.pop()
    return features, skips


def _enlarged(logits: torch.Tensor, scale: int) -> torch.Tensor:
    return F.interpolate(logits, scale_factor=float(scale), mode="bilinear")


def _middle(seen: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The middle of what is seen, of this size."""
    top, left = (seen.shape[2] - height) // 2, (seen.shape[3] - width) // 2
    return seen[..., top : top + height, left : left + width]
