"""The server's answers: routes, tokens and origins, and the pixels of tiles."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from starlette.testclient import TestClient

from pathoseg.annotations.reading import class_table
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.slides.image_reader import ImageSlide
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.viewer import gallery as gallery_module
from pathoseg.viewer import slide_view
from pathoseg.viewer.app import make_app
from pathoseg.viewer.drawing import GREY, differences, hatched
from pathoseg.viewer.gallery import EncodedTiles, Gallery
from tests.viewer import conftest
from tests.viewer.conftest import CLASSES, HEIGHT, PORT, TOKEN, WIDTH, Place, Served

TILE = 512


def _image(content: bytes, mode: str) -> NDArray[np.uint8]:
    return np.array(Image.open(io.BytesIO(content)).convert(mode))


def _sizes() -> list[tuple[int, int]]:
    return [(-(-WIDTH // 2**k), -(-HEIGHT // 2**k)) for k in range(3)]


@st.composite
def _tiles(draw: st.DrawFn) -> tuple[int, Box]:
    """A level of the pyramid and a tile of it."""
    halvings = draw(st.integers(0, 2))
    width, height = _sizes()[halvings]
    column = draw(st.integers(0, (width - 1) // TILE))
    row = draw(st.integers(0, (height - 1) // TILE))
    x, y = column * TILE, row * TILE
    return halvings, Box(x, y, min(TILE, width - x), min(TILE, height - y))


def _address(layer: str, halvings: int, box: Box, query: str = "", slide: int = 0) -> str:
    place = f"{halvings}/{box.x // TILE}/{box.y // TILE}"
    return f"/api/slides/{slide}/tile/{layer}/{place}{query}"


def _table(client: TestClient, address: str) -> dict[str, Any]:
    """A table, once it is read."""
    for _ in range(100):
        found: dict[str, Any] = client.get(address).json()
        if "reading" not in found:
            return found
        time.sleep(0.02)
    raise AssertionError("the table is never read")


# --- who may ask --------------------------------------------------------------------------------


@pytest.fixture
def stranger(place: Place, served: Served) -> TestClient:
    """A client without the token."""
    client = served(place.folder / "results")[0]
    del client.headers["Authorization"]
    client.follow_redirects = False
    return client


@pytest.mark.parametrize("path", ["/", "/static/viewer.js", "/api/slides", "/?token=wrong", "/x"])
def test_without_the_token_nothing_is_answered(stranger: TestClient, path: str) -> None:
    assert stranger.get(path).status_code == 403
    cookie = {"Cookie": "pathoseg=wrong"}
    assert stranger.get(path, headers=cookie).status_code == 403
    assert stranger.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 403


def test_the_token_becomes_a_cookie_of_a_secret_path(stranger: TestClient) -> None:
    answer = stranger.get(f"/?token={TOKEN}")
    page = answer.headers["location"]
    assert answer.status_code == 303
    assert re.fullmatch(r"/[\w-]{20,}/", page)
    assert TOKEN not in page
    cookie = answer.headers["set-cookie"]
    # Other ports of this host are asked for other paths: they do not get it.
    assert re.search(rf"; path={page}(;|$)", cookie, re.IGNORECASE)
    assert "httponly" in cookie.lower()
    answer = stranger.get(page)
    assert answer.status_code == 200
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert stranger.get(f"{page}api/slides").status_code == 200
    assert stranger.get(f"{page}static/viewer.js").status_code == 200
    for path in ("/", "/api/slides", f"{page[:-2]}/api/slides"):
        assert stranger.get(path, headers={"Cookie": cookie.partition(";")[0]}).status_code == 403
    other = make_app(Gallery([], Path(), 1), TOKEN)
    assert TestClient(other, stranger.base_url).get(page).status_code == 403


def test_the_token_on_the_browsers_command_line_opens_once(tmp_path: Path) -> None:
    app = make_app(Gallery([], tmp_path, 1), TOKEN, "once")
    answers = [
        TestClient(app, f"http://localhost:{PORT}", follow_redirects=False).get("/?token=once")
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [303, 403]


@pytest.mark.parametrize(
    ("headers", "method"),
    [
        ({"Host": "elsewhere.example:8765"}, "GET"),  # a name made to point here
        ({"Host": "127.0.0.1.elsewhere.example"}, "GET"),
        ({"Origin": "http://elsewhere.example"}, "GET"),
        ({"Origin": "http://127.0.0.1:9999"}, "GET"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "GET"),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, "GET"),
        ({}, "POST"),
        ({}, "DELETE"),
    ],
)
def test_other_pages_and_names_are_refused(
    client: TestClient, headers: dict[str, str], method: str
) -> None:
    assert client.request(method, "/api/slides", headers=headers).status_code == 403
    own = {"Origin": f"http://127.0.0.1:{PORT}", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/slides", headers=own).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/",
        "/results",
        "/api/slides/2",
        "/api/slides/-1",
        "/api/slides/0/tile/slide/0/3/0",
        "/api/slides/0/tile/slide/99/0/0",
        "/api/slides/0/tile/..%2f..%2f/0/0/0",
        "/api/slides/0/tile/prediction/0/0/0?show=999",
        "/api/slides/0/tile/prediction/0/0/0?show=x",
        "/api/slides/0/tile/prediction/0/0/0?style=x",
        "/api/slides/0/thumbnail/truth",
        "/api/slides/1/table/objects",
        "/api/slides/0/table/secrets",
        "/api/slides/0/table/regions?sort=rings",
        "/api/slides/0/at?x=nan&y=0",
    ],
)
def test_nothing_but_what_was_given_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


async def _ask(app: Any, path: str, query: str = "") -> tuple[int, bytes]:
    """Ask an application as it is written, past what clients make of an address."""
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())],
    }  # fmt: skip
    asked, sent = iter([{"type": "http.request", "body": b""}]), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return next(asked, None) or await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/..%2fapp.py", "//etc/passwd"])
def test_no_path_is_followed(client: TestClient, path: str) -> None:
    assert asyncio.run(_ask(client.app, path))[0] == 404


# --- pixels -------------------------------------------------------------------------------------


@given(tile=_tiles())
@settings(max_examples=12)
def test_tiles_have_the_slides_pixels(
    tile: tuple[int, Box], place: Place, client: TestClient
) -> None:
    halvings, box = tile
    got = _image(client.get(_address("slide", halvings, box)).content, "RGB")
    with open_slide(place.folder / "slides" / "a.svs") as slide:
        frame = Frame.at(slide.size, slide.mpp, slide.mpp.x * 2**halvings)
        expected = read_region(slide, frame, box).pixels
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).mean() < 2.5  # JPEG
    assert np.abs(got.astype(int).mean((0, 1)) - expected.mean((0, 1))).max() < 1


@given(tile=_tiles(), shown=st.sets(st.sampled_from([1, 2, 255])))
@settings(max_examples=25)
def test_classes_have_exactly_their_colours(
    tile: tuple[int, Box], shown: set[int], place: Place, client: TestClient
) -> None:
    halvings, box = tile
    query = f"?show={','.join(map(str, shown))}"
    got = _image(client.get(_address("prediction", halvings, box, query)).content, "RGBA")
    # A pixel of the tile is 2**halvings of level 0; one of the mask's levels 2, 4, 8…
    with tifffile.TiffFile(place.folder / "results" / "a" / "mask.ome.tiff") as tiff:
        level = min(max(0, halvings - 1), len(tiff.series[0].levels) - 1)
        mask = tiff.series[0].levels[level].asarray()
    step = 2**halvings / 2 ** (level + 1)
    x = np.minimum(((np.arange(box.x, box.right) + 0.5) * step).astype(int), mask.shape[1] - 1)
    y = np.minimum(((np.arange(box.y, box.bottom) + 0.5) * step).astype(int), mask.shape[0] - 1)
    values = mask[np.ix_(y, x)]
    expected = np.zeros((*values.shape, 4), np.uint8)
    for index, colour in enumerate(CLASSES.colours, start=1):
        if index in shown:
            expected[values == index] = (*colour, 255)
    if 255 in shown:
        expected[(values == 255) & hatched(box)] = (*GREY, 255)
    clear = expected[..., 3] == 0
    assert np.array_equal(got[..., 3], expected[..., 3])
    assert np.array_equal(got[~clear], expected[~clear])


def test_outlines_lie_within_their_class_and_cross_tiles(client: TestClient) -> None:
    whole = {
        style: np.concatenate([
            np.concatenate([
                _image(
                    client.get(
                        f"/api/slides/0/tile/prediction/0/{x}/{y}?show=1,2&style={style}"
                    ).content,
                    "RGBA",
                )
                for x in range(3)
            ], axis=1)
            for y in range(3)
        ])[..., 3] > 0
        for style in ("filled", "outlines")
    }  # fmt: skip
    filled, lines = whole["filled"], whole["outlines"]
    assert not (lines & ~filled).any()
    # Two pixels along the border, no matter where tiles meet.
    around = np.pad(filled, 2)
    near = np.zeros_like(filled)
    for dy in range(5):
        for dx in range(5):
            near |= ~around[dy : dy + HEIGHT, dx : dx + WIDTH]
    inside = np.zeros_like(filled)
    inside[2:-2, 2:-2] = True
    assert np.array_equal((filled & near)[inside], lines[inside])


def test_truth_and_difference_lie_where_they_were_drawn(place: Place, client: TestClient) -> None:
    box = Box(0, 0, 512, 512)
    truth = _image(client.get(_address("truth", 1, box, "?show=1", slide=1)).content, "RGBA")
    expected = np.zeros(truth.shape[:2], bool)
    expected[100:300, 150:350] = True
    assert np.array_equal(truth[..., 3] > 0, expected)
    assert tuple(truth[200, 200]) == (*CLASSES.colours[0], 255)  # the model's, not the file's
    got = _image(client.get(_address("difference", 1, box, "?show=1", slide=1)).content, "RGBA")
    predicted = place.mask[:512, :512] * (place.mask[:512, :512] != 255)
    kinds = differences(predicted, expected.astype(np.uint8), [1])
    assert np.array_equal(got[..., 3] > 0, kinds > 0)
    assert {*np.unique(kinds)} == {0, 1, 2, 3}
    assert client.get("/api/slides/1/status").json()["problems"] == []


def test_a_class_that_is_only_drawn_has_a_colour_of_its_own(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predict classes in the colours that classes without one get, as of most models."""
    usual = class_table([], CLASSES.names)
    monkeypatch.setattr(conftest, "CLASSES", usual)
    folder = conftest.make_place(tmp_path).folder
    drawn = folder / "slides" / "b.geojson"
    drawn.write_text(
        drawn.read_text().replace('"gland"', '"fat"').replace(', "color": [1, 2, 3]', "")
    )
    client, _, _ = served(folder / "results")
    classes = client.get("/api/slides/1/truth").json()["classes"]
    assert [one["name"] for one in classes] == [*CLASSES.names, "fat"]
    colours = [tuple(one["colour"]) for one in classes]
    assert tuple(colours[:2]) == usual.colours
    assert len(set(colours)) == 3


