"""A secret is read from the environment by the process that uses it, and is in no copy of a configuration.

The list of secrets is written by hand here: names and shapes as documented by their services.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core import credentials
from alignment_core.attestation.attest import PROVENANCE, without_secrets
from alignment_core.credentials import cut, literals, refuse_literals, resolved, variables, with_path
from alignment_core.environments import calls
from alignment_core.errors import UserError
from alignment_core.execution.cache_miss import changes
from alignment_core.host.protocol import describe
from alignment_core.recipes import BaseRecipe, load_recipe, parse_recipe
from alignment_core.recipes.methods import METHODS, method
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.endpoint import Endpoint, asks_for, read_rewards
from alignment_core.user_code.errors import Failed
from tests.recipes.contents import RL, refusal
from tests.rewards.reward_server import Server, lengths

SECRET = "tt-4711-nobody-guesses"
SHIPPED = sorted((Path(__file__).parents[1] / "deployments" / "recipes").rglob("*.yaml"))


def rl(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    section = {"environment": {"name": "env.py:Env", "options": options}, "rewards": [{"environment": True}], **more}
    return {**RL, "rl": {**RL["rl"], **section}}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value that another test has read."""
    monkeypatch.setattr(credentials, "_read", set())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"api_key": SECRET}, "api_key"),
        ({"apiKey": SECRET}, "apiKey"),
        ({"accessKey": SECRET}, "accessKey"),
        ({"judge": {"password": 12345678}}, "judge.password"),
        ({"headers": {"Authorization": "Bearer abc123def456"}}, "headers.Authorization"),
        ({"headers": [["X-Api-Key", SECRET]]}, "headers.0.1"),
        ({"env": [{"name": "MY_TOKEN", "value": SECRET}]}, "env.0.value"),
        ({"credentials": {"id": "me", "value": SECRET}}, "credentials.value"),
        ({"api_keys": [SECRET]}, "api_keys.0"),
        ({"anything": "hf_abcdefghijklmnopqrst"}, "anything"),
        ({"dsn": "postgresql://me:hunter22@db.example/x"}, "dsn"),
        ({"dsn": "host=db password=hunter22"}, "dsn"),
        ({"endpoint": f"https://h.example/v1?api_key={SECRET}"}, "endpoint"),
        ({"pem": "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----"}, "pem"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_secret_in_options_is_refused_with_its_field_and_the_fix_and_is_not_repeated(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(rl(options))
    message = str(caught.value)
    assert f"recipe: rl.environment.options.{field}: holds a secret" in message
    assert "`env:NAME`" in message
    assert SECRET not in message
    assert "hunter22" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Authorization": "Bearer env:MY_KEY"}},
        {"api_key": "env:MY_KEY", "url": "https://h.example/v1?api_key=env:MY_KEY&n=3"},
        {"api_key": "EMPTY", "token": "none", "password": None},
        {"eos_token": "</s>", "think_token": "<think>", "max_tokens": 1024, "pass": 3},
        {"prompt_key": "question", "sort_key": "difficulty", "key": "answer"},
        {"template": "Give the author=Jane of {text}: https://h.example/?author=jane&max_tokens=5"},
        {"token_file": "/run/secrets/token", "token_variable": "MY_TOKEN", "auth_type": "oauth"},
        {"tokenizer": "org/some-tokenizer-with-a-long-name"},
        {"reward_fn_key": "data_source", "stop": ["password", "login"], "think_end_token": "[/THINK]"},
        {"token_budget": 4096, "secret_number": 1234, "token_penalties": [1000, 2000.0]},
    ],
)
def test_options_without_secrets_are_accepted(options: dict[str, Any]) -> None:
    assert parse_recipe(rl(options)).model_dump()["rl"]["environment"]["options"] == options


@pytest.mark.parametrize("name", ["pass", "pwd", "jwt", "pat", "cookie", "webhook", "user_pass", "api_key", "sig"])
def test_a_parameter_of_a_url_is_a_secret_by_the_names_of_fields_that_are(name: str) -> None:
    url = f"https://h.example/score?rows=2&{name}=hunter2"
    assert literals({"urls": [url]}) == ["urls.0"]
    assert cut(url) == f"https://h.example/score?rows=2&{name}=<removed>"
    assert literals({"urls": [f"https://h.example/score?{name}=env:MINE"]}) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_recipe_appears_to_contain_a_secret(path: Path) -> None:
    assert literals(load_recipe(path).model_dump(mode="json")) == []


@pytest.mark.parametrize("name", METHODS.names())
def test_no_field_of_a_recipe_is_called_like_a_secret(name: str) -> None:
    """Else its value would be refused, or cut out of attestations."""
    schema = json.dumps(method(name).recipe.model_json_schema())
    fields = {
        name for definition in json.loads(schema).get("$defs", {}).values() for name in definition.get("properties", {})
    }
    assert {name for name in fields if credentials.looks_secret(name)} == set()


def test_the_value_of_a_secret_variable_is_recognised_in_any_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    assert literals({"data": [{"note": f"use {SECRET}"}]}) == ["data.0.note"]


def test_an_override_and_options_that_pass_through_are_looked_at_too(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(rl({})))
    load = lambda _, *overrides: load_recipe(recipe, overrides)  # noqa: E731
    message = refusal(load, None, f"resources.engine_options={{hf_token: {SECRET}}}")
    assert "resources.engine_options.hf_token: holds a secret" in message
    assert SECRET not in message


