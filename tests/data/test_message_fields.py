"""Fields of messages: those that a template shows are rendered as by ``apply_chat_template``, others are refused or named.

The templates are short forms of those of real families, with their peculiarities.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.checks.rows import Question, TokenizerSource, answers_to
from alignment_core.data.build import BuiltDataset
from alignment_core.data.message_fields import REASONING
from alignment_core.data.pin import pin
from alignment_core.data.statistics import losses
from alignment_core.errors import DataError
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.stages.dataset import DatasetConfig
from tests.data.chat_templates import DROPS_THOUGHTS, FORGETS_THOUGHTS
from tests.data.test_tools_in_rows import CALL, targets

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = (  # as Qwen3: thoughts are shown after the last question, and forgotten in earlier turns
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.NAME and loop.index0 > ns.last %}<think>{{ m.NAME }}</think>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = (  # as Llama 3.1: a turn with calls shows these alone
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls[:1] %}"
    "{{ c.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM_IN_QUESTION = (  # as Mistral 0.3: the words of the system stand in the last question
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ system if loop.last and m.role == 'user' else '' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, OTHER = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}
FOUR, SIX = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "6"}
CHAT = [USER, FOUR, OTHER, SIX]


def thinking(name: str) -> str:
    return THINKS.replace("NAME", name)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (
            [USER, {**FOUR, "content": None, "tool_calls": [CALL]}],
            "`tool_calls` of message 2 are not shown by the chat",
        ),
        ([USER, {**FOUR, "function_call": CALL["function"]}], "`function_call` of message 2 is not shown by the chat"),
        ([USER, {**FOUR, "reasoning_content": "two and two"}], "`reasoning_content` of message 2 is not shown"),
        ([USER, {**FOUR, "thinking": "two and two"}, OTHER, SIX], "`thinking` of message 2 is not shown"),
        ([{**USER, "images": ["a.png"]}, FOUR], r"`messages\[0\].images` is not text"),
        (
            [
                {**USER, "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]},
                FOUR,
            ],
            r"`messages\[0\].content\[1\]` is a part of the type 'image_url'",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_fields_that_a_template_does_not_show_are_refused_by_name(
    built: Build, jsonl: Write, messages: Any, sentence: str, kind: str
) -> None:
    if kind == "prompts":
        messages = [*messages, OTHER]
    with pytest.raises(DataError, match=rf"train\.jsonl:1: {sentence}"):
        built(jsonl([{"messages": messages}]), kind, chat_template=CHATML)


@pytest.mark.parametrize("read", REASONING)
@pytest.mark.parametrize("given", REASONING)
def test_thoughts_are_trained_under_the_name_that_the_template_reads(
    built: Build, jsonl: Write, tokenizer: Any, given: str, read: str
) -> None:
    """`reasoning_content` is what Qwen3 and DeepSeek read, `thinking` gpt-oss, `reasoning` OpenRouter and vLLM write."""
    rows = [{"messages": [USER, {**FOUR, given: "two and two"}]}]
    data = built(jsonl(rows), "demonstrations", chat_template=thinking(read))
    named = [USER, {**FOUR, read: "two and two"}]
    right = tokenizer.apply_chat_template(named, chat_template=thinking(read), tokenize=False)
    assert data.train["text"][0].as_py() == right == "<user>2+2?<assistant><think>two and two</think>4<eos>"
    assert targets(data, tokenizer) == ["<think>two and two</think>4<eos>"]


def test_each_turn_is_trained_with_its_reasoning_although_templates_drop_it_later(
    built: Build, jsonl: Write, tokenizer: Any
) -> None:
    chat = [USER, {**FOUR, "reasoning": "one"}, OTHER, {**SIX, "reasoning": "two"}]
    data = built(
        {"path": str(jsonl([{"messages": chat}])), "shuffle": False},
        "demonstrations",
        chat_template=thinking("thinking"),
    )
    assert data.train["text"].to_pylist() == [
        "<user>2+2?<assistant><think>one</think>4<eos>",
        "<user>2+2?<assistant>4<eos><user>3+3?<assistant><think>two</think>6<eos>",
    ]
    prompt = built(jsonl([{"prompt": chat[:3]}]), "prompts", chat_template=thinking("thinking"))
    assert prompt.train["prompt"][0].as_py() == "<user>2+2?<assistant>4<eos><user>3+3?<assistant>"


def test_compared_and_labelled_answers_keep_their_reasoning(built: Build, jsonl: Write) -> None:
    answer, other = {**FOUR, "reasoning": "one"}, {**SIX, "thinking": "two"}
    pairs = built(
        jsonl([{"prompt": [USER], "chosen": [answer], "rejected": [other]}]),
        "preferences",
        chat_template=thinking("thinking"),
    )
    row = pairs.train.to_pylist()[0]
    assert (row["chosen"], row["rejected"]) == ("<think>one</think>4", "<think>two</think>6")
    labelled = jsonl([{"prompt": [USER], "completion": [answer], "label": True}])
    data = built(labelled, "unpaired", chat_template=thinking("thinking"))
    assert data.train["completion"].to_pylist() == ["<think>one</think>4"]


def test_a_turn_of_thoughts_alone_is_not_empty_and_different_thoughts_are_refused(
    built: Build, jsonl: Write, tokenizer: Any
) -> None:
    rows = [{"messages": [USER, {**FOUR, "content": "", "thinking": "hm"}]}]
    assert targets(built(jsonl(rows), "demonstrations", chat_template=thinking("thinking")), tokenizer) == [
        "<think>hm</think><eos>"
    ]
    rows = [{"messages": [USER, {**FOUR, "thinking": "a", "reasoning": "b"}]}]
    with pytest.raises(DataError, match="`thinking` and `reasoning` of message 2 are different"):
        built(jsonl(rows), "demonstrations", chat_template=thinking("thinking"))


def test_a_second_call_or_words_beside_a_call_that_the_template_leaves_out_are_refused(
    built: Build, jsonl: Write
) -> None:
    silent = {"role": "assistant", "content": None}
    other = {"type": "function", "function": {"name": "cube", "arguments": {"x": 3}}}
    for turn, sentence in (
        ({**silent, "tool_calls": [CALL, other]}, "`tool_calls` of message 2 are not shown"),
        (
            {**FOUR, "tool_calls": [CALL]},
            "`content` of message 2 is not shown by the chat template beside `tool_calls`",
        ),
    ):
        with pytest.raises(DataError, match=sentence):
            built(jsonl([{"messages": [USER, turn]}]), "demonstrations", chat_template=CALLS)
    data = built(jsonl([{"messages": [USER, {**silent, "tool_calls": [CALL]}]}]), "demonstrations", chat_template=CALLS)
    assert '"name": "square"' in data.train["text"][0].as_py()


def test_arguments_are_in_text_for_a_template_that_takes_no_objects(built: Build, jsonl: Write, tokenizer: Any) -> None:
    """As DeepSeek-V3's, which joins them with `+`. The expected text is that of OpenAI's form, with arguments as JSON text."""
    template = CALLS.replace("{{ c.function | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}")
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    data = built(jsonl([{"messages": [USER, turn]}]), "demonstrations", chat_template=template)
    openai = {**turn, "tool_calls": [{"type": "function", "function": {"name": "square", "arguments": '{"x": 3}'}}]}
    right = tokenizer.apply_chat_template([USER, openai], chat_template=template, tokenize=False)
    assert data.train["text"][0].as_py() == right == '<user>2+2?<assistant>square {"x": 3}<eos>'


@pytest.mark.parametrize(
    "fields",
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {}),
        ({"train": False}, {"train": True}),
        ({"training": False}, {}),
        ({"loss_mask": 0}, {"loss_mask": 1}),
        ({"loss": False}, {"loss": True}),
        ({"weight": 0, "train": False}, {"weight": None}),
    ],
)
@pytest.mark.parametrize("form", ["messages", "prompt_completion"])
def test_a_turn_with_the_weight_0_is_context_and_no_target(
    built: Build, jsonl: Write, tokenizer: Any, fields: Any, form: str
) -> None:
    first, second = fields
    chat = [
        {**USER, **dict.fromkeys(first, 0 if "loss" not in first else False)},
        {**FOUR, **first},
        OTHER,
        {**SIX, **second},
    ]
    row = {"messages": chat} if form == "messages" else {"prompt": chat[:1], "completion": chat[1:]}
    data = built(jsonl([row]), "demonstrations", chat_template=CHATML)
    assert data.train["text"].to_pylist() == ["<user>2+2?<assistant>4<eos><user>3+3?<assistant>6<eos>"]
    assert targets(data, tokenizer) == ["6<eos>"]
    assert "unread" not in data.statistics


def test_the_last_turn_is_the_last_with_a_nonzero_weight(built: Build, jsonl: Write, tokenizer: Any) -> None:
    path = jsonl([{"messages": [USER, FOUR, OTHER, {**SIX, "weight": 0}]}])
    data = built(path, "demonstrations", chat_template=CHATML, assistant_turns="last")
    assert targets(data, tokenizer) == ["4<eos>"]


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ([USER, {**FOUR, "weight": 0.5}], r"`messages\[1\].weight` is 0.5; a turn is trained"),
        ([USER, {**FOUR, "train": "no"}], r"`messages\[1\].train` is 'no'"),
        ([USER, {**FOUR, "loss_mask": [0, 1]}], r"`messages\[1\].loss_mask` is \[0, 1\]"),
        ([USER, {**FOUR, "weight": 1, "train": False}], r"`messages\[1\].weight` and `messages\[1\].train` contradict"),
        ([{**USER, "weight": 1}, FOUR], r"`messages\[0\].weight` is set on a message of the role 'user'"),
        ([USER, {**FOUR, "weight": 0}], "`messages` has no assistant message with a weight above 0"),
    ],
)
def test_invalid_weights_are_refused(built: Build, jsonl: Write, chat: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        built(jsonl([{"messages": chat}]), "demonstrations", chat_template=CHATML)


def test_a_prompt_is_the_same_with_weights_and_an_answer_with_the_weight_0_is_refused(
    built: Build, jsonl: Write
) -> None:
    weighted = [{**USER, "weight": 0}, {**FOUR, "weight": 1}, OTHER]
    data = built(jsonl([{"prompt": weighted}]), "prompts", chat_template=CHATML)
    assert json.loads(data.train["messages"][0].as_py()) == CHAT[:3]
    assert data.prompts == built(jsonl([{"prompt": CHAT[:3]}]), "prompts", chat_template=CHATML).prompts
    pair = {"chosen": [USER, {**FOUR, "weight": 0}], "rejected": [USER, SIX]}
    with pytest.raises(DataError, match="the last message of `chosen` has the weight 0"):
        built(jsonl([pair]), "preferences", chat_template=CHATML)
    row = {"prompt": [USER], "completion": [{**FOUR, "train": False}], "label": True}
    with pytest.raises(DataError, match="the last message of `completion` has the weight 0"):
        built(jsonl([row]), "unpaired", chat_template=CHATML)


def test_a_loss_that_is_a_number_is_no_weight(built: Build, jsonl: Write) -> None:
    data = built(jsonl([{"messages": [USER, {**FOUR, "loss": 1.7}]}]), "demonstrations", chat_template=CHATML)
    assert data.statistics["unread"] == {"assistant messages have `loss`, which the chat template does not show": 1}


def test_text_parts_are_one_text(built: Build, jsonl: Write, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "2+", "image": None}, "2", {"type": "input_text", "text": "?"}]
    chat = [{"role": "user", "content": parts}, {**FOUR, "content": [{"type": "text", "text": "4"}]}]
    data = built(jsonl([{"messages": chat}]), "demonstrations", chat_template=CHATML)
    assert data.train["text"][0].as_py() == tokenizer.apply_chat_template(
        [USER, FOUR], chat_template=CHATML, tokenize=False
    )


@pytest.mark.parametrize("thought", ["<think>\ntwo and two\n</think>\n\n", "<think>two and two</think>"])
def test_thoughts_in_the_content_that_a_template_drops_are_no_targets_lost_in_silence(
    built: Build, jsonl: Write, thought: str
) -> None:
    turn = {**FOUR, "content": f"{thought}4"}
    shouts = DROPS_THOUGHTS.replace("m.content.split('</think>')[-1]", "m.content | upper")
    problem = "`content` of message 2 is not shown whole by the chat template, which leaves out 'two'"
    for row, kind in (
        ({"messages": [USER, turn]}, "demonstrations"),
        ({"prompt": [USER], "chosen": [turn], "rejected": [SIX]}, "preferences"),
        ({"prompt": [USER], "completion": [turn], "label": True}, "unpaired"),
    ):
        with pytest.raises(DataError, match=problem):
            built(jsonl([row]), kind, chat_template=DROPS_THOUGHTS)
        built(jsonl([row]), kind, chat_template=FORGETS_THOUGHTS)
        built(jsonl([row]), kind, chat_template=shouts)
    chat = [USER, {**FOUR, "content": "<think>\n\n</think>\n\n4"}, OTHER, SIX]
    assert built(jsonl([{"messages": chat}]), "demonstrations", chat_template=DROPS_THOUGHTS).train.num_rows == 1


def test_words_and_fields_that_a_template_leaves_out_are_counted_by_name(built: Build, jsonl: Write) -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {**USER, "name": "ann", "id": 7},
        {**FOUR, "extra": {}},
        {**OTHER, "name": "bob"},
        SIX,
    ]
    path = jsonl(
        [{"messages": chat, "images": ["a.png"], "audio": None, "chat_template_kwargs": {"enable_thinking": False}}]
    )
    no_system = CHATML.replace(
        "<{{ m.role }}>{{ m.content }}", "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    )
    data = built(path, "demonstrations", chat_template=no_system)
    assert data.statistics["unread"] == {
        "rows have `chat_template_kwargs`, which nothing reads": 1,
        "rows have `images`, which nothing reads": 1,
        "system messages have `content`, which the chat template does not show": 1,
        "user messages have `id`, which the chat template does not show": 1,
        "user messages have `name`, which the chat template does not show": 2,
    }
    assert "2 user messages have `name`, which the chat template does not show" in losses(
        data.statistics, "concatenate"
    )
    shows = CHATML.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.name }}{{ m.id }}")
    shown = built(path, "demonstrations", chat_template=shows)
    assert [sentence[:9] for sentence in shown.statistics["unread"]] == ["rows have", "rows have"]


def test_the_system_message_may_be_part_of_the_question(built: Build, jsonl: Write) -> None:
    chat = [{"role": "system", "content": "be brief "}, USER, FOUR, OTHER]
    data = built(jsonl([{"messages": chat}]), "prompts", chat_template=SYSTEM_IN_QUESTION)
    assert data.train["prompt"][0].as_py() == "<user>2+2?<assistant>4<eos><user>be brief 3+3?<assistant>"
    assert "unread" not in data.statistics


@pytest.mark.parametrize(
    ("message", "problem", "warnings"),
    [
        ({**FOUR, "reasoning_content": "two and two"}, "`reasoning_content` of message 2 is not shown", []),
        ({**FOUR, "votes": 3}, None, ["8 assistant messages have `votes`, which the chat template does not show"]),
    ],
)
def test_the_check_before_a_run_reports_problems_and_warnings(
    jsonl: Write, message: Any, problem: str | None, warnings: list[str]
) -> None:
    path = jsonl([{"messages": [{**USER, "content": f"{number}+2?"}, message]} for number in range(8)])
    data = DataConfig.model_validate({"sources": [str(path)], "chat_template": CHATML})
    dataset = DatasetConfig(data=data, sources=(pin(data.sources[0]),), kind="demonstrations")
    (answer,) = answers_to([Question(label="rows", dataset=dataset, tokenizer=TokenizerSource())])
    assert (problem or "") in str(answer.problem)
    assert (answer.problem is None) == (problem is None)
    assert answer.warnings == warnings
