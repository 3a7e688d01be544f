"""ASGI middleware for vLLM's server: every path needs the bearer token. vLLM's own check leaves `/invocations`, `/tokenize`,
`/score` and others open. Imports nothing heavy; vLLM loads it by ``--middleware``."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "VLLM_API_KEY"
"""Environment variable that holds the token: process lists do not show it to other users."""
OPEN = ("/health", "/metrics")
"""Paths that monitoring reads without a token."""

Send = Callable[[dict[str, Any]], Awaitable[None]]


def carries(authorization: bytes, token: str) -> bool:
    """Whether an Authorization header holds the token; the comparison takes constant time."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())


class RequireToken:
    """Answers 401 to a request without the token."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._token = os.environ[VARIABLE]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = json.dumps({"error": "send the token as `Authorization: Bearer …`"}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_allowed(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "http" and (scope["path"] in OPEN or scope["method"] == "OPTIONS"):
            return True
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and carries(given[0], self._token)
