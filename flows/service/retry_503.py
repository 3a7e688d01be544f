"""Prefect's application: 503 while its database is away, and retries of changes that SQLite rejects.

Where PostgreSQL does not answer, Prefect answers 500, with which its clients give up: workers exit, runs crash. They retry 503.

On SQLite a request that reads first and writes then is refused where another one has written between, and the server answers
503, for the client to try again. Prefect's client does, after seconds; its pages in a browser do not: with some runs under
way, about every second run that was submitted from the form was lost.
"""

from __future__ import annotations

import asyncio
import os
import time

from alignment.flows import access
from alignment.flows.console import say
from alignment.flows.service.sign_in import Application, Message, Receive, Send, SignIn

PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before the second try, the third, …"""
BUSY, FAILED = 503, 500
BUSY_ANSWER: tuple[Message, ...] = (
    {"type": "http.response.start", "status": BUSY, "headers": [(b"content-type", b"application/json")]},
    {"type": "http.response.body", "body": b'{"exception_message": "The database does not answer"}'},
)
SAY_AGAIN_SECONDS = 10.0


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


class AnswersBusy:
    """An ASGI application that answers 503 instead of 500 while ``application`` cannot reach its database.

    Only some of Prefect's routes do so; what it puts before them (its protection against forged requests) does not.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._said = -SAY_AGAIN_SECONDS

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        failed = list[Message]()
        """The answer 500: it is held back until what was raised is known."""

        async def answer(message: Message) -> None:
            if failed or message.get("status") == FAILED:
                failed.append(message)
            else:
                await send(message)

        try:
            await self._application(scope, receive, answer)
        except Exception as error:  # Starlette raises again what it has answered, for the log
            if not database_is_away(error):
                raise
            failed[:] = BUSY_ANSWER if failed else []
            self._say(error)
        finally:
            for message in failed:
                await send(message)

    def _say(self, error: Exception) -> None:
        """One line now and then: while the database is away, every request fails."""
        if time.monotonic() - self._said >= SAY_AGAIN_SECONDS:
            self._said = time.monotonic()
            say(f"the database does not answer: {type(error).__name__}: {error}; clients are told to try again")


def _once_more(request: list[Message], receive: Receive) -> Receive:
    """Hear the request from its beginning, then what comes after it: that the client has gone."""
    messages = iter(request)

    async def hear() -> Message:
        return next(messages, None) or await receive()

    return hear


def database_is_away(error: BaseException) -> bool:
    """Whether a request failed because the server could not reach its database, or was refused a connection."""
    import asyncpg
    import sqlalchemy.exc

    if isinstance(error, BaseExceptionGroup):
        return any(map(database_is_away, error.exceptions))
    if isinstance(error, sqlalchemy.exc.DBAPIError):  # of a connection that was there
        return error.connection_invalidated
    refused = (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, asyncpg.InsufficientResourcesError)
    return isinstance(error, (OSError, *refused, asyncpg.InterfaceError, sqlalchemy.exc.TimeoutError))


def create_app() -> Application:
    """What uvicorn serves."""
    from prefect.server.api import server

    password, token = os.environ.pop(access.PASSWORD, None), os.environ.get("PREFECT_SERVER_API_AUTH_STRING")

    retryable = server.is_client_retryable_exception
    server.is_client_retryable_exception = lambda exc: retryable(exc) or database_is_away(exc)
    application = TriesAgain(AnswersBusy(server.create_app()))
    return SignIn(application, token, password) if token and password else application
