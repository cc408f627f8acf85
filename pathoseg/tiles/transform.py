"""Random changes of a tile and its mask, each a function of the generator it is given."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.tiles.stain import jitter_stains
from pathoseg.tiles.tile_options import AugmentOptions

Image = NDArray[np.uint8]

_BEND = 128  # knots of elastic displacements are side / (ceil(side / _BEND) + 1) pixels apart
_ALL_IGNORED = (IGNORE,) * 4  # of up to four planes
_STRIP = 2**16  # pixels whose source positions are computed at once, to stay in a core's cache


@dataclass(frozen=True, slots=True)
class _Warp:
    """A map from each pixel of the new tile to its source in the old one.

    The offset from the centre is turned and scaled, then shifted, then bent.

    Attributes:
        cos: Cosine of the angle, divided by the scale.
        sin: Its sine, divided by the scale.
        shift_x: Shift to the right, in pixels of the tile.
        shift_y: Shift down.
        bend: Further shifts of each pixel of the tile (h, w, 2), in memory that is kept; or None.
    """

    cos: float
    sin: float
    shift_x: float
    shift_y: float
    bend: NDArray[np.float32] | None


class Around(NamedTuple):
    """An input of a network beside the tile, around the same centre.

    Attributes:
        image: RGB, shape (size, size, 3).
        ratio: How many pixels of the tile one of its pixels is wide.
        mask: Class indices, shape (size, size), or None.
    """

    image: Image
    ratio: int
    mask: Image | None = None


class Augmentation:
    """Random changes of tiles; may be called by several threads.

    Every step works in the memory of the tile that is returned, or in memory that a thread keeps
    from tile to tile: fresh pages of a tile cost as much as computing it.

    Args:
        options: What is varied and how much.
    """

    def __init__(self, options: AugmentOptions) -> None:
        self._options = options
        self._own = threading.local()

    def __call__(self, image: Image, mask: Image, rng: np.random.Generator) -> tuple[Image, Image]:
        """A changed copy of a tile.

        Args:
            image: RGB, shape (height, width, 3).
            mask: Class indices, shape (height, width).
            rng: The only source of chance: equal states give equal tiles.

        Returns:
            Image and mask of the same shapes. Mask values are never mixed, and 255 where the tile
            was moved away; the image is mirrored there. Quarter turns are left out where the tile
            is not square.
        """
        return self.together(image, mask, {}, rng)[:2]

    def together(
        self,
        image: Image,
        mask: Image,
        context: Mapping[str, Around],
        rng: np.random.Generator,
    ) -> tuple[Image, Image, dict[str, Around]]:
        """As `__call__`, with the other inputs of a network changed in the same way.

        In micrometres they move about the tile's centre as it does; what bends the tile's edge
        shifts what lies beyond. Stains, colour, blur (in pixels) and noise draw the same numbers.

        Args:
            image: As for `__call__`; square where there is context.
            mask: Likewise; or several planes, shape (height, width, planes), such as class indices
                and colours of objects, which move together.
            context: By name. Their masks are 255 where nothing is known of what was moved in.
            rng: Draws the same numbers with and without context.
        """
        options = self._options
        changed, labels = np.empty(image.shape, np.uint8), np.empty(mask.shape, np.uint8)
        around = {
            name: Around(
                np.empty(seen.image.shape, np.uint8),
                seen.ratio,
                None if seen.mask is None else np.empty(seen.mask.shape, np.uint8),
            )
            for name, seen in context.items()
        }
        shape = mask.shape[:2]
        turns, mirror = _flip(shape, rng) if options.flip else (0, False)
        if rng.random() < options.warp:
            turned, turned_labels = self._kept("image", image), self._kept("mask", mask)
            self._turn(image, turns, mirror, turned)
            self._turn(mask, turns, mirror, turned_labels)
            warp = self._draw_warp(shape, rng)
            self._warp(turned, turned_labels, warp, changed, labels)
            for name, seen in context.items():
                turned = self._kept(f"context {name}", seen.image)
                self._turn(seen.image, turns, mirror, turned)
                turned_mask = None
                if seen.mask is not None:
                    turned_mask = self._kept(f"mask of {name}", seen.mask)
                    self._turn(seen.mask, turns, mirror, turned_mask)
                _warp_context(Around(turned, seen.ratio, turned_mask), warp, shape, around[name])
        else:
            self._turn(image, turns, mirror, changed)
            self._turn(mask, turns, mirror, labels)
            for name, seen in context.items():
                self._turn(seen.image, turns, mirror, around[name].image)
                found = around[name].mask
                if seen.mask is not None and found is not None:
                    self._turn(seen.mask, turns, mirror, found)
        again = {name: deepcopy(rng) for name in context}
        changed = self._change_colour(changed, rng)
        coloured = {
            name: seen._replace(image=self._change_colour(seen.image, again[name]))
            for name, seen in around.items()
        }
        return changed, labels, coloured

    def _change_colour(self, image: Image, rng: np.random.Generator) -> Image:
        """Change an image in place where that can be."""
        options = self._options
        if options.stain:
            jitter_stains(image, options.stain, rng, image)
        if options.colour or options.blur or options.noise:
            image = self._change_light(image, rng)
        return image

    def _turn(self, image: Image, turns: int, mirror: bool, out: Image) -> None:
        """Turn by quarters against the clock, then mirror left and right."""
        upside_down, left_right = turns in (1, 2), (turns in (2, 3)) != mirror
        # A quarter turn is a transposition with one of the two flips.
        source = image
        if turns % 2:
            scratch = f"transposed {image.shape}"  # its own for image, mask and each context
            source = self._kept(scratch, image) if upside_down or left_right else out
            cv2.transpose(image, dst=source)
        if upside_down or left_right:
            cv2.flip(source, -1 if upside_down and left_right else int(left_right), dst=out)
        elif source is not out:
            np.copyto(out, source)

    def _draw_warp(self, shape: tuple[int, ...], rng: np.random.Generator) -> _Warp:
        options, (height, width) = self._options, shape
        scale = 1 + options.scale * rng.uniform(-1, 1)
        angle = math.radians(options.rotate) * rng.uniform(-1, 1)
        shift_x, shift_y = options.shift * rng.uniform(-1, 1, 2)
        cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
        bend = None
        if options.elastic:
            knots = (math.ceil(height / _BEND) + 1, math.ceil(width / _BEND) + 1, 2)
            steps = rng.normal(0, options.elastic, knots).astype(np.float32)
            bend = self._kept("bend", np.broadcast_to(np.float32(0), (height, width, 2)))
            cv2.resize(steps, (width, height), dst=bend, interpolation=cv2.INTER_CUBIC)
        return _Warp(cos, sin, shift_x * width, shift_y * height, bend)

    def _warp(self, image: Image, mask: Image, warp: _Warp, warped: Image, labels: Image) -> None:
        """Scales, rotates, shifts and bends in one interpolation."""
        cos, sin, bend = warp.cos, warp.sin, warp.bend
        height, width = mask.shape[:2]
        across = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
        down = (np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2))[:, None]
        rows = max(1, _STRIP // width)
        for top in range(0, height, rows):
            strip = slice(top, min(top + rows, height))
            x = np.float32(cos) * across - np.float32(sin) * down[strip]
            y = np.float32(sin) * across + np.float32(cos) * down[strip]
            x += np.float32((width - 1) / 2 + warp.shift_x)
            y += np.float32((height - 1) / 2 + warp.shift_y)
            if bend is not None:
                x += bend[strip, :, 0]
                y += bend[strip, :, 1]
            mirrored, nothing = cv2.BORDER_REFLECT_101, cv2.BORDER_CONSTANT
            cv2.remap(image, x, y, cv2.INTER_LINEAR, dst=warped[strip], borderMode=mirrored)
            cv2.remap(
                mask, x, y, cv2.INTER_NEAREST, labels[strip], nothing, borderValue=_ALL_IGNORED
            )

    def _kept(self, name: str, like: NDArray[Any]) -> NDArray[Any]:
        """This thread's array of that name, of the shape and type of `like`."""
        found: NDArray[Any] | None = getattr(self._own, name, None)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            found = np.empty(like.shape, like.dtype)
            setattr(self._own, name, found)
        return found

    def _change_light(self, image: Image, rng: np.random.Generator) -> Image:
        # An albumentations pipeline holds its own generators, so each thread has one.
        pipeline = getattr(self._own, "pipeline", None)
        if pipeline is None:
            # Imported here because it takes a second that segmenting a slide need not wait for.
            from pathoseg.tiles.light import light_pipeline

            pipeline = self._own.pipeline = light_pipeline(self._options)
        pipeline.set_random_seed(int(rng.integers(2**31)))
        return np.asarray(pipeline(image=image)["image"], dtype=np.uint8)


