"""The viewer's HTTP side: who may ask, what may be asked, and in which form it is answered."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any, Literal, cast
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pathoseg.errors import PathosegError
from pathoseg.viewer.gallery import Gallery

LIBRARY = "node_modules/openseadragon/build/openseadragon/openseadragon.min.js"
# Name in the address -> file in this package, and its type. Nothing else is served from disk.
_STATIC: Mapping[str, tuple[str, str]] = {
    "viewer.js": ("page/viewer.js", "text/javascript"),
    "viewer.css": ("page/viewer.css", "text/css"),
    "openseadragon.js": (LIBRARY, "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",  # slides are patients' data: no copy stays in the browser
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REFUSED = (
    "This viewer answers only to the address that it printed in the terminal, with its token. "
    "Copy it from there.\n"
)
_CLIENT_GONE = 499
Answer = Callable[[Request], Awaitable[Response]]


def _is_loopback(name: str) -> bool:
    """Return True if a name or number of a host is that of the loopback interface."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def library_is_installed() -> bool:
    """Return True if the JavaScript library of the page is there."""
    return files("pathoseg.viewer").joinpath(LIBRARY).is_file()


class Guard:
    """Lets requests pass that carry the token and come from the viewer's own page.

    The first one has the token in its address; it is answered with a cookie, and sent on to the
    same place without it. Programs may send `Authorization: Bearer <token>` instead. A name in
    `Host` other than the loopback interface's is refused (a page elsewhere whose name is made to
    point here), and so is a request that another site's page makes.

    Args:
        app: What is guarded.
        token: The secret of this start.
        port: Told in the cookie's name: cookies of one host are shared by its ports.
        once: A second token, for one address: the browser's command line, which all users see.
    """

    def __init__(self, app: ASGIApp, token: str, port: int, once: str | None = None) -> None:
        self._app, self._token, self._cookie = app, token, f"pathoseg-{port}"
        self._once = once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        answer: ASGIApp = self._app
        if not self._is_own(scope, headers):
            answer = Response(_REFUSED, 403, _HEADERS, "text/plain")
        elif not self._has_token(headers):
            if scope["path"] == "/" and self._opens(scope["query_string"].decode("latin-1")):
                redirect = RedirectResponse("/", 303, _HEADERS)
                redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
                answer = redirect
            else:
                answer = Response(_REFUSED, 403, _HEADERS, "text/plain")
        elif scope["path"] == "/" and scope["query_string"]:
            answer = RedirectResponse("/", 303, _HEADERS)
        await answer(scope, receive, send)

    def _is_own(self, scope: Scope, headers: Headers) -> bool:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        is_loopback = _is_loopback(name or "")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        follows_link = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        return (
            is_loopback
            and scope["method"] in ("GET", "HEAD")
            and (origin is None or origin == f"http://{host}")
            and (site in ("same-origin", "none") or follows_link)
        )

    def _opens(self, query: str) -> bool:
        """Return True if the address has a token; the one that is for once is used up by it."""
        given = parse_qs(query).get("token", [""])[0].encode()
        if self._once is not None and secrets.compare_digest(given, self._once.encode()):
            self._once = None
            return True
        return secrets.compare_digest(given, self._token.encode())

    def _has_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        tokens = [given] if kind.lower() == "bearer" else []
        for pair in headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie:
                tokens.append(value)
        return any(secrets.compare_digest(token.encode(), self._token.encode()) for token in tokens)


def make_app(gallery: Gallery, token: str, port: int, once: str | None = None) -> ASGIApp:
    """Make the application that serves a gallery.

    Args:
        gallery: What is served.
        token: What every request must carry.
        port: Where it will be served.
        once: A token that opens it a single time.
    """
    app = _App(gallery)
    slide = "/api/slides/{slide:int}"
    routes = [
        Route("/", app.page),
        Route("/static/{name}", app.static),
        Route("/api/slides", app.overview),
        Route(slide, app.details),
        Route(f"{slide}/status", app.status),
        Route(f"{slide}/truth", app.truth),
        Route(f"{slide}/thumbnail/{{layer}}", app.thumbnail),
        Route(f"{slide}/tile/{{layer}}/{{halvings:int}}/{{column:int}}/{{row:int}}", app.tile),
        Route(f"{slide}/table/{{kind}}", app.table),
        Route(f"{slide}/table/{{kind}}/{{number:int}}", app.feature),
        Route(f"{slide}/at", app.at),
    ]
    return Guard(Starlette(routes=routes), token, port, once)


