"""Requests that SQLite refuses: the pages of the Prefect UI do not try them again, so the server does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from alignment.flows.service import retry_503
from alignment.flows.service.retry_503 import Retry503


class Busy:
    """Answers 503 this many times and raises the cause, as Starlette does; then 201 with the request's body."""

    def __init__(self, times: int) -> None:
        self.times, self.requests = times, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        body = (await receive())["body"]
        status = 503 if self.requests <= self.times else 201
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"busy" if status == 503 else body})
        if status == 503:
            raise OSError("database is locked")


@pytest.mark.parametrize(
    ("method", "times", "answer", "requests"),
    [
        ("POST", 0, (201, "run"), 1),
        ("POST", 2, (201, "run"), 3),
        ("POST", 9, (503, "busy"), 3),
        ("GET", 1, (503, "busy"), 1),
    ],
    ids=["at once", "at the third try", "never", "what changes nothing"],
)
def test_a_change_is_tried_again_a_few_times(
    method: str, times: int, answer: tuple[int, str], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_503, "PAUSES", (0.0, 0.0))
    busy = Busy(times)

    async def ask() -> httpx.Response:
        transport: Any = httpx.ASGITransport(app=Retry503(busy), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, "/create", content="run")

    response = asyncio.run(ask())
    assert ((response.status_code, response.text), busy.requests) == (answer, requests)