def test_a_url_with_a_secret_in_its_query_is_refused_and_a_variable_is_taken() -> None:
    """`?api_key=…` and the password are the two ways in which a URL carries a secret."""

    def rewarded(url: str) -> BaseRecipe:
        return parse_recipe({**RL, "rl": {**RL["rl"], "rewards": [{"urls": url}]}})

    with pytest.raises(UserError, match=r"rl\.rewards\.0\.urls: holds a secret"):
        rewarded(f"http://127.0.0.1:9/score?api_key={SECRET}")
    for url in ("env:SCORER", "https://h.example/score?api_key=env:SCORER_KEY"):
        assert rewarded(url).model_dump()["rl"]["rewards"][0]["urls"] == (url,)


def test_variables_are_resolved_on_use_and_a_missing_variable_is_named_with_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("ODD", "a b&c")
    options = {
        "key": "env:MY_KEY",
        "header": "Bearer env:MY_KEY",
        "list": ["env:MY_KEY", 3],
        "url": "https://h/?a=env:ODD&b=1",
        "text": "env: none",
    }
    assert resolved(options, "options") == {
        "key": SECRET,
        "header": f"Bearer {SECRET}",
        "list": [SECRET, 3],
        "url": "https://h/?a=a%20b%26c&b=1",
        "text": "env: none",
    }
    named = [("key", "MY_KEY"), ("header", "MY_KEY"), ("list.0", "MY_KEY"), ("url", "ODD")]
    assert [*variables(options)] == named
    with pytest.raises(UserError, match=r"^options\.x\.0: the environment has no variable NOT_THERE$"):
        resolved({"x": ["env:NOT_THERE"]}, "options")


def test_a_path_below_a_url_comes_before_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_path("https://h/v1?key=env:K", "chat/completions") == "https://h/v1/chat/completions?key=env:K"
    monkeypatch.setenv("JUDGE", "https://h/v1?key=4711")
    assert resolved(with_path("env:JUDGE", "chat/completions"), "judge") == "https://h/v1/chat/completions?key=4711"


def test_an_environment_gets_the_value_and_the_configuration_keeps_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the key of its stage, which is a hash of the configuration, is the same for every value."""
    (tmp_path / "env.py").write_text(
        "class Env:\n"
        "    def __init__(self, api_key):\n        self.api_key = api_key\n"
        "    def reset(self, prompt, label):\n        return 'the key has %d letters' % len(self.api_key)\n"
    )
    monkeypatch.setenv("MY_KEY", SECRET)
    config = EnvironmentConfig(name=f"{tmp_path}/env.py:Env", options={"api_key": "env:MY_KEY"})
    answer = asyncio.run(calls.reset("e", config.name, None, config.options, "p", None))
    assert answer == {"observation": f"the key has {len(SECRET)} letters"}
    assert config.model_dump()["options"] == {"api_key": "env:MY_KEY"}


def test_a_server_gets_the_key_and_no_message_contains_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lengths)
    try:
        monkeypatch.setenv("MY_KEY", SECRET)
        monkeypatch.setenv("PLACE", f"{server.url}?sig={SECRET}")
        for url in (f"{server.url}?sig=env:MY_KEY", "env:PLACE"):
            source = Endpoint([url], 1, None, 5.0, "rewards.0.urls", asks_for(lambda row: "x"), read_rewards)
            row = {"prompt_text": "p", "completion_text": "xx", "label": None}
            assert [answer for _, answer in source([row])] == [2]
        assert [replica.url for replica in source.replicas] == ["env:PLACE"]
    finally:
        server.end()
    ((_, answer),) = source([row])
    assert isinstance(answer, Failed)
    assert "env:PLACE" in str(answer)
    assert SECRET not in str(answer)


def test_a_secret_value_is_removed_from_errors_passed_to_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    resolved("env:MY_KEY", "options.api_key")
    assert describe(ValueError(f"no such key {SECRET!r}"))["message"] == "ValueError: no such key '<removed>'"
    assert cut({"reason": SECRET, "api_key": "env:MY_KEY"}) == {"reason": "<removed>", "api_key": "env:MY_KEY"}


def test_secrets_in_stored_records_and_attestations_are_removed_before_publication() -> None:
    old = {"config": {"environment": {"options": {"api_key": SECRET}}}, "url": f"https://me:{SECRET}@h.example"}
    new = {"config": {"environment": {"options": {"api_key": "env:K"}}}, "url": "env:U"}
    assert SECRET not in str(changes(old, new))
    cleaned = without_secrets(json.dumps(old).encode())
    assert json.loads(cleaned)["config"]["environment"]["options"] == {"api_key": "<removed>"}
    assert SECRET.encode() not in cleaned
    clean = json.dumps(new, separators=(",", ":")).encode()
    assert without_secrets(clean) is clean, f"{PROVENANCE} stays byte for byte what the store has"


def test_a_sentence_about_a_field_is_not_taken_for_its_value() -> None:
    for sentence in ("options.api_key: the environment has no variable X", "a.password: holds a secret"):
        assert cut(sentence) == sentence
    assert cut("password: hunter22") == "password: <removed>"
    assert cut('{"password": "hunter"}') == '{"password": "<removed>"}'


def test_all_fields_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        refuse_literals({"a": {"token": SECRET}, "b": {"password": SECRET}}, "flow")
    assert [line.split(": holds")[0] for line in str(caught.value).splitlines()] == [
        "flow: a.token",
        "flow: b.password",
    ]