def object_distance(options: AugmentOptions, tile: int) -> float:
    """Return the pixels within which two objects need different colours (`Labels.objects`).

    Then no pixels of two objects of one colour touch, neither in a tile nor after augmentation.

        a pixel of A | pixel of the new tile | √2 | its neighbour | a pixel of B
           √2 / 2   <->  nearest: √2 / 2    <- √2 L ->   √2 / 2  <->  √2 / 2

    Neighbours of the new tile come from places that are √2 L apart: L is the largest stretch from
    the new tile to the old one, which is that of the scale and of the bend. Each place takes the
    pixel that it lies in, and that has a point of its object. Displacements are normal, so L is a
    bound but for bends of five standard deviations.

    Args:
        options: What is varied and how much.
        tile: Side of a tile in pixels.
    """
    if not options.warp:
        return 2 * math.sqrt(2) + _ROUNDING
    spacing = tile / (math.ceil(tile / _BEND) + 1)  # of the knots
    stretch = 1 / (1 - options.scale) + 5 * _STEEPEST * options.elastic / spacing
    return math.sqrt(2) * (stretch + 2) + _ROUNDING


_STEEPEST = 1.88  # deviation of the slope of a cubic between knots of deviation 1, 1 apart
_ROUNDING = 0.1  # pixels: corners are taken to 1/256


