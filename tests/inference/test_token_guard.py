"""Every path of vLLM's server needs the token, including those that vLLM's own check leaves open."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from alignment_core.inference.token_guard import VARIABLE, RequireToken


async def everything(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application that answers any request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"an answer"})


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(VARIABLE, "s3cret")
    guarded: Any = RequireToken(everything)

    def status(path: str, header: str | None = None, method: str = "POST") -> int:
        async def send() -> int:
            headers = {"Authorization": header} if header is not None else {}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://here") as client:
                return (await client.request(method, path, headers=headers)).status_code

        return asyncio.run(send())

    return status


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/invocations", "/tokenize", "/score", "/rerank", "/pooling", "/"]
)
def test_a_request_needs_the_token(asks: Any, path: str) -> None:
    assert asks(path, "Bearer s3cret") == 200
    for wrong in (None, "", "Bearer", "Bearer ", "s3cret", "Basic s3cret", "Bearer s3cre", "Bearer s3cret2"):
        assert asks(path, wrong) == 401, wrong


def test_health_and_metrics_are_open(asks: Any) -> None:
    assert [asks(path, method="GET") for path in ("/health", "/metrics", "/healthy", "/health/x")] == [
        200,
        200,
        401,
        401,
    ]


def test_a_websocket_is_closed_and_the_life_of_the_server_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3cret")
    sent: list[Any] = []
    passed: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    guarded: Any = RequireToken(application)
    asyncio.run(guarded({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    asyncio.run(guarded({"type": "lifespan"}, None, send))
    assert (sent, passed) == ([{"type": "websocket.close", "code": 1008}], ["lifespan"])
