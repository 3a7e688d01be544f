"""Agents: the endpoint that they use, the conversation that they must continue, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.data.turn_end import PLAIN, keep_chat_template
from alignment_core.environments.agents import _canonical, _reply
from alignment_core.environments.environments import Environments, chat_template_of_turns, environment_content
from alignment_core.environments.episode import Episode
from alignment_core.errors import UserError
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from alignment_core.recipes.sections.rl import EnvironmentConfig
from tests.environments.test_tool_calls import HERMES, LLAMA, calling

BARE = "{{ messages[-1]['content'] }}"
"""Of prompts, for agents that need the text of the question as it is (docs/recipes/environments.md)."""
AGENTS = """
import asyncio, json, time
import httpx


class Chat:
    def __init__(self, url, key, prompt):
        self.client = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        self.messages = [{"role": "user", "content": prompt}]

    async def post(self, **more):
        return await self.client.post("/chat/completions", json={"model": "m", "messages": self.messages, **more})

    async def ask(self, **more):
        answer = await self.post(**more)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        self.messages.append(choice["message"])
        return choice

    def tell(self, text, role="user"):
        self.messages.append({"role": role, "content": text})


async def two_turns(prompt, label, base_url, api_key, worth=1.0):
    chat = Chat(base_url, api_key, prompt)
    first = await chat.ask(max_tokens=5, temperature=0.3)
    chat.tell([{"type": "text", "text": "no: "}, {"type": "text", "text": first["finish_reason"]}])
    second = await chat.ask()
    return worth * len(second["message"]["content"])


def with_openai(prompt, label, base_url, api_key):
    import openai
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    response = client.chat.completions.create(model="m", messages=messages, tools=tools)
    (call,) = response.choices[0].message.tool_calls
    messages += [response.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "user", "content": str(sum(json.loads(call.function.arguments)["of"]))}]
    assert response.choices[0].finish_reason == "tool_calls"
    response = client.chat.completions.create(model="m", messages=messages, tools=tools)
    messages += [response.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    chunks = list(client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True))
    (call,) = chunks[0].choices[0].delta.tool_calls
    messages += [{"role": "assistant", "tool_calls": [call.model_dump()]}, {"role": "user", "content": "streamed"}]
    client.chat.completions.create(model="m", messages=messages, tools=tools)
    return response.usage.completion_tokens


def streams(prompt, label, base_url, api_key):
    import openai
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages, text = [{"role": "user", "content": prompt}], ""
    for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(model="m", messages=messages, stream=True, stream_options=options)
    assert last.choices == []
    return last.usage.completion_tokens


async def raises(prompt, label, base_url, api_key):
    await Chat(base_url, api_key, prompt).ask()
    raise LookupError("lost")


async def hangs(prompt, label, base_url, api_key):
    await Chat(base_url, api_key, prompt).ask()
    await asyncio.sleep(60)


async def asks_nothing(prompt, label, base_url, api_key):
    return 1.0


async def edits(prompt, label, base_url, api_key):
    chat = Chat(base_url, api_key, prompt)
    await chat.ask()
    chat.messages[0] = {"role": "user", "content": "something else"}
    chat.tell("go on")
    await chat.ask()


async def branches(prompt, label, base_url, api_key):
    chat = Chat(base_url, api_key, prompt)
    await asyncio.gather(chat.post(), chat.post())


async def no_number(prompt, label, base_url, api_key):
    await Chat(base_url, api_key, prompt).ask()
    return float("nan")


async def refused(prompt, label, base_url, api_key):
    stranger = Chat(base_url, "guess", prompt)
    assert (await stranger.post()).status_code == 401
    chat = Chat(base_url, api_key, prompt)
    for more in ({"n": 2}, {"max_tokens": 0}, {"messages": "hi"}):
        assert (await chat.post(**more)).status_code == 400, more
    elsewhere = Chat(base_url.replace("/v1", "0/v1"), api_key, prompt)
    assert (await elsewhere.post()).status_code == 404
    await chat.ask()
    return 0.5
