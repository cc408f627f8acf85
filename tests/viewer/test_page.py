"""The page in a real browser: what is drawn, pixel by pixel, and what keys and clicks do."""

from __future__ import annotations

import io
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray
from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from pathoseg.errors import PathosegError
from pathoseg.viewer.app import library_is_installed, make_app
from pathoseg.viewer.gallery import Gallery
from tests.viewer.conftest import CLASSES, PINK, TOKEN, Place, Served

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.process]

StartPython = Callable[..., subprocess.Popen[str]]
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUICK = 20  # seconds that anything on the page may take


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """A headless Chromium with a window of 1,200 × 800."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("chromium and chromedriver (Debian's chromium-driver) are not installed")
    if not library_is_installed():
        pytest.skip("OpenSeadragon is not installed: `make install` where npm's registry is")
    options = ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
        *("--window-size=1200,800", "--force-device-scale-factor=1", "--force-color-profile=srgb"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The viewer's page of a slide.

    Args:
        browser: Shows it.
    """

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)  # type: ignore[no-untyped-call]

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        WebDriverWait(self.browser, QUICK, 0.05).until(
            lambda _: self.run(f"return Boolean({condition})")
        )

    def settle(self) -> None:
        """Wait until everything that is asked for is drawn and nothing moves."""
        for _ in range(3):  # what a key asked for begins in the next frame
            self.browser.execute_async_script("requestAnimationFrame(arguments[0])")  # type: ignore[no-untyped-call]
        self.until(
            "osd && osd.isOpen() && !osd.isAnimating() && "
            "[...Array(osd.world.getItemCount()).keys()]"
            ".every((i) => osd.world.getItemAt(i).getFullyLoaded()) && "
            "[...layers.values()].every((one) => !one.wanted || "
            "one.item && Math.abs(one.item.getOpacity() - one.wanted.opacity) < 1e-6) && "
            "osd.viewport.getContainerSize().x === at('view').clientWidth"
        )

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    def element(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def move(self, x: float, y: float, times: float) -> None:
        self.run(f"moveTo({x}, {y}, {times}, true)")
        self.settle()

    def screen(self, x: float, y: float) -> tuple[int, int]:
        """Return where a point of level 0 lies on the stage."""
        found = self.run(
            "const p = osd.viewport.pixelFromPoint("
            f"level0().imageToViewportCoordinates({x}, {y}, true), true); return [p.x, p.y]"
        )
        return round(found[0]), round(found[1])

    def colour(self, x: float, y: float) -> NDArray[np.int64]:
        """Return the colour on the screen at a point of level 0."""
        self.settle()
        shot = self.browser.get_screenshot_as_png()
        pixels = np.array(Image.open(io.BytesIO(shot)).convert("RGB")).astype(np.int64)
        box = self.run("const b = at('stage').getBoundingClientRect(); return [b.left, b.top]")
        across, down = self.screen(x, y)
        found: NDArray[np.int64] = pixels[down + round(box[1]), across + round(box[0])]
        return found

    def shows(self, x: float, y: float, expected: NDArray[Any] | tuple[int, ...]) -> None:
        """Wait until a point of level 0 has a colour: what is loaded is drawn frames later."""
        end = time.monotonic() + QUICK
        # JPEG gives back a flat colour to 1, and the browser rounds once more.
        while np.abs((got := self.colour(x, y)) - np.asarray(expected)).max() > 2:
            assert time.monotonic() < end, (got, expected)

    def click(self, x: float, y: float) -> None:
        stage = self.element("#stage")
        across, down = self.screen(x, y)
        left, top = stage.size["width"] / 2, stage.size["height"] / 2
        ActionChains(self.browser).move_to_element_with_offset(
            stage, round(across - left), round(down - top)
        ).click().perform()


def _blended(class_index: int, opacity: float) -> NDArray[np.float64]:
    colour, ground = np.array(CLASSES.colours[class_index - 1]), np.array(PINK)
    return ground + opacity * (colour - ground)


class Gate:
    """Holds up the tiles of one layer.

    Args:
        gallery: Their source.
        layer: The layer.
    """

    def __init__(self, gallery: Gallery, layer: str) -> None:
        self.gallery = gallery
        self._open, make = threading.Event(), gallery.tile

        def tile(slide: int, asked: str, *arguments: Any) -> bytes:
            if asked == layer:
                assert self._open.wait(QUICK)
            return make(slide, asked, *arguments)

        self.release()
        gallery.tile = tile  # type: ignore[method-assign]

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @contextmanager
    def holding(self, answer: str) -> Iterator[None]:
        """Make a context in which another answer of the gallery's is held up."""
        going, make = threading.Event(), getattr(self.gallery, answer)

        def held(*arguments: Any) -> Any:
            assert going.wait(QUICK)
            return make(*arguments)

        setattr(self.gallery, answer, held)
        try:
            yield
        finally:
            setattr(self.gallery, answer, make)
            going.set()


@pytest.fixture(scope="module")
def shown(
    place: Place, served: Served, browser: Chrome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Page, Gate]]:
    """A page of a, b, c and d, which is no slide, and the gate of its predictions."""
    bad = tmp_path_factory.mktemp("bad") / "d.svs"
    bad.write_bytes(b"not a slide")
    gallery = served(place.folder / "results", place.folder / "slides", bad)[1]
    gate = Gate(gallery, "prediction")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        app = make_app(gallery, TOKEN)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        browser.get(f"http://127.0.0.1:{port}/?token={TOKEN}")
        page = Page(browser)
        page.until("slides.length > 0")
        yield page, gate
        gate.release()
        server.should_exit = True
        thread.join()