def _warp_context(seen: Around, warp: _Warp, shape: tuple[int, ...], warped: Around) -> None:
    """Warp what lies around a tile of `shape` as the tile."""
    ratio, side, (height, width) = seen.ratio, len(seen.image), shape
    middle = np.float32((side - 1) / 2)
    along = np.float32(ratio) * (np.arange(side, dtype=np.float32) - middle)
    x = np.float32(warp.cos) * along - np.float32(warp.sin) * along[:, None]
    y = np.float32(warp.sin) * along + np.float32(warp.cos) * along[:, None]
    x += np.float32(warp.shift_x)
    y += np.float32(warp.shift_y)
    if warp.bend is not None:
        at_x, at_y = np.meshgrid(
            along + np.float32((width - 1) / 2), along + np.float32((height - 1) / 2)
        )
        bend = cv2.remap(warp.bend, at_x, at_y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        x += bend[..., 0]
        y += bend[..., 1]
    x, y = x / np.float32(ratio) + middle, y / np.float32(ratio) + middle
    mirrored, nothing = cv2.BORDER_REFLECT_101, cv2.BORDER_CONSTANT
    cv2.remap(seen.image, x, y, cv2.INTER_LINEAR, dst=warped.image, borderMode=mirrored)
    if seen.mask is not None and warped.mask is not None:
        nearest = cv2.INTER_NEAREST
        cv2.remap(seen.mask, x, y, nearest, warped.mask, nothing, borderValue=_ALL_IGNORED)


def _flip(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[int, bool]:
    """Quarter turns, and whether to mirror after them."""
    turns = int(rng.integers(4)) if shape[0] == shape[1] else 2 * int(rng.integers(2))
    return turns, bool(rng.integers(2))
