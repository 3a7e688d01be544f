"""The context of several turns equals the chat template's rendering of the whole conversation, token by token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.rl import EnvironmentConfig

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TOOL_USE = (
    "{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t.function.name }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'tool' -%}{{ '<tool_response>' + m['content'] + '</tool_response>' }}"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""As that of Hermes 3 with this name, which ``transformers`` chooses for conversations with tools."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAYS_ITS_OPTION = """
class Env:
    def __init__(self, observation, first=None):
        self.observation = observation
        self.first = first

    def reset(self, prompt, label):
        return self.first

    def step(self, completion):
        return {"observation": self.observation}
"""


TAKES_ITS_TIME = """
import time

class Env:
    def __init__(self, seconds):
        self.seconds = seconds

    def reset(self, prompt, label):
        return None

    def step(self, completion):
        time.sleep(self.seconds)
        return {"observation": "again"}
"""


WAITS_FOR_THE_OTHER_PROCESS = """
import os
import pathlib
import time

class Env:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def reset(self, prompt, label):
        (self.folder / str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < 2:
            if time.monotonic() > end:
                raise TimeoutError("there is no other process at work")
            time.sleep(0.01)
        return None
"""


@pytest.fixture
def tokenizer() -> Any:
    """EOS is not the end of a turn, as of a base model."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture
def context(tmp_path: Path, tokenizer: Any) -> Iterator[Any]:
    """The text before the second turn, for a first turn and the environment's answer."""
    file, opened = tmp_path / "env.py", list[Environments]()
    file.write_text(SAYS_ITS_OPTION)

    def of(
        turn: str,
        finish_reason: str,
        observation: Any,
        first: str | None = None,
        role: Any = "user",
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        options = {"observation": observation, "first": first}
        config = EnvironmentConfig(name=f"{file}:Env", options=options, max_turns=3, role=role)
        opened.append(Environments(config, tokenizer, processes=1, timeout=20))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        row = {"prompt": prompt, "label": None, "prompt_ids": tokenizer(prompt)["input_ids"]}
        row["tools"] = json.dumps(tools) if tools else None
        episode = Episode(0, 0, 0, row, most_tokens=1000)
        opened[-1].answer_all([episode])
        sampled = np.array(tokenizer(turn)["input_ids"], np.int32)
        episode.append_turn(
            Completion(sampled, np.zeros(len(sampled)), np.zeros(len(sampled), np.int32), finish_reason)
        )
        opened[-1].answer_all([episode])
        assert episode.failure is None
        return str(tokenizer.decode([*episode.prompt_ids, *episode.ids.tolist()]))

    yield of
    for environments in opened:
        environments.close()


@pytest.mark.parametrize(
    ("turn", "finish_reason"), [("hello<|im_end|>", "stop"), ("hello", "length")], ids=["ended", "truncated"]
)
@pytest.mark.parametrize("observations", [["no"], [""], ["no", "again"], []])
def test_a_turn_is_closed_once_and_each_observation_is_a_message_even_if_empty(
    context: Any, tokenizer: Any, turn: str, finish_reason: str, observations: list[str]
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    messages += [{"role": "user", "content": observation} for observation in observations]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert context(turn, finish_reason, observations) == expected
    if len(observations) == 1:
        assert context(turn, finish_reason, observations[0]) == expected, "a text is a list of one"


@pytest.mark.parametrize("first", [None, "0"])
def test_messages_of_tools_are_rendered_by_the_template_named_for_tools(
    context: Any, tokenizer: Any, first: str | None
) -> None:
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOL_USE}
    messages = [{"role": "user", "content": "a"}]
    messages += [{"role": "tool", "content": first}] if first else []
    messages += [{"role": "assistant", "content": "hello"}, {"role": "tool", "content": "3"}]
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert "<tool_response>3</tool_response>" in expected
    assert context("hello<|im_end|>", "stop", "3", first, role="tool", tools=TOOLS) == expected


@pytest.mark.parametrize(("sampling", "step", "fails"), [(2.1, 0.0, False), (0.0, 2.1, True)])
def test_the_time_limit_of_an_episode_is_that_of_its_environment_and_not_of_sampling(
    sampling: float, step: float, fails: bool, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "env.py").write_text(TAKES_ITS_TIME)
    config = EnvironmentConfig(
        name=f"{tmp_path / 'env.py'}:Env", options={"seconds": step}, max_turns=3, episode_seconds=2
    )
    episode = Episode(0, 0, 0, {"prompt": "a", "label": None, "prompt_ids": [97]}, most_tokens=1000)
    turn = np.array(tokenizer("hello<|im_end|>")["input_ids"], np.int32)
    with closing(Environments(config, tokenizer, processes=1, timeout=20)) as environments:
        environments.answer_all([episode])
        time.sleep(sampling)  # an engine that samples many episodes
        episode.append_turn(Completion(turn, np.zeros(len(turn)), np.zeros(len(turn), np.int32), "stop"))
        environments.answer_all([episode])
    assert (episode.failure is not None, episode.over) == (fails, fails)
    if episode.failure is not None:
        assert episode.failure.reason == "timeout"
        assert str(episode.failure) == "took more than 2 seconds in all (rl.environment.episode_seconds)"


@pytest.mark.parametrize("first", [None, "<|image_pad|>"], ids=["step", "reset"])
def test_an_episode_whose_environment_writes_the_token_of_an_image_fails(
    first: str | None, tokenizer: Any, tmp_path: Path
) -> None:
    """For which there is no image: engines and trainers fail to read it."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    (tmp_path / "env.py").write_text(SAYS_ITS_OPTION)
    options = {"observation": "a <|image_pad|>", "first": first}
    config = EnvironmentConfig(name=f"{tmp_path / 'env.py'}:Env", options=options, max_turns=3)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    row = {"prompt": prompt, "label": None, "prompt_ids": tokenizer(prompt)["input_ids"]}
    episode = Episode(0, 0, 0, row, most_tokens=1000)
    with closing(Environments(config, tokenizer, processes=1, timeout=20, image_tokens=[image])) as environments:
        environments.answer_all([episode])
        if first is None:
            assert episode.failure is None
            turn = np.array(tokenizer("hello<|im_end|>")["input_ids"], np.int32)
            episode.append_turn(Completion(turn, np.zeros(len(turn)), np.zeros(len(turn), np.int32), "stop"))
            environments.answer_all([episode])
    assert episode.over
    assert episode.failure is not None
    assert episode.failure.reason == "wrong_shape"
    assert str(episode.failure) == "returned a text with a token that stands for an image, a video or a sound"
    assert image not in [*episode.prompt_ids, *episode.ids.tolist()]


def test_processes_work_at_the_same_time(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(WAITS_FOR_THE_OTHER_PROCESS)
    (tmp_path / "met").mkdir()
    config = EnvironmentConfig(name=f"{tmp_path / 'env.py'}:Env", options={"folder": str(tmp_path / "met")})
    prompt = {"prompt": "a", "label": None, "prompt_ids": [97]}
    with closing(Environments(config, tokenizer, processes=2, timeout=120)) as environments:
        by_process = {
            environments.process_of(episode): episode
            for episode in (Episode(0, sample, 0, prompt, most_tokens=1000) for sample in range(16))
        }
        assert sorted(by_process) == [0, 1]
        environments.answer_all([*by_process.values()])
    assert [episode.failure for episode in by_process.values()] == [None, None]
