"""Access to `align serve` and `align serve-reward` (the source of the token, and refused settings), and their models."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli import serve
from alignment_core.artifacts import open_store
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.inference import http_server
from tests.align import align_here


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.TOKEN, raising=False)


def test_the_token_of_the_environment_needs_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.token_of("127.0.0.1", None, None) is None
    monkeypatch.setenv(serve.TOKEN, "of-the-environment")
    monkeypatch.setenv("OTHER", "of-another-variable")
    assert serve.token_of("127.0.0.1", None, None) == "of-the-environment"
    assert serve.token_of("0.0.0.0", None, None) == "of-the-environment"
    assert serve.token_of("127.0.0.1", None, "OTHER") == "of-another-variable"
    assert serve.token_of("127.0.0.1", "given", None) == "given"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.2", "a-host", "127.0.0.1.example"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    with pytest.raises(UserError, match="others can reach it, so set a token with ALIGN_SERVE_TOKEN or --token"):
        serve.token_of(host, None, None)


def test_an_empty_or_unfit_token_is_refused_and_never_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("", "two words", "line\n", "schlüssel"):
        with pytest.raises(UserError, match="printable ASCII"):
            serve.token_of("127.0.0.1", wrong, None)
    monkeypatch.setenv(serve.TOKEN, "")
    with pytest.raises(UserError, match="printable ASCII"):
        serve.token_of("127.0.0.1", None, None)
    with pytest.raises(UserError, match="--token-variable: the environment has no variable NONE"):
        serve.token_of("127.0.0.1", None, "NONE")
    with pytest.raises(UserError, match="not both"):
        serve.token_of("127.0.0.1", "a", "b")


@pytest.mark.parametrize(
    "option", ["--host=0.0.0.0", "--host", "--hos", "--port", "--api-key=x", "--api_key", "--uds=/a"]
)
def test_options_of_vllm_cannot_open_the_server_to_others(option: str, tmp_path: Path) -> None:
    done = align_here(tmp_path, "serve", str(tmp_path), "--", option, "0.0.0.0")
    assert (done.returncode, "before the --, where it is checked" in done.stderr) == (2, True)


def test_other_options_of_vllm_are_passed_on() -> None:
    serve._check_options(["--max-model-len", "64", "--kv-cache-memory-bytes=362M", "--no-enable-log-requests", "-q"])


def test_the_token_is_in_the_servers_environment_and_not_in_its_command(tiny_model: Any) -> None:
    command, variables = http_server.server_of(str(tiny_model()), "m", "127.0.0.1", 1, token="s3cret")
    assert variables["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in " ".join(command)
    assert "--middleware=alignment_core.inference.token_guard.RequireToken" in command
    open_to_all, variables = http_server.server_of(str(tiny_model()), "m", "127.0.0.1", 1)
    assert "VLLM_API_KEY" not in variables
    assert not [word for word in open_to_all if word.startswith("--middleware")]


def test_a_port_that_another_server_has_is_refused_before_any_token_is_sent_there(tiny_model: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(EnvironmentFault, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"),
            http_server.running(str(tiny_model()), "m", "127.0.0.1", port, token="s3cret"),
        ):
            pass
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


def test_the_context_is_as_long_as_the_cache_allows_unless_set_by_an_option(tiny_model: Any) -> None:
    """vLLM takes -1 for the longest context that its cache can hold; of an option that is given twice it takes the last."""
    command, _ = http_server.server_of(str(tiny_model()), "m", "127.0.0.1", 1, options=["--max-model-len", "64"])
    assert command.index("--max-model-len=-1") < command.index("--max-model-len")
    assert command[1] == "-P", "files of the working folder are not imported"


def test_a_model_is_named_by_its_address_on_the_hub_too(tmp_path: Path) -> None:
    store, until = str(tmp_path / "store"), ExitStack()
    assert serve.model_of("hf://org/name", store, until) == ("org/name", "org/name")
    for address, sentence in (
        ("s3://bucket/model", "is an address; give an artifact of the store"),
        ("ftp://host/model", "^model: ftp:// cannot be read"),
    ):
        with pytest.raises(UserError, match=sentence):
            serve.model_of(address, store, until)


def test_a_model_of_the_store_stays_in_the_cache_until_its_server_ends(tmp_path: Path) -> None:
    """Else `align artifacts gc --cache-days 0`, or a second model where the cache is bounded, evicts it while it is loaded."""
    store = open_store(tmp_path / "store")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    reference = store.publish(tmp_path / "model", "model")
    with ExitStack() as until:
        folder, _ = serve.model_of(str(reference), str(tmp_path / "store"), until)
        assert not store.cache.evict(reference.digest)
        assert Path(folder, "config.json").read_text() == "{}"
    assert store.cache.evict(reference.digest)
    assert not Path(folder).exists()
