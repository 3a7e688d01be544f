"""Calls in a policy's turn: which count, how they are numbered, and which functions can answer them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from alignment_core.checks.rows import Question, TokenizerSource, answers_to
from alignment_core.data.pin import pin
from alignment_core.data.template import Renderer
from alignment_core.environments.calling import called
from alignment_core.environments.environments import Environments, environment_content
from alignment_core.environments.episode import Episode
from alignment_core.environments.tool_calls import Call, answers, call_id, check_format, parse
from alignment_core.environments.tools import Tools
from alignment_core.errors import UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.user_code.process import FunctionProcess
from tests.environments.test_tools import TEMPLATE, call, say
from tests.rendering.installed import TRL

CHARGE = call('{"name": "charge", "arguments": {"euros": 5}}')
CALLS = [Call("charge", {"euros": 5})]
IDS = re.compile(r"[a-zA-Z0-9]{9}")
"""The requirement of Mistral's templates: `Tool call IDs should be alphanumeric strings with length 9!`"""
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.name }}:{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
HERMES = "<tool_call>{{ call.function | tojson }}</tool_call>"
LLAMA = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
PARAMETERS = {"type": "object", "properties": {"euros": {"type": "integer", "description": "How many."}}}
SCHEMAS = [{"type": "function", "function": {"name": "charge", "description": "Charges.", "parameters": PARAMETERS}}]


def calling(written: str) -> str:
    """A chat template that shows tools, and calls of them as ``written``."""
    calls = f"{{% for call in m.tool_calls or [] %}}{written}{{% endfor %}}"
    shown = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    return shown + TEMPLATE.replace("{{ m.content }}", "{{ m.content }}" + calls)


@pytest.mark.parametrize(
    ("turn", "rest", "calls"),
    [
        (f"<think>Or {CHARGE}?</think>The answer is 4.", f"<think>Or {CHARGE}?</think>The answer is 4.", []),
        (f"<think>Or {CHARGE}?</think>{CHARGE}", f"<think>Or {CHARGE}?</think>", CALLS),
        (f"Or {CHARGE}?</think>4", f"Or {CHARGE}?</think>4", []),  # the prompt opened the thought
        (f"<think>Or {CHARGE}", f"<think>Or {CHARGE}", []),  # it was truncated
        (f"[THINK]{CHARGE}[/THINK]4", f"[THINK]{CHARGE}[/THINK]4", []),
        (f"<think>a</think>{CHARGE}<think>{CHARGE}</think>{CHARGE}", f"<think>a</think><think>{CHARGE}</think>", CALLS * 2),
        ("Use <tool_call> to call. The answer is 4.", "Use <tool_call> to call. The answer is 4.", []),
        (f"Use <tool_call> so: {CHARGE}", "Use <tool_call> so:", CALLS),
        (
            call('{"name": "write", "arguments": {"text": "</tool_call><think>"}}'),
            "",
            [Call("write", {"text": "</tool_call><think>"})],
        ),
        ('<tool_call>\n{"name": "f"}\n<tool_call>{"name": "g"}', "", [Call("f", {}), Call("g", {})]),
    ],
)  # fmt: skip
def test_calls_count_outside_of_thoughts(turn: str, rest: str, calls: list[Call]) -> None:
    """vLLM also removes the reasoning before it parses calls."""
    assert parse(turn) == (rest, calls)


def test_marks_of_thoughts_in_the_arguments_of_a_call_are_none() -> None:
    """A tool that writes text may be given any. Behind a thought that the prompt opened the call is still one."""
    arguments = {"text": "a</think>b<think>"}
    written = call(json.dumps({"name": "write", "arguments": arguments}))
    assert parse(written) == ("", [Call("write", arguments)])
    assert parse(f"so</think>{written}") == ("so</think>", [Call("write", arguments)])
    assert parse(f"{written}?</think>4")[1] == []


def test_a_malformed_call_counts_as_a_call() -> None:
    for turn in (call("charge(5)"), '<tool_call>{"name": "charge", "argu', call('{"name": "charge"} please')):
        assert [bool(parsed.problem) for parsed in parse(turn)[1]] == [True]


TOOLS = """
import functools

def wrapped(function):
    def inner(*arguments, **options):
        return function(*arguments, **options)
    return inner

CHARGED = []

def charge(euros):
    CHARGED.append(euros)
    return f"charged {sum(CHARGED)}"

@wrapped
async def decorated(x):
    return f"decorated {x}"

class Asks:
    async def __call__(self, x):
        return f"object {x}"

asks = Asks()
partial = functools.partial(asks, x=3)

def yields(x):
    yield x

@wrapped
def hidden(x):
    yield x

def maps(x):
    return map(str, [x])
"""


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    (tmp_path / "tools.py").write_text(TOOLS)
    return lambda *names: {"tools": [f"{tmp_path / 'tools.py'}:{name}" for name in names], "verifier": "task"}


@pytest.fixture(params=["plain", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Of bytes; also one that has the marks of thoughts as special tokens."""
    tokenizer = byte_tokenizer(TEMPLATE)
    if request.param == "special":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


def opened(options: dict[str, Any], tokenizer: Any, role: Any = "tool") -> Environments:
    config = EnvironmentConfig(name="alignment_core.environments.tools:Tools", options=options, role=role)
    return Environments(config, tokenizer, processes=1, timeout=20)


def answered(environments: Environments, tokenizer: Any, *turns: str) -> Episode:
    episode = Episode(0, 0, 0, {"prompt": "?", "label": "4", "prompt_ids": []}, most_tokens=4000)
    environments.answer_all([episode])
    for turn in turns:
        say(episode, tokenizer, turn)
        environments.answer_all([episode])
    return episode


def test_a_call_in_a_thought_is_not_executed_and_the_turn_with_the_answer_is_scored(
    tools: Callable[..., dict[str, Any]], tokenizer: Any
) -> None:
    with closing(opened(tools("charge"), tokenizer)) as environments:
        episode = answered(environments, tokenizer, f"<think>Or {CHARGE}?</think>{CHARGE}", f"<think>{CHARGE}</think>4")
    observed = tokenizer.decode(episode.ids[~episode.mask])
    assert observed == "<tool>charged 5<assistant>", "once"
    assert (episode.over, episode.failure) == (True, None)


def test_a_thought_that_the_prompt_opens_and_the_turn_does_not_close_calls_no_tool(
    tools: Callable[..., dict[str, Any]],
) -> None:
    """Generation prompts of Qwen3.5 and DeepSeek-R1 end with `<think>` and a line break."""
    tokenizer = byte_tokenizer(TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}"))
    prompt = {"prompt": "?", "label": "4", "prompt_ids": tokenizer("<user>?<assistant><think>\n")["input_ids"]}
    with closing(opened(tools("charge"), tokenizer)) as environments:
        episodes = [Episode(draw, 0, 0, prompt, most_tokens=4000) for draw in range(2)]
        environments.answer_all(episodes)
        for episode, turn in zip(episodes, (f"Or {CHARGE}?", f"Or {CHARGE}?</think>{CHARGE}"), strict=True):
            say(episode, tokenizer, turn)
        environments.answer_all(episodes)
    observed = [tokenizer.decode(episode.ids[~episode.mask]) for episode in episodes]
    assert (episodes[0].over, observed[0]) == (True, "")
    assert (episodes[1].over, observed[1]) == (False, "<tool>charged 5<assistant><think>\n")


@pytest.mark.parametrize(
    ("name", "says"), [("decorated", "decorated 1"), ("asks", "object 1"), ("partial", "object 1")]
)
def test_every_kind_of_async_tool_is_awaited(tools: Callable[..., dict[str, Any]], name: str, says: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    with closing(opened(tools(name), tokenizer)) as environments:
        episode = answered(environments, tokenizer, call(json.dumps({"name": name, "arguments": {"x": 1}})))
    assert tokenizer.decode(episode.ids[~episode.mask]) == f"<tool>{says}<assistant>"


@pytest.mark.parametrize("name", ["hidden", "maps"])
def test_a_tool_that_returns_an_iterator_fails_the_episode_without_an_observation(
    tools: Callable[..., dict[str, Any]], name: str
) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    with closing(opened(tools(name), tokenizer)) as environments:
        episode = answered(environments, tokenizer, call(json.dumps({"name": name, "arguments": {"x": 1}})))
    assert not len(episode.ids[~episode.mask])
    assert re.search(rf"'{name}' returned a (generator|map); return a text", str(episode.failure))


def test_a_generator_is_refused_as_a_tool(tools: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"rl\.environment\.options\.tools: 'yields' yields its results"):
        Tools(**tools("charge", "yields"))


def test_two_tools_of_one_name_are_refused_with_both_fields(tools: Callable[..., dict[str, Any]]) -> None:
    options = tools("charge", "yields", "charge")
    config = EnvironmentConfig(name="alignment_core.environments.tools:Tools", options=options)
    for refuse in (lambda: Tools(**options), lambda: environment_content(config)):
        with pytest.raises(
            UserError, match=r"options\.tools\[0\] \(.*\) and .*tools\[2\] \(.*\) are both called 'charge'"
        ):
            refuse()


def test_an_object_with_an_async_call_is_awaited_and_a_class_is_not() -> None:
    class Adds:
        def __init__(self, to: int) -> None:
            self.to = to

        async def __call__(self, x: int) -> int:
            return self.to + x

    result = asyncio.run(called(Adds, 1))
    assert asyncio.run(called(result, 2)) == 3
    assert asyncio.run(called(lambda x: result(x), 2)) == 3


REWARDS = """
def wrapped(function):
    return lambda *arguments, **options: function(*arguments, **options)

@wrapped
async def decorated(rows):
    return [0.5 for _ in rows]

class Scores:
    async def __call__(self, rows):
        return [0.25 for _ in rows]

scores = Scores()

async def trl(completions, prompts, **_):
    return [0.75 for _ in completions]

def hides(completions, prompts, **columns):
    return trl(completions, prompts, **columns)
"""


@pytest.mark.parametrize(("name", "reward"), [("decorated", 0.5), ("scores", 0.25), ("hides", 0.75)])
def test_every_kind_of_async_reward_function_is_awaited(tmp_path: Path, name: str, reward: float) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": "a", "completion": "b", "messages": None}]
    with FunctionProcess(f"{tmp_path / 'rewards.py'}:{name}", 20, "rl.rewards.0.function") as process:
        assert [answer for _, answer in process.answers([[rows]])] == [[reward]]


def test_tool_results_name_their_call_in_mistrals_form() -> None:
    messages = answers(["1", "2"], [Call("f", {}), Call(problem="no JSON")], turn=3)
    assert [IDS.fullmatch(message["tool_call_id"]) is not None for message in messages] == [True, True]
    assert [message.get("name") for message in messages] == ["f", None]
    assert len({call_id(turn, number) for turn in range(20) for number in range(20)}) == 400
    assert [message.get("name") for message in answers(["of both"], [Call("f", {}), Call("g", {})], 1)] == [None]


def test_a_template_that_requires_call_ids_gets_them(tools: Callable[..., dict[str, Any]]) -> None:
    tokenizer = byte_tokenizer(MISTRAL)
    with closing(opened(tools("charge"), tokenizer)) as environments:
        episode = answered(environments, tokenizer, CHARGE)
    assert episode.failure is None
    assert tokenizer.decode(episode.ids[~episode.mask]) == "[TOOL_RESULTS]000010000charge:charged 5[/TOOL_RESULTS]"


@pytest.fixture
def problem_of(tmp_path: Path) -> Callable[..., Iterator[Any]]:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')

    def ask(template: str, role: str, rows: bool = True) -> Any:
        data = DataConfig.model_validate({"sources": [str(path)], "chat_template": template})
        dataset = DatasetConfig(data=data, sources=(pin(data.sources[0]),), kind="prompts")
        question = Question(label="rl/prompts", dataset=dataset, tokenizer=TokenizerSource(), role=role, rows=rows)
        (answer,) = answers_to([question])
        return answer.problem

    return ask


@pytest.mark.parametrize("rows", [True, False])
def test_the_check_before_a_run_renders_a_turn_with_its_answer(problem_of: Callable[..., Any], rows: bool) -> None:
    assert problem_of(MISTRAL, "tool", rows) is None
    assert problem_of(TEMPLATE, "user", rows) is None
    other = MISTRAL.replace("length != 9", "length != 8")
    assert "rl.environment.role: a turn cannot be answered by a message of the role 'tool'" in problem_of(
        other, "tool", rows
    )
    assert "Tool call IDs should be alphanumeric" in problem_of(other, "tool", rows)
    capital = TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'user' else m.content }}")
    assert problem_of(capital, "user", rows) is None
    silent = TEMPLATE.replace("<{{ m.role }}>{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    assert (
        problem_of(silent, "tool", rows)
        == "rl.environment.role: the chat template does not show messages of the role 'tool'"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *((name, None) for name in ("qwen2_5", "qwen3", "qwen3_training", "qwen3_vl")),
        *((name, None) for name in ("phi3", "gemma3", "qwen2_5_vl")),  # show no calls
        ("qwen3_6", "<function=probe>"),
        ("nemotron_3_nano", "<function=probe>"),
        ("glm4moe", "<arg_key>text</arg_key>"),
        ("llama3_1", '"parameters": {"text": "probe"}'),
        ("gptoss", "to=functions.probe"),
        ("lfm2_v2", "[probe(text='probe')]"),
    ],
)
def test_chat_templates_that_write_calls_in_another_format_are_refused(name: str, shown: str | None) -> None:
    if not (file := TRL / f"{name}.jinja").is_file():
        pytest.skip("the package that is installed does not ship the template")
    renderer = Renderer(byte_tokenizer(), file.read_text(encoding="utf-8"))
    if shown is None:
        check_format(renderer, SCHEMAS)
        return
    with pytest.raises(UserError, match=f"writes a call of a tool as .*{re.escape(shown)}"):
        check_format(renderer, SCHEMAS)


@pytest.mark.parametrize(("written", "is_read"), [(HERMES, True), (LLAMA, False)], ids=["Hermes", "Llama"])
def test_tools_whose_calls_could_not_be_read_end_the_run_before_the_first_turn(
    written: str, is_read: bool, tools: Callable[..., dict[str, Any]]
) -> None:
    rows = [
        {"prompt": "?", "label": "4", "prompt_ids": [], "tools": offered} for offered in (None, json.dumps(SCHEMAS))
    ]
    described, shown = (Episode(number, 0, 0, row, most_tokens=4000) for number, row in enumerate(rows))
    refused = pytest.raises(UserError, match=r"rl\.environment: .* is read: set model\.chat_template")
    with closing(opened(tools("charge"), byte_tokenizer(calling(written)))) as environments:
        environments.answer_all([described])  # its prompt may tell the policy about the format
        with nullcontext() if is_read else refused:
            environments.answer_all([shown])
    assert (described.failure, shown.failure) == (None, None)
