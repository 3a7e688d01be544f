"""Requests to our own servers on loopback take no proxy, and a dead proxy is named.

Clients decide themselves which addresses use the proxy: the test sends requests with the installed urllib, httpx and
requests, and counts those that reach a recording proxy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment.flows.cli.services import env
from alignment.flows.service import services
from alignment_core import network
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.network import defaults
from alignment_core.processes import inherited
from alignment_core.rewards.endpoint import Endpoint, asks_for, read_rewards
from tests.answering import answering
from tests.rewards.reward_server import Server, lengths
from tests.servers.recording import recording_proxy

ROOT = Path(__file__).parents[1]
DIRECT = "127.0.0.1,localhost,::1,169.254.169.254,169.254.170.2"
ASK = """
import sys, urllib.request
from alignment_core import network
if sys.argv[2] == "prepared":
    network.prepare()
import httpx, requests
url = sys.argv[1]
def ask(name, send):
    try:
        print(name, send())
    except Exception as error:
        print(name, type(error).__name__)
ask("urllib", lambda: urllib.request.urlopen(url, timeout=5).status)
ask("httpx", lambda: httpx.get(url, timeout=5).status_code)
ask("requests", lambda: requests.get(url, timeout=5).status_code)
"""


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*network.PROXIES, *network.NO_PROXY):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({}, {}),
        ({"HTTP_PROXY": "http://p:1"}, {"NO_PROXY": DIRECT, "no_proxy": DIRECT}),
        ({"all_proxy": "http://p:1"}, {"NO_PROXY": DIRECT, "no_proxy": DIRECT}),
        (
            {"https_proxy": "http://p:1", "NO_PROXY": "corp.example, 10.0.0.0/8"},
            dict.fromkeys(("NO_PROXY", "no_proxy"), f"corp.example,10.0.0.0/8,{DIRECT}"),
        ),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": DIRECT, "no_proxy": DIRECT}, {}),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "*", "no_proxy": "*"}, {}),
        ({"NO_PROXY": "corp.example"}, {}),
    ],
)
def test_loopback_is_added_to_the_users_no_proxy(given: dict[str, str], set_to: dict[str, str]) -> None:
    assert defaults({"DO_NOT_TRACK": "1", **given}) == set_to


@pytest.mark.parametrize("value", ["1", "0", "true"])
def test_usage_tracking_is_off_unless_set_by_the_user(value: str) -> None:
    assert defaults({}) == {"DO_NOT_TRACK": "1"}
    assert defaults({"DO_NOT_TRACK": value}) == {}


def test_no_client_asks_a_proxy_for_loopback_once_the_process_is_prepared(without_proxies: pytest.MonkeyPatch) -> None:
    """Without it all three do: so it is the preparation that the second half measures."""
    with recording_proxy() as proxy, answering(200, b"{}") as (port, _):
        environment = {**os.environ, **proxy.variables(), "PYTHONPATH": str(ROOT)}
        for prepared, reached in (("not", 3), ("prepared", 0)):
            proxy.requests.clear()
            command = [sys.executable, "-c", ASK, f"http://127.0.0.1:{port}/", prepared]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert len(proxy.requests) == reached, done.stdout + done.stderr
        assert done.stdout.split() == ["urllib", "200", "httpx", "200", "requests", "200"]


def test_a_shell_of_align_env_asks_no_proxy_for_the_services(
    without_proxies: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else `prefect`, which the user runs there, sends its requests with the token to the proxy."""
    without_proxies.setenv("ALIGN_HOME", str(tmp_path))
    without_proxies.setenv("DO_NOT_TRACK", "1")
    ready = SimpleNamespace(phase="ready", url="http://127.0.0.1:4200/api")
    without_proxies.setattr(services, "running", lambda: ready)
    env()
    assert "NO_PROXY" not in capsys.readouterr().out
    without_proxies.setenv("HTTPS_PROXY", "http://p:1")
    without_proxies.setenv("NO_PROXY", "corp.example")
    network.prepare()
    env()
    printed = capsys.readouterr().out
    for name in network.NO_PROXY:
        assert f"export {name}=corp.example,{DIRECT}\n" in printed
        without_proxies.delenv(name)


def test_every_started_process_has_the_network_defaults_even_if_its_parent_has_none(
    without_proxies: pytest.MonkeyPatch,
) -> None:
    """A flow of the user's own, or a worker of theirs, starts our run host without the `align` command."""
    without_proxies.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    without_proxies.setenv("NO_PROXY", "corp.example")
    assert inherited()["no_proxy"] == f"corp.example,{DIRECT}"


def test_a_reward_server_is_reached_through_the_proxy_and_a_dead_proxy_is_named(
    without_proxies: pytest.MonkeyPatch,
) -> None:
    """Before, the server itself was tried, which a machine that needs a proxy cannot reach."""

    def endpoint() -> Endpoint:
        asks = asks_for(lambda row: "x")
        return Endpoint(["http://scores.example/score"], 1, None, 2.0, "rl.rewards.0.urls", asks, read_rewards)

    server = Server(lengths)
    try:
        without_proxies.setenv("http_proxy", server.url)
        row = {"prompt_text": "p", "completion_text": "xx", "label": None}
        assert [answer for _, answer in endpoint()([row])] == [2]
    finally:
        server.end()
    with pytest.raises(EnvironmentFault, match=r"scores\.example/score through the proxy 127\.0\.0\.1:\d+: .*refused"):
        endpoint()


def test_a_dead_proxy_is_named_where_the_hub_is_not_reached(without_proxies: pytest.MonkeyPatch) -> None:
    from alignment_core.data.hub import commit_of

    without_proxies.setenv("https_proxy", "http://me:hunter22@127.0.0.1:9")
    with pytest.raises(UserError, match=r"could not be reached .* through the proxy 127\.0\.0\.1:9 \(") as caught:
        commit_of("org/rows", None, "dataset", "")
    assert "hunter22" not in str(caught.value)
