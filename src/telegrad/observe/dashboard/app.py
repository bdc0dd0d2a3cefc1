"""The web application: the page, its updates, and the metrics of the group.

Importing this needs starlette, see `telegrad.observe.dashboard.server`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telegrad.observe.dashboard.access import HEADERS, Access
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.model import GroupView

Metrics = Callable[[GroupView], tuple[bytes, str]]
"""Returns the metrics of a view, and their content type."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Guard:
    """Refuses requests that may not look, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # only the messages of start and stop: there are no WebSockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        request = Request(scope)
        refusal: Response | None = None
        if not self._access.knows_host(headers.get("host", "")):
            refusal = PlainTextResponse("This server does not have that name. Use the printed address.\n", 421)
        elif not self._access.admits(headers, request.query_params.get("token", "")):
            refusal = PlainTextResponse(
                "Open the address that `telegrad dashboard` has printed: it carries the token.\n", 401
            )
        return await (refusal or self._app)(scope, receive, send_with_headers)


def make_app(feed: Feed, access: Access, metrics: Metrics | None = None) -> ASGIApp:
    """Return the application that shows what `feed` sees to who has `access`."""
    page = files("telegrad.observe.dashboard") / "page"
    contents = {
        entry.name: (entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
        for entry in page.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }

    def answer(name: str) -> Response:
        if name not in contents:
            return PlainTextResponse("Not found.\n", 404)
        data, media_type = contents[name]
        return Response(data, media_type=media_type)

    async def index(request: Request) -> Response:
        response = answer("index.html")
        if "token" in request.query_params:
            response.headers["set-cookie"] = access.cookie()
        return response

    async def file(request: Request) -> Response:
        return answer(request.path_params["name"])

    async def updates(_: Request) -> Response:
        return StreamingResponse(_events(feed), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def state(_: Request) -> Response:
        return Response(await run_in_threadpool(feed.state), media_type="application/json")

    async def measures(_: Request) -> Response:
        view = feed.view()
        if metrics is None:
            return PlainTextResponse("Metrics need prometheus-client: pip install 'telegrad[metrics]'\n", 501)
        if view is None:
            return PlainTextResponse("The group has not been seen yet.\n", 503)
        data, media_type = await run_in_threadpool(metrics, view)
        return Response(data, media_type=media_type)

    routes: list[Any] = [
        Route("/", index),
        Route("/page/{name}", file),
        Route("/updates", updates),
        Route("/state.json", state),
        Route("/metrics", measures),
    ]
    return Guard(Starlette(routes=routes), access)


async def _events(feed: Feed) -> AsyncIterator[bytes]:
    """Yield server-sent events: the whole state, and then what changes."""
    subscriber = feed.subscribe()
    try:
        message: bytes | None = b""
        while message is not None:
            if message:
                yield b"event: update\ndata: " + message + b"\n\n"
            else:
                yield b"event: state\ndata: " + await run_in_threadpool(feed.state) + b"\n\n"
            message = await subscriber.next()
        yield b"event: end\ndata: {}\n\n"
    finally:
        feed.unsubscribe(subscriber)
