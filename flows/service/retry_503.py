"""Prefect's application with two additions: 503 during a database outage, and retries of writes that SQLite rejects.

During an outage of PostgreSQL, Prefect answers 500, on which its clients give up: workers exit and runs crash. Clients retry
503.

SQLite rejects a transaction that reads and then writes if another one has written in between; Prefect answers 503. Its Python
client retries, its web pages do not: with some runs active, about half of the runs submitted from the form were lost.
"""

from __future__ import annotations

import asyncio
import os
import time

from alignment.flows import access
from alignment.flows.console import say
from alignment.flows.service.sign_in import Application, Message, Receive, Send, SignIn

PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before each retry."""
UNAVAILABLE, FAILED = 503, 500
UNAVAILABLE_ANSWER: tuple[Message, ...] = (
    {"type": "http.response.start", "status": UNAVAILABLE, "headers": [(b"content-type", b"application/json")]},
    {"type": "http.response.body", "body": b'{"exception_message": "The database does not answer"}'},
)
LOG_AGAIN_SECONDS = 10.0


class Retry503:
    """ASGI middleware that repeats requests answered with 503, and drops those answers."""

    def __init__(self, application: Application, pauses: tuple[float, ...] = PAUSES) -> None:
        self._application = application
        self._pauses = pauses

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._application(scope, receive, send)
        request = [await receive()]
        while request[-1].get("more_body"):
            request.append(await receive())
        for pause in self._pauses:
            if not await self._answered_503(scope, request, receive, send):
                return None
            await asyncio.sleep(pause)
        return await self._application(scope, _replayed(request, receive), send)

    async def _answered_503(self, scope: Message, request: list[Message], receive: Receive, send: Send) -> bool:
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


class Answer503:
    """ASGI middleware that answers 503 instead of 500 while ``application`` cannot reach its database.

    Prefect does this for some of its routes, but not in its middleware (the CSRF protection).
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._logged_at = -LOG_AGAIN_SECONDS

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        failed = list[Message]()  # a 500, which waits for the exception that explains it

        async def answer(message: Message) -> None:
            if failed or message.get("status") == FAILED:
                failed.append(message)
            else:
                await send(message)

        try:
            await self._application(scope, receive, answer)
        except Exception as error:  # Starlette re-raises after its answer, for the log
            if not database_is_away(error):
                raise
            failed[:] = UNAVAILABLE_ANSWER if failed else []
            self._log(error)
        finally:
            for message in failed:
                await send(message)

    def _log(self, error: Exception) -> None:
        """Log at most one line every :data:`LOG_AGAIN_SECONDS`: during an outage every request fails."""
        if time.monotonic() - self._logged_at >= LOG_AGAIN_SECONDS:
            self._logged_at = time.monotonic()
            say(f"the database does not answer: {type(error).__name__}: {error}; clients retry")


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


def create_app() -> Application:
    """The ASGI application for uvicorn."""
    from prefect.server.api import server

    password = os.environ.pop(access.PASSWORD, None)
    token = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    retryable = server.is_client_retryable_exception
    server.is_client_retryable_exception = lambda exc: retryable(exc) or database_is_away(exc)
    application = Retry503(Answer503(server.create_app()))
    return SignIn(application, token, password) if token and password else application
