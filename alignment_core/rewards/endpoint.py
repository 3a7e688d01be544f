"""A reward over HTTP: batches of completions, distributed over the replicas of one endpoint, with retries until a deadline.

Functions make the request and read the answer; those for reward servers are here. Request, POST with JSON: ``query``
(prompt and completion as one text, special tokens included), ``prompts``, ``completions`` and ``labels``, lists of the same
length. Answer: ``{"rewards": [...]}``, a number or null for each. Servers for OpenRLHF's ``remote_url`` work: they
read ``query``, ``prompts`` and ``labels``, and return ``rewards`` among others.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from alignment_core.credentials import cut, remember, resolved
from alignment_core.errors import EnvironmentFault, Stopped, UserError
from alignment_core.network import proxy_of, through_proxy
from alignment_core.rewards.http_errors import because, status
from alignment_core.rewards.results import Answers
from alignment_core.user_code.errors import Failed

Rows = Sequence[dict[str, Any]]

FIRST_REST, LONGEST_REST = 0.2, 5.0
"""Seconds without requests after a failure of a replica: exponential backoff, with up to 50% jitter."""
CONNECT_SECONDS = 5.0
BUSY = (408, 425, 429)
"""Status codes that are worth a retry, beside 5xx."""
OF_THE_ROWS = (400, 413, 422)
"""Status codes that may concern only the rows of this request, such as one that is too long."""


@dataclass
class Replica:
    url: str
    """As in the recipe, with ``env:NAME`` for secrets, for messages."""
    address: str
    requests: int = 0
    failures: int = 0
    rests_until: float = 0.0

    def failed(self) -> None:
        # Jitter: batches that failed together must not all come back at the same moment.
        rest = min(FIRST_REST * 2**self.failures, LONGEST_REST) * random.uniform(0.5, 1.0)
        self.failures += 1
        self.rests_until = time.monotonic() + rest


class Endpoint:
    """Rewards from the servers at ``urls``, in batches with a deadline of ``timeout`` seconds each, retries included.

    Raises UserError if the token is missing, EnvironmentFault if no server listens at any of the URLs.

    Args: ``field`` is the field of the URLs in the recipe; ``token_variable`` names the environment variable with the bearer
    token, unless ``token`` is given; ``asks`` makes the JSON of a request for some rows; ``reads`` returns a reward, None or a
    Failed for each of so many rows, and raises Failed for an answer without any; ``max_concurrency`` is the number of
    concurrent requests per replica.
    """

    def __init__(
        self,
        urls: Sequence[str],
        batch_size: int,
        token_variable: str | None,
        timeout: float,
        field: str,
        asks: Callable[[Rows], dict[str, Any]],
        reads: Callable[[httpx.Response, int], list[Any]],
        token: str | None = None,
        max_concurrency: int = 32,
    ) -> None:
        self.batch_size = batch_size
        self.max_concurrency = max_concurrency
        self.timeout = timeout
        self.field = field
        self._asks = asks
        self._reads = reads
        self.replicas = [Replica(url, _address(url, field)) for url in urls]
        self._loop: asyncio.AbstractEventLoop | None = None
        if token_variable:
            token = os.environ.get(token_variable)
            if not token:
                raise UserError(
                    f"{field.rpartition('.')[0]}.token_variable: the environment has no variable {token_variable}"
                )
        if token:
            remember(token)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._find_one()

    def __call__(self, rows: Rows) -> Answers:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            batches = self._batches(rows)

            async def next_batch() -> list[tuple[int, Any]] | None:
                return await anext(batches, None)

            try:
                while (batch := runner.run(next_batch())) is not None:
                    yield from batch
            except asyncio.CancelledError:
                raise Stopped(f"{self.field}: the endpoint was closed") from None
            finally:
                self._loop = None
                runner.run(batches.aclose())

    def close(self) -> None:
        """End a call in progress in another thread, with Stopped."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has ended by now
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    async def _batches(self, rows: Rows) -> AsyncGenerator[list[tuple[int, Any]], None]:
        """The answers of each batch, as they come."""
        room = asyncio.Semaphore(self.max_concurrency * len(self.replicas))
        # No timeout of httpx: its read timeout begins anew with every byte, so a server that trickles would never reach it.
        limits = httpx.Limits(max_connections=None)  # by default 100, and further requests would wait for one of these
        async with httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits) as client:

            async def one(first: int) -> list[tuple[int, Any]]:
                numbers = range(first, min(first + self.batch_size, len(rows)))
                async with room:
                    answers = await self._answers(client, [rows[number] for number in numbers])
                return list(zip(numbers, answers, strict=True))

            tasks = [asyncio.create_task(one(first)) for first in range(0, len(rows), self.batch_size)]
            try:
                for done in asyncio.as_completed(tasks):
                    yield await done
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answers(self, client: httpx.AsyncClient, rows: Rows) -> list[Any]:
        """The answer of a replica for each row, or the reason why none answered within the deadline."""
        try:
            content = self._asks(rows)
        except Failed as failure:
            return [failure] * len(rows)
        deadline, failed = time.monotonic() + self.timeout, None
        while (left := deadline - time.monotonic()) > 0:
            replica = min(self.replicas, key=lambda replica: (replica.rests_until > time.monotonic(), replica.requests))
            rest = replica.rests_until - time.monotonic()
            if rest > 0:  # all of them do
                await asyncio.sleep(min(rest, left))
                continue
            # leave another replica time to answer where this one hangs
            share = left if len(self.replicas) == 1 else max(left / 2, min(left, 1.0))
            try:
                return self._reads(await self._ask(client, replica, content, share), len(rows))
            except Failed as error:
                # The last attempt may have had too little time: then the error before is more informative.
                if failed is None or error.reason != "timeout" or 2 * share >= self.timeout:
                    failed = error
            if failed.reason not in ("unreachable", "timeout"):
                break  # the same rows would be refused again
        return [failed or Failed("unreachable", "has no replica that answers")] * len(rows)

    async def _ask(
        self, client: httpx.AsyncClient, replica: Replica, content: dict[str, Any], seconds: float
    ) -> httpx.Response:
        replica.requests += 1
        try:
            async with asyncio.timeout(seconds):
                response = await client.post(replica.address, json=content)
            if response.status_code in BUSY or response.is_server_error:
                raise Failed("unreachable", self._refusal(response, replica))
        except (httpx.TransportError, TimeoutError, Failed) as error:
            replica.failed()
            if isinstance(error, Failed):
                raise
            if isinstance(error, TimeoutError):
                late = f"gave no answer within {self.timeout:g} seconds (resources.reward_timeout_seconds)"
                raise Failed("timeout", f"{late} at {replica.url}") from None
            raise Failed("unreachable", f"cannot be reached at {replica.url}: {_message(error)}") from None
        finally:
            replica.requests -= 1
        replica.failures = 0
        if response.status_code in OF_THE_ROWS:
            raise Failed("refused", self._refusal(response, replica))
        if not response.is_success:
            raise UserError(f"{self.field}: {replica.url} {status(response)}{because(response)}")
        return response

    def _refusal(self, response: httpx.Response, replica: Replica) -> str:
        return f"{status(response)} at {replica.url}{because(response)}"

    def _find_one(self) -> None:
        """Check that something listens, before anything expensive starts."""
        problems = []
        for replica in self.replicas:
            url = httpx.URL(proxy_of(replica.address) or replica.address)
            place = (url.host, url.port or (443 if url.scheme == "https" else 80))
            try:
                with socket.create_connection(place, min(CONNECT_SECONDS, self.timeout)):
                    return
            except OSError as error:
                replica.failed()
                problems.append(f"{replica.url}{through_proxy(replica.address)}: {_message(error)}")
        raise EnvironmentFault(f"{self.field}: no server answers ({'; '.join(problems)})")


def asks_for(text: Callable[[dict[str, Any]], str]) -> Callable[[Rows], dict[str, Any]]:
    """The JSON of a request to a reward server; ``text`` joins prompt and completion of a row."""
    return lambda rows: {
        "query": [text(row) for row in rows],
        "prompts": [row["prompt_text"] for row in rows],
        "completions": [row["completion_text"] for row in rows],
        "labels": [row["label"] for row in rows],
    }


def read_rewards(response: httpx.Response, count: int) -> list[Any]:
    """The rewards in the answer of a reward server."""
    answer = None
    with suppress(ValueError, RecursionError):
        answer = response.json()
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise Failed("wrong_shape", 'did not answer with a JSON object that has a list "rewards"')
    if len(rewards) != count:
        raise Failed("wrong_shape", f"answered {len(rewards)} rewards for {count} completions")
    return rewards


def _address(url: str, field: str) -> str:
    """The address of a URL in the recipe. Raises UserError for a variable that is not set, or holds no URL."""
    address: str = resolved(url, field)
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{field}: {url} is not an http:// or https:// URL")
    return address


def _message(error: Exception) -> str:
    return cut(str(error)) or type(error).__name__