"""


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[Callable[..., Environments]]:
    """``environments("two_turns")`` runs that agent."""
    (tmp_path / "agents.py").write_text(AGENTS)
    opened: list[Environments] = []

    def make(name: str, timeout: float = 30, template: Any = None, **fields: Any) -> Environments:
        config = EnvironmentConfig(agent=f"{tmp_path / 'agents.py'}:{name}", **fields)
        own = chat_template_of_turns(config, tmp_path)
        opened.append(Environments(config, byte_tokenizer(template), processes=1, timeout=timeout, chat_template=own))
        return opened[-1]

    yield make
    for environment in opened:
        environment.close()


def episode(sample: int = 0) -> Episode:
    row = {"prompt": "1+2", "label": None, "prompt_ids": list(b"1+2")}
    return Episode(0, sample, 0, row, most_tokens=200)


def say(episode: Episode, ids: list[int], reason: str = "stop") -> None:
    episode.append_turn(Completion(np.array(ids, np.int32), np.zeros(len(ids)), np.zeros(len(ids)), reason))


def turn(text: str) -> list[int]:
    return [*text.encode(), byte_tokenizer().eos_token_id]


def test_sampled_ids_stay_unchanged_and_only_new_messages_are_encoded(environments: Any) -> None:
    first, second = episodes = [episode(0), episode(1)]
    places = environments("two_turns", options={"worth": 2})
    places.answer_all(episodes)
    tokenizer = byte_tokenizer()
    prompt_ids = tokenizer("<user>1+2<assistant>")["input_ids"]
    assert first.prompt_ids == second.prompt_ids == prompt_ids
    assert (len(first.ids), first.most, first.room) == (0, 5, 200 - (len(prompt_ids) - 3)), (
        "the longer prompt comes off the room"
    )
    broken = [0xE2, 0x82, 0x41, 0xFF, tokenizer.eos_token_id]
    say(first, broken)
    say(second, list(b"abcde"), "length")
    places.answer_all(episodes)
    assert first.ids.tolist() == broken + tokenizer("<user>no: stop<assistant>")["input_ids"]
    assert second.ids.tolist() == list(b"abcde") + tokenizer("<eos><user>no: length<assistant>")["input_ids"]
    assert first.mask.tolist() == [True] * 5 + [False] * (len(first.ids) - 5)
    assert first.most is None
    say(first, turn("four"))
    say(second, turn("fifteen"))
    places.answer_all(episodes)
    assert [(each.over, each.reward, each.failure) for each in episodes] == [(True, 8.0, None), (True, 14.0, None)]


def test_messages_of_an_agent_are_rendered_by_the_tokenizers_chat_template_and_not_by_that_of_the_prompts(
    environments: Any, tmp_path: Path
) -> None:
    keep_chat_template(BARE, tmp_path)
    tokenizer, ongoing, places = byte_tokenizer(), episode(), environments("two_turns")
    messages = [{"role": "user", "content": "1+2"}]
    places.answer_all([ongoing])
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ongoing.prompt_ids) == first
    say(ongoing, turn("four"))
    places.answer_all([ongoing])
    messages += [{"role": "assistant", "content": "four"}, {"role": "user", "content": "no: stop"}]
    second = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode([*ongoing.prompt_ids, *ongoing.ids.tolist()]) == second, ongoing.failure
    assert chat_template_of_turns(EnvironmentConfig(name="a:B"), tmp_path) == BARE, "a class continues the prompt"
    assert chat_template_of_turns(None, tmp_path) == BARE
    with pytest.raises(
        UserError, match=r"rl\.environment\.agent: its messages need a chat template, .*`model\.chat_template`"
    ):
        environments("two_turns", template=PLAIN)


def test_openais_client_drives_an_episode_and_reads_tool_calls(environments: Any) -> None:
    pytest.importorskip("openai")
    spoken = "{{ '<' ~ message['role'] ~ '>' ~ message['content'] }}"
    marked = CHAT_TEMPLATE.replace(spoken, spoken + "{{ '!' if message['role'] == 'user' else '' }}")
    tool_use = "{% for t in tools %}({{ t.function.name }}){% endfor %}" + marked
    ongoing = episode()
    places = environments("with_openai", template={"default": CHAT_TEMPLATE, "tool_use": tool_use})
    places.answer_all([ongoing])
    assert byte_tokenizer().decode(ongoing.opening) == "(add)<user>1+2!<assistant>", (
        "the agent's request replaces the prompt, in the template that `transformers` chooses for tools"
    )
    say(ongoing, turn('adding <tool_call>{"name": "add", "arguments": {"of": [1, 2]}}</tool_call>'))
    places.answer_all([ongoing])
    assert byte_tokenizer().decode(ongoing.ids).endswith("<eos><user>3!<assistant>"), ongoing.failure
    say(ongoing, turn("it is 3"))
    places.answer_all([ongoing])
    say(ongoing, turn('<tool_call>{"name": "add"}</tool_call>'))
    places.answer_all([ongoing])
    assert byte_tokenizer().decode(ongoing.ids).endswith("<eos><user>streamed!<assistant>"), ongoing.failure
    say(ongoing, turn("well"))
    places.answer_all([ongoing])
    assert (ongoing.reward, ongoing.failure) == (8.0, None)


def test_a_stream_ends_with_a_chunk_for_the_usage_only_if_the_agent_requests_it(environments: Any) -> None:
    """As OpenAI's API and vLLM: loops over a stream read ``chunk.choices[0]``, which that chunk does not have."""
    pytest.importorskip("openai")
    ongoing, places = episode(), environments("streams")
    for text in ("four", "two"):
        places.answer_all([ongoing])
        say(ongoing, turn(text))
    places.answer_all([ongoing])
    assert (ongoing.reward, ongoing.failure) == (4.0, None), "three bytes and the end of the turn"


