"""Asks how soon the viewer shows a picture and a tile, and how much memory it holds."""

from __future__ import annotations

import argparse
import http.client
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import cv2
import numpy as np
import psutil
import tifffile
from openslide import OpenSlide
from openslide.deepzoom import DeepZoomGenerator

ROOT = Path(__file__).resolve().parents[2]
TILE = 512
SCREEN = (1400, 900)
LEVELS = (1, 4, 16, 64)
Place = tuple[int, int, int]  # how often halved, column, row


def encoded_tiles() -> list[bytes]:
    """Eight different tiles of coloured noise with structure, as JPEG of about 60 KB."""
    rng, tiles = np.random.default_rng(0), []
    for _ in range(8):
        coarse = rng.integers(80, 240, (40, 40, 3)).astype(np.uint8)
        pixels = np.asarray(cv2.resize(coarse, (TILE, TILE), interpolation=cv2.INTER_CUBIC), int)
        pixels = pixels + rng.normal(0, 6, (TILE, TILE, 3))
        picture = np.clip(pixels, 0, 255).astype(np.uint8)
        tiles.append(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes())
    return tiles


def write_slide(path: Path, side: int) -> None:
    """Write an Aperio-like slide of four levels, its tiles repeated."""
    tiles = encoded_tiles()

    def some(count: int) -> Iterator[bytes]:
        return (tiles[number * 5 % len(tiles)] for number in range(count))

    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for downsample in LEVELS:
            length = side // downsample
            says = (
                f"Aperio Image Library v12\r\n{side}x{side} ({TILE}x{TILE})|AppMag = 40|MPP = 0.25"
            )
            tiff.write(
                some((-(-length // TILE)) ** 2),
                shape=(length, length, 3),
                dtype=np.uint8,
                tile=(TILE, TILE),
                compression="jpeg",
                photometric="ycbcr",
                subsampling=(2, 2),
                description=says,
                metadata=None,
            )


class Client:
    """One connection to the viewer.

    Args:
        address: As the viewer prints it, with its token.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {parse_qs(parts.query)['token'][0]}"}

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return content

    def tile(self, place: Place) -> float:
        """Return the seconds that a tile takes."""
        began = time.perf_counter()
        self.get("/api/slides/0/tile/slide/{}/{}/{}".format(*place))
        return time.perf_counter() - began


def random_places(side: int, count: int, seed: int) -> list[Place]:
    """Different tiles of the six finest levels."""
    draw, found = random.Random(seed), dict[Place, None]()
    while len(found) < count:
        halvings = draw.randrange(6)
        tiles = -(-side // 2**halvings) // TILE
        found[halvings, draw.randrange(tiles), draw.randrange(tiles)] = None
    return list(found)


def first_picture(client: Client) -> float:
    """Return the seconds until a screen is full: the headers, and the tiles of the whole slide."""
    began = time.perf_counter()
    details = json.loads(client.get("/api/slides/0"))
    halvings = details["halvings"]
    while details["width"] // 2 ** (halvings - 1) <= SCREEN[0]:
        halvings -= 1
    columns, rows = (-(-details[axis] // 2**halvings // TILE) for axis in ("width", "height"))
    for column in range(columns):
        for row in range(rows):
            client.tile((halvings, column, row))
    return time.perf_counter() - began


def deepzoom_times(slide: Path, places: list[Place]) -> list[float]:
    """Return the seconds that OpenSlide's DeepZoom takes to the same tiles, encoded likewise."""
    times = []
    with OpenSlide(slide) as opened:
        pyramid = DeepZoomGenerator(opened, tile_size=TILE, overlap=0)
        for halvings, column, row in places:
            began = time.perf_counter()
            picture = pyramid.get_tile(pyramid.level_count - 1 - halvings, (column, row))
            picture.save(io.BytesIO(), "JPEG", quality=90)
            times.append(time.perf_counter() - began)
    return times


def peak_while_zooming(address: str, server: psutil.Process, side: int, seconds: float) -> float:
    """Return the most MiB that the viewer held while four connections ask for random tiles."""
    end, peak = time.monotonic() + seconds, 0.0

    def ask(seed: int) -> None:
        client, turn = Client(address), 0
        while time.monotonic() < end:
            turn += 1
            for place in random_places(side, 50, 1000 * seed + turn):
                client.tile(place)
                if time.monotonic() >= end:
                    return

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, server.memory_info().rss / 2**20)
        time.sleep(0.1)
    return peak


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--quick", action="store_true", help="a slide of 25,000 px, 10 s of zooming"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    side, count, seconds = (25_000, 60, 10.0) if options.quick else (100_000, 300, 600.0)
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(folder) / "slide.svs"
        write_slide(slide, side)
        command = [
            sys.executable,
            "-m",
            "pathoseg",
            "view",
            str(slide),
            "--no-browser",
            "--port",
            "0",
        ]
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = server.stdout.readline().strip()
                start = time.perf_counter() - began
                client = Client(address)
                first = first_picture(client)
                ours, theirs = list[float](), list[float]()
                for turn in range(3):  # alternating
                    places = random_places(side, count // 3, turn)
                    client = Client(address)  # the server closes a connection that idles
                    ours += [client.tile(place) for place in places]
                    theirs += deepzoom_times(slide, places)
                peak = peak_while_zooming(address, psutil.Process(server.pid), side, seconds)
            finally:
                server.terminate()
    median = statistics.median(ours)
    figures = {
        "slide_px": side,
        "start_s": start,
        "first_picture_s": first,
        "tile_median_ms": 1e3 * median,
        "tile_p95_ms": 1e3 * statistics.quantiles(ours, n=20)[-1],
        "deepzoom_median_ms": 1e3 * statistics.median(theirs),
        "deepzoom_p95_ms": 1e3 * statistics.quantiles(theirs, n=20)[-1],
        "vs_deepzoom": statistics.median(theirs) / median,
        "peak_mib": peak,
        "zooming_s": seconds,
    }
    for name, value in figures.items():
        print(f"{name:20} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
