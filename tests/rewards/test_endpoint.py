"""Rewards of real HTTP servers: load balancing, retries, time limits, and strict parsing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from socket import create_server
from typing import Any

import pytest

from alignment_core.errors import DataError, EnvironmentFault, Stopped, UserError
from alignment_core.rewards.endpoint import Endpoint, asks_for, read_rewards
from alignment_core.rewards.results import Account, numbers
from tests.rewards.reward_server import Answer, Server, lengths

FIELD = "rl.rewards.0"


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def start(answer: Answer = lengths) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"source": f"p.jsonl:{n}", "prompt_text": f"prompt {n}", "completion_text": "x" * n, "label": str(n)}
        for n in range(count)
    ]


def endpoint(
    urls: list[str], size: int = 2, timeout: float = 10.0, token: str | None = None, most: int = 32
) -> Endpoint:
    asks = asks_for(lambda row: f"<{row['prompt_text']}{row['completion_text']}>")
    return Endpoint(urls, size, token, timeout, f"{FIELD}.urls", asks, read_rewards, max_concurrency=most)


def rewards(source: Endpoint, given: list[dict[str, Any]], max_failed: float = 0.5) -> list[Any]:
    account = Account("the endpoint", max_failed, f"{FIELD}.max_failed")
    return [numbers(account.settle(given, source(given))), dict(account.failed)]


def test_batches_are_spread_over_the_replicas_with_all_that_a_reward_server_asks_for(serve: Any) -> None:
    replicas = [serve(), serve()]
    source = endpoint([replica.url for replica in replicas])
    assert rewards(source, rows(9)) == [[*range(9)], {}]
    assert rewards(source, rows(9)) == [[*range(9)], {}]
    assert all(replica.requests for replica in replicas)
    requests = [content for replica in replicas for content in replica.requests]
    assert sorted(len(content["query"]) for content in requests) == [1, 1, *[2] * 8]
    first = next(content for content in requests if content["labels"] == ["0", "1"])
    assert first == {
        "query": ["<prompt 0>", "<prompt 1x>"],
        "prompts": ["prompt 0", "prompt 1"],
        "completions": ["", "x"],
        "labels": ["0", "1"],
    }


def test_a_replica_that_is_busy_or_gone_is_left_for_another_and_tried_again(serve: Any) -> None:
    answers = iter([(503, b""), (429, b""), (500, b"")])
    shaky = serve(lambda content: next(answers, None) or lengths(content))
    assert rewards(endpoint([shaky.url]), rows(3)) == [[0, 1, 2], {}]
    with create_server(("127.0.0.1", 0)) as closing:
        gone = f"http://127.0.0.1:{closing.getsockname()[1]}/"
    assert rewards(endpoint([gone, shaky.url]), rows(6)) == [[*range(6)], {}]


def test_a_replica_that_hangs_does_not_take_the_time_of_another(serve: Any) -> None:
    released = threading.Event()

    def hang(content: dict[str, Any]) -> tuple[int, bytes]:
        released.wait(300)
        return lengths(content)

    hanging = serve(hang)
    try:
        assert rewards(endpoint([hanging.url, serve().url], timeout=4.0), rows(6)) == [[*range(6)], {}]
        started = time.monotonic()
        assert rewards(endpoint([hanging.url], timeout=0.5), rows(2), 1.0) == [[None] * 2, {"timeout": 2}]
        assert time.monotonic() - started < 100, "it did not wait for the answer"
    finally:
        released.set()


def test_a_server_that_stays_broken_is_given_up_at_the_deadline(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = serve(lambda content: (503, b""))
    assert rewards(endpoint([broken.url], timeout=1.0), rows(2), 1.0) == [[None] * 2, {"unreachable": 2}]
    assert f"p.jsonl:1: the endpoint answered 503 Service Unavailable at {broken.url}, for the prompt" in caplog.text
    assert 2 <= len(broken.requests) <= 8, "it rests longer and longer between attempts"
    with pytest.raises(DataError, match=r"1 of 2 completions may lack a reward \(rl\.rewards\.0\.max_failed 0\.01\)"):
        rewards(endpoint([broken.url], timeout=0.3), rows(2), 0.01)


@pytest.mark.parametrize(
    ("answer", "given", "failed"),
    [
        (b'{"rewards": [1.0]}', [None, None], {"wrong_shape": 2}),
        (b'{"scores": [1.0, 2.0]}', [None, None], {"wrong_shape": 2}),
        (b"<html>", [None, None], {"wrong_shape": 2}),
        (b'{"rewards": [NaN, 2.0]}', [None, 2.0], {"bad_number": 1}),
        (b'{"rewards": ["high", true]}', [None, None], {"bad_number": 2}),
        (b'{"rewards": [null, 2.0]}', [None, 2.0], {"none_given": 1}),
    ],
)
def test_an_answer_without_a_number_for_each_completion_is_a_failure(
    answer: bytes, given: list[Any], failed: dict[str, int], serve: Any
) -> None:
    server = serve(lambda content: (200, answer))
    assert rewards(endpoint([server.url]), rows(2), 1.0) == [given, failed]
    assert len(server.requests) == 1, "asking again would not help"


def test_a_refusal_is_a_user_error_and_shows_no_token(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "hidden")
    server = serve(lambda content: (401, b""))
    source = endpoint([server.url], token="REWARD_TOKEN")
    with pytest.raises(UserError, match=rf"^rl\.rewards\.0\.urls: {server.url} answered 401 Unauthorized$") as caught:
        rewards(source, rows(20))
    assert server.tokens == {"Bearer hidden"}
    assert "hidden" not in str(caught.value)
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(
        UserError, match=r"^rl\.rewards\.0\.token_variable: the environment has no variable REWARD_TOKEN$"
    ):
        endpoint([server.url], token="REWARD_TOKEN")


def test_an_endpoint_without_a_server_is_reported_before_the_first_request() -> None:
    with create_server(("127.0.0.1", 0)) as closing:
        url = f"http://127.0.0.1:{closing.getsockname()[1]}/"
    with pytest.raises(EnvironmentFault, match=rf"^rl\.rewards\.0\.urls: no server answers \({url}: .*refused"):
        endpoint([url])


def test_closing_ends_a_call_that_is_under_way(serve: Any) -> None:
    calls, released = threading.Event(), threading.Event()

    def hang(content: dict[str, Any]) -> tuple[int, bytes]:
        calls.set()
        released.wait(300)
        return lengths(content)

    source = endpoint([serve(hang).url], timeout=600.0)

    def close() -> None:
        calls.wait(300)
        source.close()

    closing = threading.Thread(target=close)
    closing.start()
    started = time.monotonic()
    with pytest.raises(Stopped, match=r"rl\.rewards\.0\.urls"):
        rewards(source, rows(3))
    assert time.monotonic() - started < 100, "it did not wait for the answer"
    released.set()
    closing.join()


def test_the_servers_reason_is_shown_for_each_kind_of_refusal(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"error": {"message": "this text is too long"}}'
    denied = serve(lambda content: (403, body))
    with pytest.raises(UserError, match=rf"{denied.url} answered 403 Forbidden: this text is too long$"):
        rewards(endpoint([denied.url]), rows(1))
    broken = serve(lambda content: (500, body))
    rewards(endpoint([broken.url], timeout=0.5), rows(1), 1.0)
    assert f"answered 500 Internal Server Error at {broken.url}: this text is too long" in caplog.text


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_that_may_be_about_the_rows_costs_these_rows(
    status: int, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 20 completions a share of 0.1 may lack a reward: two, which are in the one batch that the server refuses."""

    def refuses_one(content: dict[str, Any]) -> tuple[int, bytes]:
        return (status, b'{"error": "row 4 is too long"}') if content["prompts"][0] == "prompt 4" else lengths(content)

    server = serve(refuses_one)
    values, failed = rewards(endpoint([server.url], size=2), rows(20), 0.1)
    assert [number for number, value in enumerate(values) if value is None] == [4, 5]
    assert failed == {"refused": 2}
    assert len(server.requests) == 10, "refused requests are not retried"
    assert "row 4 is too long" in caplog.text
    with pytest.raises(DataError, match=rf"answered {status} .*: row 4 is too long, for the prompt"):
        rewards(endpoint([server.url], size=2), rows(20), 0.05)


@pytest.mark.parametrize("most", [3, 120])
def test_as_many_requests_are_made_at_a_time_as_configured(serve: Any, most: int) -> None:
    """The server answers none before so many have come, and counts those it has: 120 are more than httpx opens by default."""
    changed, here, largest = threading.Condition(), 0, 0

    def together(content: dict[str, Any]) -> Any:
        nonlocal here, largest
        with changed:
            here += 1
            largest = max(largest, here)
            changed.notify_all()
            changed.wait_for(lambda: largest >= most, timeout=60.0)
        answer = lengths(content)
        with changed:
            here -= 1
        return answer

    server = serve(together)
    assert rewards(endpoint([server.url], size=1, timeout=60.0, most=most), rows(2 * most)) == [[*range(2 * most)], {}]
    assert largest == most
