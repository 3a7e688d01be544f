"""The web application of `align ui`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from alignment.flows.ui.artifact_pages import ArtifactPages
from alignment.flows.ui.compare_pages import ComparePages
from alignment.flows.ui.guard import LOOPBACK, SIGN_IN, Guard, sign_in_page
from alignment.flows.ui.label_pages import LabelPages
from alignment.flows.ui.night_pages import NightPages
from alignment.flows.ui.rendering import FOLDER, HEADERS, page
from alignment.flows.ui.run_pages import RunPages
from alignment_core.artifacts import Store
from alignment_core.artifacts.index_snapshot import SECONDS, IndexSnapshot
from alignment_core.errors import AlignmentError, Conflict, NotFound, UnknownName, UserError
from alignment_core.printable import printable

IDLE_SECONDS = 60.0
"""Time without readers after which the snapshot of the index is released."""


STATUS: dict[type[Exception], int] = {NotFound: 404, UnknownName: 404, Conflict: 409, UserError: 400}


class Timed:
    """Notes when a request began, and adds the headers to files, too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["began"] = time.perf_counter()

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] += [entry for entry in more if entry[0] not in there]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


def application(
    store: Store,
    token: str,
    hosts: tuple[str, ...] = LOOPBACK,
    reads_need_token: bool = False,
    seconds: float = SECONDS,
) -> Starlette:
    """The pages over a store, for requests that name one of the ``hosts``; see :class:`alignment.flows.ui.guard.Guard`. The
    listing is renewed when it is older than ``seconds``."""
    snapshot = IndexSnapshot(store, seconds)
    pages, runs, labels = ArtifactPages(snapshot), RunPages(snapshot), LabelPages(snapshot)

    def route(path: str, endpoint: Callable[[Request], Any], method: str = "GET") -> Route:
        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/", lambda _: RedirectResponse("/artifacts")),
            route("/artifacts", pages.listed),
            route("/artifacts/{reference:path}/tag", pages.move_tag, "POST"),
            route("/artifacts/{path:path}", pages.one),
            route("/images/{reference}/{digest}", pages.image),
            route("/nights", NightPages(snapshot).listed),
            route("/labels", labels.listed),
            route("/labels/{reference}", labels.one),
            route("/labels/{reference}/results", labels.results),
            route("/labels/{reference}/begin", labels.begin, "POST"),
            route("/labels/{reference}/annotator", labels.name, "POST"),
            route("/labels/{reference}/answer", labels.answer, "POST"),
            route("/labels/{reference}/inbox", labels.to_inbox, "POST"),
            route(SIGN_IN, sign_in_page),
            route("/compare", ComparePages(snapshot).one),
            route("/runs", runs.listed),
            route("/runs/{run}", runs.one),
            route("/runs/{run}/report", runs.report),
            route("/runs/{run}/events", runs.events),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        middleware=[
            Middleware(Timed),
            Middleware(Guard, token=token, hosts=hosts, reads_need_token=reads_need_token),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers={AlignmentError: refused, Exception: refused},
        lifespan=lambda _: _releasing(snapshot),
    )


@asynccontextmanager
async def _releasing(snapshot: IndexSnapshot) -> AsyncIterator[None]:
    """Release the snapshot while nobody reads."""

    async def release() -> None:
        while True:
            await anyio.sleep(IDLE_SECONDS)
            await anyio.to_thread.run_sync(snapshot.release_if_idle, IDLE_SECONDS)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(release)
        yield
        tasks.cancel_scope.cancel()
    snapshot.release()


def refused(request: Request, error: Exception) -> Response:
    """The page of an error: its sentence."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    if "x-fragment" in request.headers:
        return PlainTextResponse(printable(str(error)), status)
    return page(request, "error.html", status, sentence=str(error), code=status)