def _open(page: Page, name: str) -> None:
    _show(page, name)
    page.settle()


def _show(page: Page, name: str) -> None:
    page.run(f"told(showSlide(slides.findIndex((one) => one.name === '{name}')))")
    page.until(f"slide && slide.name === '{name}'")


def test_a_mask_that_is_switched_off_while_it_loads_is_gone(shown: tuple[Page, Gate]) -> None:
    page, gate = shown
    _open(page, "b.svs")
    gate.hold()
    page.press("1")
    page.until("layers.get('prediction').item !== layers.get('prediction').shown")
    page.press("h")
    gate.release()
    assert page.run("return osd.world.getItemCount()") == 1
    page.shows(400, 300, PINK)
    page.press("h", "1")
    page.settle()
    gate.hold()  # two quick changes: the second one is what stays
    page.press("1")
    page.until("layers.get('prediction').item !== layers.get('prediction').shown")
    first = "osd.world.getItemAt(osd.world.getItemCount() - 1)"
    page.run(f"window.before = {first}")
    page.press("2")
    page.until(f"{first} !== window.before")
    gate.release()
    page.settle()
    page.until("osd.world.getItemCount() === 2")
    page.shows(400, 300, PINK)
    page.shows(840, 430, PINK)
    page.press("1", "2", "t", "o", "o")  # a layer that is drawn anew stays below the next one
    page.settle()
    assert page.run(
        "return osd.world.getIndexOfItem(layers.get('prediction').item)"
        " < osd.world.getIndexOfItem(layers.get('truth').item)"
    )
    page.press("t")


def test_an_outline_goes_with_its_slide(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "a.svs")
    page.run("told(select({x: 840, y: 430}))")
    page.until("!at('card').hidden")
    _open(page, "b.svs")
    assert page.run("return at('outline').getAttribute('d')") == ""
    assert page.run("return at('card').hidden")


def test_keys_on_a_slide(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "a.svs")
    page.move(700, 500, 20)
    page.press(Keys.ARROW_RIGHT)
    page.until("level0().viewportToImageCoordinates(osd.viewport.getCenter()).x > 701")
    page.press("?")
    page.until("at('keys').open")
    page.press(Keys.ESCAPE)
    page.until("!at('keys').open")
    page.press("2", "n")  # what is hidden stays hidden on the next slide
    page.until("slide && slide.name === 'b.svs'")
    page.settle()
    page.shows(840, 430, PINK)
    page.shows(400, 300, _blended(1, 0.5))
    page.press("2")
    page.browser.back()
    page.until("slide && slide.name === 'a.svs'")
    page.settle()
    page.browser.back()
    page.until("!slide || slide.name !== 'a.svs'")


def test_an_animation_that_ends_after_back_keeps_the_address_of_the_slide_to_come(
    shown: tuple[Page, Gate],
) -> None:
    page, _ = shown
    _open(page, "a.svs")
    page.run("location.hash = 'b.svs'; keepPlace()")  # the page hears of the address later
    page.until("slide && slide.name === 'b.svs'")


def test_keys_and_buttons_where_there_is_no_slide(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "b.svs")
    page.browser.get_log("browser")  # type: ignore[no-untyped-call]
    page.run("told(showSlide(slides.findIndex((one) => one.name === 'd.svs')))")
    page.until("slide && slide.failed")
    page.press(*"12oh[]0+-ctds")
    assert not page.element("#magnification").is_displayed()
    assert page.run("return location.hash") == "#d.svs"
    assert page.run("return at('toast').hidden || at('toast').textContent") in (
        *(True, "This is the last slide."),
    )
    page.press("p")
    page.until("slide && slide.name === 'c.svs'")
    page.settle()
    page.run("at('filter').value = 'b'; filterGallery()")
    page.press("g")
    page.until("!slide && !at('gallery').hidden")
    page.run("location.hash = '#%E0%A4,1,1,1'")
    page.until("at('toast').textContent.includes('not among')")
    page.run("at('filter').value = ''; filterGallery()")
    errors = page.browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert not [one for one in errors if "422" not in one["message"]]


