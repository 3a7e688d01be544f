"""Sign-in to the pages of Prefect's server: our own page, with a password that does not change.

Prefect's login page shows two errors before any input, and accepts only the server's token, which changes with each start. Here
a page of Prefect's without a valid password in the browser redirects to our page, and a request with the password is accepted
like one with the token. Processes use the token: if they send it to another user's process that has taken the port of dead
services, it is worthless at the next start.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from alignment.flows import access

PAGE = "/sign-in"
SIGN_IN = Path(__file__).with_name("sign_in.html").read_text()
GUARD = Path(__file__).with_name("sign_in_guard.html").read_text().strip()
"""Runs in each page before Prefect's scripts, which store the password in the browser, encoded as in the header."""
HEADERS = {"cache-control": "no-store", "x-frame-options": "DENY"}


class SignIn:
    """ASGI middleware that serves the sign-in page, and accepts ``password`` in place of ``token``."""

    def __init__(self, application: ASGIApp, token: str, password: str) -> None:
        self._application = application
        self._pages = BaseHTTPMiddleware(application, _page)
        self._token = access.basic(token)
        self._password = access.basic(password)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        headers = MutableHeaders(raw=list(scope["headers"]))
        # in constant time, so that the time of an answer tells nothing of the password
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._password.encode()):
            headers["authorization"] = self._token
        is_page = scope["method"] in ("GET", "HEAD") and not scope["path"].startswith("/api/")
        if is_page:
            for name in ("accept-encoding", "if-none-match", "if-modified-since", "range"):
                del headers[name]  # the answer must be the plain and whole page, to which the guard is added
        application = self._pages if is_page else self._application
        return await application({**scope, "headers": headers.raw}, receive, send)


async def _page(request: Request, call_next: RequestResponseEndpoint) -> Any:
    """Our sign-in page, or an answer of Prefect's; its pages get the :data:`GUARD`."""
    if request.scope["path"] == PAGE:
        return HTMLResponse(SIGN_IN, headers=HEADERS)
    answer: Any = await call_next(request)
    if answer.status_code != 200 or not answer.headers.get("content-type", "").startswith("text/html"):
        return answer
    page = b"".join([chunk async for chunk in answer.body_iterator])
    return HTMLResponse(page.replace(b"<script", GUARD.encode() + b"<script", 1), headers=HEADERS)
