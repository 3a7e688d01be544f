"""The reason of an HTTP server that refuses: in messages, short and harmless."""

from __future__ import annotations

import json

import httpx
import pytest

from alignment_core import credentials
from alignment_core.rewards.http_errors import SHOWN, because, reason


def answer(body: str | bytes, status: int = 400) -> httpx.Response:
    return httpx.Response(status, content=body)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            '{"error": {"message": "max_tokens is not taken", "type": "invalid_request_error"}}',
            "max_tokens is not taken",
        ),
        ('{"error": "no such model"}', "no such model"),
        ('{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        ('{"detail": "Not authenticated"}', "Not authenticated"),
        ('[{"error": {"message": "of a list"}}]', "of a list"),
        ("too bad", "too bad"),
        ('{"other": 1}', '{"other": 1}'),
        ("", ""),
        ("{}", ""),
        ("\x1b[31mred\x1b[0m\x9b1m\n\u202eback\u2066wards", "[31mred [0m 1m back wards"),
    ],
)
def test_the_reason_is_found_and_has_no_control_characters(body: str, shown: str) -> None:
    assert reason(answer(body)) == shown
    assert because(answer(body)) == (f": {shown}" if shown else "")


def test_a_long_reason_is_cut_and_nesting_without_end_is_no_reason() -> None:
    assert reason(answer(json.dumps({"error": "x" * 5000}))) == "x" * SHOWN + "…"
    assert len(reason(answer("[" * 100_000))) <= SHOWN + 1
    assert reason(answer('{"error": ' * 50 + "1" + "}" * 50)) != ""
    assert reason(answer(b"\xff\xfe bytes")).endswith("bytes")


def test_a_secret_that_the_server_repeats_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the query of a URL, which is no header's token."""
    monkeypatch.setattr(credentials, "_read", set())
    monkeypatch.setenv("SIGNATURE", "s3cret-of-a-url")
    credentials.resolved("https://h.example/score?sig=env:SIGNATURE", "rewards.0.urls")
    credentials.remember("s3cret")
    assert reason(answer('{"error": "the key s3cret is wrong"}')) == "the key <removed> is wrong"
    assert because(answer("bad signature s3cret-of-a-url")) == ": bad signature <removed>", "the longer one goes first"