def test_tools_of_an_agent_that_the_template_does_not_show_end_the_run(environments: Any) -> None:
    with pytest.raises(UserError, match="the agent offers `tools`, which the chat template does not show"):
        environments("with_openai").answer_all([episode()])


def test_tools_of_an_agent_whose_calls_could_not_be_read_end_the_run_before_the_first_turn(environments: Any) -> None:
    pytest.importorskip("openai")
    places = environments("with_openai", template=calling(LLAMA))
    with pytest.raises(UserError, match=r"rl\.environment: .* is read: set model\.chat_template"):
        places.answer_all([episode()])
    environments("with_openai", template=calling(HERMES)).answer_all([episode()])


def test_a_call_that_a_policy_only_thinks_about_is_no_call_for_an_agent() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"of": [1]}}</tool_call>'
    thought = f"<think>shall I {call}?</think>no"
    assert _reply(thought, 2, has_tools=True) == {"role": "assistant", "content": thought}
    reply = _reply(f"<think>{call}</think>{call}", 2, has_tools=True)
    assert (reply["content"], [tool_call["id"] for tool_call in reply["tool_calls"]]) == (
        f"<think>{call}</think>",
        ["000020000"],
    )


def test_the_first_request_of_an_agent_keeps_fields_that_a_template_may_show() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    ]
    first, second = map(_canonical, messages)
    assert (first["tool_calls"][0]["id"], first["reasoning_content"]) == ("abcdefghi", "hm")
    assert second == messages[1]


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("raises", "raised", "failed: LookupError: lost"),
        ("hangs", "timeout", "gave no answer within 3 seconds"),
        ("asks_nothing", "wrong_shape", "ended without sending a request to the policy"),
        ("edits", "wrong_shape", "changed earlier messages"),
        ("branches", "wrong_shape", "sent a request while another one was open"),
        ("no_number", "raised", "the reward is nan"),
        ("no_such", "", "has no 'no_such'"),
    ],
)
def test_a_failed_episode_has_its_reason(name: str, reason: str, says: str, environments: Any) -> None:
    ongoing, places = episode(), environments(name, timeout=3 if name == "hangs" else 30)
    while not ongoing.over:
        places.answer_all([ongoing])
        if not ongoing.over:
            say(ongoing, turn("well"))
    assert ongoing.failure
    assert says in str(ongoing.failure)
    assert ongoing.failure.reason == (reason or "raised")


def test_a_request_that_the_endpoint_refuses_fails_no_episode(environments: Any) -> None:
    ongoing, places = episode(), environments("refused")
    places.answer_all([ongoing])
    say(ongoing, turn("well"))
    places.answer_all([ongoing])
    assert (ongoing.reward, ongoing.failure) == (0.5, None)


def test_an_agent_that_exceeds_max_turns_ends_with_its_reward_so_far(environments: Any) -> None:
    ongoing, places = episode(), environments("two_turns", max_turns=1)
    places.answer_all([ongoing])
    say(ongoing, turn("well"))
    places.answer_all([ongoing])
    assert (ongoing.over, ongoing.reward, ongoing.failure, ongoing.turns) == (True, 0.0, None, 1)


def test_an_environment_is_a_class_or_an_agent() -> None:
    for fields in ({}, {"name": "a:B", "agent": "a:b"}):
        with pytest.raises(ValueError, match=r"exactly one of `name` .* and `agent`"):
            EnvironmentConfig(**fields)
    assert "agent" not in EnvironmentConfig(name="a:B").model_dump(), "seeds of classes are unchanged"


def test_the_source_of_an_agent_decides_a_result(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    config = EnvironmentConfig(agent=f"{tmp_path / 'agents.py'}:two_turns")
    before = environment_content(config)
    (tmp_path / "agents.py").write_text(AGENTS.replace("worth=1.0", "worth=2.0"))
    assert environment_content(config) != before
