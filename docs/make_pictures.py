"""Takes the pictures of the documentation: the viewer's pages as headless Chromium draws them.

    python docs/make_pictures.py results/ --out docs/ [--slide NAME] [--at X,Y,MAGNIFICATION]

Chromium and its driver are Debian's `chromium` and `chromium-driver`.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WIDTH, HEIGHT = 1280, 800
SECONDS, SETTLED = 60, 3  # that a page may take; for what it loads in the end
DRAWN = """
const places = [...Array(osd.world.getItemCount()).keys()];
return osd.isOpen() && !osd.isAnimating()
    && places.every((place) => osd.world.getItemAt(place).getFullyLoaded());
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results, slides or report pages")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--slide", default="", metavar="NAME", help="the file to show")
    parser.add_argument("--at", default="", metavar="X,Y,MAGNIFICATION", help="the place to show")
    options = parser.parse_args()
    pages = [path for path in options.results if path.suffix == ".html"]
    with chromium() as browser:
        for page in pages:
            browser.get(page.resolve().as_uri())
            save(browser, options.out / f"{page.parent.name}-{page.stem}.png")
        others = [path for path in options.results if path not in pages]
        if others:
            with viewer(others) as address:
                photograph(browser, address, options.out, options.slide, options.at)


@contextmanager
def chromium() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
        *(f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=1"),
    ):
        options.add_argument(argument)
    browser = Chrome(options, Service(shutil.which("chromedriver") or "chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


@contextmanager
def viewer(places: list[Path]) -> Iterator[str]:
    """Start the viewer, and yield its address with the token."""
    command = [sys.executable, "-m", "pathoseg", "view", "--no-browser", *map(str, places)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = (re.search(r"http://\S+", line) for line in process.stdout)
        found = next((match for match in said if match), None)
        if found is None:
            sys.exit("the viewer did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def photograph(browser: Chrome, address: str, out: Path, name: str, at: str) -> None:
    """Take pictures of the gallery, and of a slide."""
    browser.get(address)
    time.sleep(SETTLED)
    save(browser, out / "viewer-gallery.png")
    browser.execute_script(f"location.hash = '#{','.join(filter(None, (name, at)))}'")
    waiting = WebDriverWait(browser, SECONDS, 0.2)
    waiting.until(lambda _: browser.execute_script(DRAWN))
    time.sleep(SETTLED)
    save(browser, out / "viewer.png")


def save(browser: Chrome, path: Path) -> None:
    """Save what the window shows, in 256 colours."""
    shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    shot.quantize(256).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
