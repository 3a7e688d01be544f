"""Tools: calls in a turn, their results, and the reward of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.environments.environments import Environments, environment_content
from alignment_core.environments.episode import Episode
from alignment_core.environments.tool_calls import Call, parse
from alignment_core.errors import UserError
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.user_code.dependencies import counting
from alignment_core.user_code.functions import function_content

TOOLS = """
import asyncio

def add(a, b=1):
    return a + b

async def greet(function):
    await asyncio.sleep(0)
    return f"hello {function}"
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.fixture
def config(tmp_path: Path) -> EnvironmentConfig:
    (tmp_path / "tools.py").write_text(TOOLS)
    tools = [f"{tmp_path / 'tools.py'}:{name}" for name in ("add", "greet")]
    options = {"tools": tools, "verifier": "task"}
    return EnvironmentConfig(name="alignment_core.environments.tools:Tools", options=options, role="tool")


@pytest.fixture(params=["plain", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Of bytes; also one that has the tags of a call as special tokens."""
    tokenizer = byte_tokenizer(TEMPLATE)
    if request.param == "special":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    return tokenizer


@pytest.fixture
def environments(config: EnvironmentConfig, tokenizer: Any) -> Iterator[Environments]:
    environments = Environments(config, tokenizer, processes=1, timeout=20)
    yield environments
    environments.close()


def test_a_verifier_loaded_in_a_thread_refuses_code_changed_since_the_key(
    config: EnvironmentConfig, tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "verifier.py"
    file.write_text("def f(*_): return 1.0\n")
    with counting():
        function_content(f"{file}:f", "rl.rewards.0.verifier")
        environments = Environments(config, tokenizer, processes=1, timeout=20)
    file.write_text("def f(*_): return 0.0\n")
    row = {"prompt_text": "a", "completion_text": "b", "label": None}
    with closing(environments), pytest.raises(UserError, match=r"verifier\.py changed since this stage began"):
        # after `counting`, as in a thread: no context has the files
        list(environments._verifier(0, f"{file}:f")([row]))


def say(episode: Episode, tokenizer: Any, text: str) -> None:
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
    episode.append_turn(Completion(ids, np.zeros(len(ids)), np.zeros(len(ids)), "stop"))


def test_calls_are_answered_one_message_each_and_the_last_turn_is_scored(
    environments: Environments, tokenizer: Any
) -> None:
    episode = Episode(0, 0, 0, {"prompt": "1+2?", "label": "3", "prompt_ids": []}, most_tokens=4000)
    environments.answer_all([episode])
    assert (len(episode.ids), episode.over) == (0, False)
    problem = (
        call('{"name": "add", "arguments": {"a": 1, "b": 2}}'),
        call('{"name": "greet", "arguments": {"function": "ä"}}'),
        call('{"name": "add", "arguments": {"c": 1}}'),
        call('{"name": "sub", "arguments": {}}'),
        call('{"name": "add"'),
    )
    say(episode, tokenizer, "let me see" + "\n".join(problem))
    environments.answer_all([episode])
    observed = tokenizer.decode(episode.ids[~episode.mask])
    messages = observed.removesuffix("<assistant>").split("<tool>")[1:]
    assert messages[:2] == ["3", "hello ä"]
    assert messages[2] == (
        "Error: TypeError: add() got an unexpected keyword argument 'c'; it is called as add(a, b=1)"
    )
    assert messages[3] == "Error: there is no tool 'sub'; there are add, greet"
    assert messages[4].startswith("Error: the tool call is not valid JSON")
    assert observed.endswith("<assistant>")
    say(episode, tokenizer, " 3\n")
    environments.answer_all([episode])
    assert (episode.over, episode.reward, episode.failure) == (True, 1.0, None)


HIDDEN = """
import importlib

def plain(name):
    return importlib.import_module(f"hidden_{name}").VALUE

async def wrapped(name):
    try:
        return plain(name)
    except ImportError as error:
        raise RuntimeError("there is no such rule") from error

def inner(a):
    return len(a, a)
"""


def test_a_refused_import_of_a_tool_fails_the_episode_with_an_error_for_the_user_only(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(HIDDEN)
    (tmp_path / "hidden_rules.py").write_text("VALUE = 1\n")
    tools = [f"{tmp_path / 'tools.py'}:{name}" for name in ("plain", "wrapped", "inner")]
    options = {"tools": tools, "verifier": "task"}
    config = EnvironmentConfig(name="alignment_core.environments.tools:Tools", options=options, role="tool")
    tokenizer = byte_tokenizer(TEMPLATE)
    with closing(Environments(config, tokenizer, processes=1, timeout=20)) as environments:
        prompt = {"prompt": "?", "label": "3", "prompt_ids": []}
        episodes = [Episode(number, 0, 0, prompt, most_tokens=4000) for number in range(3)]
        environments.answer_all(episodes)
        for episode, tool in zip(episodes, ("plain", "wrapped", "inner"), strict=True):
            argument = {"a": 1} if tool == "inner" else {"name": "rules"}
            say(episode, tokenizer, call(json.dumps({"name": tool, "arguments": argument})))
        environments.answer_all(episodes)
    for episode in episodes[:2]:
        assert (episode.over, episode.failure and episode.failure.reason) == (True, "raised")
        assert "hidden_rules.py is loaded in a way that the source does not show" in str(episode.failure)
    text = tokenizer.decode(episodes[2].ids)
    assert "Error: TypeError: len() takes exactly one argument (2 given)<" in text, "of its inside, not of its call"


def test_an_unclosed_call_counts_as_a_call_and_other_text_does_not() -> None:
    assert parse('a <tool_call>{"name": "f"}') == ("a", [Call("f", {})])
    assert parse("a {} b") == ("a {} b", [])
    assert [parsed.problem[:9] for parsed in parse(call("[]") + call('{"name": "f", "arguments": []}'))[1]] == [
        "not of th",
        "`argument",
    ]


def test_the_source_of_tools_and_verifier_decides_a_result(config: EnvironmentConfig) -> None:
    before = environment_content(config)
    path = Path(config.options["tools"][0].rpartition(":")[0])
    path.write_text(TOOLS.replace("b=1", "b=2"))
    assert environment_content(config) != before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": ["none.py:f"], "verifier": "math"}, "rl.environment.options.tools: 'none.py:f' cannot be loaded"),
        ({"tools": [], "verifier": "maths"}, "rl.environment.options.verifier: 'maths' is neither `code` nor"),
        ({"tools": []}, "rl.environment.options: .*missing 1 required positional argument: 'verifier'"),
    ],
)
def test_options_that_cannot_work_are_refused_when_the_key_is_made(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        environment_content(EnvironmentConfig(name="alignment_core.environments.tools:Tools", options=options))