@given(
    sizes=st.lists(st.integers(0, 40), max_size=60),
    keys=st.lists(st.integers(0, 15), max_size=60),
)
def test_the_cache_never_holds_more_than_its_bound(sizes: list[int], keys: list[int]) -> None:
    cache, made = EncodedTiles(100), dict[int, bytes]()
    for key, size in zip(keys, sizes, strict=False):
        tile = made.setdefault(key, bytes([key]) * size)
        assert cache.get(key, lambda tile=tile: tile) == tile  # type: ignore[misc]
        assert cache.held <= 100
    if keys and sizes:
        last = keys[: len(sizes)][-1]
        assert cache.get(last, lambda: b"made anew") == made[last]


def test_annotations_that_are_read_hold_up_no_tile(
    place: Place, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, read, reads = threading.Event(), slide_view.read_labels, list[Path]()

    def slow(path: Path, *arguments: Any) -> Any:
        reads.append(path)
        assert may_read.wait(30)
        return read(path, *arguments)

    monkeypatch.setattr(slide_view, "read_labels", slow)
    app = served(place.folder / "results")[0].app

    async def ask_all() -> list[int]:
        truth = [
            asyncio.create_task(_ask(app, f"/api/slides/1/tile/truth/0/{column}/0", "show=1"))
            for column in range(3)
        ]
        try:
            while not reads:
                await asyncio.sleep(0.01)
            status, _ = await asyncio.wait_for(_ask(app, "/api/slides/0/tile/slide/0/0/0"), 10)
            assert not any(task.done() for task in truth)
        finally:
            may_read.set()
        return [status, *[answer[0] for answer in await asyncio.gather(*truth)]]

    assert asyncio.run(ask_all()) == [200] * 4
    assert len(reads) == 1


# --- tables -------------------------------------------------------------------------------------


def test_regions_are_sorted_counted_and_found(client: TestClient) -> None:
    found = _table(client, "/api/slides/0/table/regions?sort=area&order=desc")
    areas = [row["area_um2"] for row in found["rows"]]
    assert found["total"] == 4
    assert areas == sorted(areas, reverse=True)
    assert areas[2] == pytest.approx(np.pi * 80**2 * 0.25, rel=0.01)  # has no measurement
    only = _table(client, "/api/slides/0/table/regions?class=gland&sort=x&order=asc")
    assert [row["x"] for row in only["rows"]] == [400, 840]
    assert _table(client, "/api/slides/0/table/regions?page=1")["rows"] == []

    def hit(x: float, y: float) -> Any:
        return client.get(f"/api/slides/0/at?x={x}&y={y}").json()

    assert hit(840, 600)["class"] == "gland"  # in the hole of the ring
    assert hit(840, 430)["class"] == "tumour"
    assert hit(840, 680) is None
    assert hit(840, 430)["measurements"] == {"Area µm^2": 37385.0}
    number = hit(840, 430)["id"]
    assert client.get(f"/api/slides/0/table/regions/{number}").json()["class"] == "tumour"
    assert client.get("/api/slides/0/table/regions/77").status_code == 404


def test_tables_together_have_a_bound(
    place: Place, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery_module, "MOST_BYTES", 0)
    client, gallery, _ = served(place.folder / "results")
    first = _table(client, "/api/slides/0/table/regions")
    before = gallery.index(0, "regions")
    assert before.size > 0
    assert _table(client, "/api/slides/1/table/regions")["total"] == 4
    assert before.size == 0
    assert _table(client, "/api/slides/0/table/regions") == first  # is read again


# --- what is broken -----------------------------------------------------------------------------


def test_a_result_without_its_slide_shows_the_mask_alone(own_place: Place, served: Served) -> None:
    slides = own_place.folder / "slides"
    slides.rename(own_place.folder / "moved")
    client, _, _ = served(own_place.folder / "results")
    details = client.get("/api/slides/0").json()
    assert "--slides DIR" in details["problem"]
    assert (details["width"], details["height"], details["mpp"]) == (WIDTH, HEIGHT, [0.5, 0.5])
    assert _image(client.get("/api/slides/0/tile/slide/0/0/0").content, "RGB").min() > 250
    tile = client.get("/api/slides/0/tile/prediction/0/0/0?show=1").content
    assert tuple(_image(tile, "RGBA")[300, 400]) == (*CLASSES.colours[0], 255)
    there, _, _ = served(own_place.folder / "results", slides=[own_place.folder / "moved"])
    assert there.get("/api/slides/0").json()["slide"] == "a.svs"


def test_a_damaged_mask_is_told_and_the_slide_goes_on(own_place: Place, served: Served) -> None:
    path = own_place.folder / "results" / "a" / "mask.ome.tiff"
    client, _, told = served(own_place.folder / "results")
    assert client.get("/api/slides/0").json()["prediction"]
    content = path.read_bytes()
    with path.open("r+b") as file:  # what the header points at is no longer there
        file.truncate(len(content) // 3)
    for _ in range(2):
        answer = client.get("/api/slides/0/tile/prediction/0/0/0?show=1")
        assert answer.status_code == 422
        assert str(path) in answer.json()["problem"]
    assert len(told) == 1
    assert client.get("/api/slides/0/status").json()["problems"] == told
    assert client.get("/api/slides/0/tile/slide/0/0/0").status_code == 200
    # Opened when it is cut short already.
    again, _, _ = served(own_place.folder / "results")
    details = again.get("/api/slides/0").json()
    assert details["status"] == "cut short"
    assert not details["prediction"]
    assert [problem for problem in details["problems"] if str(path) in problem]


def test_what_has_another_extent_is_stretched_with_its_probabilities(
    own_place: Place, served: Served
) -> None:
    folder = own_place.folder / "results" / "a"
    size = Size(own_place.mask.shape[1], own_place.mask.shape[0])
    for name in ("mask.ome.tiff", "probability.ome.tiff"):  # of which 255 is the last corner
        write_mask(folder / name, size, Mpp(0.7, 0.7), [own_place.mask], CLASSES)
    client, _, told = served(folder)
    for layer in ("prediction", "probability"):
        tile = client.get(f"/api/slides/0/tile/{layer}/0/2/1?show=255").content
        clear, corner = (_image(tile, "RGBA")[500:560, x : x + 20, 3] for x in (150, 400))
        assert (clear.max(), corner.max()) == (0, 255)
    assert len(told) == 1
    assert "stretched over the slide" in told[0]


def test_a_slide_that_fails_in_the_middle_is_hatched_and_told(
    own_place: Place, served: Served
) -> None:
    path = own_place.folder / "slides" / "b.svs"
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        tiles = [(page.dataoffsets[at], page.databytecounts[at]) for at in (0, 4)]
    client, gallery, told = served(own_place.folder / "results")
    assert client.get("/api/slides/1").status_code == 200
    with path.open("r+b") as file:
        for offset, count in tiles:
            file.seek(offset)
            file.write(b"\x13\x37" * (count // 2))
    pixels = _image(client.get("/api/slides/1/tile/slide/0/0/0").content, "RGB").astype(int)
    assert np.abs(pixels[:200, :200].reshape(-1, 3).min(axis=0) - GREY).max() < 30
    assert np.abs(pixels[300:, 300:] - (230, 180, 200)).max() < 4
    for tile in ("0/2/0", "1/0/0"):  # damage elsewhere, and the same at another level
        hatch = _image(client.get(f"/api/slides/1/tile/slide/{tile}").content, "RGB").astype(int)
        assert np.abs(hatch[:60, :60].reshape(-1, 3).min(axis=0) - GREY).max() < 30
    assert len(told) == 1
    assert str(path) in told[0]
    path.unlink()
    assert client.get("/api/slides").status_code == 200
    # The handle that is open still reads. Where the file has to be opened anew, the mask is left.
    assert client.get("/api/slides/1/tile/slide/0/1/1").status_code == 200
    gallery.close()
    assert _image(client.get("/api/slides/1/tile/slide/0/2/1").content, "RGB").min() > 250
    assert len(told) == 2
    assert client.get("/api/slides/1/status").json()["problems"] == told


def test_annotations_that_cannot_be_read_are_told_and_read_once(
    own_place: Place, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, reads = own_place.folder / "slides" / "b.geojson", slide_view.read_labels, [0]
    path.write_text('{"type": "Feature"')

    def counted(*arguments: Any) -> Any:
        reads[0] += 1
        return read(*arguments)

    monkeypatch.setattr(slide_view, "read_labels", counted)
    client, _, told = served(own_place.folder / "results")
    for address in ("truth", "tile/truth/0/0/0?show=1", "tile/difference/0/0/0?show=1"):
        answer = client.get(f"/api/slides/1/{address}")
        assert answer.status_code == 422
        assert str(path) in answer.json()["problem"]
    assert reads == [1]
    assert len(told) == 1
    assert client.get("/api/slides/1/status").json()["problems"] == told


def test_a_bug_is_answered_in_json_and_told(
    place: Place, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, gallery, told = served(place.folder / "results")

    def broken(slide: int) -> Any:
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(gallery, "details", broken)
    answer = TestClient(
        client.app, client.base_url, headers=client.headers, raise_server_exceptions=False
    ).get("/api/slides/0")
    assert answer.status_code == 500
    assert "what nobody thought of" in answer.json()["problem"]
    assert told == [answer.json()["problem"]]


@pytest.mark.parametrize(
    "path",
    [
        f"regions?page={'9' * 30}", "regions?page=x", "regions?page=-1",
        f"regions/{'9' * 30}", "objects/2", "elephants/1",
    ],
)  # fmt: skip
def test_numbers_out_of_bounds_are_no_error_of_the_server(client: TestClient, path: str) -> None:
    _table(client, "/api/slides/0/table/regions")
    assert client.get(f"/api/slides/0/table/{path}").status_code == 404


def test_a_mask_without_classes_is_shown_where_it_is_unread(
    own_place: Place, served: Served
) -> None:
    path = own_place.folder / "results" / "a" / "mask.ome.tiff"
    path.unlink()
    tifffile.imwrite(path, own_place.mask, tile=(256, 256), ome=True)
    client, _, _ = served(own_place.folder / "results")
    tile = client.get("/api/slides/0/tile/prediction/1/1/1?show=255")
    assert tile.status_code == 200
    assert _image(tile.content, "RGBA")[..., 3].any()


def test_a_file_that_is_no_slide_is_told(own_place: Place, served: Served) -> None:
    path = own_place.folder / "slides" / "c.svs"
    path.write_bytes(b"not a slide")
    client, _, _ = served(own_place.folder / "slides")
    names = [entry["name"] for entry in client.get("/api/slides").json()]
    answer = client.get(f"/api/slides/{names.index('c.svs')}")
    assert answer.status_code == 422
    assert str(path) in answer.json()["problem"]
    assert client.get("/api/slides/0").status_code == 200


# --- what is held -------------------------------------------------------------------------------


def test_few_files_stay_open_however_many_slides_are_seen(own_place: Place, served: Served) -> None:
    out, result = own_place.folder / "many", own_place.folder / "results" / "b"
    for number in range(40):  # one result, linked
        shutil.copytree(result, out / str(number), copy_function=os.link)
    client, gallery, _ = served(out, slides=[own_place.folder / "slides"])
    process = psutil.Process()
    before = process.num_fds()
    for number in range(40):
        assert client.get(f"/api/slides/{number}").json()["prediction"]
        assert client.get(f"/api/slides/{number}/thumbnail/prediction").status_code == 200
        assert client.get(f"/api/slides/{number}/tile/slide/1/0/0").status_code == 200
    assert process.num_fds() - before < 30
    gallery.close()
    assert process.num_fds() <= before


def test_pictures_that_were_seen_are_let_go(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, decoded, decode = 600, list[weakref.ref[Any]](), ImageSlide._open

    def recorded(slide: ImageSlide) -> Any:
        image = decode(slide)
        decoded.append(weakref.ref(image))
        return image

    monkeypatch.setattr(ImageSlide, "_open", recorded)
    for number in range(5):
        picture = Image.new("RGB", (side, side), (number, 0, 0))
        picture.save(tmp_path / f"{number}.png", dpi=(50800, 50800))
    client, _, _ = served(tmp_path)
    for number in range(5):
        assert client.get(f"/api/slides/{number}").json()["width"] == side
        assert client.get(f"/api/slides/{number}/tile/slide/0/0/0").status_code == 200
    gc.collect()
    assert len(decoded) >= 5
    assert sum(one() is not None for one in decoded) <= 1


def test_who_reads_a_mask_goes_on_while_it_is_closed(place: Place, served: Served) -> None:
    _, gallery, _ = served(place.folder / "results")
    mask = gallery.view(0).opened.mask
    assert mask is not None
    gallery.view(0).close()
    assert mask.read(0, Box(200, 150, 1, 1))[0, 0] == 1
    assert gallery.view(0).opened.mask is not mask
