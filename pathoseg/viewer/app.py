"""The viewer's HTTP server: access control, routes and responses."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any, Literal, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pathoseg.errors import PathosegError
from pathoseg.viewer.feature_index import NotFoundError
from pathoseg.viewer.gallery import DRAWN_OVER, Gallery

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
_T = TypeVar("_T")
_CLIENT_GONE = 499
_FILES = 32  # threads, of which some may wait for a file for ever
_COOKIE = "pathoseg"


def is_loopback(name: str) -> bool:
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
    page, which lies below a random path. The cookie is of that path: browsers send cookies of a
    host to all its ports, but not to other paths. Programs may send `Authorization: Bearer <token>`
    instead, with or without the path. A name in `Host` other than the loopback interface's is
    refused (a page elsewhere whose name is made to point here), and so is a request that another
    site's page makes.

    Args:
        app: The application to guard.
        token: The secret of this start.
        once: A token that is accepted once; it is passed on the browser's command line, which other
            users can see.
    """

    def __init__(self, app: ASGIApp, token: str, once: str | None = None) -> None:
        self._app, self._token, self._once = app, token, once
        self._page = f"/{secrets.token_urlsafe(18)}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, path = Headers(scope=scope), scope["path"]
        within = path.startswith(self._page)
        answer: ASGIApp = Response(_REFUSED, 403, _HEADERS, "text/plain")
        if self._is_own(scope, headers):
            if (within and self._has_cookie(headers)) or self._has_bearer(headers):
                answer = self._app
            elif path == "/" and self._opens(scope["query_string"].decode("latin-1")):
                redirect = RedirectResponse(self._page, 303, _HEADERS)
                redirect.set_cookie(
                    _COOKIE, self._token, path=self._page, httponly=True, samesite="lax"
                )
                answer = redirect
        if within:
            scope = {**scope, "root_path": self._page[:-1]}
        await answer(scope, receive, send)

    def _is_own(self, scope: Scope, headers: Headers) -> bool:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        follows_link = (
            scope["path"] in ("/", self._page) and headers.get("sec-fetch-mode") == "navigate"
        )
        return (
            is_loopback(name or "")
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

    def _has_bearer(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._is_token(given)

    def _has_cookie(self, headers: Headers) -> bool:
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        return any(name == _COOKIE and self._is_token(value) for name, _, value in pairs)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def make_app(gallery: Gallery, token: str, once: str | None = None) -> ASGIApp:
    """Make the application that serves a gallery.

    Args:
        gallery: The slides to serve.
        token: The token that every request must carry.
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
    answers: Mapping[Any, Callable[[Request, Any], Response]] = {
        PathosegError: _refused,
        OSError: _unread,
        NotFoundError: _missing,
        HTTPException: _missing,
        Exception: app.broken,
    }
    return Guard(Starlette(routes=routes, exception_handlers=answers), token, once)


class _App:
    """The answers. Pictures are made by as many threads as slides may be read by.

    No thread is of asyncio's own pool, for whose threads a server that ends would wait: one may
    read annotations for minutes, or from a file server that has gone away.
    """

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._pictures = asyncio.Semaphore(gallery.readers)
        self._threads = ThreadPoolExecutor(gallery.readers, "pictures")
        self._files = ThreadPoolExecutor(_FILES, "files")
        self._annotations = dict[int, asyncio.Task[dict[str, Any]]]()

    async def page(self, request: Request) -> Response:
        html = files("pathoseg.viewer").joinpath("page/index.html").read_bytes()
        return Response(html, 200, _HEADERS, "text/html; charset=utf-8")

    async def static(self, request: Request) -> Response:
        found = _STATIC.get(request.path_params["name"])
        if found is None:
            raise NotFoundError("no such file")
        content = files("pathoseg.viewer").joinpath(found[0]).read_bytes()
        return Response(content, 200, _HEADERS, f"{found[1]}; charset=utf-8")

    async def overview(self, request: Request) -> Response:
        return await self._made(self._gallery.overview)

    async def details(self, request: Request) -> Response:
        return await self._made(self._gallery.details, _slide(request))

    async def status(self, request: Request) -> Response:
        return await self._made(self._gallery.status, _slide(request))

    async def truth(self, request: Request) -> Response:
        return _json(await self._truth(_slide(request)))

    async def _truth(self, slide: int) -> dict[str, Any]:
        """Return the annotated classes; one thread reads them for all requests of a slide."""

        async def read() -> dict[str, Any]:
            try:
                return await self._in_thread(self._gallery.truth, slide)
            finally:
                del self._annotations[slide]

        if slide not in self._annotations:
            self._annotations[slide] = asyncio.create_task(read())
        return await asyncio.shield(self._annotations[slide])

    async def at(self, request: Request) -> Response:
        try:
            x, y = (float(request.query_params[name]) for name in "xy")
        except (LookupError, ValueError) as error:
            raise NotFoundError("no such place") from error
        if not (math.isfinite(x) and math.isfinite(y)):
            raise NotFoundError("no such place")
        return await self._made(self._gallery.at, _slide(request), x, y)

    async def table(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        return await self._made(self._gallery.table, _slide(request), kind, request.query_params)

    async def feature(self, request: Request) -> Response:
        kind, number = request.path_params["kind"], request.path_params["number"]
        return await self._made(self._gallery.feature, _slide(request), kind, number)

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
        except ValueError as error:
            raise NotFoundError("no such tile") from error
        if style not in ("filled", "outlines") or any(not 0 <= number < 256 for number in shown):
            raise NotFoundError("no such tile")
        drawn = cast(Literal["filled", "outlines"], style)
        if layer in DRAWN_OVER:  # reading annotations may take long: no picture waits for it
            await self._truth(_slide(request))
        return await self._picture(
            request,
            layer,
            lambda: self._gallery.tile(_slide(request), layer, place, shown, drawn, channel),
        )

    async def _picture(self, request: Request, layer: str, make: Callable[[], bytes]) -> Response:
        """Answer with a picture; skip it if the client has disconnected while it waited."""
        async with self._pictures:
            if await request.is_disconnected():
                return Response(status_code=_CLIENT_GONE)
            content = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        kind = "image/jpeg" if layer == "slide" else "image/png"
        return Response(content, 200, _HEADERS, kind)

    async def _made(self, answer: Callable[..., Any], *arguments: Any) -> Response:
        """Answer with what a thread makes: files may have to be opened for it."""
        return _json(await self._in_thread(answer, *arguments))

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    def broken(self, request: Request, error: Exception) -> Response:
        """Answer where a bug or a file that nobody thought of raised; tell the terminal, too."""
        told = f"{request.url.path} fails: {type(error).__name__}: {error}."
        self._gallery.tell(told)
        return _json({"problem": told, "hint": "Please report it."}, 500)


def _slide(request: Request) -> int:
    number: int = request.path_params["slide"]
    return number


def _json(content: Any, status: int = 200) -> Response:
    # Names of files and texts in them may be no Unicode.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Response(text, status, _HEADERS, "application/json")


def _refused(request: Request, error: PathosegError) -> Response:
    return _json({"problem": error.problem, "hint": error.hint}, 422)


def _unread(request: Request, error: OSError) -> Response:
    named = f"{error.filename}: " if error.filename else ""
    return _json({"problem": f"{named}{error.strerror or error}", "hint": ""}, 422)


def _missing(request: Request, error: Exception) -> Response:
    return _json({"problem": "There is no such thing.", "hint": ""}, 404)