def test_annotations_are_drawn_once_they_are_read(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "a.svs")
    page.run("state.truth = true")
    page.run("told(showSlide(slides.findIndex((one) => one.name === 'b.svs')))")
    page.until("slide && slide.name === 'b.svs' && slide.truthRead")
    page.settle()
    page.until("layers.get('truth').item !== null")
    page.run("slide.truthRead = false; drawLayers()")
    assert page.run("return layers.get('truth').item") is None
    page.run("state.truth = false")


def test_nothing_is_compared_where_no_annotations_are_read(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "b.svs")
    page.until("slide.truthRead")
    page.press("d")
    page.settle()
    page.until("layers.get('difference')?.item && !layers.get('prediction')?.item")
    page.run("slide.truthRead = false; drawLayers()")  # they are being read, or cannot be
    page.until("!layers.get('difference')?.item && layers.get('prediction')?.item")
    _open(page, "a.svs")  # it has none
    page.until("layers.get('prediction')?.item")
    page.run("state.difference = false; toggle('swipe')")
    assert page.run("return at('swipe-line').hidden")
    page.press("h")
    _open(page, "b.svs")
    page.until("!at('swipe-line').hidden")
    page.until("layers.get('prediction')?.item && layers.get('truth')?.item")  # on, as both are
    page.press("h", "s")


def test_a_slide_that_is_left_has_nothing_under_way(shown: tuple[Page, Gate]) -> None:
    page, gate = shown
    _open(page, "a.svs")
    page.run(
        "window.plain = fetch; window.ended = []; window.fetch = (path, how) => "
        "plain(path, how).catch((error) => { ended.push(path); throw error; })"
    )
    with gate.holding("truth"):
        _open(page, "b.svs")
        _open(page, "a.svs")
        page.until("ended.some((path) => path.endsWith('/truth'))")
    assert page.run("window.fetch = plain; return at('toast').textContent") != (
        "The viewer in the terminal has ended."
    )
    images = "document.querySelectorAll('#cards img')"
    page.press("g")
    with gate.holding("thumbnail"):
        page.browser.refresh()  # it forgets the images
        page.until(f"{images}.length === 5")
        _show(page, "a.svs")  # its tiles come once the readers are free again
        assert page.run(f"return {images}.length") == 0
    page.settle()
    page.press("g")
    page.until(f"{images}.length === 5 && [...{images}].every((one) => one.naturalWidth > 0)")


def test_keys_and_back_while_a_slide_loads_go_from_it(shown: tuple[Page, Gate]) -> None:
    page, gate = shown
    _open(page, "a.svs")
    with gate.holding("details"):
        page.press("n", "n", "h")
        assert page.run("return state.prediction")  # of no slide that is on its way
    page.until("slide.name === 'c.svs'")
    page.settle()
    with gate.holding("details"):
        page.press("p")
        page.browser.back()
    page.until("slide.id === target && slide.name === 'c.svs'")
    page.settle()
    assert page.run("return location.hash").startswith("#c.svs")


def test_a_problem_that_passes_is_no_longer_told(shown: tuple[Page, Gate]) -> None:
    page, gate = shown
    _open(page, "a.svs")
    status = gate.gallery.status

    def fails(slide: int) -> dict[str, Any]:
        raise PathosegError("The disk is busy.", "Wait.")

    gate.gallery.status = fails  # type: ignore[method-assign]
    page.run("askStatus()")
    page.until("at('problems').textContent.includes('busy')")
    gate.gallery.status = status  # type: ignore[method-assign]
    page.until("!at('problems').textContent.includes('busy')")  # by the next poll


def test_the_panel_goes_by_the_keyboard(shown: tuple[Page, Gate]) -> None:
    page, _ = shown
    _open(page, "b.svs")
    page.run("at('class-2').focus()")
    for is_hidden in (True, False):
        page.press(Keys.SPACE)
        assert page.run("return state.hidden.has('tumour')") == is_hidden
        assert page.run("return document.activeElement.id") == "class-2"
    page.element("#tabs button:nth-child(2)").click()
    page.until("at('table').tBodies[0].rows.length === 4")
    page.run("document.querySelector('#table tbody button').focus()")
    page.press(Keys.ENTER)
    page.until("!at('card').hidden")
    page.run("showTab('layers')")
    pressed = "document.dispatchEvent(new KeyboardEvent('keydown', {key: ']', "
    for modifiers, opacity in (("altKey: true, ctrlKey: true", 0.6), ("metaKey: true", 0.6)):
        page.run(f"{pressed}{modifiers}}}))")
        assert page.run("return state.opacity") == opacity
    page.press("[")


