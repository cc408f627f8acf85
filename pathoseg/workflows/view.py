"""Serves slides, masks and annotations to a browser on this machine until it is stopped."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from pathoseg.config import Config
from pathoseg.config_file import UNNUMBERED, load_config
from pathoseg.errors import PathosegError, StoppedError
from pathoseg.platform_support import cores_to_use, follow_pointer, signals_held
from pathoseg.progress import say
from pathoseg.training.run_folder import CONFIG, RUNS, SPLITS
from pathoseg.training.splits import read_rows
from pathoseg.viewer.app import is_loopback, library_is_installed, make_app
from pathoseg.viewer.finding import find_entries
from pathoseg.viewer.gallery import Gallery

_PORT = 8765
_RESULTS = Path("results")
_SECONDS_TO_FINISH = 2


def view(
    paths: Sequence[Path],
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    config_file: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Serve slides until Ctrl-C or SIGTERM.

    Args:
        paths: Slides, results, runs, and folders of them; none means `results/`, or else the newest
            finished run.
        host: An address of the loopback interface.
        port: The port; None takes 8765, or a free one if that is taken.
        browser: Open the browser.
        config_file: TOML file, or None for the options of the run that is given, if one is.
        flags: `data` is used: `slides` (folders to search for the slides of results), `annotations`
            and `assume_mpp`.

    Raises:
        PathosegError: There is nothing to show, the address cannot be used, or the page's library
            is not installed.
        StoppedError: A signal came: the usual end.
    """
    if not library_is_installed():
        raise PathosegError(
            "OpenSeadragon, with which the page shows slides, is not installed.",
            "In a checkout, `make install` brings it in where npm's registry can be reached; a "
            "wheel that was built after that contains it.",
        )
    config, shown = _configured(_given(paths), config_file, flags or {})
    folders = config.data.slide_folders if (flags or {}).get("data", {}).get("slides") else ()
    annotations = None if config.data.annotations is None else Path(config.data.annotations)
    entries = find_entries(shown, folders, annotations)
    with (
        closing(_listening(host, port)) as listening,
        tempfile.TemporaryDirectory(prefix="pathoseg-view-") as folder,
    ):
        gallery = Gallery(
            entries,
            Path(folder),
            cores_to_use(),
            config.data.assume_mpp,
            config.annotations,
            tell=lambda problem: say(f"Take care: {problem}"),
        )
        with closing(gallery):
            _serve(gallery, listening, host, browser)


def _given(paths: Sequence[Path]) -> list[Path]:
    if paths:
        return [follow_pointer(path) for path in paths]
    if _RESULTS.is_dir():
        return [_RESULTS]
    latest = follow_pointer(RUNS / "latest")
    if latest.is_dir():
        return [latest]
    raise PathosegError(
        f"There are neither results in {_RESULTS.resolve()} nor a finished run in {RUNS}.",
        "Name what to show: pathoseg view RESULTS, or pathoseg view SLIDE.",
    )


def _configured(
    paths: Sequence[Path], config_file: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> tuple[Config, list[Path]]:
    """Return the options, of a run if one is given, and the paths with its slides in its stead."""
    shown, config = list[Path](), load_config(config_file, flags)
    given = flags.get("data", {})  # which lies where this is given
    for path in paths:
        if not ((path / CONFIG).is_file() and (path / SPLITS).is_file()):
            shown.append(path)
            continue
        run = load_config(path / CONFIG, flags, UNNUMBERED)  # its slides may have been moved
        if not run.data.slide_folders:
            raise PathosegError(f"The run {path} names no slides.", "Name the slides to show.")
        places = _places(path, run.data.slide_folders)
        for folder in run.data.slide_folders:
            found = folder if given.get("slides") else _found(folder, places)
            if found is None:
                raise PathosegError(
                    f"The run {path} names the slides {folder}, which are neither in this folder "
                    "nor beside the run.",
                    "Name the folder that they are in now with --slides DIR.",
                )
            shown.append(found)
        if config_file is None:
            annotations = run.data.annotations
            if annotations is not None and not given.get("annotations"):
                annotations = str(_found(Path(annotations), places) or annotations)
            config = replace(run, data=replace(run.data, annotations=annotations))
    return config, shown


def _places(run: Path, folders: Sequence[Path]) -> list[Path]:
    """Return where the relative paths of a run may begin, the likeliest first.

    They were most likely given in one of the folders around the run, or in this one. A place from
    which they lead to slides of the run comes first.

    Args:
        run: Its folder.
        folders: The folders of slides that it names.
    """
    names = read_rows(run / SPLITS, is_recorded=True)

    def has_none(place: Path) -> bool:
        return not any((place / folder / name).exists() for folder in folders for name in names)

    return sorted([*run.resolve().parents[:2], Path()], key=has_none)


def _found(folder: Path, places: Sequence[Path]) -> Path | None:
    """Return a folder at the first place where it is, and is no run; None if there is none."""
    found = (place / folder for place in places)
    return next((each for each in found if each.is_dir() and not (each / CONFIG).is_file()), None)


def _listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at an address of the loopback interface.

    Raises:
        PathosegError: The address is another one, or taken.
    """
    if not is_loopback(host):
        raise PathosegError(
            f"The viewer does not listen at {host}: slides are shown on this machine alone.",
            "Leave --host out. From another machine: ssh -L 8765:localhost:8765 THIS_MACHINE, then "
            "open the address there.",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (_PORT, 0):
        # asyncio sends without delay (40 ms a tile) only through sockets that name their protocol.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if os.name != "nt":  # there it would let two programs share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen()
        except (OSError, OverflowError) as error:
            listening.close()
            refused = error
        else:
            return listening
    asked = f"Port {_PORT if port is None else port}"
    raise PathosegError(
        f"{asked} of {host} cannot be used ({getattr(refused, 'strerror', None) or refused}).",
        "Choose another --port, or leave it out.",
    )


def _serve(gallery: Gallery, listening: socket.socket, host: str, browser: bool) -> None:
    port: int = listening.getsockname()[1]
    shown_host = f"[{host}]" if ":" in host else host
    token, once = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    address = f"http://{shown_host}:{port}/?token="
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(gallery, token, once),
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_SECONDS_TO_FINISH,
        )
    )
    print(f"{address}{token}", flush=True)
    say("Open this address in a browser on this machine; Ctrl-C ends the viewer.")
    if browser:
        # A browser may stay in front until it is closed: the server does not wait for it.
        arguments = server, address + once, port
        threading.Thread(target=_open_browser, args=arguments, daemon=True).start()
    with signals_held() as came:
        server.run(sockets=[listening])  # ends at a signal, and raises it again
    if came:
        raise StoppedError(came[0], "The viewer's address no longer answers.")


def _open_browser(server: uvicorn.Server, address: str, port: int) -> None:
    """Open a browser with a window once the server answers; one for terminals would take this."""
    while not server.started:
        time.sleep(0.05)
    has_display = sys.platform in ("win32", "darwin") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    try:
        opened = has_display and webbrowser.open(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        say("No browser is at hand here: copy the address, or from another machine first run")
        say(f"ssh -L {port}:localhost:{port} THIS_MACHINE")
