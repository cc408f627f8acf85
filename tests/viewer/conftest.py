"""A folder with slides, annotations and a result whose every pixel is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import tifffile
from numpy.typing import NDArray
from PIL import Image
from starlette.testclient import TestClient

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.inference.result_folder import State, state_file, write_state
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.report import Level0, Summary, TileCounts, class_summaries, write_summary
from pathoseg.viewer.app import make_app
from pathoseg.viewer.finding import find_entries
from pathoseg.viewer.gallery import Gallery

CLASSES = ClassTable(("gland", "tumour"), ((200, 30, 20), (20, 120, 220)))
SLIDE_MPP, MASK_MPP = 0.5, 1.0
WIDTH, HEIGHT = 1500, 1100
PINK = (230, 180, 200)  # of slide b, all over
TOKEN = "the-token-of-this-test"
PORT = 8765


@dataclass(frozen=True)
class Place:
    """The files of a made batch.

    Attributes:
        folder: Holds `slides/` with a.svs, b.svs and c.svs, and `results/` with those of a and b.
        mask: Class indices of the masks of a and of b.
    """

    folder: Path
    mask: NDArray[np.uint8]


def write_slide(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write pixels as an Aperio slide of two levels at 0.5 µm."""
    height, width = (side // 4 * 4 for side in pixels.shape[:2])
    small = pixels[:height, :width].reshape(height // 4, 4, width // 4, 4, 3).mean((1, 3))
    says = f"Aperio Image Library v12\r\n{width}x{height} (256x256)|AppMag = 20|MPP = {SLIDE_MPP}"
    with tifffile.TiffWriter(path) as tiff:
        for level in (pixels, small.round().astype(np.uint8)):
            tiff.write(
                level, photometric="rgb", description=says, metadata=None, tile=(256, 256),
                compression="adobe_deflate",
            )  # fmt: skip


def drawn_mask() -> NDArray[np.uint8]:
    """Discs of both classes, a ring, and an unread corner, at 1 µm."""
    mask = np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8)
    y, x = np.mgrid[: mask.shape[0], : mask.shape[1]]
    for value, across, down, outer, inner in (
        (1, 200, 150, 90, 0), (2, 420, 300, 120, 50), (1, 420, 300, 20, 0), (2, 650, 120, 40, 0),
    ):  # fmt: skip
        squared = (x - across) ** 2 + (y - down) ** 2
        mask[(squared < outer**2) & (squared >= inner**2)] = value
    mask[-60:, -80:] = 255
    return mask


def write_result(out: Path, slide: Path, mask: NDArray[np.uint8]) -> Path:
    """Write the result of a slide with the shapes of `drawn_mask` as its regions."""
    folder = out / slide.stem
    folder.mkdir(parents=True, exist_ok=True)
    height, width = mask.shape
    frame = Frame(Size(width, height), 2.0, 2.0, Mpp(MASK_MPP, MASK_MPP))
    write_mask(folder / "mask.ome.tiff", frame.size, frame.mpp, [mask], CLASSES, "test")
    ring = shapely.Point(840, 600).buffer(240).difference(shapely.Point(840, 600).buffer(100))
    with GeoJsonWriter(folder / "regions.geojson", CLASSES) as writer:
        writer.add(shapely.Point(400, 300).buffer(180), 1, {"Area µm^2": 25446.9})
        writer.add(ring, 2, {"Area µm^2": 37385.0})
        writer.add(shapely.Point(840, 600).buffer(40), 1, {"Area µm^2": 1256.6})
        writer.add(shapely.Point(1300, 240).buffer(80), 2)
    counted = {index: int((mask == index).sum()) for index in (1, 2)}
    summary = Summary(
        slide=slide.name,
        model="0123456789abcdef",
        mpp=frame.mpp,
        tissue_mm2=0.4,
        classes=class_summaries(CLASSES, counted, {1: 2, 2: 2}, frame, 0.4),
        tiles=TileCounts(1, 0, 1),
        unread_pixels=int((mask == 255).sum()),
        versions={},
        seconds={},
        level0=Level0(Size(2 * width, 2 * height), Mpp(SLIDE_MPP, SLIDE_MPP)),
    )
    write_summary(folder / "summary.json", summary)
    outputs = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_state(
        state_file(out, folder), State(str(slide), "done", "key", 1, "host", (1.0,), outputs)
    )
    return folder


def write_objects(folder: Path) -> None:
    """Write two detections that touch, which the mask's first disc has in it."""
    folder.mkdir(parents=True)
    with GeoJsonWriter(folder / "objects.geojson", CLASSES, "detection") as writer:
        for across, circularity in ((360, 0.875), (440, 0.75)):
            measured = {"Area µm^2": 1256.6, "Circularity": circularity}
            writer.add(shapely.Point(across, 300).buffer(40), 1, measured)


def make_place(folder: Path) -> Place:
    slides, mask = folder / "slides", drawn_mask()
    slides.mkdir()
    rng = np.random.default_rng(7)
    coarse = Image.fromarray(rng.integers(60, 230, (9, 12, 3), np.uint8))
    clouds = np.array(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    write_slide(slides / "a.svs", clouds)
    write_slide(slides / "b.svs", np.full((HEIGHT, WIDTH, 3), PINK, np.uint8))
    write_slide(slides / "c.svs", clouds[:300, :400])
    square = [[300, 200], [700, 200], [700, 600], [300, 600], [300, 200]]
    feature = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [square]},
        "properties": {"classification": {"name": "gland", "color": [1, 2, 3]}},
    }
    (slides / "b.geojson").write_text(json.dumps(feature))
    write_objects(folder / "results" / "a")
    for name in "ab":
        write_result(folder / "results", slides / f"{name}.svs", mask)
    return Place(folder, mask)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder, which no test changes."""
    return make_place(tmp_path_factory.mktemp("viewer"))


@pytest.fixture
def own_place(tmp_path: Path) -> Place:
    """A folder of the test's own."""
    return make_place(tmp_path)


Served = Callable[..., tuple[TestClient, Gallery, list[str]]]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """served(paths…, slides=…): a client with the token, the gallery, and what was told."""
    galleries = list[Gallery]()

    def serve(*paths: Path, **folders: Any) -> tuple[TestClient, Gallery, list[str]]:
        told = list[str]()
        databases = tmp_path_factory.mktemp("databases")
        entries = find_entries(paths, folders.get("slides", ()), folders.get("annotations"))
        gallery = Gallery(entries, databases, readers=2, tell=told.append)
        galleries.append(gallery)
        client = TestClient(
            make_app(gallery, TOKEN),
            base_url=f"http://127.0.0.1:{PORT}",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        return client, gallery, told

    yield serve
    for gallery in galleries:
        gallery.close()


@pytest.fixture(scope="session")
def client(place: Place, served: Served) -> TestClient:
    """A client of the results in `place`: slide 0 is a.svs, 1 is b.svs."""
    return served(place.folder / "results")[0]
