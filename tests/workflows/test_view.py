"""The command `view`: what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pathoseg.errors import PathosegError
from pathoseg.workflows import view as workflow
from tests.conftest import draw_disc
from tests.forked import Forked

Command = Callable[..., tuple[int, str]]
Start = Callable[..., Forked]

OPTIONS = ("--no-browser", "--assume-mpp", "0.5")


@pytest.fixture
def slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A slide; the page's library counts as installed, wherever this runs."""
    monkeypatch.setattr(workflow, "library_is_installed", lambda: True)
    draw_disc(tmp_path / "slide.png", 0)
    return tmp_path / "slide.png"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_another_host_than_this_one_is_refused(slide: Path, command: Command, host: str) -> None:
    code, said = command("view", slide, *OPTIONS, "--host", host)
    assert code == 2
    assert "ssh -L" in said


def test_a_port_that_is_taken_is_told(slide: Path, command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = command("view", slide, *OPTIONS, "--port", port)
    assert code == 2
    assert f"Port {port}" in said
    assert "--port" in said


def test_nothing_to_show_and_no_library_are_told(
    slide: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = command("view", *OPTIONS)
    assert code == 2
    assert "pathoseg view RESULTS" in said
    code, said = command("view", "none", *OPTIONS)
    assert code == 2
    assert "none does not exist" in said
    Path("note.csv").write_text("slide\n")
    code, said = command("view", "note.csv", *OPTIONS)
    assert code == 2
    assert "note.csv is in no format" in said
    monkeypatch.setattr(workflow, "library_is_installed", lambda: False)
    code, said = command("view", slide, *OPTIONS)
    assert code == 2
    assert "OpenSeadragon" in said
    assert "make install" in said


def test_a_run_without_slides_is_told(slide: Path, command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "splits.csv").write_text("slide,split\na.png,train\n")
    code, said = command("view", run, *OPTIONS)
    assert code == 2
    assert "names no slides" in said


def _status(port: int) -> int | None:
    """Return the status of a request without the token; None while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_slides_of_a_run_that_were_moved_are_shown(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[data]\nslides = "gone"\nannotations = "drawn"\n')
    (tmp_path / "splits.csv").write_text("slide,split\na.png,train\n")
    config, shown = workflow._configured([tmp_path], None, {"data": {"slides": "moved"}})
    assert shown == [Path("moved")]
    assert config.data.annotations == "drawn"


def test_slides_of_a_run_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, elsewhere = tmp_path / "lab" / "runs" / "one", tmp_path / "elsewhere"
    for folder in (run, tmp_path / "lab" / "slides", tmp_path / "lab" / "drawn", elsewhere):
        folder.mkdir(parents=True)
    (run / "config.toml").write_text('[data]\nslides = "slides"\nannotations = "drawn"\n')
    (run / "splits.csv").write_text("slide,split\na.png,train\n")
    monkeypatch.chdir(elsewhere)
    for given in (run, Path("../lab/runs/one")):
        config, shown = workflow._configured([given], None, {})
        assert shown == [tmp_path / "lab" / "slides"]
        assert config.data.annotations == str(tmp_path / "lab" / "drawn")
    (tmp_path / "lab" / "slides").rmdir()
    with pytest.raises(PathosegError, match="names the slides slides, which are neither"):
        workflow._configured([run], None, {})
    (elsewhere / "slides").mkdir()
    assert workflow._configured([run], None, {})[1] == [Path("slides")]


@pytest.mark.parametrize("is_run", [True, False])
def test_a_folder_without_slides_of_the_run_is_not_taken_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_run: bool
) -> None:
    """Runs are named like cohorts, and lie beside each other."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / ("lung" if is_run else "one")
    run.mkdir(parents=True)
    (run / "config.toml").write_text('[data]\nslides = "lung"\nannotations = "drawn"\n')
    (run / "splits.csv").write_text("slide,split\na.png,train\n")
    for folder in ("runs/lung", "runs/drawn", "lung", "drawn"):
        Path(folder).mkdir(exist_ok=True)
    Path("lung/a.png").touch()
    config, shown = workflow._configured([run], None, {})
    assert shown == [tmp_path / "lung"]
    assert config.data.annotations == str(tmp_path / "drawn")
    Path("lung/a.png").rename(
        "a.png"
    )  # they are elsewhere now: another run is still no folder of them
    assert (workflow._configured([run], None, {})[1] == [tmp_path / "lung"]) == is_run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_comes(
    tmp_path: Path, slide: Path, start: Start, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = (
        "import pathoseg.workflows.view as view; view.library_is_installed = lambda: True;"
        # A browser that stays in front, and asks for what lies on a file server that has gone away:
        # the server waits for neither.
        "import os, pathlib, time, urllib.request as web; os.environ['DISPLAY'] = ':0';"
        "browser = web.build_opener(web.HTTPCookieProcessor());"
        "api = lambda page: browser.open(page.geturl() + 'api/slides');"
        "view.webbrowser.open = lambda address: api(browser.open(address));"
        "hang = lambda _: (pathlib.Path('asked').touch(), time.sleep(60));"
        "view.Gallery.overview = hang;"
        "import runpy; runpy.run_module('pathoseg', run_name='__main__')"
    )
    options = (*OPTIONS[1:], "--port", str(port))  # with a browser
    with Forked(["view", str(slide), *options], tmp_path, program) as server:
        try:
            deadline = time.monotonic() + 30
            while _status(port) != 403 or not (tmp_path / "asked").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server.send_signal(number)
            said, _ = server.communicate(20)
        finally:
            server.kill()
        assert server.returncode == 128 + number
    assert re.search(rf"^http://127\.0\.0\.1:{port}/\?token=\S{{20,}}$", said, re.MULTILINE)
    assert "Traceback" not in said
