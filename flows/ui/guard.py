"""Who may use the pages: requests that name this server, and, for changes and beyond loopback, those with the token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from base64 import b64decode
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from alignment.flows.ui.rendering import page
from alignment.flows.ui.token import token_file
from alignment_core.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIGN_IN = "/sign-in"
OPEN = (SIGN_IN, "/static/")
"""Paths that need no token anywhere."""
LONGEST_FORM = 1 << 16
"""Bytes."""
DAYS = 30
"""Time for which a browser stays signed in."""


_HERE = re.compile(r"/(?![/\\])[^\x00-\x20\\]*")
"""A path of this server, and nothing that a browser takes for the name of another one."""
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:[0-9]+)?")


class Guard:
    """ASGI middleware. Names in ``hosts`` are those of this server; with ``reads_need_token``, nothing is shown without it.

    A browser has the token in a cookie, after the sign-in page or an address with ``?token=``; its changes come from a page of
    this server. Other programs send it in an ``Authorization`` header, as bearer or as the password of the basic form.
    ``signed_in`` in the scope says whether a request has it.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str], reads_need_token: bool) -> None:
        self.app = app
        self._token = token
        self._hosts = frozenset(host.lower() for host in hosts)
        self._reads_need_token = reads_need_token
        # Cookies are shared by all ports of a host, and so by the pages of other homes.
        self._cookie = f"align-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        response = await self._refusal(request)
        return await (response or self.app)(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that goes no further."""
        named = _HOST.fullmatch(request.headers.get("host", ""))
        if named is None or not self._is_here(named["name"].strip("[]")):
            return PlainTextResponse("this server has another name", 400)
        if request.method == "GET" and "token" in request.query_params:
            target = request.url.remove_query_params("token")
            here = f"{target.path}?{target.query}" if target.query else target.path
            return self._signed_in(request, request.query_params["token"], here)
        if request.url.path == SIGN_IN and request.method == "POST":
            try:
                form = await form_of(request)
            except UserError as error:
                return sign_in_page(request, 400, str(error))
            return self._signed_in(request, form.get("token", ""), form.get("next", "/"))
        changes = request.method not in ("GET", "HEAD")
        request.scope["signed_in"] = signed_in = self._has_token(request, changes)
        needs_token = changes or self._reads_need_token
        if needs_token and not signed_in and not request.url.path.startswith(OPEN):
            return sign_in_page(request, 403)
        return None

    def _is_here(self, host: str) -> bool:
        if host.lower() in self._hosts:
            return True
        if not self._reads_need_token:
            return False
        with suppress(ValueError):  # no other site can have an address as its name
            return bool(ipaddress.ip_address(host))
        return False

    def _signed_in(self, request: Request, given: str, target: str) -> Response:
        if not self._equals(given.strip()):
            return sign_in_page(request, 403, "That is not the token.")
        response = RedirectResponse(target if _HERE.fullmatch(target) else "/", 303)
        response.set_cookie(
            self._cookie,
            self._token,
            max_age=DAYS * 86400,
            httponly=True,
            samesite="lax",  # it comes along if a link or the file that opens a browser leads here; changes need an own page
            secure=request.url.scheme == "https",
        )
        return response

    def _has_token(self, request: Request, changes: bool) -> bool:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._equals(secret)
        if scheme.lower() == "basic":
            with suppress(ValueError):
                return self._equals(b64decode(secret, validate=True).decode().rpartition(":")[2])
            return False
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        from_own_page = request.headers.get("origin") == own  # cookies also come along from pages of other ports
        return self._equals(request.cookies.get(self._cookie, "")) and (from_own_page or not changes)

    def _equals(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that was sent. Raises UserError if they are too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_FORM:
            raise UserError(f"a form may have {LONGEST_FORM:,} bytes")
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def sign_in_page(request: Request, status: int = 200, problem: str = "") -> Response:
    """The page that asks for the token, and leads back to the page that was asked for, or whose form was sent."""
    target = request.query_params.get("next", "/")
    if request.url.path != SIGN_IN:
        target = (
            request.url.path if request.method == "GET" else urlsplit(request.headers.get("referer", "")).path or "/"
        )
    return page(request, "sign_in.html", status, target=target, refusal=problem, file=token_file())


def names_of_this_machine(host: str) -> tuple[str, ...]:
    """The names under which a server that listens at ``host`` is called: of loopback, of the machine, and the one given."""
    return tuple(dict.fromkeys((*LOOPBACK, host, socket.gethostname(), socket.getfqdn())))