class _App:
    """The answers. Pictures are made by as many threads as slides may be read by."""

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._pictures = asyncio.Semaphore(gallery.readers)
        self._threads = ThreadPoolExecutor(gallery.readers, "pictures")

    async def page(self, request: Request) -> Response:
        html = files("pathoseg.viewer").joinpath("page/index.html").read_bytes()
        return Response(html, 200, _HEADERS, "text/html; charset=utf-8")

    async def static(self, request: Request) -> Response:
        found = _STATIC.get(request.path_params["name"])
        if found is None:
            return _missing()
        content = files("pathoseg.viewer").joinpath(found[0]).read_bytes()
        return Response(content, 200, _HEADERS, f"{found[1]}; charset=utf-8")

    async def overview(self, request: Request) -> Response:
        return await _json(self._gallery.overview)

    async def details(self, request: Request) -> Response:
        return await _json(self._gallery.details, _slide(request))

    async def status(self, request: Request) -> Response:
        return await _json(self._gallery.status, _slide(request))

    async def truth(self, request: Request) -> Response:
        return await _json(self._gallery.truth, _slide(request))

    async def at(self, request: Request) -> Response:
        try:
            x, y = (float(request.query_params[name]) for name in "xy")
        except (LookupError, ValueError):
            return _missing()
        if not (math.isfinite(x) and math.isfinite(y)):
            return _missing()
        return await _json(self._gallery.at, _slide(request), x, y)

    async def table(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        return await _json(self._gallery.table, _slide(request), kind, request.query_params)

    async def feature(self, request: Request) -> Response:
        kind, number = request.path_params["kind"], request.path_params["number"]
        return await _json(lambda: self._gallery.index(_slide(request), kind).feature(number))

    async def thumbnail(self, request: Request) -> Response:
        layer = request.path_params["layer"]
        return await self._picture(
            request, layer, lambda: self._gallery.thumbnail(_slide(request), layer)
        )

    async def tile(self, request: Request) -> Response:
        asked, path = request.query_params, request.path_params
        layer, style = path["layer"], asked.get("style", "filled")
        place = path["halvings"], path["column"], path["row"]
        try:
            shown = tuple(
                sorted({int(number) for number in asked.get("show", "").split(",") if number})
            )
            channel = int(asked.get("channel", 0))
        except ValueError:
            return _missing()
        if style not in ("filled", "outlines") or any(not 0 <= number < 256 for number in shown):
            return _missing()
        drawn = cast(Literal["filled", "outlines"], style)
        return await self._picture(
            request,
            layer,
            lambda: self._gallery.tile(_slide(request), layer, place, shown, drawn, channel),
        )

    async def _picture(self, request: Request, layer: str, make: Callable[[], bytes]) -> Response:
        """Answer with a picture, unless who asked is gone by the time that it is its turn."""
        async with self._pictures:
            if await request.is_disconnected():
                return Response(status_code=_CLIENT_GONE)
            loop = asyncio.get_running_loop()
            try:
                content = await loop.run_in_executor(self._threads, make)
            except (PathosegError, LookupError, OSError) as error:
                return _failed(error)
        kind = "image/jpeg" if layer == "slide" else "image/png"
        return Response(content, 200, _HEADERS, kind)


def _slide(request: Request) -> int:
    number: int = request.path_params["slide"]
    return number


async def _json(answer: Callable[..., Any], *arguments: Any) -> Response:
    """Answer with JSON that a thread makes: files may have to be opened for it."""
    try:
        return JSONResponse(await asyncio.to_thread(answer, *arguments), 200, _HEADERS)
    except (PathosegError, LookupError, ValueError, OSError) as error:
        return _failed(error)


def _failed(error: Exception) -> Response:
    if isinstance(error, PathosegError):
        told = {"problem": error.problem, "hint": error.hint}
        return JSONResponse(told, 422, _HEADERS)
    if isinstance(error, OSError):
        return JSONResponse({"problem": str(error.strerror), "hint": ""}, 422, _HEADERS)
    return _missing()


def _missing() -> Response:
    return JSONResponse({"problem": "There is no such thing.", "hint": ""}, 404, _HEADERS)
