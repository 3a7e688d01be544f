"""Prefect's application with two additions: 503 during a database outage, and retries of writes that SQLite rejects.

During an outage of PostgreSQL, Prefect answers 500, on which its clients give up: workers exit and runs crash. Clients retry
503.

SQLite rejects a transaction that reads and then writes if another one has written in between; Prefect answers 503. Its Python
client retries, its web pages do not: with some runs active, about half of the runs submitted from the form were lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignment.flows import access
from alignment.flows.console import say
from alignment.flows.service.sign_in import SignIn

if TYPE_CHECKING:
    from fastapi import FastAPI

PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before each retry."""
UNAVAILABLE = 503
LOG_AGAIN_SECONDS = 10.0
LOGS_OF_OUTAGES = ("uvicorn.error", "docket.worker", "docket.dependencies")
"""Starlette raises again what it has answered; docket runs Prefect's background tasks and repeats them after errors."""


class Retry503:
    """ASGI middleware that repeats requests answered with 503, and drops those answers."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._application(scope, receive, send)
        request = [await receive()]
        while request[-1].get("more_body"):
            request.append(await receive())
        for pause in PAUSES:
            if not await self._answered_503(scope, request, receive, send):
                return None
            await asyncio.sleep(pause)
        return await self._application(scope, _replayed(request, receive), send)

    async def _answered_503(self, scope: Scope, request: list[Message], receive: Receive, send: Send) -> bool:
        refused = False

        async def answer(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                refused = message["status"] == UNAVAILABLE
            if not refused:
                await send(message)

        try:
            await self._application({**scope}, _replayed(request, receive), answer)
        except Exception:  # Starlette re-raises after its answer, for the log
            if not refused:
                raise
        return refused


def _replayed(request: list[Message], receive: Receive) -> Receive:
    """Receive a read request again, then new messages, such as the client's disconnect."""
    messages = iter(request)

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay


def database_is_away(error: BaseException) -> bool:
    """Whether the server could not connect to its database, or lost the connection."""
    import asyncpg
    import sqlalchemy.exc

    if isinstance(error, BaseExceptionGroup):
        return any(map(database_is_away, error.exceptions))
    if isinstance(error, sqlalchemy.exc.DBAPIError):  # on an open connection
        return error.connection_invalidated
    refused = (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, asyncpg.InsufficientResourcesError)
    return isinstance(error, (OSError, *refused, asyncpg.InterfaceError, sqlalchemy.exc.TimeoutError))


class OutageFilter(logging.Filter):
    """Log an outage of the database as one line every :data:`LOG_AGAIN_SECONDS`, not as a traceback for each request."""

    _logged_at = -LOG_AGAIN_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not database_is_away(error):
            return True
        if time.monotonic() - self._logged_at >= LOG_AGAIN_SECONDS:
            self._logged_at = time.monotonic()
            say(f"the database does not answer: {type(error).__name__}: {error}; clients retry")
        return False


def answer_503(application: FastAPI) -> None:
    """Answer 503 instead of 500 while Prefect's application cannot reach its database."""
    from prefect.server.api import server

    prefect_retryable = server.is_client_retryable_exception

    def retryable(exc: Exception) -> bool:
        return prefect_retryable(exc) or database_is_away(exc)

    server.is_client_retryable_exception = retryable
    # Prefect installs its handler for the routes of the API. Its middleware around them (CSRF) uses the database, too.
    application.add_exception_handler(Exception, server.custom_internal_exception_handler)
    outage_filter = OutageFilter()
    for name in LOGS_OF_OUTAGES:
        logging.getLogger(name).addFilter(outage_filter)


def create_app() -> ASGIApp:
    """The ASGI application for uvicorn."""
    from prefect.server.api import server

    password = os.environ.pop(access.PASSWORD, None)
    token = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    prefect = server.create_app()
    answer_503(prefect)
    application = Retry503(prefect)
    return SignIn(application, token, password) if token and password else application