def test_what_a_pathologist_does(
    place: Place, browser: Chrome, start_python: StartPython, tmp_path: Path
) -> None:
    folders = place.folder / "results", place.folder / "slides"
    server = start_python("view", *map(str, folders), "--no-browser", "--port", "0")
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    page = Page(browser)

    browser.get(address.replace("token=", "token=x"))
    assert "answers only to the address" in page.element("body").text
    browser.get_log("browser")  # it names the refusal

    browser.get(address)
    page.until("document.querySelectorAll('#cards img').length === 5")  # 3 slides, 2 masks
    assert browser.current_url.endswith("/")  # without its token, below a path that nobody knows
    page.until("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    cards = page.element("#cards").text
    assert "b.svs" in cards
    assert "gland" in cards

    page.element("[data-name='b.svs']").click()
    page.settle()
    page.shows(1100, 150, PINK)
    page.shows(400, 300, _blended(1, 0.5))
    page.shows(840, 430, _blended(2, 0.5))

    page.press("1")  # a class off and on
    page.shows(400, 300, PINK)
    page.shows(840, 430, _blended(2, 0.5))
    page.element("#class-1").click()
    page.shows(400, 300, _blended(1, 0.5))
    page.press("]", "]")
    page.shows(400, 300, _blended(1, 0.7))
    page.press("o")  # outlines leave the middle clear
    page.shows(400, 300, PINK)
    page.press("o", "[", "[")

    page.move(1000, 250, 20)  # a pixel of the slide is one of the screen
    assert page.run("return screenMicrons()") == pytest.approx(0.5)
    assert page.run("return at('scale-line').offsetWidth * screenMicrons()") == pytest.approx(
        float(page.element("#scale-text").text.split()[0]), rel=0.03
    )
    page.shows(1300, 240, _blended(2, 0.5))
    page.shows(1100, 240, PINK)
    place_linked = browser.current_url
    assert place_linked.endswith("#b.svs,1000,250,20")

    page.press("0")
    page.settle()
    page.click(840, 430)
    page.until("!at('card').hidden")
    assert "tumour" in page.element("#card").text
    assert "37,385" in page.element("#card").text
    page.click(840, 600)  # an object in the other's hole
    page.until("at('card').textContent.includes('gland')")
    page.press(Keys.ESCAPE)
    assert not page.element("#card").is_displayed()

    page.press("d")  # a square of 300 to 700 across, 200 to 600 down is annotated as gland
    page.shows(320, 590, np.array(PINK) + 0.5 * (np.array([45, 110, 235]) - PINK))
    page.shows(250, 300, np.array(PINK) + 0.5 * (np.array([230, 60, 50]) - PINK))
    page.shows(690, 590, np.array(PINK) + 0.5 * (np.array([240, 170, 20]) - PINK))
    page.shows(400, 300, PINK)
    page.press("d", "s")
    page.run("state.swipeAt = 0.5; drawMarks()")
    page.move(500, 400, 5)
    page.shows(680, 560, _blended(1, 0.5))  # annotated, right of the line
    page.shows(320, 560, PINK)  # annotated, left of it
    page.press("s")

    page.element("#tabs button:nth-child(2)").click()
    page.until("at('table').tBodies[0].rows.length === 4")
    areas = [row.split()[1] for row in page.element("#table tbody").text.splitlines()]
    assert areas[:2] == ["37,385", "25,447"]
    page.element("#table tbody tr").click()
    page.until("!at('card').hidden && Math.abs(level0().viewportToImageCoordinates("
               "osd.viewport.getCenter(true)).x - 840) < 2")  # fmt: skip

    page.press("n")
    page.until("slide.name === 'c.svs'")
    page.settle()
    assert browser.get_log("browser") == []
    browser.get(place_linked)
    page.until("slide && slide.name === 'b.svs'")
    page.settle()
    assert page.run("return screenMicrons()") == pytest.approx(0.5, rel=1e-3)

    browser.get(place_linked.split("#")[0] + "#a.svs,400,300,10")
    page.until("slide && slide.name === 'a.svs'")
    page.settle()
    page.until("[...at('tabs').children].some((one) => one.textContent === 'Objects')")
    for across, circularity in ((360, "0.875"), (440, "0.75")):  # neighbours, of one region
        page.click(across, 300)
        page.until(f"!at('card').hidden && at('card').textContent.includes('{circularity}')")
        assert "Circularity" in page.element("#card").text

    server.send_signal(signal.SIGINT)
    assert server.wait(10) == 130
    assert "Take care" not in server.stdout.read()
    page.press("p")
    page.until("at('problems').textContent.includes('has ended')")
