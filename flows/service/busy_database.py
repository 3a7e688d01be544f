"""Prefect's application, in which a change that SQLite rejects is retried before the client is answered.

On SQLite a request that reads first and writes then is refused where another one has written between, and the server answers
503, for the client to try again. Prefect's client does, after seconds; its pages in a browser do not: with some runs under
way, about every second run that was submitted from the form was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before the second try, the third, …"""
BUSY = 503


class TriesAgain:
    """An ASGI application that asks ``application`` again what it answered with 503. Nothing of that answer was sent."""

    def __init__(self, application: Application, pauses: tuple[float, ...] = PAUSES) -> None:
        self._application, self._pauses = application, pauses

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._application(scope, receive, send)
        request = [await receive()]
        while request[-1].get("more_body"):
            request.append(await receive())
        for pause in self._pauses:
            if not await self._refused(scope, request, receive, send):
                return None
            await asyncio.sleep(pause)
        return await self._application(scope, _once_more(request, receive), send)

    async def _refused(self, scope: Message, request: list[Message], receive: Receive, send: Send) -> bool:
        refused = False

        async def answer(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                refused = message["status"] == BUSY
            if not refused:
                await send(message)

        try:
            await self._application({**scope}, _once_more(request, receive), answer)
        except Exception:  # Starlette raises again what it has answered, for the log
            if not refused:
                raise
        return refused


def _once_more(request: list[Message], receive: Receive) -> Receive:
    """Hear the request from its beginning, then what comes after it: that the client has gone."""
    messages = iter(request)

    async def hear() -> Message:
        return next(messages, None) or await receive()

    return hear


def create_app() -> TriesAgain:
    """What uvicorn serves."""
    from prefect.server.api import server

    return TriesAgain(server.create_app())
